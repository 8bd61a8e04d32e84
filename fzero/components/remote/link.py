"""How a component's controlling process reaches one rank."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch

K = TypeVar("K")
V = TypeVar("V")
NOTICED = 1.0  # seconds in which a process that has gone is seen to have ended
Message = tuple[Any, ...]  # of a kind, which is first
Arguments = dict[str, Any]  # of a call, by name


class Settings(NamedTuple):
    """What all ranks of a component are told as they start."""

    component: str
    identity: str  # of the component, which no other has
    ranks: int
    timeout: float  # seconds that a call, or the start, may take
    threads: int  # that torch computes with, as in the controlling process: sums have the same bits then
    checked: bool  # whether what ranks communicate is compared first
    # the default dtype, as in the controlling process: of what functions make of nothing
    dtype: torch.dtype = torch.float32
    # in_specs, out_specs: how inputs and outputs lie over the ranks; None where examples do in dim 0
    in_specs: object = None
    out_specs: object = None
    backend: str = "gloo"  # of their process group: "gloo", or "nccl" beside it, for tensors on GPUs


class Place(NamedTuple):
    """A rank's place in its component."""

    axes: tuple[tuple[str, int, int], ...] = ()  # of each axis its name, this rank's number on it, and its size
    averaged: tuple[str, ...] = ()  # the axes that the step takes means over, as far as they are known by name
    batch: tuple[str, ...] = ()  # those that examples lie over where no specs say anything else
    # mean_rank, means: which of how many the step takes means over it is
    mean_rank: int = 0
    means: int = 1

    def piece(self, names: Sequence[str]) -> tuple[int, int]:
        """This rank's number on some axes as one, the first of them slowest, and the size of that one."""
        number, count = 0, 1
        for name in names:
            rank, size = next((rank, size) for own, rank, size in self.axes if own == name)
            number, count = number * size + rank, count * size
        return number, count

    def copies(self, names: Sequence[str]) -> int:
        """How many of the ranks that means are taken over have the same piece of what is cut over some axes."""
        return self.means // self.piece([name for name in names if name in self.averaged])[1]


class Link:
    """One rank, as its component's controlling process has it."""

    local = False  # whether it is in this process

    def send(self, message: Message) -> None:
        """Sends a message; raises OSError where the rank has ended."""
        raise NotImplementedError

    def source(self, local: bool) -> Any:
        """What a reader asks for values: in this process, or what is sent to one elsewhere."""
        raise NotImplementedError

    def gone(self) -> tuple[str, str] | None:
        """How its process has ended, and its last words, once it has."""
        return None

    def end(self) -> None:
        """Ends the rank at once, where that can be done."""

    def join(self, timeout: float) -> None:
        """Waits for its end."""


class Kept(OrderedDict[K, V]):
    """Values of the `most` names that were set, or got by `get`, last: there may be one for each number of a step."""

    most = 1024

    def get(self, name: K, default: Any = None) -> V | Any:
        if name in self:
            self.move_to_end(name)
        return super().get(name, default)

    def __setitem__(self, name: K, value: V) -> None:
        super().__setitem__(name, value)
        while len(self) > self.most:
            self.popitem(last=False)
