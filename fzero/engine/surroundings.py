"""What surrounds a unit's call, and its second run: function modes, context variables, closures."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import types
from collections.abc import Callable, Iterator

from fzero.base import private
from fzero.base.ambient import Ambient
from fzero.base.context import OURS
from fzero.base.refusals import is_library
from fzero.base.thread_state import function_modes_on
from fzero.purity.observer import own_modes


class Surroundings(Ambient):
    """Those of one call."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        context = contextvars.copy_context()
        others = set(context).difference(OURS)
        self._variables = [(variable, context[variable]) for variable in others] if others else ()
        self._modes = own_modes() if function_modes_on() else []

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Inside, all are as in the call."""
        with super().again(), private.under_function_modes(self._modes):
            tokens = [(variable, variable.set(value)) for variable, value in self._variables]
            try:
                yield
            finally:
                for variable, token in tokens:
                    variable.reset(token)


def closed(fn: Callable[..., object]) -> Callable[..., object]:
    """A function that closes over what `fn` closes over now, whatever those variables name when it is called."""
    if isinstance(fn, functools.partial):
        own = closed(fn.func)
        return fn if own is fn.func else functools.partial(own, *fn.args, **fn.keywords)
    if not isinstance(fn, types.FunctionType) or not fn.__closure__ or is_library(fn.__code__.co_filename):
        return fn
    # of a variable that has no value yet its own
    cells = tuple([types.CellType(x.cell_contents) if x != types.CellType() else x for x in fn.__closure__])
    new = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, cells)
    new.__kwdefaults__ = fn.__kwdefaults__
    return new
