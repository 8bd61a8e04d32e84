"""Trains a byte language model on documents that no rank has the memory for, and asks what was said far before.

Each rank may allocate a certain number of bytes, and the operating system refuses whatever goes beyond (RLIMIT_DATA).
One rank alone tries first, and a document does not fit; cut over two ranks it does. Two to three minutes on two cores:

    python examples/long_context.py
    python examples/long_context.py --attention ulysses
    python examples/long_context.py --ranks 4 --groups 2
    torchrun --nproc-per-node 4 examples/long_context.py

A document is source of Python's standard library, in lower case and without digits, with a letter and a digit in many
places ("Q7"); at its end the letters come again, and the digits have to be known. Documents are short in the beginning,
and become twice as long whenever nine of ten answers are right. Held-out ones are always as long as the longest.

Shapes: b documents, t bytes of this rank's piece of them, h heads, d features of one head.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from bigger_than_memory import Sampler, allocated, limit_to
from einops import rearrange
from launch import add_numbers, any_rank, check_folder, check_options, default_ranks, device_of, launch, parser_of
from torch import Tensor
from tqdm import tqdm
from train_lm import standard_library
from transformer import VOCABULARY, rotary_angles, rotate

import fzero as fz

LETTERS, DIGITS, END = 26, 10, ord("\n")  # a needle is a letter, a digit and END
TILE = 1024  # bytes of which an MLP or the head has intermediates at once
NO_MEMORY = 75  # exit status of a rank that ran out of memory
Params = dict[str, Any]
Batch = dict[str, Tensor]
WHERE = ("first third", "middle", "last third", "other rank")


# ---- the model: pure functions of params and of this rank's piece of a batch


def language_model(args: argparse.Namespace, ax: Any, everyone: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """A function of params and a piece of a batch: the loss of all ranks, and which answers of this piece are right.

    Args:
        ax: the axis that sequences are cut over.
        everyone: all axes as one.
    """
    if args.attention == "ring":
        attention = fz.parallel.ring(ax, order_of(args), causal=True)
    else:
        attention = fz.parallel.ulysses(None, ax, causal=True)

    @fz.unit
    def block(p: Params, x: Tensor, angles: Tensor | None) -> Tensor:
        """Near bytes by their places, or all that came before by what they are (arXiv 2501.18795)."""
        q, k, v = rearrange(normed(x, p["norm"]) @ p["qkv"], "b t (three h d) -> three b h t d", three=3, h=args.heads)
        if angles is not None:
            y = attention(rotate(q, angles), rotate(k, angles), v, window=args.window)
        else:
            y = attention(q, k, v)
        x = x + rearrange(y, "b h t d -> b t (h d)") @ p["out"]
        return fz.parallel.tiled(mlp, x, p["mlp"], tiles=tiles_of(x))

    def fn(p: Params, own: Batch) -> tuple[Tensor, Tensor]:
        angles = rotary_angles(args.length, args.width // args.heads, own["tokens"].device)[own["position_ids"][0]]
        x = p["embed"][own["tokens"]] + p["embed_before"][own["before"]]
        for each in p["blocks"][:-1]:
            x = block(each, x, angles)
        x = normed(block(p["blocks"][-1], x, None), p["norm"])
        targets, asked = own["shift_labels"], own["needle"] >= 0
        losses = fz.parallel.tiled_cross_entropy(x, p["head"], targets, tiles=tiles_of(x), reduction="none")
        loss = fz.parallel.weighted_mean(losses, own["weights"], everyone)
        return loss, (x[asked] @ p["head"].T).argmax(-1) == targets[asked]

    return fn


def mlp(x: Tensor, p: Params) -> Tensor:
    return x + F.silu(normed(x, p["norm"]) @ p["up"]) @ p["down"]


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight)


def tiles_of(x: Tensor) -> int:
    return -(-x.shape[1] * x.shape[0] // TILE)


def drawn_params(args: argparse.Namespace, generator: torch.Generator) -> Params:
    def matrix(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * gain * rows**-0.5

    def block() -> Params:
        width, quiet = args.width, (2 * args.blocks) ** -0.5  # what is added to the residual stream (GPT-2)
        hidden = {"norm": torch.ones(width), "up": matrix(width, 2 * width), "down": matrix(2 * width, width, quiet)}
        return {
            "norm": torch.ones(width),
            "qkv": matrix(width, 3 * width),
            "out": matrix(width, width, quiet),
            "mlp": hidden,
        }

    embed, embed_before = [torch.randn(VOCABULARY, args.width, generator=generator) for _ in range(2)]
    return {
        "embed": embed,
        "embed_before": embed_before,  # of the byte before
        "blocks": [block() for _ in range(args.blocks)],
        "norm": torch.ones(args.width),
        "head": matrix(args.width, VOCABULARY).T.contiguous(),
    }


# ---- data


def haystacks() -> tuple[Tensor, Tensor]:
    """Bytes to train on and held-out ones; none is a capital letter or a digit."""
    found = [text.numpy().tobytes().lower().translate(None, b"0123456789") for text in standard_library()]
    train, held_out = [torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in found]
    return train, held_out


def documents(text: Tensor, count: int, length: int, args: argparse.Namespace, generator: torch.Generator) -> Batch:
    """Whole documents, [count, length] each: tokens, the bytes before them, labels, their weights in the loss, and for
    each letter that is asked for the place of its digit, -1 elsewhere."""
    needles = needles_in(length)
    room = length - 3 * needles  # the rest are questions
    starts = torch.randint(len(text) - room, (count, 1), generator=generator)
    letters = torch.rand(count, LETTERS, generator=generator).argsort(1)[:, :needles] + ord("A")
    digits = torch.randint(DIGITS, (count, needles), generator=generator) + ord("0")
    said = torch.stack([letters, digits, torch.full_like(digits, END)], 2)
    places = 3 * torch.rand(count, room // 3, generator=generator).argsort(1)[:, :needles]
    tokens = torch.cat([text[starts + torch.arange(room)].long(), said.flatten(1)], 1)
    tokens.scatter_(1, (places[..., None] + torch.arange(3)).flatten(1), said.flatten(1))
    needle = torch.full_like(tokens, -1)
    needle[:, room::3] = places + 1
    weights = torch.where(needle >= 0, 1.0, args.text_weight)
    weights[:, -1] = 0  # nothing comes after it
    return {"tokens": tokens, "before": tokens.roll(1, 1), "labels": tokens, "weights": weights, "needle": needle}


def needles_in(length: int) -> int:
    return min(LETTERS, length // 12)


# ---- the run of one rank


def train(rank: int, ranks: int, args: argparse.Namespace, stop: Callable[[], bool]) -> None:
    device = device_of(rank, ranks)
    say: Callable[..., None] = print if rank == 0 and not args.alone else lambda *_, **__: None
    train_text, held_out_text = haystacks()
    mesh = dist.init_device_mesh(device.type, (args.groups, ranks // args.groups), mesh_dim_names=("dp", "sp"))
    ax, everyone = fz.parallel.axis(mesh, "sp"), fz.parallel.axis(mesh, ("dp", "sp"))
    lr = fz.warmup_cosine(args.lr, warmup=min(20, args.steps), total=args.steps, end=args.lr / 10)
    optimizer = fz.chain(fz.clip_by_global_norm(1.0), fz.adamw(lr, b2=0.98, weight_decay=0.0))
    step = fz.train_step(language_model(args, ax, everyone), optimizer, has_aux=True)
    step = fz.donate(fz.shard_zero3(step, mesh=mesh, axis=("dp", "sp")))

    began = allocated()
    limit_to(int(began + args.memory))
    say(f"a rank has {began:,.0f} MiB before it begins, and may allocate {args.memory:,} MiB more")
    params = drawn_params(args, torch.Generator().manual_seed(args.seed))
    generator, of_held_out = [torch.Generator().manual_seed(args.seed + n + mesh.get_local_rank("dp")) for n in (1, 1000)]

    def piece(text: Tensor, count: int, length: int, generator: torch.Generator) -> Batch:
        whole = documents(text, count, length, args, generator)
        own = fz.parallel.shard_sequence(whole, ax, order=order_of(args))
        return {name: value.to(device) for name, value in own.items()}

    held_out = [piece(held_out_text, 1, args.length, of_held_out) for _ in range(args.eval_documents)]
    state, length = step.init(params), min(args.shortest, args.length)
    curve: list[tuple[int, int, list[float]]] = []

    with Sampler() as sampler:
        bar = tqdm(total=args.steps, unit="step", disable=rank != 0 or args.alone, mininterval=0.5 if sys.stderr.isatty() else 10)
        for done in range(args.steps):
            if any_rank(stop(), device):
                break
            if done % args.eval_every == 0:
                share = shares(step, state, held_out, args)
                curve.append((done, length, share))
                say(done, length, share)
            own = piece(train_text, max(1, args.length // length), length, generator)
            state, metrics = step(state, own)
            right = share_of(metrics["aux"])
            bar.set_postfix_str(f"loss {metrics['loss'].item():.3f}, {right:.0%} of answers in documents of {length:,}")
            bar.update()
            if right >= 0.9 and length < args.length:
                length = min(2 * length, args.length)
        share = shares(step, state, held_out, args)
        say(args.steps, length, share)
        bar.close()
    say(max(s[2] for s in sampler.samples) - began, max(s[2] for s in sampler.samples))


def share_of(right: Tensor) -> float:
    counts = torch.tensor([right.sum(), right.numel()], dtype=torch.float64)
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def shares(step: fz.Step, state: fz.TrainState, held_out: list[Batch], args: argparse.Namespace) -> list[float]:
    """The shares of right answers, by where the needle lies; every rank must call it."""
    counts = torch.zeros(len(WHERE), 2)
    for own in held_out:
        _, right = step.forward(state, own)
        needle = own["needle"][own["needle"] >= 0]
        third = 3 * needle // (args.length - 3 * needles_in(args.length))
        chosen = [third == n for n in range(3)] + [~torch.isin(needle, own["position_ids"][0])]
        counts += torch.stack([torch.stack([(right & each).sum(), each.sum()]) for each in chosen]).cpu()
    dist.all_reduce(counts)
    return (counts[:, 0] / counts[:, 1]).tolist()


def order_of(args: argparse.Namespace) -> str:
    """How documents are cut: what a ring does is the same for all ranks if each has an early and a late piece."""
    return "zigzag" if args.attention == "ring" else "contiguous"


def options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_numbers(
        parser,
        ("ranks", default_ranks(), "processes"),
        ("groups", 1, "groups of ranks, each with documents of its own, which are cut over the group"),
        ("memory", 96, "MiB that a rank may allocate beyond what it has before it begins"),
        ("length", 16384, "bytes of a document"),
        ("shortest", 128, "bytes of a document in the beginning"),
        ("width", 64, "features of the residual stream"),
        ("blocks", 2, "transformer blocks; the last one looks far"),
        ("heads", 2, "attention heads of a block"),
        ("window", 32, "bytes that the other blocks see"),
        ("steps", 200, "updates"),
        ("eval-every", 20, "updates between two looks at held-out documents"),
        ("eval-documents", 2, "held-out documents of a group"),
        ("lr", 3e-3, "peak learning rate"),
        ("text-weight", 0.1, "of a byte that is no answer in the loss"),
    )
    parser.add_argument("--attention", default="ring", choices=["ring", "ulysses"])
    parser.add_argument("--seed", type=int, default=0, help="of weights and documents")
    parser.add_argument("--out", type=Path, default=Path("out/long_context"), help="folder for the picture")
    args = parser.parse_args(argv)
    check_options(parser, args)
    check_folder(parser, args.out)
    args.alone = False
    return args


if __name__ == "__main__":
    sys.exit(launch(train, options()))
