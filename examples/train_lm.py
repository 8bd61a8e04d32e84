"""Trains a small transformer on the source of Python's standard library, and lets it complete a `def `.

Two ranks and ZeRO-3 by default, about three minutes on two cores (computed in bf16, or on a CPU that is slow in it in
fp32, with fewer updates):

    python examples/train_lm.py
    python examples/train_lm.py --ranks 1 --stage 0 --dtype fp32
    torchrun --nproc-per-node 4 examples/train_lm.py

Losses are in nats per byte. Ctrl-C or SIGTERM stops the run and keeps what was trained; a second one kills it. A run
that was stopped or killed goes on from its newest whole checkpoint, also on another number of ranks, with its options
and the data that it would have seen:

    python examples/train_lm.py --resume
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import sysconfig
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from curve import draw_losses
from launch import (
    add_numbers,
    check_folder,
    check_options,
    default_ranks,
    device_of,
    launch,
    matmul_ms,
    memory_mib,
    parser_of,
)
from resuming import kept_options, parse_options
from safetensors.torch import save_file
from torch import Tensor
from transformer import VOCABULARY, Transformer

import fzero as fz

SHARD: dict[int, Callable[[fz.Step], fz.Step]] = {
    0: lambda step: step,
    1: fz.shard_zero1,
    2: fz.shard_zero2,
    3: fz.shard_zero3,
}
STEPS, FEWER = 400, 300  # updates by default, and where each takes longer for want of bf16
GIVES_UP = 10  # batches in a row that raise the loss
Batch = tuple[Tensor, Tensor]  # tokens and targets, [b, t] each


# ---- the run of one rank


def train(rank: int, ranks: int, args: argparse.Namespace, stop: Callable[[], bool]) -> None:
    device = device_of(rank, ranks)
    say: Callable[..., None] = print if rank == 0 else lambda *_: None
    if args.dtype == "auto":
        args.dtype, args.steps, why = chosen_dtype(rank, args.steps, device)
        say(why)
    train_text, held_out_text = standard_library()
    baseline = byte_frequency_loss(train_text, held_out_text)
    say(f"{len(train_text):,} bytes to train on; {len(held_out_text):,} bytes of other files are held out")

    module = Transformer(args.width, args.blocks, args.heads, torch.Generator().manual_seed(args.seed)).to(device)
    apply, params = fz.functional(module)

    def loss_fn(params: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(apply(params, tokens).flatten(0, 1).float(), targets.flatten())

    def next_logits(params: Any, tokens: Tensor) -> Tensor:
        return apply(params, tokens)[:, -1].float()

    lr = fz.warmup_cosine(args.lr, warmup=min(args.warmup, args.steps), total=args.steps, end=args.lr / 10)
    optimizer = fz.chain(
        fz.clip_by_global_norm(1.0),
        fz.partition({"*norm*": fz.adamw(lr, b2=0.95, weight_decay=0.0), "*": fz.adamw(lr, b2=0.95, weight_decay=0.1)}),
    )
    step = fz.train_step(loss_fn, optimizer)
    if args.dtype == "bf16":
        step = fz.autocast(step, torch.bfloat16)
    step = SHARD[args.stage](step)
    step = step if args.rollback else fz.donate(step)  # a state to go back to is not overwritten
    say(f"\n{fz.plan(step, params, world_size=ranks)}")
    per_rank, alone = state_mib(step, params, ranks), state_mib(step, params, 1)
    say(f"state per rank: {per_rank:.2f} MiB of {alone:.2f} MiB on one rank alone\n")

    held_out = held_out_batches(held_out_text, rank, ranks, args, device)
    kept = fz.Checkpoints(args.out / "checkpoints")
    with device:
        found = kept.restore(step) if args.resume else None
    if found is not None:
        state, progress = found
        all_taken = ", which was the last; --steps takes more" if len(progress["train"]) >= args.steps else ""
        say(f"going on after update {state.step} of {args.steps}{all_taken}")
    else:
        if args.resume:
            say(f"nothing to go on from in {kept.folder}: a new run begins")
        state = step.init(params, seed=args.seed)
        progress = {"seen": 0, "train": [], "held out": []}
    train_curve: list[float] = progress["train"]
    skipped: int = progress.get("skipped", 0)  # batches in a row
    held_out_curve: list[tuple[int, float]] = [(done, loss) for done, loss in progress["held out"]]
    seen: int = progress["seen"]  # examples, over all ranks

    def save(state: fz.TrainState, done: int, seen: int, skipped: int) -> fz.Saving:
        held_out = [list(pair) for pair in held_out_curve if pair[0] <= done]
        curves = {"train": train_curve[:done], "held out": held_out}
        return kept.save_async(state, {"seen": seen, "skipped": skipped, **curves, "options": kept_options(args)})

    def next_batch(_: int) -> Batch:
        nonlocal seen
        if args.rollback:
            before.append((run.state, run.done, seen, skipped))
        first, seen = seen + rank * args.batch, seen + ranks * args.batch
        return batch_at(train_text, first, args, device)

    def look(state: fz.TrainState) -> dict[str, float]:
        held_out_curve.append((run.done, held_out_loss(step, state, held_out)))
        return {"held out": held_out_curve[-1][1]}

    run = fz.loop(
        fz.jit(step) if args.jit else step,  # texts of other lengths, as below, would each be compiled
        state,
        next_batch,
        total=args.steps,
        after=None if found is None else len(train_curve),
        log=args.out / "log.csv",
        evaluate=look,
        evaluate_every=args.eval_every,
        stop=stop,
    )
    saving: fz.Saving | None = None
    saved = seen
    before: deque[tuple[fz.TrainState, int, int, int]] = deque(maxlen=GIVES_UP)  # as `save` takes them
    for state, metrics in run:
        loss = metrics["loss"].item()
        if args.rollback and is_spike(loss, train_curve):
            skipped, after = skipped + 1, before[-1][0].step
            if skipped > 1 and len(before) > 1:
                before.pop()  # not the batch raised the loss, but the update before
            run.state, run.done, *_ = before.pop()
            del train_curve[run.done :]
            held_out_curve = [pair for pair in held_out_curve if pair[0] <= run.done]
            say(f"\nloss {loss:.3f} after update {after}: back to update {run.state.step}, and past this batch")
            if skipped == GIVES_UP:
                raise RuntimeError(f"{GIVES_UP} batches in a row raised the loss; a smaller --lr may help")
            continue
        train_curve.append(loss)
        skipped = 0
        if run.done % args.save_every == 0:
            saving, saved = save(state, run.done, seen, skipped), seen
            before.clear()  # a run that is resumed here has no others
        speed = ranks * args.batch * args.context / run.logged["seconds"]
        run.note = f"{speed:,.0f} tokens/s, {memory_mib(device):,.0f} MiB a rank"
    state, stopped = run.state, run.ended == "asked"
    if saved != seen:  # a run that is resumed has no states to go back to, so that it begins at the oldest
        saving = save(*(before[0] if before and stopped else (state, run.done, seen, skipped)))
    if saving is not None:
        saving.wait()
    if not held_out_curve or held_out_curve[-1][0] < run.done:
        look(state)

    weights = fz.gather(state.params)
    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        save_file({name: weight.cpu() for name, weight in weights.items()}, args.out / "weights.safetensors")
        dashed = ("byte frequencies alone", baseline)
        draw_losses(train_curve, held_out_curve, dashed, args.out / "loss.png", "held-out files")
    if stopped:
        say(f"stopped after {len(train_curve)} of {args.steps} steps; what was trained is kept; --resume goes on")
    say(f"saved weights.safetensors, loss.png and log.csv in {args.out}")
    say(f"held-out loss, nats per byte: {held_out_curve[-1][1]:.3f}; byte frequencies alone: {baseline:.3f}")
    if not stopped:
        say("\nA completion in the model's own words:\n")
        say(complete(fz.with_fn(step, next_logits), state, b"\ndef ", args, device).strip("\n"))


def held_out_loss(step: fz.Step, state: fz.TrainState, batches: list[Batch]) -> float:
    """The mean over all ranks' batches; every rank must call it."""
    total = torch.stack([step.forward(state, *batch) for batch in batches]).mean()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def complete(step: fz.Step, state: fz.TrainState, prompt: bytes, args: argparse.Namespace, device: torch.device) -> str:
    """Samples bytes one by one. Every rank takes part, as each forward gathers params, and all draw the same."""
    generator = torch.Generator().manual_seed(args.seed)
    text = torch.tensor([list(prompt)])
    for _ in range(args.sample_bytes):
        logits = step.forward(state, text[:, -args.context :].to(device)).cpu()
        text = torch.cat([text, torch.multinomial((logits / args.temperature).softmax(-1), 1, generator=generator)], 1)
    return bytes(text[0].tolist()).decode(errors="replace")


def chosen_dtype(rank: int, steps: int, device: torch.device) -> tuple[str, int, str]:
    """What to compute in, how many updates to take, and why: rank 0 measures, and all do the same."""
    if device.type != "cpu":
        return "bf16", steps, f"computing in bf16 on {torch.cuda.get_device_name(device)}"
    box: list[Any] = [None]
    if rank == 0:
        bf16, fp32 = matmul_ms(torch.bfloat16), matmul_ms(torch.float32)
        measured = f"a small matmul takes {bf16:.2f} ms in bf16 and {fp32:.2f} ms in fp32 on this CPU"
        if bf16 <= fp32:
            box = [("bf16", steps, f"computing in bf16: {measured}")]
        else:
            fewer = FEWER if steps == STEPS else steps
            said = f"; {fewer} updates instead of {steps} (--dtype fp32 takes them all)" if fewer < steps else ""
            box = [("fp32", fewer, f"computing in fp32: {measured}, {bf16 / fp32:.0f} times as long{said}")]
    dist.broadcast_object_list(box, src=0)
    return box[0]


# ---- data: bytes of the standard library


def standard_library(*also_skip: str) -> tuple[Tensor, Tensor]:
    """All bytes to train on, and those of every 20th file, which are held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "site-packages", "dist-packages"}
    skip.update(also_skip)
    files = [file for file in sorted(root.rglob("*.py")) if not skip & set(file.relative_to(root).parts)]
    held_out = set(files[::20])

    def text(chosen: list[Path]) -> Tensor:
        return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in chosen)), dtype=torch.uint8)

    return text([file for file in files if file not in held_out]), text(files[::20])


def byte_frequency_loss(train_text: Tensor, held_out_text: Tensor) -> float:
    """The held-out loss, in nats per byte, of a model that knows only how often each byte occurs."""
    counts = torch.bincount(train_text.long(), minlength=VOCABULARY).double() + 1
    return -(counts / counts.sum()).log()[held_out_text.long()].mean().item()


def windows(text: Tensor, starts: Tensor, length: int, device: torch.device) -> Batch:
    chunk = text[starts[:, None] + torch.arange(length + 1)].long().to(device)
    return chunk[:, :-1], chunk[:, 1:]


def random_batch(text: Tensor, generator: torch.Generator, args: argparse.Namespace, device: torch.device) -> Batch:
    starts = torch.randint(len(text) - args.context, (args.batch,), generator=generator)
    return windows(text, starts, args.context, device)


def batch_at(text: Tensor, first: int, args: argparse.Namespace, device: torch.device) -> Batch:
    """Examples `first`, `first + 1`, ... of one random sequence, the same for any number of ranks."""
    drawn = np.random.Philox(key=args.seed, counter=first).random_raw(4 * args.batch)[::4]  # four numbers for a count
    starts = torch.from_numpy((drawn % np.uint64(len(text) - args.context)).astype(np.int64))
    return windows(text, starts, args.context, device)


def is_spike(loss: float, curve: list[float]) -> bool:
    """Whether a loss is not finite, or twice as high as it was."""
    return not math.isfinite(loss) or (len(curve) >= 10 and loss > 2 * statistics.median(curve[-20:]))


def held_out_batches(
    text: Tensor, rank: int, ranks: int, args: argparse.Namespace, device: torch.device
) -> list[Batch]:
    """This rank's share of windows that lie evenly over the held-out text."""
    count = args.eval_batches * args.batch * ranks
    starts = torch.linspace(0, len(text) - args.context - 1, count).long()[rank::ranks]
    return [windows(text, part, args.context, device) for part in starts.split(args.batch)]


# ---- what is shown


def state_mib(step: fz.Step, params: Any, ranks: int) -> float:
    plan = fz.plan(step, params, world_size=ranks)
    return (plan.params + plan.grads + plan.moments) / 2**20


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
        ("batch", 16, "examples a rank and step"),
        ("steps", STEPS, "updates"),
        ("warmup", 30, "updates over which the learning rate rises"),
        ("eval-every", 40, "updates between two looks at the held-out files"),
        ("save-every", 100, "updates between two checkpoints; the last three are kept"),
        ("eval-batches", 8, "held-out batches a rank"),
        ("sample-bytes", 300, "length of the completion"),
        ("lr", 2e-3, "peak learning rate"),
        ("temperature", 0.6, "of the completion"),
    )
    parser.add_argument("--stage", type=int, default=3, choices=sorted(SHARD), help="ZeRO stage; 0 shards nothing")
    parser.add_argument(
        "--dtype", default="auto", choices=["auto", "bf16", "fp32"], help="what matrices are computed in; auto measures"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint in --out, if any, with its options where none are given",
    )
    parser.add_argument(
        "--rollback",
        action=argparse.BooleanOptionalAction,
        default=False,
        help=f"where a batch raises the loss, go back to the state before it; the last {GIVES_UP} are held",
    )
    parser.add_argument(
        "--jit", action=argparse.BooleanOptionalAction, default=False, help="run the step as one compiled graph"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and completion")
    parser.add_argument("--out", type=Path, default=Path("out/train_lm"), help="folder for what is kept")
    args = parse_options(parser, argv)
    check_options(parser, args, args.stage)
    check_folder(parser, args.out)
    return args


if __name__ == "__main__":
    sys.exit(launch(train, options()))
