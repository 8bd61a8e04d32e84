"""Random numbers of a unit's call depend on (seed, step, rank, microbatch, call); global generators stay as found."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import numpy as np
import torch

from fzero.base import intercept
from fzero.base.context import jitting

_MASK = (1 << 64) - 1
_START = 0x9E3779B97F4A7C15
# A generator's own lock is taken with Python's, and Python's may be given away inside it (a collection frees tensors):
# two threads would wait for each other. Waiting for this one holds nothing.
_one_at_a_time = threading.Lock()
_in_use: list[seeded] = []  # regions that have seeded the default generators


def _mixed(state: int, number: int) -> int:
    state = (state + (number & _MASK) * 0xBF58476D1CE4E5B9 + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


class Later(int):
    """A seed in a graph: that of `Seeds(*numbers)` after so many calls, of which a run knows the numbers."""

    numbers: tuple[int | torch.Tensor, ...]
    calls: int

    def of(self, count: int) -> int:
        """The seed, where the number that the graph has is this one."""
        seeds = Seeds(*[count if isinstance(x, torch.Tensor) else x for x in self.numbers])
        seeds._calls = self.calls - 1
        return seeds.next()


class Seeds:
    """63-bit seeds, one after the other, from several numbers (splitmix64 steps, Steele et al. 2014)."""

    def __init__(self, *numbers: int | torch.Tensor) -> None:
        self._calls, self._state = 0, _START
        self._later = numbers if any(isinstance(x, torch.Tensor) for x in numbers) else ()
        for number in numbers if not self._later else ():
            self._state = _mixed(self._state, int(number))

    def next(self) -> int:
        self._calls += 1
        if self._later:
            out = Later()
            out.numbers, out.calls = self._later, self._calls
            return out
        return _mixed(self._state, self._calls) >> 1


class seeded:
    """Draws from a stream of its own inside, and leaves the default generators as they were; `None` changes nothing.

    On the main thread torch's default generators are seeded, and put back. On any other, as they are one for all
    threads, each operator that draws is given the region's own generator, which makes the same numbers of the same
    seed; torch.manual_seed does not reach that one. `states` are those of generators that have been drawn from already.
    """

    __slots__ = ("default", "generators", "outer", "seed", "start", "states", "traced")

    def __init__(self, seed: int | None, states: Mapping[torch.device, torch.Tensor] | None = None) -> None:
        self.seed, self.start = seed, states
        self.default: tuple[torch.Generator, ...] = ()
        self.generators: dict[torch.device, torch.Generator] | None = None
        self.traced: AbstractContextManager[object] | None = None  # what takes their place in a trace

    def __enter__(self) -> None:
        if self.seed is None:
            return
        if (graph := jitting.get()) is not None:
            self.traced = drawing = graph.effects.drawing(self.seed)
            drawing.__enter__()
            return
        if not intercept.acts_for_main():
            self.generators = {}
            self.outer = intercept.swap_stream(self)
            return
        default: tuple[torch.Generator, ...] = (torch.default_generator,)
        if torch.cuda.is_initialized():
            default += (torch.cuda.default_generators[torch.cuda.current_device()],)
        with _one_at_a_time:
            self.states = list(map(torch.Generator.get_state, default))
            self.default = default
            _in_use.append(self)
            for generator in default:
                self._begin(generator)

    def __exit__(self, *_: object) -> None:
        if self.default:
            with _one_at_a_time:
                for generator, state in zip(self.default, self.states, strict=True):
                    generator.set_state(state)
                _in_use.remove(self)
        elif self.generators is not None:
            intercept.swap_stream(self.outer)
        elif self.traced is not None:
            self.traced.__exit__(None, None, None)

    def _begin(self, generator: torch.Generator) -> torch.Generator:
        state = self.start.get(generator.device) if self.start else None
        assert self.seed is not None
        generator.manual_seed(self.seed) if state is None else generator.set_state(state)
        return generator

    # ---- a stream, as `intercept` asks for it

    def generator(self, device: torch.device) -> torch.Generator | None:
        """This region's own generator on a device, for a thread that must leave the default ones alone."""
        assert self.generators is not None
        if device.type not in ("cpu", "cuda"):
            return None
        if device.type == "cpu":
            device = torch.device("cpu")  # cpu:0 is the same
        elif device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if device not in self.generators:
            self.generators[device] = self._begin(torch.Generator(device))
        return self.generators[device]

    def here(self) -> Callable[[], seeded]:
        """Makes regions that draw what this one will from here on."""
        states = {**(self.start or {}), **{device: g.get_state() for device, g in (self.generators or {}).items()}}
        return functools.partial(seeded, self.seed, states)

    def lend(self, device: torch.device, name: str, run: Callable[[], object]) -> object:
        """`run()`, which draws from a device's default generator, with this region's numbers."""
        own = self.generator(device)
        if own is None:
            return run()
        default = intercept.default_generator(own.device)
        with _one_at_a_time, intercept.unseen():
            if _in_use:
                raise RuntimeError(
                    f"{name} takes no generator, so it draws from torch's default one, which a unit on the main thread "
                    "is using right now. Run the two one after the other, or on processes of their own."
                )
            state = default.get_state()
            default.set_state(own.get_state())
            try:
                return run()
            finally:
                own.set_state(default.get_state())
                default.set_state(state)


# those that the functions of the modules `random` and `numpy.random` draw from
_SHARED = {id(random.getstate.__self__), id(np.random.get_state.__self__)}  # type: ignore[attr-defined]


def is_shared(generator: object) -> bool:
    """Tells whether a generator is one of torch's default ones, or of the modules `random` and `numpy.random`."""
    defaults = torch.default_generator, *torch.cuda.default_generators
    return id(generator) in _SHARED or any(generator is default for default in defaults)
