"""Steps that have everything on a disk, and disks that fail."""

from __future__ import annotations

import collections
import functools
import os
import re
import threading
from collections.abc import Callable
from typing import Any

import torch

import fzero as fz
from fzero.state.sharded import trees_of
from fzero.stores.disk import Disk
from fzero.stores.memories import DiskBuffer

CALLS = ("preadv", "pwritev", "posix_fallocate", "open", "rename")  # of the system, on files of state


class Faults:
    """Files of this process that fail: from now on, one call of a kind, or that one and all that follow."""

    def __init__(self) -> None:
        self.real: dict[str, Any] = {name: getattr(os, name) for name in CALLS}
        self._lock = threading.Lock()
        self.stop()

    def stop(self) -> None:
        self.calls: collections.Counter[str] = collections.Counter()
        self._bad: tuple[str, int, int, bool] = ("", 0, 0, False)

    def start(self, name: str, at: int, number: int, always: bool = True) -> None:
        self.stop()
        self._bad = name, at, number, always

    def call(self, name: str, *given: Any, **named: Any) -> Any:
        if name == "open" and not re.search(r"\.state(\.part)?$", str(given[0])):
            return self.real[name](*given, **named)
        bad, at, number, always = self._bad
        with self._lock:
            count = self.calls[name]
            self.calls[name] += 1
        if name == bad and (count == at or (always and count > at)):
            raise OSError(number, os.strerror(number))
        return self.real[name](*given, **named)


def model(width: int = 24) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / 5

    block = fz.unit(lambda p, x: torch.tanh(x @ p["w"]))

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return (functools.reduce(lambda x, q: block(q, x), p["blocks"], x) @ p["head"]).square().mean()

    return loss, {"blocks": [{"w": draw(width, width)} for _ in range(3)], "head": draw(width, 2)}


X = torch.ones(16, 24)
FUSED: dict[str, Callable[[Any], Any]] = {
    "plain": lambda step: step,
    "held": functools.partial(fz.fuse_update, norm="held"),
}


def steps(disk: Disk, fused: str, donate: bool = False) -> tuple[fz.Step, fz.Step]:
    """A step that has everything on a disk, and the same one in memory.

    Where it donates, params lie in memory, which an update then overwrites.
    """
    plain = FUSED[fused](fz.train_step(model()[0], fz.chain(fz.clip_by_global_norm(0.5), fz.adamw(1e-2))))
    away = fz.offload(plain, grads=disk, moments=disk, activations=disk)
    return fz.donate(away) if donate else fz.offload(away, params=disk), plain


def bits(state: fz.TrainState) -> Any:
    return fz.gather((state.params, state.moments)), state.step


@functools.cache
def wanted(fused: str) -> list[Any]:
    """The bits of an undisturbed run in memory, after each update."""
    _, plain = steps(fz.Disk("/tmp"), fused)
    state, out = plain.init(model()[1]), []
    for _ in range(4):
        out.append(bits(state))
        state, _ = plain(state, X)
    return out


def at_rest(state: fz.TrainState, grads: fz.Sharded | None = None) -> fz.TrainState:
    """The state, all of which is written, and so are the grads."""
    for tree in trees_of((state.params, state.moments, grads)):
        for buffer in tree.entries.values():
            if isinstance(buffer, DiskBuffer):
                buffer.file.written()
    return state


def begun(step: fz.Step) -> fz.TrainState:
    state, _ = step(step.init(model()[1]), X)
    return at_rest(state)
