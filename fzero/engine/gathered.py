"""What a unit's call has gathered for itself, from its run to its pullback."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fzero.comm.axis import done
from fzero.engine.called import CalledOp
from fzero.table.layout import Key


class GatheredOp(CalledOp):
    """A unit's call, as far as its own buffers go: its graph refers to them, and they have memory when it is used."""

    _fulls: dict[Key, torch.Tensor]
    _arriving: dict[Key, Callable[[], None]]  # to be waited for before the graph is pulled back

    def _put_down(self) -> None:
        """After the run. What is gathered last stays, as the pullback begins with it."""
        if self.traversal.schedule.is_last():
            self._arriving = dict.fromkeys(self._fulls, done)
        else:
            self._empty()

    def _empty(self) -> None:
        for full in self._fulls.values():
            self.traversal.schedule.empty(full)

    def _start_refill(self) -> None:
        for key, full in self._fulls.items():
            if key not in self._arriving:
                self._arriving[key] = self.traversal.schedule.refill(key, full)

    def _refill(self) -> None:
        """Before the pullback."""
        for key, full in self._fulls.items():
            (self._arriving.pop(key, None) or self.traversal.schedule.refill(key, full))()

    def forget_ahead(self) -> None:
        """Leaves what was gathered ahead and not used."""
        for key in list(self._arriving):
            self._arriving.pop(key)()
            self.traversal.schedule.empty(self._fulls[key])
