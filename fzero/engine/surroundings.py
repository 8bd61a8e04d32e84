"""What surrounds a unit's call, and its second run: torch's settings, its function modes, context variables."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fzero.base import private
from fzero.base.ambient import ambient, within
from fzero.base.context import values_here
from fzero.purity.look import own_modes


class Surroundings:
    """Those of one call.

    Attributes:
        differ: whether a second run has found others: later calls need not look if the first one's were alike.
    """

    def __init__(self) -> None:
        self._settings, self._modes, self._variables = ambient(), own_modes(), values_here()
        self.differ = False

    def modes(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the function modes are those of the call."""
        return private.under_function_modes(self._modes)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Inside, all are as in the call."""
        now = dict(values_here())
        same = ambient() == self._settings and [*map(id, own_modes())] == [*map(id, self._modes)]
        same = same and len(now) == len(self._variables)
        self.differ = not (same and all(x in now and now[x] is value for x, value in self._variables))
        with within(self._settings), self.modes():
            tokens = [(variable, variable.set(value)) for variable, value in self._variables]
            try:
                yield
            finally:
                for variable, token in tokens:
                    variable.reset(token)
