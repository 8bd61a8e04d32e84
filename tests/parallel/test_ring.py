"""Ring attention against all scores at once in one process: values, derivatives of any order, orders, errors."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from attentions import F64, Case, need_equal, plain
from hypothesis import given
from hypothesis import strategies as st
from nightly import by_day, in_turns

import fzero as fz
from fzero.comm import pieces
from fzero.comm.divergence import recorded_collectives
from fzero.parallel import visible
from fzero.testing import RankError, run_ranks

pytestmark = pytest.mark.usefixtures("hazards")


@st.composite
def options(draw: st.DrawFn, total: int) -> tuple[tuple[str, Any], ...]:
    cuts = draw(st.none() | st.lists(st.integers(0, total), max_size=3))
    drawn = {
        "is_causal": draw(st.booleans()),
        "window": draw(st.none() | st.integers(1, 6)),
        "documents": None if cuts is None else (0, *sorted(cuts), total),
        "scale": draw(st.none() | st.just(0.7)),
    }
    return tuple(drawn.items())


@st.composite
def rings(draw: st.DrawFn) -> Case:
    ranks, order = draw(st.integers(1, 4)), draw(st.sampled_from(("contiguous", "zigzag")))
    if order == "zigzag":
        parts = pieces.balanced(draw(st.integers(1, 13)), 2 * ranks)
        lengths = tuple(parts[rank] + parts[-1 - rank] for rank in range(ranks))
    else:
        lengths = tuple(draw(st.lists(st.integers(0, 5), min_size=ranks, max_size=ranks).filter(any)))
    kv_heads = draw(st.integers(1, 3))
    heads, d = kv_heads * draw(st.integers(1, 3)), draw(st.integers(1, 4))
    size = draw(st.just(d) | st.integers(1, 4))  # torch's kernel wants both alike
    return Case(lengths, heads, kv_heads, d, size, 0, order, draw(options(sum(lengths))), averaged=draw(st.booleans()))


@by_day(6)
@given(case=rings(), shortest=st.sampled_from([1, 32]))
def test_equals_one_process(case: Case, shortest: int) -> None:
    with mock.patch.object(visible, "SHORTEST", shortest):  # torch's kernel for short documents too, or tiles
        need_equal(case)


@in_turns(8, "on processes, as on threads")
def test_in_zigzag_order_on_processes() -> None:
    """Others are drawn in test_on_processes."""
    need_equal(Case((3, 4, 4), order="zigzag", options=(("is_causal", True), ("documents", (0, 4, 11)))), "processes")


@in_turns(6)
@pytest.mark.parametrize("given", [{}, {"is_causal": True}, {"window": 300, "documents": (0, 100, 700)}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_tiles(given: dict[str, Any], dtype: torch.dtype) -> None:
    """More tokens than a tile has rows, and in the dtypes that are trained in."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = [torch.randn(2, heads, 700, 8, generator=generator, dtype=F64) for heads in (6, 2, 2)]
    got: Any = torch.func.vjp(lambda *x: fz.parallel.attention(*x, **given), *[x.to(dtype) for x in (q, k, v)])
    expected: Any = torch.func.vjp(lambda *x: plain(*x, **given), *[x.to(dtype).to(F64) for x in (q, k, v)])
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    cotangent = q.to(dtype)
    pulled = zip(got[1](cotangent), expected[1](cotangent.to(F64)), strict=True)
    for found, wanted in ((got[0], expected[0]), *pulled):
        assert found.dtype == dtype
        assert (found - wanted).abs().max() < tolerance * max(1, wanted.abs().max().item())


def test_what_is_not_seen_is_not_sent() -> None:
    """Causal pieces go to later ranks only, those out of a window to nobody."""

    def sent(rank: int, **given: Any) -> list[int]:
        x = torch.ones(1, 1, 4, 2, dtype=F64)
        with recorded_collectives() as record:
            fz.parallel.ring(fz.parallel.axis(None, "sp"), **given)(x, x, x)
        return [size for operation, tag, size in record if "shapes" not in str(tag)]

    whole = 2 * 4 * 2 * 8
    assert run_ranks(sent, 3) == [[whole, whole]] * 3
    assert run_ranks(lambda rank: sent(rank, is_causal=True), 3) == [[whole, whole], [whole, 0], [0, 0]]
    assert run_ranks(lambda rank: sent(rank, is_causal=True, window=3), 3) == [[whole], [whole], [0]]
    assert run_ranks(lambda rank: sent(rank, documents=(0, 4, 8, 12)), 3) == [[], [], []]


def test_zigzag_costs_all_ranks_the_same() -> None:
    """Pairs of tokens that see one another, by rank."""
    for ranks in (2, 4):
        total = 8 * ranks
        case = Case(tuple([total // ranks] * ranks), order="zigzag")
        pairs = [int((case.places(rank) + 1).sum()) for rank in range(ranks)]
        assert len(set(pairs)) == 1


def mistaken(rank: int, which: str) -> None:
    ax = fz.parallel.axis(None, "sp")
    x = torch.ones(1, 2, 3, 2, dtype=F64)
    wrong = rank == 1
    if which == "keys":
        fz.parallel.ring(ax)(x, x[:, :, :2] if wrong else x, x)
    elif which == "batch":
        y = x.expand(2, -1, -1, -1) if wrong else x
        fz.parallel.ring(ax)(y, y, y)
    elif which == "causal":
        fz.parallel.ring(ax, causal=wrong)(x, x, x)
    elif which == "window":
        fz.parallel.ring(ax)(x, x, x, window=0 if wrong else 1)
    elif which == "documents":
        fz.parallel.ring(ax)(x, x, x, documents=[0, 5])
    elif which == "zigzag":
        y = x[:, :, : 1 if wrong else 3]
        fz.parallel.ring(ax, "zigzag")(y, y, y)
    else:
        fz.parallel.ring(ax)(x, x[:, :0], x[:, :0])


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ("keys", r"rank 1 of axis 'sp' got q, k and v of shapes \(1, 2, 3, 2\), \(1, 2, 2, 2\)"),
        ("batch", r"rank 1 differs from rank 0"),
        ("causal", r"dtypes or options"),
        ("window", r"window=0, expected at least 1|rank 1 of axis 'sp' got options that it refuses"),
        ("documents", r"documents that end at 5, expected 6"),
        ("zigzag", r"pieces of \[3, 1\] tokens in zigzag order, expected \[2, 2\]"),
        ("heads", r"2 heads and 0 KV heads"),
    ],
)
def test_mistakes_are_told_on_every_rank(which: str, words: str) -> None:
    def caught(rank: int) -> str:
        with pytest.raises(ValueError, match=words) as info:
            mistaken(rank, which)
        return str(info.value)

    said = run_ranks(caught, 2)
    assert which == "window" or len(set(said)) == 1


def test_arguments() -> None:
    x = torch.ones(1, 1, 2, 2)
    with pytest.raises(TypeError, match="got q=None, expected a tensor of floats"):
        fz.parallel.attention(None, x, x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected one"):
        fz.parallel.attention(x, x.double(), x)
    with pytest.raises(TypeError, match="got mask, expected no options but"):
        fz.parallel.attention(x, x, x, mask=None)
    with pytest.raises(ValueError, match="cumulative lengths"):
        fz.parallel.attention(x, x, x, documents=[1, 2])
    with pytest.raises(RankError, match="order='ring', expected one of contiguous, zigzag"):
        run_ranks(lambda rank: fz.parallel.ring(fz.parallel.axis(None, "sp"), "ring"), 1)


@pytest.mark.parametrize("causal", [False, True])
def test_no_documents_at_all(causal: bool) -> None:
    """As a rank has of a batch of fewer examples than ranks."""
    q, k = torch.ones(1, 2, 0, 3, dtype=F64), torch.ones(1, 1, 0, 3, dtype=F64)

    def own(rank: int) -> None:
        attend = fz.parallel.ulysses(None, fz.parallel.axis(None, "sp"), is_causal=causal, documents=[0])
        for each in (attend, functools.partial(fz.parallel.attention, is_causal=causal, documents=torch.tensor([0]))):
            out, pull, *_ = torch.func.vjp(each, q, k, k)
            assert out.shape == q.shape and [x.shape for x in pull(out)] == [q.shape, k.shape, k.shape]

    run_ranks(own, 2)
    with pytest.raises(ValueError, match="documents that end at 0, expected 2"):
        y = torch.ones(1, 1, 2, 2)
        fz.parallel.attention(y, y, y, documents=[0])
