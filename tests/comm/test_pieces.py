"""Pieces of any sizes between ranks, and sums in rank order, which have the same bits on every rank."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fzero as fz
from fzero.comm import pieces
from fzero.comm.axis import Axis
from fzero.testing import assert_collectives, assert_trees_equal, run_ranks

pytestmark = pytest.mark.usefixtures("hazards")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.uint8]
BACKENDS = st.sampled_from(["threads"] * 9 + ["processes"])


def axis() -> Axis:
    return fz.parallel.axis(None, "a test")


def drawn(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Values of all sizes, of which a sum in another order has other bits."""
    generator = torch.Generator().manual_seed(seed)
    real = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    wild = real * 10.0 ** torch.randint(-2, 3, tuple(shape), generator=generator)
    if dtype.is_complex:
        return torch.complex(wild, real).to(dtype)
    return wild.to(dtype) if dtype.is_floating_point else wild.abs().clamp(max=50).to(dtype)


def in_order(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """The first and the second, and the third to that; 16-bit floats in float32."""
    dtype = terms[0].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    return functools.reduce(torch.add, [x.to(wide) for x in terms]).to(dtype)


def total(rank: int, terms: Sequence[torch.Tensor]) -> torch.Tensor:
    return pieces.total(axis(), terms[rank], "x")


# small ones that all ranks send whole, and large ones, which they add up in pieces
SHAPES = st.one_of(
    st.lists(st.integers(0, 5), max_size=3), st.sampled_from([[pieces.SMALL + 7], [3, 1 << 14], [1 << 17]])
)


@given(
    world=st.integers(1, 4),
    shape=SHAPES,
    dtype=st.sampled_from(DTYPES),
    turned=st.booleans(),
    seed=st.integers(0, 2**31),
    backend=BACKENDS,
)
@settings(max_examples=60)
def test_a_total_is_in_rank_order(
    world: int, shape: list[int], dtype: torch.dtype, turned: bool, seed: int, backend: str
) -> None:
    terms = [drawn(shape, dtype, seed + rank) for rank in range(world)]
    terms = [x.transpose(0, -1) if turned and x.ndim else x for x in terms]
    kept = [x.clone() for x in terms]
    got = run_ranks(functools.partial(total, terms=terms), world, backend=backend)
    expected = in_order(terms)
    for own in got:
        assert own.shape == expected.shape
        assert_trees_equal(own.contiguous(), expected.contiguous())
    assert_trees_equal(terms, kept)


def test_a_total_of_flags_is_refused() -> None:
    def rank_main(rank: int) -> None:
        with pytest.raises(TypeError, match=r"got a tensor of torch.bool, expected numbers"):
            pieces.total(axis(), torch.ones(2, dtype=torch.bool), "x")

    run_ranks(rank_main, 2)


def test_the_order_shows() -> None:
    """Or the test above would say nothing."""
    terms = [drawn([100], torch.float32, seed) for seed in range(3)]
    assert not torch.equal(in_order(terms), in_order(terms[::-1]))


Cut = tuple[list[int], list[int], int]  # sizes of a dim, the others, which dim it is


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    others = draw(st.lists(st.integers(0, 3), max_size=2))
    return sizes, others, draw(st.integers(0, len(others)))


def of(size: int, others: Sequence[int], dim: int) -> list[int]:
    return [*others[:dim], size, *others[dim:]]


def scattered(rank: int, terms: Sequence[torch.Tensor], dim: int, sizes: Sequence[int]) -> torch.Tensor:
    return pieces.scattered(axis(), terms[rank], dim, sizes, "x")


def gathered(rank: int, terms: Sequence[torch.Tensor], dim: int, sizes: Sequence[int]) -> torch.Tensor:
    return pieces.gathered(axis(), terms[rank], dim, sizes, "x")


@given(cut=cuts(), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**31), backend=BACKENDS)
@settings(max_examples=40)
def test_pieces_of_sums(cut: Cut, dtype: torch.dtype, seed: int, backend: str) -> None:
    sizes, others, dim = cut
    terms = [drawn(of(sum(sizes), others, dim), dtype, seed + rank) for rank in range(len(sizes))]
    got = run_ranks(functools.partial(scattered, terms=terms, dim=dim, sizes=sizes), len(sizes), backend=backend)
    assert_trees_equal([x.contiguous() for x in got], [x.contiguous() for x in in_order(terms).split(sizes, dim)])


@given(cut=cuts(), dtype=st.sampled_from([*DTYPES, torch.bool]), seed=st.integers(0, 2**31), backend=BACKENDS)
@settings(max_examples=40)
def test_pieces_are_joined(cut: Cut, dtype: torch.dtype, seed: int, backend: str) -> None:
    sizes, others, dim = cut
    terms = [drawn(of(size, others, dim), dtype, seed + rank) for rank, size in enumerate(sizes)]
    got = run_ranks(functools.partial(gathered, terms=terms, dim=dim, sizes=sizes), len(sizes), backend=backend)
    assert_trees_equal(got, [torch.cat(terms, dim)] * len(sizes))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_pieces_that_do_not_lie_one_after_the_other(dim: int, backend: str) -> None:
    terms = [drawn(of(size, [3], dim), torch.float64, size) for size in (2, 0, 4)]
    got = run_ranks(functools.partial(gathered, terms=terms, dim=dim, sizes=[2, 0, 4]), 3, backend=backend)
    assert_trees_equal(got, [torch.cat(terms, dim)] * 3)


def exchanged(rank: int, shapes: Any, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    send = [drawn(shape, dtype, seed + 10 * rank + to) for to, shape in enumerate(shapes[rank])]
    return pieces.exchange(axis(), send, [own[rank] for own in shapes], "x")


@given(
    data=st.data(), world=st.integers(1, 4), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**31), backend=BACKENDS
)
@settings(max_examples=40)
def test_everything_arrives(data: Any, world: int, dtype: torch.dtype, seed: int, backend: str) -> None:
    shape = st.lists(st.integers(0, 3), min_size=1, max_size=2)
    shapes = data.draw(st.lists(st.lists(shape, min_size=world, max_size=world), min_size=world, max_size=world))
    got = run_ranks(functools.partial(exchanged, shapes=shapes, dtype=dtype, seed=seed), world, backend=backend)
    for rank, received in enumerate(got):
        assert_trees_equal(received, [drawn(shapes[r][rank], dtype, seed + 10 * r + rank) for r in range(world)])


def two_at_once(rank: int) -> list[float]:
    """Messages of two exchanges under way, which are waited for the other way round, do not meet."""
    ax, filled = axis(), []
    for number in range(2):
        send = [torch.full((3,), 100.0 * number + 10 * rank + to) for to in range(ax.size)]
        receive = [torch.empty(3) for _ in send]
        filled.append((pieces.start_exchange(ax, send, receive, f"exchange {number}"), receive))
    for wait, _ in reversed(filled):
        wait()
    return [x[-1].item() for _, receive in filled for x in receive]


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_exchanges_under_way(backend: str) -> None:
    expected = [[100.0 * number + 10 * other + rank for number in range(2) for other in range(3)] for rank in range(3)]
    assert run_ranks(two_at_once, 3, backend=backend) == expected


def test_numbers_are_told_below_transforms() -> None:
    def rank_main(rank: int) -> list[tuple[int, ...]]:
        found = []

        def fn(x: torch.Tensor) -> torch.Tensor:
            found.extend(assert_collectives(lambda: pieces.told(axis(), [rank, 5, -rank], "x"), {"exchange": 1}))
            return x * found[-1][1]

        torch.func.vmap(torch.func.grad(fn))(torch.ones(2))
        return found

    assert run_ranks(rank_main, 3) == [[(0, 5, 0), (1, 5, -1), (2, 5, -2)]] * 3
    assert pieces.told(Axis(), [3], "x") == [(3,)]


@given(count=st.integers(0, 20), parts=st.integers(1, 6))
def test_balanced_pieces(count: int, parts: int) -> None:
    sizes = pieces.balanced(count, parts)
    assert len(sizes) == parts and sum(sizes) == count and max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True) and [x.numel() for x in torch.empty(count).tensor_split(parts)] == sizes
    assert pieces.starts(sizes) == [sum(sizes[:place]) for place in range(parts + 1)]
