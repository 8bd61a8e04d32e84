"""Randomness of a unit's call: drawn from (seed, step, rank, microbatch, call), the global generators left as found."""

from __future__ import annotations

import threading
from typing import Any

import torch

_MASK = (1 << 64) - 1
_START = 0x9E3779B97F4A7C15
# A generator's own lock is taken with Python's, and Python's may be given away inside it (a collection frees tensors):
# two threads would wait for each other. Waiting for this one holds nothing.
_one_at_a_time = threading.Lock()


def _mixed(state: int, number: int) -> int:
    state = (state + (number & _MASK) * 0xBF58476D1CE4E5B9 + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


class Seeds:
    """63-bit seeds, one after the other, from several numbers (splitmix64 steps, Steele et al. 2014)."""

    def __init__(self, *numbers: int) -> None:
        self._calls, self._state = 0, _START
        for number in numbers:
            self._state = _mixed(self._state, number)

    def next(self) -> int:
        self._calls += 1
        return _mixed(self._state, self._calls) >> 1


class seeded:
    """Runs with torch's default generators seeded, then puts them back; `None` changes nothing."""

    __slots__ = ("generators", "seed", "states")

    def __init__(self, seed: int | None) -> None:
        self.seed = seed
        self.generators: tuple[torch.Generator, ...] = ()

    def __enter__(self) -> None:
        if self.seed is None:
            return
        self.generators = (torch.default_generator,)
        if torch.cuda.is_initialized():
            self.generators += (torch.cuda.default_generators[torch.cuda.current_device()],)
        with _one_at_a_time:
            self.states = [generator.get_state() for generator in self.generators]
            for generator in self.generators:
                generator.manual_seed(self.seed)

    def __exit__(self, *_: Any) -> None:
        if self.generators:
            with _one_at_a_time:
                for generator, state in zip(self.generators, self.states, strict=True):
                    generator.set_state(state)
