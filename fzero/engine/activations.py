"""What a unit's pullback needs, in another memory until then: its inputs, or what its graph saved.

A tensor that is put away leaves a stand-in in the graph: one of its shape, without memory, that leads to where the
tensor came from, so that derivatives of derivatives find their way through what is brought back.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import torch

from fzero.base import hooks, private
from fzero.base.node import direct, first_order
from fzero.base.refusals import refuse_writes
from fzero.stores.away import Away, Wait
from fzero.stores.memories import Memory, put
from fzero.table.handle import storage_of

LEAST = 1024  # bytes from which a tensor is worth its way


class Kept:
    """One tensor in another memory, of the same shape and strides as it had.

    Writes to it count as they would if it had stayed: to the tensor itself later, and to what was brought back.
    """

    def __init__(self, away: Away, tensor: torch.Tensor) -> None:
        self._away, self._shape, self._stride = away, tensor.shape, tensor.stride()
        self._counter, self._version = private.counted(tensor.new_empty(0), tensor), private.version(tensor)
        self._coming: Wait | None = None
        self._brought: torch.Tensor | None = None
        self.uses, self._left = 1, 0  # of one pullback, and those that are still to come

    @staticmethod
    def of(tensor: torch.Tensor, memory: Memory, what: str) -> Kept | None:
        """A tensor's values, put away as they are now; None for one that stays."""
        if not _is_dense(tensor) or tensor.numel() * tensor.element_size() < LEAST:
            return None
        with private.below_transforms(), torch.no_grad():
            flat = tensor.detach().as_strided((tensor.numel(),), (1,))
            away = put(memory, flat, tensor.device, what, shared=True)
        return Kept(away, tensor) if isinstance(away, Away) else None

    def start(self) -> None:
        """Begins to bring it back."""
        if self._coming is None and self._brought is None:
            self._coming = self._away.start_read()

    def value(self) -> torch.Tensor:
        """The tensor, for one of its uses; it is here from the first one to the last."""
        refuse_writes(private.version(self._counter), self._version, self._shape)
        if self._brought is None:
            self.start()
            coming, self._coming = self._coming, None
            assert coming is not None
            self._brought = private.counted(coming().as_strided(self._shape, self._stride), self._counter)
            self._left = self.uses
        brought, self._left = self._brought, self._left - 1
        if not self._left:
            self._brought = None
        return brought

    def leave(self) -> None:
        """Drops what was brought back and not used."""
        coming, self._coming, self._brought = self._coming, None, None
        if coming is not None:
            coming()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor's elements fill a range of its memory, each place once."""
    if tensor.layout != torch.strided or tensor.is_meta or private.is_fake(tensor) or not tensor.is_floating_point():
        return False
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    expanded = any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return span == tensor.numel() > 0 and not expanded and type(tensor) is torch.Tensor


_Views = weakref.WeakValueDictionary[object, Kept]


class Activations:
    """What one unit's pullback needs and lies elsewhere."""

    def kept(self) -> Iterable[Kept]:
        """What there is to be brought back."""
        raise NotImplementedError

    def start(self) -> None:
        """Begins to bring it back."""
        for kept in self.kept():
            kept.start()

    def leave(self) -> None:
        """Drops what was brought back and not used."""
        for kept in self.kept():
            kept.leave()


class Inputs(Activations):
    """The inputs of a unit that is recomputed.

    Attributes:
        stand_ins: place of an operand -> what the graph keeps in its place.
    """

    def __init__(self, operands: Sequence[torch.Tensor], places: Collection[int], memory: Memory, what: str) -> None:
        self._kept: list[Kept] = []
        self.stand_ins: dict[int, torch.Tensor] = {}
        for place in places:
            kept = Kept.of(private.unwrapped(operands[place]), memory, what)
            if kept is not None:
                self._kept.append(kept)
                self.stand_ins[place] = _stand_in(operands[place])

    def kept(self) -> Iterable[Kept]:
        return self._kept

    def restored(self, saved: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """What the graph saved, with the tensors in the places of their stand-ins."""
        out = list(saved)
        for place, kept in zip(self.stand_ins, self._kept, strict=True):
            value = kept.value()
            out[place] = value if first_order() else _Other.apply(saved[place], value)  # type: ignore[assignment]
        return tuple(out)


class Saved(Activations):
    """What the graph of a unit that is not recomputed saved, but for its params and inputs."""

    def __init__(self, memory: Memory, what: str, stays: Collection[torch.Tensor]) -> None:
        self._memory, self._what = memory, what
        self._stays = {storage_of(x) for x in stays}
        self._kept: list[weakref.ref[Kept]] = []  # which live as long as what saved them
        # what several operations save is put away once, for as long as it lives: its memory may be another's then
        self._known: weakref.WeakKeyDictionary[torch.UntypedStorage, _Views] = weakref.WeakKeyDictionary()

    def hooks(self) -> contextlib.AbstractContextManager[None]:
        return hooks.putting_away(self._what, self._pack, _unpacked)

    def _pack(self, tensor: torch.Tensor) -> _Stays | Kept:
        # or an output that its own operation saves would keep itself alive
        stays = _Stays(tensor.detach(), private.version(tensor))
        if tensor.layout != torch.strided or storage_of(tensor) in self._stays:
            return stays
        known = self._known.setdefault(tensor.untyped_storage(), weakref.WeakValueDictionary())
        view = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, private.version(tensor)
        kept = known.get(view)
        if kept is not None:
            kept.uses += 1
            return kept
        kept = Kept.of(tensor, self._memory, self._what)
        if kept is None:
            return stays
        known[view] = kept
        self._kept.append(weakref.ref(kept))
        return kept

    def kept(self) -> Iterable[Kept]:
        return [kept for reference in self._kept if (kept := reference()) is not None]


class _Stays(NamedTuple):
    """A tensor that is not put away, and what counts the writes to it: torch does not look where there are hooks."""

    tensor: torch.Tensor
    version: int


def _unpacked(packed: _Stays | Kept) -> torch.Tensor:
    if isinstance(packed, Kept):
        return packed.value()
    refuse_writes(private.version(packed.tensor), packed.version, packed.tensor.shape)
    return packed.tensor


class _Other(torch.autograd.Function):
    """`apply(x, value)`: another value in the place of x, that comes from where x came from."""

    @staticmethod
    def forward(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: object, inputs: object, output: object) -> None:
        pass

    @staticmethod
    def backward(ctx: object, cotangent: torch.Tensor) -> object:  # type: ignore[override]
        return cotangent, None

    @staticmethod
    def jvp(ctx: object, tangent: torch.Tensor, _: object) -> torch.Tensor:  # type: ignore[override]
        return tangent.view_as(tangent)


_other: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = direct(_Other)


def _stand_in(x: torch.Tensor) -> torch.Tensor:
    """The shape of x, and where it came from, without its memory."""
    return _other(x, torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape))
