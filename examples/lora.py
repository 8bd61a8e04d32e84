"""Adapts a Hugging Face Llama with low-rank factors (LoRA, arXiv 2106.09685): a frozen bf16 base, fp32 factors.

The base first learns Python's standard library for a minute; the factors then learn something else, the prose of
Python's language reference. No gradient and no moment of the base exists anywhere. Two ranks and ZeRO-3, about three
minutes on two cores; needs transformers (pip install '.[hf]'):

    python examples/lora.py
    python examples/lora.py --ranks 1 --stage 0 --lora-rank 16
    python examples/lora.py --base path/of/a/hugging/face/folder
    torchrun --nproc-per-node 4 examples/lora.py

Losses are in nats per byte, with --base per token of that folder's tokenizer. Ctrl-C stops the run and keeps what was
trained; a second one kills it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from curve import draw_losses
from launch import add_numbers, check_options, default_ranks, device_of, launch, parser_of
from safetensors.torch import save_file
from torch import Tensor, nn
from train_lm import SHARD, held_out_batches, held_out_loss, random_batch, standard_library
from transformer import VOCABULARY

import fzero as fz

FACTORS = "*.lora_a|*.lora_b"


# ---- the model


class LoRALinear(nn.Module):
    """A frozen linear map plus a trainable one of low rank: `x W^T + (x A^T) B^T * alpha / r`. B starts at zero."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, generator: torch.Generator) -> None:
        super().__init__()
        self.base = base
        self.scale = alpha / rank
        a = torch.randn(rank, base.in_features, generator=generator) * base.in_features**-0.5
        self.lora_a = nn.Parameter(a.to(base.weight.device))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank, device=base.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        low = x.to(self.lora_a.dtype) @ self.lora_a.T @ self.lora_b.T  # in the factors' own compute dtype
        return self.base(x) + (self.scale * low).to(x.dtype)


def llama(args: argparse.Namespace) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=args.width,
        intermediate_size=8 * args.width // 3,
        num_hidden_layers=args.blocks,
        num_attention_heads=args.heads,
        max_position_embeddings=args.context,
    )
    with torch.random.fork_rng():  # transformers draws from the global generator
        torch.manual_seed(args.seed)
        return LlamaForCausalLM(config)


def with_factors(module: Any, args: argparse.Namespace) -> nn.Module:
    """The Hugging Face module with every linear map but the head wrapped, in place."""
    generator = torch.Generator().manual_seed(args.seed)
    head = module.get_output_embeddings()
    for path, child in list(module.named_modules()):
        if isinstance(child, nn.Linear) and child is not head:
            module.set_submodule(path, LoRALinear(child, args.lora_rank, args.lora_alpha, generator))
    return module


def is_factor(path: str) -> bool:
    return path.endswith((".lora_a", ".lora_b"))


def adapt(module: nn.Module, base: dict[str, Tensor], args: argparse.Namespace) -> tuple[fz.Step, dict[str, Tensor]]:
    """The step that trains the factors, and its params: those of the base, and new factors.

    Args:
        base: of the module without factors, by name.
    """
    apply, params = fz.functional(with_factors(module, args))
    params = {path: leaf if is_factor(path) else base[path.replace(".base.", ".")] for path, leaf in params.items()}
    bf16 = torch.bfloat16
    # the factors are stored in fp32, where small updates add up, and cast to the base's bf16 for each use
    policy = fz.Policy.by_path({FACTORS: fz.Policy(compute=bf16), "*": fz.Policy(param=bf16, compute=bf16)})
    lr = fz.warmup_cosine(args.lora_lr, warmup=min(10, args.steps), total=args.steps, end=args.lora_lr / 10)
    step = fz.train_step(loss_of(apply), fz.chain(fz.clip_by_global_norm(1.0), fz.adamw(lr, weight_decay=0.0)), policy)
    frozen = [path for path in params if not is_factor(path)]  # by name: a pattern can not say "all but"
    return fz.freeze(step, "|".join(frozen)), params


def loss_of(apply: Callable[..., Any]) -> Callable[..., Tensor]:
    def loss(params: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        # a cache is written to, which does not fit a pure function
        logits = apply(params, input_ids=tokens, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    return loss


# ---- the run of one rank


def train(rank: int, ranks: int, args: argparse.Namespace, stop: Callable[[], bool]) -> None:
    device = device_of(rank, ranks)
    say: Callable[..., None] = print if rank == 0 else lambda *_: None
    generator = torch.Generator().manual_seed((args.seed << 16) + rank)
    module, encode = from_folder(args.base) if args.base else (llama(args), encode_bytes)
    module = module.to(device)
    prose = encode(language_reference())
    cut = len(prose) * 9 // 10
    if len(prose) - cut <= args.context:
        raise ValueError(f"only {len(prose)} tokens of text: a smaller --context may do, or another tokenizer")
    held_out = held_out_batches(prose[cut:], rank, ranks, args, device)
    unit = "token" if args.base else "byte"
    say(f"{cut:,} {unit}s of prose for the factors, {len(prose) - cut:,} of other paragraphs held out")

    def run(step: fz.Step, state: fz.TrainState, text: Tensor, steps: int, what: str) -> tuple[fz.TrainState, Any]:
        """Trains, and looks at the held-out prose now and then."""
        losses: list[float] = []
        curve: list[tuple[int, float]] = []

        def look(state: fz.TrainState) -> dict[str, float]:
            curve.append((run.done, held_out_loss(step, state, held_out)))
            return {"held-out prose": curve[-1][1]}

        batch = lambda _: random_batch(text, generator, args, device)
        options: Any = {"total": steps, "evaluate": look, "evaluate_every": args.eval_every}
        run = fz.loop(step, state, batch, progress=what, stop=stop, **options)
        losses += [metrics["loss"].item() for _, metrics in run]
        if not curve or curve[-1][0] < run.done:
            look(run.state)
        return run.state, (losses, curve)

    shard = SHARD[args.stage]
    apply, base = fz.functional(module)
    if not args.base:
        code = standard_library("pydoc_data")[0]  # without the folder that has the prose
        lr = fz.warmup_cosine(args.lr, warmup=min(20, args.base_steps), total=args.base_steps, end=args.lr / 10)
        base_step = fz.donate(shard(fz.autocast(fz.train_step(loss_of(apply), fz.adamw(lr)))))
        base_state, _ = run(base_step, base_step.init(base), code, args.base_steps, "base")
        base = fz.gather(base_state.params)
        del base_state

    step, params = adapt(module, base, args)
    step = fz.donate(shard(fz.remat(step) if args.remat else step))
    say(describe(fz.plan(step, params, world_size=ranks)))
    state = step.init(params)
    before = {path: state.params[path].clone() for path in params if not is_factor(path)}
    del module, base, params  # from here on a rank has its slices only
    state, (losses, curve) = run(step, state, prose[:cut], args.steps, "LoRA")

    assert all(torch.equal(state.params[path], bits) for path, bits in before.items()), "the base has changed"
    check_nothing_of(set(before), step, state, held_out[0])
    factors = {path: leaf.cpu() for path, leaf in fz.gather(state.params).items() if is_factor(path)}
    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        save_file(factors, args.out / "adapter.safetensors")
        updates, dashed = "update of the factors", ("base alone", curve[0][1])
        draw_losses(losses, curve, dashed, args.out / "loss.png", "held-out prose", updates, unit)
    say("the base has the bits that it had before, and no grads and no moments")
    say(f"saved adapter.safetensors and loss.png in {args.out}, after {len(losses)} of {args.steps} updates")
    say(f"held-out prose, nats per {unit}: {curve[0][1]:.3f} with the base alone, {curve[-1][1]:.3f} with the factors")


def describe(plan: fz.Plan) -> str:
    """The table, of a stack's equal layers the first only, and what is frozen and what is trained."""
    lines = [line for line in str(plan).splitlines() if not re.match(r"[^\d ]*\.[1-9]\d*\.", line)]
    lines += ["(the rows of the other layers are like those of layer 0)", ""]
    for frozen in (True, False):
        rows = [row for row in plan.rows if row.frozen is frozen]
        what = "frozen, no grads, no moments" if frozen else "trained"
        dtypes = {str(row.policy.param).removeprefix("torch.") for row in rows}
        lines.append(f"{what}: {sum(row.numel for row in rows):,} parameters, stored in {', '.join(sorted(dtypes))}")
    return "\n".join(["", *lines, ""])


def check_nothing_of(frozen: set[str], step: fz.Step, state: fz.TrainState, batch: tuple[Tensor, Tensor]) -> None:
    """That there is no gradient or moment of these leaves: neither in the state nor in what a pullback gives."""
    loss, pullback = step.vjp(state, *batch)
    grads, _ = pullback(torch.ones_like(loss))
    adam = state.moments[-1]  # the chain's last member; the first, the clipping, keeps nothing
    for tree in (grads, adam.mu, adam.nu):
        full = fz.gather(tree)
        assert all((full[path] is None) is (path in frozen) for path in full), "a frozen leaf has state"


# ---- base and data


def from_folder(folder: Path) -> tuple[Any, Callable[[str], Tensor]]:
    """A local Hugging Face model, and what makes token ids of text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def encode(text: str) -> Tensor:
        return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True), encode


def encode_bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def language_reference() -> str:
    """The prose of Python's language reference, which every Python carries for its help().

    Topics contain one another, so a paragraph counts once, or some that are held out would be trained on.
    """
    from pydoc_data.topics import topics

    paragraphs = (part for name in sorted(topics) for part in re.split(r"\n{2,}", topics[name].strip("\n")))
    return "\n\n".join(dict.fromkeys(paragraphs))


# ---- options


def options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_numbers(
        parser,
        ("ranks", default_ranks(), "processes, each with its own share of the batch and of the state"),
        ("width", 192, "features of the residual stream"),
        ("blocks", 4, "transformer blocks"),
        ("heads", 6, "attention heads of a block"),
        ("context", 128, "bytes of one example"),
        ("batch", 8, "examples a rank and step"),
        ("base-steps", 240, "updates of the base"),
        ("steps", 240, "updates of the factors"),
        ("lora-rank", 8, "rank of the factors"),
        ("eval-every", 40, "updates between two looks at the held-out prose"),
        ("eval-batches", 6, "held-out batches a rank"),
        ("lr", 2e-3, "peak learning rate of the base"),
        ("lora-lr", 5e-3, "peak learning rate of the factors"),
        ("lora-alpha", 16.0, "the factors' product is multiplied by alpha / rank"),
    )
    parser.add_argument("--stage", type=int, default=3, choices=sorted(SHARD), help="ZeRO stage")
    parser.add_argument("--remat", action="store_true", help="keep a unit's inputs only, and run it again to pull back")
    parser.add_argument("--base", type=Path, help="local Hugging Face folder to adapt, model and tokenizer")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    parser.add_argument("--out", type=Path, default=Path("out/lora"), help="folder for weights and curve")
    args = parser.parse_args(argv)
    if args.base and not (args.base / "config.json").is_file():
        parser.error(f"--base {args.base}: no config.json there; expected a folder that save_pretrained has written")
    check_options(parser, args, args.stage)
    return args


def main() -> int:
    args = options()
    try:
        import transformers  # noqa: F401 - every rank needs it; say so once, here
    except ImportError:
        print("lora: this example needs Hugging Face's transformers: pip install '.[hf]'", file=sys.stderr)
        return 1
    return launch(train, args)


if __name__ == "__main__":
    sys.exit(main())
