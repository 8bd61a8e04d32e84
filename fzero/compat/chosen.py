"""The choice of leaves that others' files are read for: as that of fz.load, on a device that holds values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fzero.base import pytree
from fzero.checkpoint.choice import Choice, Wanted, choose
from fzero.comm.axis import Axis
from fzero.table.rows import Leaf
from fzero.table.spec import Spec


def chosen(
    wanted: Wanted, saved: Sequence[Leaf], structure: Callable[[], pytree.Spec], step: Spec, axis: Axis
) -> Choice:
    """As `choose`; refuses the meta device, where what is read would be lost without a word.

    Raises:
        ValueError: the default device is meta, and no tensor of `like` has another.
    """
    choice = choose(wanted, saved, structure, step, axis)
    if choice.device.type == "meta":
        raise ValueError(
            f"{wanted.who}: got the meta device as the default, on which tensors have no values; expected one that "
            'holds them. Call it outside of torch.device("meta"); the tensors of like= may stay there.'
        )
    return choice
