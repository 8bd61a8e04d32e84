"""Randomness of a unit's call: drawn from (seed, step, rank, microbatch, call), the global generators left as found."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """One 63-bit seed from several numbers (splitmix64 steps, Steele et al. 2014)."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state + (number & _MASK) * 0xBF58476D1CE4E5B9 + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


@contextlib.contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Runs with torch's default generators seeded, then puts them back; `None` changes nothing."""
    if seed is None:
        yield
        return
    generators = [torch.default_generator]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    states = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
