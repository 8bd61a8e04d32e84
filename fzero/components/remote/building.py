"""What a rank does before its first call: the user's `build`, and its place among the data ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from fzero.base.arguments import named
from fzero.comm.axis import Axis
from fzero.comm.divergence import checked_collectives
from fzero.components.remote.link import Place, Settings
from fzero.components.remote.verbs import Part
from fzero.table.spec import Spec


def built_by(build: Callable[[int], object], rank: int) -> Part:
    """The step and params of a rank.

    Raises:
        TypeError: `build` returned something else.
        ValueError: batches are to be split over more ranks than the step takes means over.
    """
    given = build(rank)
    parts: tuple[Any, ...] = given if isinstance(given, tuple) else ()
    if len(parts) not in (2, 3) or not isinstance(parts[0], Spec):
        raise TypeError(
            f"fz.remote: got build({rank}) that returned {named(given)}, expected (step, params), or (step, params, "
            "axis) with the axis that batches are split over (fz.parallel.axis(mesh, 'dp'))."
        )
    step, params = parts[0], parts[1]
    means = step.axis()
    axis = parts[2] if len(parts) == 3 else means
    if not isinstance(axis, Axis):
        raise TypeError(f"fz.remote: build({rank}) returned axis={named(axis)}, expected fz.parallel.axis(mesh, name).")
    if means.ranks % axis.ranks:
        raise ValueError(
            f"fz.remote: build({rank}) returned an axis of {axis.ranks} ranks to split batches over, and the step "
            f"takes means over {means.ranks} ranks; expected an axis that the step takes means over: shard_zero1, 2 "
            "or 3 with axis= its name, or replicate=."
        )
    return Part(step, params, Place(axis.data_rank, axis.ranks, means.data_rank, means.ranks))


@contextlib.contextmanager
def calls_run_in(settings: Settings) -> Iterator[None]:
    """What every call runs in."""
    with checked_collectives(settings.checked, counted=True):
        yield
