"""How results are cut, without ranks: drawn programs on slices are what is said of them beside the whole."""

from __future__ import annotations

import random
from typing import Any

import between
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nightly import by_day
from torch import nn
from units import F64

import fzero as fz
from fzero.comm.axis import Axis
from fzero.parallel.rules import PARTIAL
from fzero.parallel.watched import mark_of, note, watching
from fzero.table.placements import Cut, Mark
from fzero.testing import RankError, assert_trees_close, run_ranks

Parts = tuple[tuple[int, ...], ...]
MILD, LINES = [
    [line for line in every if "total" not in line and "kept" not in line] for every in (between.MILD, between.LINES)
]


def drawn(rng: random.Random, h: torch.Tensor, x: torch.Tensor) -> tuple[list[str], torch.Tensor]:
    """Some lines that plain torch runs, and what they give of the whole."""
    lines, space = list[str](), between.space_of(h, x)
    for _ in range(20):
        d, e, k = rng.randint(-3, -1), rng.randint(-3, -1), rng.choice([2, 3, 4, 6])
        line = rng.choice(MILD if rng.random() < 0.1 else LINES).format(d=d, e=e, k=k)
        own = dict(space)
        try:
            exec(line, own)
        except Exception:
            continue
        if own["h"].numel() < 2000 and own["h"].is_floating_point() and own["h"].isfinite().all():
            lines, space = [*lines, line], own
        if len(lines) > rng.randint(0, 4):
            break
    return lines, space["h"]


def slices(whole: torch.Tensor, parts: Parts, rank: int) -> torch.Tensor:
    every = [own.split(part, -1)[rank] for own, part in zip(whole.split([*map(sum, parts)], -1), parts, strict=True)]
    return torch.cat(every, -1)


def joined(found: list[torch.Tensor], cut: Cut) -> torch.Tensor:
    """The whole of slices that are cut so."""
    assert cut.parts is not None
    dim = found[0].ndim + cut.dim
    own = [
        x.unflatten(dim, (cut.outer, -1)).split([part[r] for part in cut.parts], dim + 1) for r, x in enumerate(found)
    ]
    return torch.cat([torch.cat(part, dim + 1) for part in zip(*own, strict=True)], dim + 1).flatten(dim, dim + 1)


def on_rank(lines: list[str], h: torch.Tensor, x: torch.Tensor, cut: Cut) -> tuple[torch.Tensor, Mark | None]:
    def run(h: torch.Tensor, x: torch.Tensor) -> Any:
        note(h, Mark("up", cut))
        space = between.space_of(h, x)
        for line in lines:
            exec(line, space)
        return space["h"], mark_of(space["h"])

    return watching(run, Axis(), lambda x, _: x, "module")(h, x)  # type: ignore[return-value]


def said(seed: int) -> tuple[str, object]:
    """What became of a program: refused, unknown, whole, cut or partial; an error where it is not what is said."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    h, x = torch.randn(2, 3, 12, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)
    lines, want = drawn(rng, h, x)
    every = ((6, 6),), ((4, 4, 4),), ((8, 4),), ((6, 0, 6),), ((4, 2), (4, 2)), ((8, 2), (1, 1)), ((2, 1),) * 4
    parts: Parts = rng.choice(every)
    found, marks = list[torch.Tensor](), list[Mark | None]()
    for rank in range(len(parts[0])):
        try:
            out, mark = on_rank(lines, slices(h, parts, rank), x, Cut(-1, parts, rank))
        except (ValueError, RuntimeError, IndexError) as error:
            return "refused", (lines, error)
        found.append(out)
        marks.append(mark)
    cuts = [mark.cut if mark is not None else None for mark in marks]
    if None in marks or not all(mark and mark.source for mark in marks):
        assert not any(cuts) and all(map(want.equal, found)), (seed, lines, parts, marks)
        return "whole", lines
    if None in cuts:
        return "unknown", lines
    assert len({cut and cut._replace(rank=0) for cut in cuts}) == 1, (seed, lines, parts, cuts)
    cut = cuts[0]
    assert cut is not None
    if cut.parts is None and cut != PARTIAL:
        return "unknown", lines
    got = torch.stack(found).sum(0) if cut == PARTIAL else joined(found, cut)
    assert got.shape == want.shape and torch.allclose(got, want, rtol=1e-9, atol=1e-9), (seed, lines, parts, cut)
    return "partial" if cut == PARTIAL else "cut", lines


@pytest.mark.filterwarnings("ignore:std..:UserWarning", "ignore:Tensor.mT is deprecated:UserWarning")
@by_day(200)
@given(st.integers(0, 10**9))
def test_what_is_said_of_slices_is_so(seed: int) -> None:
    said(seed)


def test_programs_of_each_kind_are_drawn() -> None:
    kinds = [said(seed)[0] for seed in range(150)]
    assert kinds.count("cut") > 20 and {"refused", "partial"} <= {*kinds}, kinds


WHOLE: dict[str, Any] = {
    "before it": lambda h: h.unflatten(1, (4, -1)).tanh().flatten(1, 2),
    "before it, by -1": lambda h: h.unflatten(1, (-1, 2)).cumsum(1).flatten(1, 2),
    "behind it": lambda h: h.permute(2, 0, 1).unflatten(2, (2, -1)).tanh().flatten(2, 3).permute(1, 2, 0),
    "then over it": lambda h: h.unflatten(1, (4, 1, -1)).softmax(-1).flatten(1, 3),
}


class Between(nn.Module):
    def __init__(self, of: str) -> None:
        super().__init__()
        self.up, self.down, self.of = nn.Linear(8, 12, dtype=F64), nn.Linear(12, 8, dtype=F64), of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(WHOLE[self.of](self.up(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("of", WHOLE)
def test_what_is_done_to_a_whole_dim_leaves_the_cut_one(of: str) -> None:
    apply, params = fz.functional(Between(of))
    x = torch.randn(3, 4, 8, dtype=F64)
    loss = lambda p, x: apply(p, x).square().mean()
    want = torch.func.grad(loss)(dict(params), x)

    def rank_main(rank: int) -> Any:
        step = fz.shard_tensor(fz.train_step(loss, fz.sgd(1.0)), {"up": "column", "down": "row"})
        out, pullback = step.vjp(step.init(params), x)
        return fz.gather(pullback(torch.ones_like(out))[0])

    if of == "then over it":
        with pytest.raises(RankError, match="'softmax' goes over the dim"):
            run_ranks(rank_main, 2)
        return
    for got in run_ranks(rank_main, 2):
        assert_trees_close(dict(got), want, rtol=1e-10)
