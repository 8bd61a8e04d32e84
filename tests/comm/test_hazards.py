"""Hazards show a read before an arrival, a read after a return, and a transfer that nobody waits for."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from fzero.comm import hazards


def copies(target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
    """A transfer that arrives at once."""
    target.copy_(source)
    return lambda: None


@pytest.mark.parametrize("late", [False, True])
def test_in_flight_reads_as_nan_until_it_is_waited_for(late: bool) -> None:
    source, target = torch.ones(3), torch.zeros(3)
    with hazards.hazards(1):
        wait = hazards.in_flight(target, source, copies, late)
        assert target.isnan().all()
        wait()
        assert torch.equal(target, source)
    hazards.in_flight(target, 2 * source, copies, late)
    assert torch.equal(target, 2 * source)  # nothing is shown outside


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.int16, torch.bool])
def test_what_comes_from_elsewhere_may_be_waited_for_twice(dtype: torch.dtype) -> None:
    source, target = torch.ones(3).to(dtype), torch.zeros(3, dtype=dtype)
    with hazards.hazards(1):
        wait = hazards.arriving(target, lambda target: copies(target, source))
        early = (
            torch.ones_like(target) if dtype == torch.bool else target.isnan() if dtype.is_floating_point else target
        )
        assert (early != 0).all() and (dtype == torch.bool or not torch.equal(target, source))
        wait()
        assert torch.equal(target, source)
        target.zero_()
        wait()
        assert not target.any()
    hazards.arriving(target, lambda target: copies(target, source))
    assert torch.equal(target, source)


def test_what_fails_to_arrive_was_waited_for() -> None:
    def fails(_: torch.Tensor) -> Callable[[], None]:
        raise OSError("gone")

    with hazards.hazards(1):
        wait = hazards.arriving(torch.zeros(3), fails)
        for _ in range(2):
            with pytest.raises(OSError, match="gone"):
                wait()


def test_what_departs_may_depart_late() -> None:
    done: list[int] = []
    with hazards.hazards(1):
        for number in range(50):
            hazards.departing(lambda number=number: done.append(number))
        late = len(done) < 50
    hazards.departing(lambda: done.append(-1))
    assert late and -1 in done  # at once outside
    while len(done) < 51:
        time.sleep(1e-3)
    assert done != sorted(done) and set(done) == {-1, *range(50)}


def test_given_back_is_poisoned_inside_only() -> None:
    x, i = torch.ones(2), torch.ones(2, dtype=torch.int32)
    assert not hazards.poison(x) and hazards.current_seed() is None
    with hazards.hazards(7):
        assert hazards.current_seed() == 7 and hazards.poison(x) and hazards.poison(i)
        with hazards.hazards(None):
            assert not hazards.poison(x)
    assert x.isnan().all() and (i == torch.iinfo(torch.int32).max).all()


def test_nobody_waits() -> None:
    with pytest.raises(AssertionError, match="1 transfers were started"), hazards.hazards():
        hazards.in_flight(torch.zeros(1), torch.ones(1), copies, False)
