"""What a second run of a unit's call finds as its first run did, beside tensors; what it cannot find so is refused.

That are context variables, torch function modes and random generators. A unit runs again where it is recomputed
(fz.remat, derivatives of derivatives), and where its first run showed what must be known beforehand.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

from fzero import _intercept, _private
from fzero._containers import MANY
from fzero._found import marks
from fzero._random import NUMPY, PYTHON, Replayed
from fzero._surroundings import Reach
from fzero._watch import is_watch


class SecondRun:
    """Made where a unit is called."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._variables = contextvars.copy_context()
        self._modes = _private.function_modes()
        self._drawn: frozenset[str] = frozenset()  # modules whose own generators the first run drew from

    def begin(self, first: bool, draws: bool) -> None:
        """Before the first run.

        Args:
            first: whether nothing is known of the call.
            draws: whether it is known to draw from generators that are Python's or numpy's own.
        """
        self._first, self._draws = first, draws
        self._replayed = Replayed((*self._reach.generators, *((PYTHON, NUMPY) if first or draws else ())))
        self._before = self._after = marks(self._reach.long, first)
        self._entered = self._left = self._versions()

    def look(self) -> None:
        """After the first run."""
        self._drawn = self._replayed.shared()
        self._left = self._versions()
        self._after = marks(self._reach.long, self._first)

    @property
    def draws(self) -> bool:
        return self._draws or bool(self._drawn)

    def run(self, run: Callable[[], Any]) -> Any:
        """A run at another time. What it sets is gone afterwards: the first run has set it already."""
        now, own = contextvars.copy_context(), contextvars.Context()
        for found, are_ours in ((self._variables, False), (now, True)):
            for variable, value in found.items():
                if variable.name.startswith("fzero_") == are_ours:
                    own.run(variable.set, value)
        modes = [mode for mode in self._modes if not is_watch(mode)]
        with _private.under_function_modes(modes), self._replayed:
            return own.run(run)

    def rewind(self) -> None:
        """Before the first run is begun anew, as it did not go to its end."""
        self._replayed.rewind()

    def refuse(self, unit: str) -> None:
        """Where the function runs again: what another run would find as the first one left it."""
        for iterator in self._reach.iterators:
            raise TypeError(
                f"Unit {unit!r} reaches a {type(iterator).__name__}, and runs again, which would take from it twice. "
                "Keep a list and an index (self.count += 1), or take from it outside and give the unit what came."
            )
        for own, before, after in zip(self._reach.long, self._before, self._after, strict=True):
            if before != after:
                raise TypeError(
                    f"Unit {unit!r} changes a {type(own).__name__} of more than {MANY} entries, and runs again, which "
                    "would change it twice. Change it outside of the unit, or keep what is written in a short one of "
                    "its own."
                )
        for module in () if _intercept.acts_for_main() else self._drawn:  # nothing tells which thread drew what
            raise TypeError(
                f"Unit {unit!r} draws from the generator of the module {module}, which all threads share, and runs "
                "again, which would draw other numbers. Give it a generator of its own (random.Random(seed), "
                "numpy.random.default_rng(seed)), draw by torch.rand, or run each rank in a process."
            )
        now = self._versions()
        for x, entered, left, version in zip(self._reach.constants, self._entered, self._left, now, strict=True):
            if entered != left:
                raise ValueError(
                    f"Unit {unit!r} changes a tensor in place that it closes over, of shape {tuple(x.shape)}, and runs "
                    "again, which would change it twice. Make it an argument of the unit, or assign another tensor to "
                    "what holds it."
                )
            if left != version:  # it is not saved for the unit, as its inputs are
                raise ValueError(
                    f"A tensor of shape {tuple(x.shape)} that unit {unit!r} closes over was changed in place after it "
                    "was called, and pulling it back runs it again, which needs what was there (fz.remat, or a "
                    "derivative of a derivative). Pass it to the unit's call, or assign another tensor."
                )

    def _versions(self) -> list[int]:
        return [_private.version(x) for x in self._reach.constants]
