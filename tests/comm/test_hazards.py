"""Hazards show a read before an arrival, a read after a return, and a transfer that nobody waits for."""

from __future__ import annotations

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
