"""What a module's first run showed that it needs for slices, done again in later runs, in which nothing is followed.

What is whole and meets slices is made each rank's own, and each rank draws random numbers for its slices by itself. It
goes by the number of a function's call in the module. A module that needs nothing runs as it is.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.overrides import TorchFunctionMode

from fzero.base import private, pytree
from fzero.base.context import during, variable
from fzero.comm.axis import Axis
from fzero.parallel.randomness import own_stream
from fzero.table.handle import Function, Named, Operands, name_of
from fzero.table.placements import Action, Actions, Notes, Straight, notes

Copy = Callable[[object, Axis], object]  # `piece.as_own`
# what sees the operations of the module that is running, in its first run or in later ones
running_mode: contextvars.ContextVar[TorchFunctionMode | None] = variable("varying", None)


class Acting(TorchFunctionMode):
    """Inside, what a module's first run needed is done again, and nothing is looked at."""

    of_slices = True

    def __init__(self, axis: Axis, copy: Copy, actions: Actions) -> None:
        super().__init__()
        self.axis, self._copy, self._actions = axis, copy, actions
        self._calls = dict.fromkeys(actions, 0)

    def next(self, what: object) -> Action:
        """What is to be done where something is called."""
        if what not in self._actions:
            return Action()
        self._calls[what] += 1
        return self._actions[what][0].get(self._calls[what], Action())

    def owned(self, values: Sequence[object], action: Action) -> list[object]:
        return [self._copy(x, self.axis) if i in action.places else x for i, x in enumerate(values)]

    def need_all(self) -> None:
        """Refuses a run that called other functions than the first one."""
        for what, (_, count) in self._actions.items():
            if self._calls[what] != count:
                name = what if isinstance(what, str) else name_of(what)
                raise ValueError(
                    f"apply: a module calls {name!r} {self._calls[what]} times, and called it {count} times in its "
                    "first run with such inputs, which showed where values that all ranks of axis "
                    f"{self.axis.name!r} have meet slices. Let what it does depend on its inputs alone; or on a "
                    "tensor's value that it reads (.item(), bool(x)), as each run is looked at then."
                )

    def __torch_function__(self, func: Function, types: object, args: Operands = (), kwargs: Named = None) -> object:
        if running_mode.get() is not self or (func not in self._actions and func != torch.Tensor.__iter__):
            return func(*args, **(kwargs or {}))
        if func == torch.Tensor.__iter__:
            return iter(self.__torch_function__(torch.Tensor.unbind, types, args))  # type: ignore[call-overload]
        action = self.next(func)
        if action.places:
            flat, spec = pytree.flatten((args, dict(kwargs or {})))
            args, kwargs = pytree.unflatten(spec, self.owned(flat, action))
        with during(running_mode, None), own_stream(self.axis) if action.draws else contextlib.nullcontext():
            return func(*args, **(kwargs or {}))


def unseen(known: Notes | None = None) -> contextlib.AbstractContextManager[object]:
    """Inside, nothing is looked at, nor noted, unless it is said in which notes."""
    if running_mode.get() is None and (isinstance(notes.get(), Straight) or notes.get() is known is None):
        return contextlib.nullcontext()
    return _unseen(known)


@contextlib.contextmanager
def _unseen(known: Notes | None) -> Iterator[None]:
    on_top = getattr(private.function_mode(), "of_slices", False)
    off = private.without_function_mode() if on_top else contextlib.nullcontext()
    with during(running_mode, None), during(notes, known), off:
        yield
