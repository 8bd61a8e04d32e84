"""A second run of a unit's call finds what its first run did, beside tensors too; what it cannot find so is refused.

That are context variables, torch function modes, settings of torch's and random generators. A unit runs again where it
is recomputed (fz.remat, derivatives of derivatives), and where its first run showed what must be known beforehand.
Whatever else makes another run something else (a counter that nobody can see, a clock, a file) shows in what is put
out, which is compared.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fzero.base import intercept, private, pytree
from fzero.base.ambient import ambient, within
from fzero.base.context import variables
from fzero.base.random import NUMPY, PYTHON, Replayed
from fzero.base.thread_state import without_dispatch_modes
from fzero.base.uncounted import told
from fzero.capture.containers import mark
from fzero.capture.contents import MANY
from fzero.capture.handle import storage_of
from fzero.capture.surroundings import Reach
from fzero.capture.watch import is_watch


class SecondRun:
    """Made where a unit is called."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._variables = variables_here(ours=False)  # this library's would lead back here
        self._modes, self._ambient = private.function_modes(), ambient()
        self._drawn: frozenset[str] = frozenset()  # modules whose own generators the first run drew from

    def begin(self, first: bool, draws: bool) -> None:
        """Before the first run, of which nothing may be known, or that it draws from Python's or numpy's generators."""
        self._first, self._draws, self._weights = first, draws, None
        self._replayed = Replayed((*self._reach.generators, *((PYTHON, NUMPY) if first or draws else ())))
        self._before = self._after = self._marks()
        self._entered = self._left = self._versions()

    def look(self) -> None:
        """After the first run."""
        self._drawn = self._replayed.shared()
        self._left = self._versions()
        self._after = self._marks()

    @property
    def draws(self) -> bool:
        return self._draws or bool(self._drawn)

    @property
    def moved(self) -> bool:
        """Tells whether something around the call is another one now than it was then."""
        modes = [[x for x in own if not is_watch(x)] for own in (self._modes, private.function_modes())]
        then, now = dict(self._variables), dict(variables_here(ours=False))
        return modes[0] != modes[1] or then.keys() != now.keys() or any(now[x] is not then[x] for x in then)

    def run(self, run: Callable[[], object]) -> object:
        """A run at another time. What it sets is gone afterwards: the first run has set it already."""
        own = contextvars.Context()
        for variable, value in (*self._variables, *variables_here(ours=True)):
            own.run(variable.set, value)
        modes = [mode for mode in self._modes if not is_watch(mode)]
        with within(self._ambient), private.under_function_modes(modes), self._replayed:
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
        for module in () if intercept.acts_for_main() else self._drawn:  # nothing tells which thread drew what
            raise TypeError(
                f"Unit {unit!r} draws from the generator of the module {module}, which all threads share, and runs "
                "again, which would draw other numbers. Give it a generator of its own (random.Random(seed), "
                "numpy.random.default_rng(seed)), draw by torch.rand, or run each rank in a process."
            )
        now = self._versions()
        for x, entered, left, version in zip(self._reach.constants, self._entered, self._left, now, strict=True):
            if entered != left:
                raise ValueError(_changes_twice(unit, x))
            if left != version:  # it is not saved for the unit, as its inputs are
                raise ValueError(
                    f"A tensor of shape {tuple(x.shape)} that unit {unit!r} closes over was changed in place after it "
                    "was called, and pulling it back runs it again, which needs what was there (fz.remat, or a "
                    "derivative of a derivative). Pass it to the unit's call, or assign another tensor."
                )

    def weigh(self, out: Sequence[torch.Tensor], again: bool) -> bool:
        """Tells whether a run put out what the first one did, as far as sums tell; those of the first one are kept.

        On an accelerator, where reading a sum waits for the device, only the first runs of a call are compared.
        """
        if private.traces() or any(map(private.is_fake, out)):
            return True
        with without_dispatch_modes():  # which look at what is computed, and not at this
            weights = _weights(out, self._first)
        if not again:
            self._weights = weights
        return not again or self._weights is None or weights is None or all(map(_agree, self._weights, weights))

    def _marks(self) -> list[int]:
        return [mark(x, self._first) for x in self._reach.long]

    def _versions(self) -> list[int]:
        return [private.version(x) for x in self._reach.constants]


def refusing_twice(unit: str, constants: Iterable[torch.Tensor]) -> told:
    """Refuses, before they are done, writes that no version counter tells of to what a unit closes over."""

    def refuse(_: str, written: torch.Tensor) -> None:
        for x in constants:
            if storage_of(x) == storage_of(written):
                raise ValueError(_changes_twice(unit, x))

    return told(refuse)


def _changes_twice(unit: str, x: torch.Tensor) -> str:
    return (
        f"Unit {unit!r} changes a tensor in place that it closes over, of shape {tuple(x.shape)}, and runs again, "
        "which would change it twice. Make it an argument of the unit, or assign another tensor to what holds it; a "
        "module and its buffers, which what it writes to must be (register_buffer), become a function by "
        "fz.functional(module, buffers=True)."
    )


def variables_here(ours: bool) -> list[tuple[contextvars.ContextVar[Any], object]]:
    """The context variables that have values here, this library's or all others, and what those are."""
    return [(x, value) for x, value in contextvars.copy_context().items() if (x in variables) == ours]


def _weights(out: Sequence[torch.Tensor], thorough: bool) -> list[list[float]] | None:
    """Returns each tensor's sum, that of its magnitudes, and the part of it that rounding takes; None under a map."""
    with private.below_transforms() if private.level() else contextlib.nullcontext(), private.without_autocast():
        found = []
        for x in out:
            if private.is_mapped(x):
                return None
            x = private.unwrapped(x).detach()
            lost = _LOST.get(x.dtype)
            if not (thorough or x.is_cpu) or x.layout != torch.strided or x.is_meta or x.is_quantized:
                continue
            if lost is None:
                x = pytree.as_reals(x)
                lost, x = _LOST.get(x.dtype, 0.0), x.to(torch.float64)
            found.append([*_sums(x), lost] if x.numel() else [0.0, 0.0, lost])
        return found


def _sums(x: torch.Tensor) -> list[float]:
    """A sum weighted by places, which tells entries in another order apart, and that of all magnitudes.

    Below float32, where products are slow or rough on many CPUs, the entries of one row have one weight.
    """
    wide = _F32 if x.itemsize < 4 else x.dtype
    x = x.reshape(-1, x.shape[-1] if x.ndim > 1 else 1)
    rows = x.sum(-1, dtype=wide) if x.itemsize < 4 else x @ _places(x.shape[1], wide, x.device)
    magnitude = torch.linalg.vector_norm(x, 1, dtype=wide)
    return torch.stack((rows @ _places(len(rows), wide, x.device), magnitude)).tolist()


@functools.lru_cache(64)
def _places(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A weight between 0 and 1 for each place, no two alike."""
    return (
        torch.arange(1, count + 1, dtype=torch.float64, device="cpu").mul_(0.6180339887498949).frac_().to(device, dtype)
    )


_F32 = torch.float32
_LOST = {d: torch.finfo(d).eps ** 0.75 for d in (torch.float64, _F32, torch.bfloat16, torch.float16)}


def _agree(one: list[float], other: list[float]) -> bool:
    """Tells whether sums are the same but for rounding; what is not finite says nothing."""
    if one == other:
        return True
    bound = one[2] * max(one[1], other[1])
    return all(
        a == b or not math.isfinite(a - b) or abs(a - b) <= bound for a, b in zip(one[:2], other[:2], strict=True)
    )
