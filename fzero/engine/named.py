"""What a unit that is recomputed keeps by name, so that its second run leaves that out (Korthikanti et al. 2022)."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from fzero.base.context import variable
from fzero.base.replay import Held, Keeping, Plan, Recording, Replaying
from fzero.engine.activations import Activations, Kept
from fzero.stores.memories import DEVICE, HOST, Memory
from fzero.table.names import Names


class Unit(NamedTuple):
    """One call of a unit, as it has run; `inputs` are those that are differentiated."""

    name: str
    run: Recording
    inputs: Sequence[torch.Tensor]


# takes each call of a unit that runs, of which nothing is recomputed meanwhile
looking: contextvars.ContextVar[Callable[[Unit], None] | None] = variable("looking_at_units", None)


class Named(Activations):
    """What is kept between the two runs of one call.

    Args:
        names: what is kept, and which of it in the host's memory.
        memory: where all of it is kept.
        what: words for errors.
        plan: what the first run under its signature has shown; None for that one itself.
    """

    def __init__(self, names: Names, memory: Memory, what: str, plan: Plan | None) -> None:
        self._names, self._memory, self._what, self._plan = names, memory, what, plan
        self._held: dict[int, list[object]] = {}
        self._blanks = False

    def first(self, given: Sequence[torch.Tensor]) -> Recording | Keeping:
        """Around the first run."""
        if self._plan is None:
            return Recording(given, self._what, looking.get() is not None)
        return Keeping(given, self._plan)

    def keep(self, run: Recording | Keeping, outputs: Sequence[torch.Tensor]) -> None:
        """Keeps what the first run has shown is needed; its outputs are given, with their graph."""
        if not isinstance(run, Keeping):
            return
        if not run.is_followed():
            self._plan = None
        self._blanks = not run.is_opaque(outputs)
        for number, results in run.held().items():
            assert self._plan is not None
            memory = self._memory
            if self._plan.keeps[number] in self._names.offload and memory == DEVICE:
                memory = HOST
            self._held[number] = [
                Kept.of(x.tensor.data, memory, self._what) or x if isinstance(x, Held) else x for x in results
            ]

    def second(self, given: Sequence[torch.Tensor], plan: bool) -> Replaying:
        """Around the second run.

        Args:
            plan: False runs everything.
        """
        held = {
            number: [x.tensor if isinstance(x, Held) else x.value() if isinstance(x, Kept) else x for x in results]
            for number, results in self._held.items()
            if plan and not any(isinstance(x, Held) and x.is_written() for x in results)
        }
        # what was written to is computed again, of values that may be left out otherwise
        blanks = self._blanks and len(held) == len(self._held)
        return Replaying(given, self._plan if plan else None, held, blanks)

    def kept(self) -> Iterable[Kept]:
        return [x for results in self._held.values() for x in results if isinstance(x, Kept)]
