"""What maps of `fz.parallel` do to what is known of tensors that vary: what they take, and how their results vary."""

from __future__ import annotations

import torch

from fzero.base import private
from fzero.comm.axis import Axis
from fzero.parallel.rules import PARTIAL
from fzero.parallel.watched import watcher
from fzero.table.placements import Cut, Mark, noting

MAP = "a map"  # the source of what a map gives, called by a module or a function itself
GATHER_OWN = "gather(own=True)"  # the name of that map
_WHOLE = ("sum", "gather")


def _covers(ax: Axis, tensor: Axis) -> bool:
    """Tells whether a map's axis is the tensor axis, or several that are one with it."""
    return set(tensor.members) <= set(ax.members)


def mapped(name: str, ax: Axis, x: torch.Tensor, out: torch.Tensor, cut: Cut | None = None) -> torch.Tensor:
    """Notes what a map of `fz.parallel` gave.

    Args:
        cut: how it cuts the result, where it does.
    """
    known = noting()
    if known is None:
        return out
    after = known.of(x)
    if _covers(ax, known.axis):
        cut = cut if ax.members == known.axis.members else None
        after = None if name in _WHOLE else Mark("" if name in ("copy", GATHER_OWN) else MAP, cut)
    known.forget(out) if after is None else known.note(out, after)
    return out


def need_mappable(name: str, ax: Axis, x: torch.Tensor, dim: int | None) -> None:
    """Refuses a map of what varies, or is cut, otherwise than the map takes it.

    Args:
        dim: along which the map joins what ranks have, where it does.
    """
    known = noting()
    mark = None if known is None else known.of(x)
    if known is None or mark is None or not _covers(ax, known.axis):
        return
    if name in ("copy", "split") and private.is_differentiated(x):
        raise ValueError(
            f"parallel.{name}: got a tensor of shape {tuple(x.shape)} that varies between the ranks of axis "
            f"{ax.name!r} already ({f'it comes of {mark.source!r}' if mark.source else 'it is a copy'}), expected one "
            "that is the same on all, as its cotangents are put together. Leave the map out, or put the ranks' tensors "
            "together first (fz.parallel.sum, gather)."
        )
    mode = watcher()
    if mode is not None and mark.cut is not None:
        summed = name in ("sum", "reduce_scatter")  # slices are no parts of a sum
        elsewhere = name in ("gather", GATHER_OWN) and dim is not None and dim - x.ndim != mark.cut.dim
        if (mark.cut == PARTIAL) != summed or elsewhere:
            raise mode.refused(f"fz.parallel.{name}", mark)
