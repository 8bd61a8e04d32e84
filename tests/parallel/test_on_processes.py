"""Drawn steps over tensor and sequence axes on four real processes, whose messages arrive in any order: one process's.

They run one after the other in the same processes, as those take seconds to start.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import attentions
import torch
import zoo
from nightly import in_turns, todays
from reference import adamw_steps

import fzero as fz
from fzero.testing import run_ranks, strategies

RANKS, EPS, CASES = 4, 1e-3, 16
MESHES = ((1, 4), (2, 2), (4, 1))  # data, tensor


def drawn_step(draw: random.Random, meshes: dict[tuple[int, int], Any]) -> tuple[Any, dict[str, float]]:
    """A model of modules whose leaves are cut, transforms in any order; three steps, and one process's."""
    kinds = draw.choices(sorted(zoo.KINDS), k=draw.randint(1, 3))
    blocks = tuple((kind, draw.randint(2, 7), draw.random() < 0.5) for kind in kinds)
    model, sizes = zoo.made(blocks, draw.random() < 0.5), draw.choice(MESHES)
    plan = {**model.plan([draw.random() < 0.8 for _ in blocks])}
    plan |= {"embedding": draw.choice(["vocabulary", "column_gather"])} if draw.random() < 0.7 or not plan else {}
    stage, sequence, mesh = draw.randint(0, 3), draw.random() < 0.5, meshes[sizes]
    if not stage:
        sizes, mesh = (1, 4), meshes[1, 4]
    apply, params = fz.functional(model)
    loss, batches = zoo.loss_of(apply), zoo.batches(sizes[0])
    shard = getattr(fz, f"shard_zero{stage}") if stage else None
    chosen: list[tuple[str, Any]] = [
        ("tensor", functools.partial(fz.shard_tensor, plan=plan, mesh=mesh, sequence=sequence)),
        *([("shard", functools.partial(shard, mesh=mesh))] if shard else []),
        *draw.sample(
            [
                ("remat", fz.remat),
                ("fused", fz.fuse_update),
                ("offload", functools.partial(fz.offload, params="host", grads="host", moments="host")),
                ("donate", fz.donate),
                ("accumulate", functools.partial(fz.accumulate, count=2)),
            ],
            draw.randint(0, 3),
        ),
    ]
    draw.shuffle(chosen)
    optimizer = fz.chain(fz.clip_by_global_norm(0.5), fz.adamw(1e-2, eps=EPS, weight_decay=0.01))
    step = strategies.apply(fz.train_step(loss, optimizer), chosen)
    state, seen = step.init(params), []
    for _ in range(3):
        state, metrics = step(state, *batches[torch.distributed.get_rank() // sizes[1]])
        seen.append(metrics["loss"].item())
    found = dict(fz.gather(state.params))
    want, losses, _ = adamw_steps(loss, dict(params), batches, 3, eps=EPS, max_norm=0.5)
    apart = {name: ((found[name] - x).abs().max() / (1e-3 + x.abs().max())).item() for name, x in want.items()}
    apart |= {f"loss {i}": abs(a - b) / abs(b) for i, (a, b) in enumerate(zip(seen, losses, strict=True))}
    said = blocks, sizes, stage, sequence, plan, [name for name, _ in chosen]
    return said, apart


def drawn_attention(draw: random.Random, _: object) -> tuple[Any, dict[str, float]]:
    """Attention over pieces of a sequence, and all its derivatives."""
    lengths = tuple(draw.choices(range(6), k=RANKS))
    lengths = lengths if any(lengths) else (1, 0, 2, 1)
    kv_heads, d, total = draw.randint(1, 3), draw.randint(1, 3), sum(lengths)
    documents = (0, *sorted(draw.choices(range(total + 1), k=2)), total) if draw.random() < 0.4 else None
    options = (("is_causal", draw.random() < 0.6), ("documents", documents))
    heads, chunks = kv_heads * draw.randint(1, 2), draw.randint(0, 3)
    case = attentions.Case(lengths, heads, kv_heads, d, d, chunks, options=options, custom=draw.random() < 0.3)
    return case, attentions.differences(torch.distributed.get_rank(), case)


def run(rank: int, numbers: list[int]) -> list[Any]:
    names = ("dp", "tp")
    meshes = {sizes: torch.distributed.init_device_mesh("cpu", sizes, mesh_dim_names=names) for sizes in MESHES}
    far = []
    for number in numbers:
        draw = random.Random(number)
        kind = drawn_attention if number % 4 == 3 else drawn_step
        with fz.testing.hazards(seed=draw.randrange(1 << 20) + rank):
            said, apart = kind(draw, meshes)
        far += [(number, said, wrong) for wrong in apart.items() if not wrong[1] < 1e-10]
    return far


@in_turns(8, "on processes, as on threads")
def test_drawn_on_processes() -> None:
    numbers = todays(range(CASES), of=4)
    for far in run_ranks(functools.partial(run, numbers=numbers), RANKS, backend="processes", timeout=240):
        assert not far, far[:3]
