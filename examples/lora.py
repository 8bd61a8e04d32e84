"""Adapts a Hugging Face Llama with low-rank factors (LoRA, arXiv 2106.09685): a frozen bf16 base, fp32 factors.

The base first learns Python's standard library for a minute; the factors then learn something else, the prose of
Python's language reference. No gradient and no moment of the base exists anywhere. Two ranks and ZeRO-3, about three
minutes on two cores; needs transformers (pip install 'fzero[hf]'):

    python examples/lora.py
    python examples/lora.py --ranks 1 --stage 0 --lora-rank 16
    torchrun --nproc-per-node 4 examples/lora.py

Losses are in nats per byte. Ctrl-C stops the run and keeps what was trained; a second one kills it.
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
from launch import any_rank, check_ranks, default_ranks, device_of, launch
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm
from train_lm import SHARD, held_out_batches, held_out_loss, random_batch, standard_library
from transformer import VOCABULARY

import fzero as fz

FACTORS = ("*.lora_a", "*.lora_b")


# ---- the model


class LoRALinear(nn.Module):
    """A frozen linear map plus a trainable one of low rank: `x W^T + (x A^T) B^T * alpha / r`. B starts at zero."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, generator: torch.Generator) -> None:
        super().__init__()
        self.base = base
        self.scale = alpha / rank
        self.lora_a = nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.normal_(self.lora_a, std=base.in_features**-0.5, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        low = x.to(self.lora_a.dtype) @ self.lora_a.T @ self.lora_b.T  # the factors are computed with as they are kept
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
        use_cache=False,  # a cache is written to, which does not fit a pure function
    )
    with torch.random.fork_rng():
        torch.manual_seed(args.seed)
        return LlamaForCausalLM(config)


def with_factors(module: nn.Module, args: argparse.Namespace) -> nn.Module:
    """The module with every linear map of its layers wrapped, in place."""
    generator = torch.Generator().manual_seed(args.seed)
    for parent in list(module.get_submodule("model.layers").modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, LoRALinear(child, args.lora_rank, args.lora_alpha, generator))
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
    policy = fz.Policy.by_path(
        {"|".join(FACTORS): fz.Policy(), "*": fz.Policy(param=torch.bfloat16, compute=torch.bfloat16)}
    )
    lr = fz.warmup_cosine(args.lora_lr, warmup=min(10, args.steps), total=args.steps, end=args.lora_lr / 10)
    step = fz.train_step(loss_of(apply), fz.chain(fz.clip_by_global_norm(1.0), fz.adamw(lr, weight_decay=0.0)), policy)
    return fz.freeze(step, "*.weight"), params  # all that is not a factor


def loss_of(apply: Callable[..., Any]) -> Callable[..., Tensor]:
    def loss(params: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = apply(params, input_ids=tokens).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    return loss


# ---- the run of one rank


def train(rank: int, ranks: int, args: argparse.Namespace, stop: Callable[[], bool]) -> None:
    device = device_of(rank, ranks)
    say: Callable[..., None] = print if rank == 0 else lambda *_: None
    code, prose = standard_library("pydoc_data")[0], language_reference()
    cut = len(prose) * 9 // 10
    held_out = held_out_batches(prose[cut:], rank, ranks, args, device)
    say(f"{len(code):,} bytes of code for the base, {cut:,} bytes of prose for the factors, the rest of it held out")
    generator = torch.Generator().manual_seed((args.seed << 16) + rank)
    module = llama(args).to(device)

    def run(step: fz.Step, state: fz.TrainState, text: Tensor, steps: int, what: str) -> tuple[fz.TrainState, Any]:
        """Trains, and looks at the held-out prose now and then."""
        losses: list[float] = []
        curve = [(0, held_out_loss(step, state, held_out))]
        with tqdm(total=steps, desc=what, unit="step", disable=rank != 0, mininterval=bar_interval()) as bar:
            while len(losses) < steps and not any_rank(stop(), device):
                state, metrics = step(state, *random_batch(text, generator, args, device))
                losses.append(metrics["loss"].item())
                if len(losses) % args.eval_every == 0:
                    curve.append((len(losses), held_out_loss(step, state, held_out)))
                bar.set_postfix_str(f"loss {losses[-1]:.3f}, held-out prose {curve[-1][1]:.3f}", refresh=False)
                bar.update()
        if curve[-1][0] < len(losses):
            curve.append((len(losses), held_out_loss(step, state, held_out)))
        return state, (losses, curve)

    shard = SHARD[args.stage]
    apply, params = fz.functional(module)
    lr = fz.warmup_cosine(args.lr, warmup=min(20, args.base_steps), total=args.base_steps, end=args.lr / 10)
    base_step = fz.donate(shard(fz.autocast(fz.train_step(loss_of(apply), fz.adamw(lr)))))
    base_state, _ = run(base_step, base_step.init(params), code, args.base_steps, "base")
    base = fz.gather(base_state.params)
    del base_state

    step, params = adapt(module, base, args)
    step = fz.donate(shard(fz.remat(step) if args.remat else step))
    plan = fz.plan(step, params, world_size=ranks)
    say(f"\n{plan}")
    state = step.init(params)
    trained = sum(leaf.numel() for path, leaf in params.items() if is_factor(path))
    total = sum(leaf.numel() for leaf in params.values())
    say(f"\n{trained:,} of {total:,} parameters are trained; a rank keeps {plan.params / 2**20:.2f} MiB of params,")
    say(f"{plan.grads / 2**20:.2f} MiB of grads and {plan.moments / 2**20:.2f} MiB of moments\n")
    state, (losses, curve) = run(step, state, prose[:cut], args.steps, "LoRA")

    full = fz.gather(state.params)
    assert all(torch.equal(leaf, base[path.replace(".base.", ".")].bfloat16()) for path, leaf in frozen(full).items())
    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        factors = {path: leaf.cpu().contiguous() for path, leaf in full.items() if is_factor(path)}
        save_file(factors, args.out / "adapter.safetensors")
        draw(losses, curve, args.out / "loss.png")
    say(f"saved {args.out / 'adapter.safetensors'} and {args.out / 'loss.png'}, after {len(losses)} updates")
    say(f"held-out prose, nats per byte: {curve[0][1]:.3f} with the base alone, {curve[-1][1]:.3f} with the factors")


def frozen(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {path: leaf for path, leaf in params.items() if not is_factor(path)}


def bar_interval() -> float:
    return 0.5 if sys.stderr.isatty() else 10


# ---- data and picture


def language_reference() -> Tensor:
    """The prose of Python's language reference, which every Python carries for its help()."""
    from pydoc_data.topics import topics

    text = "\n".join(re.sub(r"\n{3,}", "\n\n", topics[name]) for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def draw(losses: list[float], curve: list[tuple[int, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, color="tab:blue", alpha=0.5, lw=1, label="train")
    axes.plot(*zip(*curve, strict=True), color="tab:orange", marker="o", ms=3, label="held-out prose")
    axes.axhline(curve[0][1], color="gray", ls="--", label="held-out prose, base alone")
    axes.set(xlabel="update of the factors", ylabel="loss, nats per byte")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


# ---- options


def options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    whole: list[tuple[str, int, str]] = [
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
    ]
    for name, default, text in whole:
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: %(default)s)")
    parser.add_argument("--stage", type=int, default=3, choices=sorted(SHARD), help="ZeRO stage (default: 3)")
    parser.add_argument("--remat", action="store_true", help="keep a unit's inputs only, and run it again to pull back")
    for name, default, text in (
        ("lr", 2e-3, "peak learning rate of the base"),
        ("lora-lr", 5e-3, "peak learning rate of the factors"),
        ("lora-alpha", 16.0, "the factors' product is multiplied by alpha / rank"),
    ):
        parser.add_argument(f"--{name}", type=float, default=default, help=f"{text} (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/lora"), help="folder (default: %(default)s)")
    args = parser.parse_args(argv)
    if min(getattr(args, name.replace("-", "_")) for name, _, _ in whole) < 1 or min(args.lr, args.lora_lr) <= 0:
        parser.error("all sizes, numbers of updates and learning rates must be positive")
    if args.width % (2 * args.heads):
        parser.error(f"--width must be a multiple of 2 * heads = {2 * args.heads} (rotary pairs), got {args.width}")
    check_ranks(parser, args, args.stage)
    return args


def main() -> int:
    args = options()
    try:
        import transformers  # noqa: F401 - every rank needs it; say so once, here
    except ImportError:
        print("lora: this example needs Hugging Face's transformers: pip install 'fzero[hf]'", file=sys.stderr)
        return 1
    return launch(train, args)


if __name__ == "__main__":
    sys.exit(main())
