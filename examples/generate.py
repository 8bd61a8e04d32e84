"""Reinforcement learning that samples between updates (GRPO, arXiv 2402.03300): ZeRO-3 trains, transformers generates.

`fz.stream` hands the weights, unit by unit, to a plain Hugging Face model, whose own `generate` samples several answers
to each prompt. An answer's advantage is its reward beside the others', and a policy gradient step follows. The task is
to say the prompt's first digit again and again. Two ranks, half a minute; needs transformers (pip install '.[hf]'):

    python examples/generate.py
    python examples/generate.py --ranks 1 --steps 50
    torchrun --nproc-per-node 4 examples/generate.py

Each rank samples from a model of its own. An engine on one rank takes `fz.stream(state.params, to=0)`. Ctrl-C stops
the run; a second one kills it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from launch import add_numbers, check_options, default_ranks, device_of, launch, parser_of
from torch import Tensor, nn

import fzero as fz

DIGITS, PROMPT = 10, 3  # tokens


def llama(args: argparse.Namespace) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=DIGITS,
        hidden_size=args.width,
        intermediate_size=2 * args.width,
        num_hidden_layers=args.blocks,
        num_attention_heads=args.heads,
        max_position_embeddings=PROMPT + args.answer,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng():  # transformers draws from the global generator
        torch.manual_seed(args.seed)
        return LlamaForCausalLM(config)


def hand_over(params: fz.Sharded, engine: nn.Module) -> None:
    """Copies the weights into a plain model: a unit at a time, so no rank holds the model twice."""
    weights = dict(engine.named_parameters())
    with torch.no_grad():
        for path, leaf in fz.stream(params):
            weights[path].copy_(leaf)


def answers_of(engine: Any, prompts: Tensor, args: argparse.Namespace, seed: int) -> Tensor:
    """Samples answers to each prompt: [prompts * samples, PROMPT + answer]."""
    repeated = prompts.repeat_interleave(args.samples, 0)
    with torch.random.fork_rng():  # transformers draws from the global generator
        torch.manual_seed(seed)
        return engine.generate(
            repeated, attention_mask=torch.ones_like(repeated), do_sample=True, top_k=0, max_new_tokens=args.answer
        )


def rewards_of(tokens: Tensor) -> Tensor:
    """The share of an answer's digits that are the prompt's first one."""
    return (tokens[:, PROMPT:] == tokens[:, :1]).float().mean(1)


def advantages_of(rewards: Tensor, samples: int) -> Tensor:
    """Each reward beside those of the other answers to its prompt, in standard deviations."""
    groups = rewards.view(-1, samples)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1)


def log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    """Of the tokens of each answer: [answers, answer]."""
    every = logits[:, PROMPT - 1 : -1].float().log_softmax(-1)
    return every.gather(2, tokens[:, PROMPT:, None]).squeeze(2)


def train(rank: int, ranks: int, args: argparse.Namespace, stop: Callable[[], bool]) -> None:
    device = device_of(rank, ranks)
    engine = llama(args).to(device).eval()
    apply, params = fz.functional(engine)

    def loss(params: Any, tokens: Tensor, advantages: Tensor) -> Tensor:
        """The policy gradient's; its weights sampled the tokens, so the ratio of probabilities in GRPO's is one."""
        return -(advantages[:, None] * log_probabilities(apply(params, tokens).logits, tokens)).mean()

    optimizer = fz.chain(fz.clip_by_global_norm(1.0), fz.adamw(args.lr, weight_decay=0.0))
    step = fz.shard_zero3(fz.train_step(loss, optimizer))
    state = step.init(params)
    generator = torch.Generator().manual_seed(args.seed * ranks + rank)
    done = 0
    for number in range(args.steps + 1):
        hand_over(state.params, engine)
        prompts = torch.randint(DIGITS, (args.prompts, PROMPT), generator=generator).to(device)
        tokens = answers_of(engine, prompts, args, seed=number * ranks + rank)
        rewards = rewards_of(tokens)
        mean = rewards.mean()
        dist.all_reduce(mean)
        stopping = torch.tensor(float(stop()), device=device)
        dist.all_reduce(stopping)
        if rank == 0 and (number % args.print_every == 0 or number == args.steps):
            print(f"after {number:4d} updates: reward {mean.item() / ranks:.3f}", flush=True)
        if stopping or number == args.steps:
            break
        state, _ = step(state, tokens, advantages_of(rewards, args.samples))
        done += 1
    forward = fz.with_fn(step, lambda params, tokens: log_probabilities(apply(params, tokens).logits, tokens)).forward
    with torch.no_grad():
        apart = (forward(state, tokens) - log_probabilities(engine(tokens).logits, tokens)).abs().max()
    if rank == 0:
        print(f"{'stopped' if done < args.steps else 'ended'} after {done} updates")
        print(f"the engine's log probabilities are those of the trained state, to {apart.item():.1e}")


def options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_numbers(
        parser,
        ("ranks", default_ranks(), "processes that train"),
        ("steps", 60, "updates"),
        ("prompts", 8, "of each rank, in each step"),
        ("samples", 8, "answers to each prompt"),
        ("answer", 6, "digits of an answer"),
        ("lr", 1e-2, "learning rate"),
        ("width", 32, "of the model"),
        ("blocks", 2, "transformer blocks"),
        ("heads", 4, "attention heads"),
        ("print-every", 10, "updates"),
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    check_options(parser, args)
    if args.samples < 2:
        parser.error(f"--samples must be at least 2, as an answer is judged beside others; got {args.samples}")
    return args


if __name__ == "__main__":
    sys.exit(launch(train, options()))
