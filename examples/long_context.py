"""Trains a byte language model on documents that one rank has no memory for, and asks it for what was said far before.

What a rank may allocate is limited by the operating system (RLIMIT_DATA). One rank alone tries first, and a document
does not fit; cut over two ranks it does. One to three minutes on two cores:

    python examples/long_context.py
    python examples/long_context.py --attention ulysses
    python examples/long_context.py --ranks 4 --groups 2
    torchrun --nproc-per-node 4 examples/long_context.py

A document has needles in it, a letter and a digit such as "Q7", and at its end the letters come again (needles.py).
Documents are short in the beginning, and twice as long whenever nine of ten answers are right; held-out ones have their
full length all the time.

Ctrl-C stops the run; a second one kills it. Shapes: b documents, t bytes of this rank's piece, h heads, d features of
one head.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from bigger_than_memory import Sampler, allocated, limited_to
from einops import rearrange
from launch import add_numbers, check_folder, check_options, default_ranks, launch, parser_of
from needles import DIGITS, Batch, documents, haystacks, needles_in
from torch import Tensor
from tqdm import tqdm
from transformer import VOCABULARY, rotary_angles, rotate

import fzero as fz

SHORT = 32  # bytes of the document of an update before the limit is set
TILE = 1024  # bytes of which the MLP and the head have intermediates at once
NO_MEMORY = 75  # exit status of a rank that has none
WHERE = ("first third", "middle third", "last third", "another rank")  # than the question
WHOSE = ("another rank", "this rank")
Params = dict[str, Any]
Point = tuple[int, list[float]]  # updates, and shares of right answers by WHERE


# ---- the model: pure functions of params and of this rank's piece of documents


def language_model(args: argparse.Namespace, ax: Any, everyone: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """A function of params and a piece: the mean loss over all ranks, and what the model answers in this piece.

    Args:
        ax: the axis that documents are cut over.
        everyone: all axes of the mesh as one.
    """
    if args.attention == "ring":
        attention = fz.parallel.ring(ax, order_of(args), is_causal=True)
    else:
        attention = fz.parallel.ulysses(None, ax, is_causal=True)

    @fz.unit
    def block(p: Params, x: Tensor, angles: Tensor | None) -> Tensor:
        """Looks at near bytes, by their places; without angles at all before, by what they are (arXiv 2501.18795)."""
        q, k, v = rearrange(normed(x, p["norm"]) @ p["qkv"], "b t (three h d) -> three b h t d", three=3, h=args.heads)
        if angles is None:
            y = attention(q, k, v)
        else:
            y = attention(rotate(q, angles), rotate(k, angles), v, window=args.window)
        x = x + rearrange(y, "b h t d -> b t (h d)") @ p["out"]
        return fz.parallel.tiled(mlp, x, p["mlp"], tiles=tiles_of(x))

    def fn(p: Params, own: Batch) -> tuple[Tensor, Tensor]:
        angles = rotary_angles(args.length, args.width // args.heads, own["tokens"].device)[own["position_ids"][0]]
        x = p["embed"][torch.stack([own["tokens"], own["before"]], -1)].flatten(-2)
        for near in p["blocks"][:-1]:
            x = block(near, x, angles)
        x = normed(block(p["blocks"][-1], x, None), p["norm"])
        losses = fz.parallel.tiled_cross_entropy(x, p["head"], own["shift_labels"], tiles=tiles_of(x), reduction="none")
        answers = (x[own["needle"] >= 0] @ p["head"].T).argmax(-1)
        return fz.parallel.weighted_mean(losses, own["weights"], everyone), answers

    return fn


def mlp(x: Tensor, p: Params) -> Tensor:
    return x + F.silu(normed(x, p["norm"]) @ p["up"]) @ p["down"]


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight)


def tiles_of(x: Tensor) -> int:
    return math.ceil(x.shape[0] * x.shape[1] / TILE)


def order_of(args: argparse.Namespace) -> str:
    """How documents are cut: around a ring a rank with an early and a late piece has as much to do as any other."""
    return "zigzag" if args.attention == "ring" else "contiguous"


def drawn_params(args: argparse.Namespace, generator: torch.Generator) -> Params:
    width, quiet = args.width, (2 * args.blocks) ** -0.5  # for what is added to the residual stream (GPT-2)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * gain * rows**-0.5

    def block() -> Params:
        norm, up, down = torch.ones(width), matrix(width, 2 * width), matrix(2 * width, width, quiet)
        qkv, out = matrix(width, 3 * width), matrix(width, width, quiet)
        return {"norm": norm, "qkv": qkv, "out": out, "mlp": {"norm": norm.clone(), "up": up, "down": down}}

    return {
        "embed": torch.randn(VOCABULARY, width // 2, generator=generator),  # of a byte, and of the one before it
        "blocks": [block() for _ in range(args.blocks)],
        "norm": torch.ones(width),
        "head": matrix(width, VOCABULARY).T.contiguous(),
    }


# ---- the run of one rank


def train(rank: int, ranks: int, args: argparse.Namespace, stop: Callable[[], bool]) -> None:
    say: Callable[[str], None] = tqdm.write if rank == 0 else lambda _: None
    train_text, held_out_text = haystacks()
    mesh = dist.init_device_mesh("cpu", (args.groups, ranks // args.groups), mesh_dim_names=("dp", "sp"))
    ax, everyone = fz.parallel.axis(mesh, "sp"), fz.parallel.axis(mesh, ("dp", "sp"))

    def generator_of(use: int) -> torch.Generator:
        return torch.Generator().manual_seed(1_000_000 * args.seed + 1000 * use + mesh.get_local_rank("dp"))

    def piece(text: Tensor, generator: torch.Generator, count: int, length: int) -> Batch:
        """This rank's piece of documents that all ranks of its group draw."""
        whole = documents(text, count, length, args.text_weight, generator)
        return fz.parallel.shard_sequence(whole, ax, order=order_of(args))

    lr = fz.warmup_cosine(args.lr, warmup=min(20, args.steps), total=args.steps, end=args.lr / 10)
    optimizer = fz.chain(fz.clip_by_global_norm(1.0), fz.adamw(lr, b2=0.98, weight_decay=0.0))
    step = fz.train_step(language_model(args, ax, everyone), optimizer, has_aux=True)
    step = fz.donate(fz.shard_zero3(step, mesh=mesh, axis=("dp", "sp")))
    params = drawn_params(args, torch.Generator().manual_seed(args.seed))
    draw_piece = functools.partial(piece, train_text, generator_of(1))
    step(step.init(params), draw_piece(1, SHORT))  # what libraries and threads take they have after an update
    state, before = step.init(params), allocated()
    say(f"allocated before it begins: {before:,.0f} MiB a rank; limit (RLIMIT_DATA): {args.memory:,} MiB more")
    with limited_to(math.ceil(before + args.memory)), Sampler() as sampler:
        if args.alone:
            step(state, draw_piece(1, args.length))
            return
        of_held_out = generator_of(2)
        held_out = [piece(held_out_text, of_held_out, 1, args.length) for _ in range(args.eval_documents)]
        state, curve, lengths = learn(step, state, draw_piece, held_out, args, stop, say)
        found: list[list[str]] = [[] for _ in range(ranks)]
        dist.all_gather_object(found, said(step, state, held_out[0]))
    most = torch.tensor(max([sample[2] for sample in sampler.samples], default=before) - before)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    say(f"\n{most.item():,.0f} of {args.memory:,} MiB were taken on the rank with most; some of the last answers:")
    for line in [line for lines in found for line in lines][:3]:
        say(line)
    if rank == 0:
        draw(curve, lengths, args.length, args.out / "answers.png")
    say(f"saved {args.out / 'answers.png'}")


def learn(
    step: fz.Step,
    state: fz.TrainState,
    draw_piece: Callable[[int, int], Batch],
    held_out: list[Batch],
    args: argparse.Namespace,
    stop: Callable[[], bool],
    say: Callable[[str], None],
) -> tuple[fz.TrainState, list[Point], list[int]]:
    """The state after the last update, how many answers were right on the way, and every update's length."""
    length = min(args.shortest, args.length)
    curve: list[Point] = []
    lengths: list[int] = []

    def look(state: fz.TrainState) -> dict[str, float]:
        curve.append((state.step, shares(step, state, held_out, args.length)))
        shown = ["-" if math.isnan(share) else f"{share:.0%}" for share in curve[-1][1]]
        say(f"{state.step:>7}{length:>10,} bytes" + "".join(f"{share:>14}" for share in shown))
        return {}

    def update(state: fz.TrainState, own: Batch) -> tuple[fz.TrainState, dict[str, Any]]:
        state, metrics = step(state, own)
        ((right, asked),) = summed([metrics["aux"] == expected(own)])
        return state, {"loss": metrics["loss"], "right": right / asked}

    say(f"\n{'':24}answers in held-out documents of {args.length:,} bytes that are right; chance: {1 / DIGITS:.0%}")
    say(f"updates{'trained on':>16}" + "".join(f"{where:>14}" for where in WHERE))
    learned = lambda: lengths.count(args.length) >= args.longest
    batch = lambda _: draw_piece(max(1, args.batch // length), length)
    options: Any = {"total": args.steps, "evaluate": look, "evaluate_every": args.eval_every}
    run = fz.loop(update, state, batch, every=1, stop=lambda: stop() or learned(), **options)
    for _, metrics in run:
        lengths.append(length)
        run.note = f"{metrics['right']:.0%} right in documents of {length:,}"
        if metrics["right"] >= 0.9:
            length = min(2 * length, args.length)
    state = run.state
    if not curve or curve[-1][0] < state.step:
        look(state)
    if run.ended == "asked" and not learned():
        say(f"stopped after {state.step} updates")
    return state, curve, lengths


def expected(own: Batch) -> Tensor:
    return own["shift_labels"][own["needle"] >= 0]


def elsewhere(own: Batch) -> Tensor:
    """Whether what is asked for was said in another rank's piece."""
    return ~torch.isin(own["needle"][own["needle"] >= 0], own["position_ids"][0])


def shares(step: fz.Step, state: fz.TrainState, held_out: list[Batch], length: int) -> list[float]:
    """The share of right answers by WHERE the needle is; every rank must call it."""
    flags: list[list[Tensor]] = [[] for _ in WHERE]
    for own in held_out:
        _, answers = step.forward(state, own)
        third = 3 * own["needle"][own["needle"] >= 0] // (length - 3 * needles_in(length))
        for mine, chosen in zip(flags, (third == 0, third == 1, third == 2, elsewhere(own)), strict=True):
            mine.append((answers == expected(own))[chosen])
    return [right / asked if asked else math.nan for right, asked in summed([torch.cat(mine) for mine in flags])]


def summed(flags: list[Tensor]) -> list[list[float]]:
    """For each of several tensors of flags how many are set, and how many there are, on all ranks together."""
    counts = torch.tensor([[each.sum(), each.numel()] for each in flags])
    dist.all_reduce(counts)
    return counts.tolist()


def said(step: fz.Step, state: fz.TrainState, own: Batch) -> list[str]:
    """What is answered in this piece, first about other ranks' pieces; every rank must call it."""
    asked = own["needle"] >= 0
    _, answers = step.forward(state, own)
    near = ~elsewhere(own)
    values = (near, own["position_ids"][asked], own["tokens"][asked], answers, own["needle"][asked], expected(own))
    return [
        f"{letter:c} at byte {place:,}: {chr(answer)!r}; byte {needle:,}, on {WHOSE[near]}, is {chr(digit)!r}"
        for near, place, letter, answer, needle, digit in sorted(torch.stack(values, 1).tolist())
    ]


def draw(curve: list[Point], lengths: list[int], length: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (upper, lower) = plt.subplots(2, figsize=(7, 5), height_ratios=(2, 1), sharex=True, layout="constrained")
    updates, shares = zip(*curve, strict=True)
    for number, where in enumerate(WHERE):
        line = "--" if where == WHERE[-1] else "-"
        upper.plot(updates, [100 * each[number] for each in shares], line, marker="o", ms=3, lw=1, label=where)
    upper.axhline(100 / DIGITS, color="gray", ls=":", label="chance")
    upper.set(ylabel=f"right answers in {length:,} bytes, %", ylim=(0, 103))
    upper.legend(frameon=False, title="where the needle is")
    lower.step(range(len(lengths)), lengths, where="post", color="tab:blue", lw=1)
    lower.set(xlabel="updates", ylabel="bytes trained on", yscale="log")
    lower.set_yticks([2**i for i in range(5, 40, 3) if min(lengths, default=length) / 2 < 2**i < 2 * length])
    lower.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    lower.minorticks_off()
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


# ---- one rank alone


def main(args: argparse.Namespace) -> int:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what is limited is the memory of processes
    if args.ranks > 1 and "RANK" not in os.environ:
        print(f"one rank alone takes a document of {args.length:,} bytes:", flush=True)
        process = mp.get_context("spawn").Process(target=alone, args=(args,))
        process.start()
        process.join()
        if process.exitcode == 0:
            print("it fits; a larger --length or a smaller --memory needs more ranks\n", flush=True)
        elif process.exitcode != NO_MEMORY:
            print(f"{Path(sys.argv[0]).stem}: the attempt on one rank failed in another way", file=sys.stderr)
            return 1
        print(f"{args.ranks} ranks:", flush=True)
    return launch(train, args)


def alone(args: argparse.Namespace) -> None:
    """One update on one rank; the exit status says whether there was memory for it."""
    args.alone, args.ranks, args.groups = True, 1, 1
    try:
        launch(train, args)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "llocate memory" not in str(error):
            raise
        print(f"it does not fit: {str(error).splitlines()[0]}\n", flush=True)
        sys.exit(NO_MEMORY)


# ---- options


def options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_numbers(
        parser,
        ("ranks", default_ranks(), "processes"),
        ("groups", 1, "groups of ranks, each with documents of its own, which are cut over its ranks"),
        ("memory", 180, "MiB that a rank may allocate for training, beyond what Python and torch take"),
        ("length", 16384, "bytes of a document"),
        ("shortest", 32, "bytes of a document in the beginning"),
        ("batch", 4096, "bytes of a group in an update, while documents are shorter than that"),
        ("width", 64, "features of the residual stream"),
        ("blocks", 3, "transformer blocks, of which the last one looks far"),
        ("heads", 2, "attention heads of a block"),
        ("window", 32, "bytes that the other blocks look at"),
        ("steps", 300, "updates at most"),
        ("longest", 20, "updates with documents of full length, after which the run ends"),
        ("eval-every", 20, "updates between two looks at held-out documents"),
        ("eval-documents", 4, "held-out documents of a group"),
        ("lr", 6e-3, "peak learning rate"),
        ("text-weight", 0.1, "what a byte counts in the loss, beside an answer's 1"),
    )
    parser.add_argument("--attention", default="ring", choices=["ring", "ulysses"], help="over the ranks of a group")
    parser.add_argument("--seed", type=int, default=0, help="of weights and documents")
    parser.add_argument("--out", type=Path, default=Path("out/long_context"), help="folder for the picture")
    args = parser.parse_args(argv, argparse.Namespace(alone=False))
    check_options(parser, args)
    check_folder(parser, args.out)
    if args.ranks % args.groups:
        parser.error(f"--groups must divide --ranks {args.ranks}, got {args.groups}")
    if min(args.length, args.shortest) < 12:
        parser.error("--length and --shortest must be at least 12 bytes, which have one needle")
    return args


if __name__ == "__main__":
    sys.exit(main(options()))
