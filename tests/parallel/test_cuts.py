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

from fzero.comm.axis import Axis
from fzero.parallel.rules import PARTIAL
from fzero.parallel.watched import mark_of, note, watching
from fzero.table.placements import Cut, Mark

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
