"""Sequences that a stage cuts over ranks which elsewhere in the pipeline have examples of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fzero.base.context import during, over_means
from fzero.comm.axis import Axis
from fzero.components.line import Line


@contextlib.contextmanager
def refusing_cut_sequences(line: Line | None, stage: int) -> Iterator[None]:
    """Around a stage's function: where places are of other numbers of ranks, values go between them by examples.

    A function that also goes over the axis along dim 0 changes between sequences and examples by itself.

    Raises:
        ValueError: it cuts sequences over ranks whose parts other places would take for examples.
    """
    counts = sorted({seat.datas for seat in line.seats}) if line is not None else []
    if len(counts) < 2:
        yield
        return
    cut: dict[tuple[int, ...], tuple[str, str]] = {}
    by_examples: set[tuple[int, ...]] = set()

    def noted(ax: Axis, who: str, dim: int) -> None:
        if dim:
            cut.setdefault(ax.members, (who, ax.name))
        else:
            by_examples.add(ax.members)

    with during(over_means, noted):
        yield
    for members, (who, name) in cut.items():
        if members not in by_examples:
            raise ValueError(
                f"pipeline: stage {stage} calls fz.parallel.{who} over axis {name!r}, ranks {list(members)}, each of "
                "which has a part of the same sequences there, and its step takes means over them. The places have "
                f"{counts} ranks that means are over: values between them are cut by examples, the rows of dim 0; "
                "expected examples of each rank's own at the ends of the function. Say x = fz.parallel.all_to_all(x, "
                "ax, split=1, concat=0) at its beginning and x = fz.parallel.all_to_all(x, ax, split=0, concat=1) at "
                "its end, or give the places as many ranks."
            )
