"""Ranks that are played on threads are those of real ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero as fz
from fzero.comm.axis import Axis
from fzero.comm.playing import Parted, play


def named(name: str) -> Axis:
    """An axis by a name, without ranks."""
    return Axis(name=name)


MAPS = {
    "copy": lambda x, ax: fz.parallel.copy(x, ax),
    "sum": lambda x, ax: fz.parallel.sum(x, ax),
    "gather": lambda x, ax: fz.parallel.gather(x, ax, 0),
    "split": lambda x, ax: fz.parallel.split(x, ax, 1),
    "reduce_scatter": lambda x, ax: fz.parallel.reduce_scatter(x, ax, 1),
    "all_to_all": lambda x, ax: fz.parallel.all_to_all(x, ax, 1, 0),
    "ring_shift": lambda x, ax: fz.parallel.ring_shift(x, ax),
}


@given(names=st.lists(st.sampled_from(sorted(MAPS)), min_size=1, max_size=4), size=st.integers(1, 4))
def test_maps_are_those_of_ranks(names: list[str], size: int) -> None:
    def on_rank(rank: int, ax: Axis) -> list[torch.Tensor]:
        x = torch.arange(12.0).view(2, 6) + rank
        weight = torch.tensor(1.0 + rank)

        def fn(x: torch.Tensor) -> torch.Tensor:
            for name in names:
                x = torch.sin(MAPS[name](x, ax)) if x.ndim == 2 and x.shape[1] >= ax.size else x
            return weight * x.sum()

        found = [*torch.func.jvp(fn, (x,), (x,))]
        try:
            return [*found, torch.func.grad(fn)(x)]
        except ValueError:  # outside of a step cotangents of a gather must be the same
            return found

    expected = fz.testing.run_ranks(lambda rank: on_rank(rank, fz.parallel.axis(None, "tp")), size)
    found = play({"tp": size}, lambda place: on_rank(place["tp"], named("tp")))
    for each, other in zip(found, expected, strict=True):
        for a, b in zip(each, other, strict=False):  # ranks that play do not compare cotangents
            assert torch.equal(a, b)


def test_several_axes() -> None:
    def on_rank(place: object) -> tuple[object, ...]:
        both, a, b, other = named("a, b"), named("a"), named("b"), named("c")
        own = torch.tensor([float(both.rank)])
        sums = [fz.parallel.sum(own, ax).item() for ax in (both, a, b, other)]
        return (both.size, a.size, b.size, other.size, a.rank, b.rank, other.rank, *sums)

    for number, found in enumerate(play({"a": 2, "b": 3}, on_rank)):
        a, b = divmod(number, 3)
        assert found == (6, 2, 3, 1, a, b, 0, 15.0, 3.0 + 2 * b, 9.0 * a + 3.0, float(number))
    assert play({}, on_rank) == [(1, 1, 1, 1, 0, 0, 0, 0.0, 0.0, 0.0, 0.0)]
    assert named("a").size == 1


def test_attention_goes_through_pieces() -> None:
    q = torch.randn(1, 4, 8, 2, generator=torch.Generator().manual_seed(0))
    expected = fz.parallel.attention(q, q, q, is_causal=True)
    makers: list[Any] = [lambda: fz.parallel.ring(named("sp")), lambda: fz.parallel.ulysses(None, named("sp"))]
    for make in makers:
        own = lambda place, make=make: make()(*[q.chunk(2, 2)[place["sp"]]] * 3, is_causal=True)
        assert torch.allclose(torch.cat(play({"sp": 2}, own), 2), expected, atol=1e-6)


def sorted_by_place(axes: list[Axis]) -> list[Axis]:
    """So that the ranks wait in a circle."""
    return axes if axes[0].rank == axes[1].rank else axes[::-1]


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda x, ax: fz.parallel.sum(x, ax) if ax.rank else x, "wait for one another, or for one that has ended"),
        (lambda x, ax: fz.parallel.sum(x[ax.rank :], ax), r"rank 0 .* sends .*sum of \(3,\).*rank 1 .*sum of \(2,\)"),
        (lambda x, ax: fz.parallel.sum(x.double() if ax.rank else x, ax), "float64"),
        (
            lambda x, ax: [fz.parallel.sum(x, each) for each in sorted_by_place([ax, named("b")])],
            "wait for one another",
        ),
    ],
)
def test_ranks_that_part_are_told(fn: object, words: str) -> None:
    with pytest.raises(Parted, match=words):
        play({"a": 2, "b": 2}, lambda place: fn(torch.ones(3), named("a")))  # type: ignore[operator]


def test_one_that_fails_ends_all() -> None:
    def on_rank(place: Mapping[str, int]) -> object:
        if place["a"] == 1:
            raise KeyError("here")
        return fz.parallel.sum(torch.ones(1), named("a"))

    with pytest.raises(KeyError, match="here") as caught:
        play({"a": 3}, on_rank)
    assert caught.value.__notes__ == ["on rank 1 of axis 'a', which fz plays"]
