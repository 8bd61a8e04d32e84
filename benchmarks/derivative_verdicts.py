"""What was seen of a case of `derivatives.py`: how far from plain torch, and how its memory grows."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from derivative_cases import LONGEST
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fzero.base import private

ABSENT = "not expressible"
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
PART = LONGEST // 4  # the fewer steps whose memory that of LONGEST is held to
LINEAR = 3.0  # memory that grows more than this, for four times as many steps, does not grow as the square root


@dataclass(frozen=True)
class Verdict:
    """What was seen of a case.

    Attributes:
        word: "exact", "wrong", "raises", "hangs", "dies".
        apart: the relative error, where there is a result.
        text: an error's, or what more there is to say.
        growth: of memory, from PART to LONGEST steps; 0 where it was not counted.
    """

    word: str
    apart: float = 0.0
    text: str = ""
    growth: float = 0.0

    def __str__(self) -> str:
        if self.word == "exact":
            but = ", but" if self.growth > LINEAR else ","
            return self.word + (f"{but} memory x{self.growth:.1f}" if self.growth else "")
        if self.word == "wrong":
            return f"wrong ({self.text or f'{self.apart:.2g}'})"
        return f"{self.word} {self.text.partition(':')[0]}".strip()

    @property
    def rank(self) -> tuple[bool, float]:
        """The best comes first."""
        return self.word != "exact", self.growth


def dense(tree: Any, averages: bool) -> list[torch.Tensor | None]:
    """The leaves as full tensors of this process; their means over ranks, where these are taken."""
    out: list[torch.Tensor | None] = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            leaf = (leaf.full_tensor() if isinstance(leaf, DTensor) else leaf).detach().clone()
            if averages:
                dist.all_reduce(leaf)
                leaf = leaf / dist.get_world_size()
        out.append(leaf)
    return out


def held_to(found: Sequence[torch.Tensor | None], want: Sequence[torch.Tensor], tolerance: float) -> Verdict:
    if len(found) != len(want):
        return Verdict("wrong", 1.0, f"{len(found)} tensors of {len(want)}")
    whole, apart = max(b.abs().max().item() for b in want), 0.0
    for a, b in zip(found, want, strict=True):
        if a is not None and a.shape != b.shape:
            return Verdict("wrong", 1.0, f"shape {tuple(a.shape)}, not {tuple(b.shape)}")
        difference = (b if a is None else a.double() - b).abs().max().item()
        apart = max(apart, difference / (b.abs().max().item() or whole))
    if apart <= tolerance:
        return Verdict("exact", apart)
    return Verdict("wrong", apart, "none" if all(a is None for a in found) else "")


class Peak(TorchDispatchMode):
    """As `fz.testing.LiveBytes`, which looks at all storages in every operation: too slow for as many as here."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[int] = set()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: object, args: tuple[object, ...] = (), kwargs: Any = None) -> object:
        out = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in storages((args, kwargs))}
        for storage in storages(out):
            if storage._cdata not in self.known and storage._cdata not in given:
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.freed, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def freed(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def storages(tree: object) -> list[torch.UntypedStorage]:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and not private.is_wrapped(leaf)]
    return [tensor.untyped_storage() for tensor in tensors]


def growth_of(way: Any) -> float:
    """How many times the peak of live bytes of a quarter of the steps that of all of them is.

    They have run before, so that what stays allocated is.
    """
    peaks = []
    for steps in (PART, LONGEST):
        with Peak() as live:
            way.long(steps)
        peaks.append(live.peak)
    return peaks[1] / peaks[0]
