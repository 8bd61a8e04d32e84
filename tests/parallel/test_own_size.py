"""Sizes of slices: shapes are made of them, and nothing else."""

from __future__ import annotations

import pytest

from fzero.base.context import during
from fzero.comm.axis import Axis
from fzero.parallel.own_size import OwnSize
from fzero.table.placements import Cut, Notes, notes


def test_how_many_go_into_one() -> None:
    """A number where it is the same on all ranks; refused of what is fused, or where ranks have other ratios."""
    one, two, fused, uneven = [Cut(-1, parts) for parts in (((2, 1),), ((4, 2),), ((2, 1), (2, 1)), ((4, 3),))]
    by = OwnSize.of(2, "up", "tp", one)
    with during(notes, Notes(Axis())):
        found = OwnSize.of(4, "up", "tp", two) // by
        assert type(found) is int and found == 2
        for cut in (fused, uneven, Cut(-1)):
            with pytest.raises(ValueError, match="// uses a size that was read of what module 'up' gives"):
                _ = OwnSize.of(4, "up", "tp", cut) // by
