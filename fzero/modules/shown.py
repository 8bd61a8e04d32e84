"""Units that are compiled, between whose operations nothing can be looked at: what a watched run showed of them.

What a compiled unit does with slices is that of its code, which is watched in the first run with inputs of the same
forms: it refuses what mixes slices, and shows whether anything had to be seen to (what is whole made each rank's own,
random numbers, a batch norm over ranks that no layer calls). If so the unit runs as it is, and is not compiled.
"""

from __future__ import annotations

import functools
import warnings

import torch

from fzero.base import private, pytree
from fzero.base.carriers import VALUES, flatten
from fzero.base.context import during
from fzero.parallel.acting import helped
from fzero.table.handle import Function
from fzero.table.placements import Mark, Notes, hand_on, marks_of, notes

FORMS = 64  # that are kept of a unit: a call may be given other objects each time


class Shown:
    """What is known of one unit."""

    def __init__(self) -> None:
        # forms of inputs -> how the outputs vary; None where the unit is not compiled
        self._outputs: dict[object, list[Mark | None] | None] = {}

    def choice(self, unit: str, watched: Function, fast: Function, given: object) -> Function:
        """What runs in a compiled step, which stays the same for all runs of one call.

        Args:
            given: the arguments.
        """
        flat, spec = pytree.flatten(given)
        known = notes.get()
        forms = [_form(x, known) for x in flat]
        form = (spec, tuple(forms), torch.is_grad_enabled())
        if form not in self._outputs:
            return functools.partial(self._first, unit, form, watched)
        marks = self._outputs[form]
        return watched if marks is None else functools.partial(_noted, fast, marks)

    def _first(self, unit: str, form: object, watched: Function, *args: object) -> object:
        reasons = list[str]()
        with during(helped, reasons):
            out = watched(*args)
        if form not in self._outputs:
            for old in list(self._outputs)[: 1 - FORMS]:
                del self._outputs[old]
            self._outputs[form] = None if reasons else marks_of(notes.get(), _tensors(out))
            if reasons and not private.level():
                warnings.warn(
                    f"fz.compile: unit {unit or 'of all leaves'!r} is not compiled, as {reasons[0]}, which "
                    "compiled code would not do.",
                    stacklevel=2,
                )
        return out


def _form(x: object, known: Notes | None) -> object:
    """What the code that a unit runs may depend on; what a tensor's values decide is not looked at."""
    if isinstance(x, torch.Tensor):
        return x.shape, x.dtype, known.of(x) if known is not None else None
    return (type(x), x) if isinstance(x, VALUES) else (type(x), id(x))




def _noted(fast: Function, marks: list[Mark | None], *args: object) -> object:
    out = fast(*args)
    hand_on(notes.get(), marks, _tensors(out))
    return out


def _tensors(out: object) -> list[torch.Tensor]:
    return [x for x in flatten(out)[0] if isinstance(x, torch.Tensor)]
