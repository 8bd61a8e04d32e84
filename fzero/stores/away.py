"""Buffers that lie elsewhere than in the memory of the device that computes; and those whose parts do."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from fzero.base import private
from fzero.base.refusals import noting
from fzero.formats.formats import Format, Plain, Stored

Wait = Callable[[], torch.Tensor]
donated_to: weakref.WeakSet[object] = weakref.WeakSet()  # updates that are overwriting a state
_SHOWN = "_fzero_shown"  # set on copies whose writes count as those to a buffer that is away
_any_shown = False  # whether there was ever one


class Away:
    """A flat buffer that lies in a store. Immutable: who updates it puts another one in its place.

    Attributes:
        dtype: of its elements.
        device: that computes with it, and to which it is read.
        what: words for errors.
    """

    def __init__(self, dtype: torch.dtype, numel: int, device: torch.device, what: str) -> None:
        self.dtype, self.device, self.what = dtype, device, what
        self._numel = numel
        with private.outside_inference():
            self._writes = torch.empty(0, dtype=dtype, device=device)  # counts those to copies

    def numel(self) -> int:
        return self._numel

    @property
    def nbytes(self) -> int:
        return self._numel * self.dtype.itemsize

    def tell(self) -> None:
        """Raises what keeps it from getting to its store, of which its values do not depend."""

    def start_read(self, target: torch.Tensor | None = None) -> Wait:
        """Begins to copy it to the device, into `target` where there is one; the result waits, and returns the copy.

        Transforms of torch.func take it for a constant; new memory would be out of reach on their levels.
        """
        with noting(), private.below_transforms():
            self._refuse_writes()
            wait = self._start_read(target)

        def arrived() -> torch.Tensor:
            # noting: or an `except` of the function that runs could take it, and go on without the values
            with noting(), private.below_transforms():
                return wait()

        return arrived

    def start_open(self, takes: bool) -> Wait:
        """Begins to bring it into the host's memory, to be updated there; the result waits, and returns it.

        Args:
            takes: whether nobody else has it, so that it may be overwritten where it lies.
        """
        self._refuse_writes()
        return self._start_open(takes)

    def _start_read(self, target: torch.Tensor | None) -> Wait:
        raise NotImplementedError

    def _start_open(self, takes: bool) -> Wait:
        raise NotImplementedError

    def again(self, tensor: torch.Tensor, opened: bool, takes: bool) -> Away:
        """Another value, in the same store.

        Args:
            tensor: the value, which is not the caller's any more.
            opened: whether it is what `start_open` brought, updated.
            takes: whether nobody else has this one, so that it may be overwritten, and is not read any more.
        """
        raise NotImplementedError

    def read(self) -> torch.Tensor:
        """A copy on the device."""
        return self.start_read()()

    def shown(self, copy: torch.Tensor) -> torch.Tensor:
        """A copy for somebody who may write to it: nobody would see that, so the next one to read this is told."""
        global _any_shown
        out = private.counted(copy, self._writes)
        vars(out)[_SHOWN] = _any_shown = True
        return out

    def _refuse_writes(self) -> None:
        if private.version(self._writes):
            raise RuntimeError(
                f"{self.what}: got a write in place to a tensor that was read from here. It is offloaded, so only a "
                "copy has changed. Make new values instead: tree.map(fn), and state.replace(params=tree)."
            )

    def __reduce__(self) -> tuple[object, ...]:
        return _same, (self.read(),)  # a pickled buffer is a tensor

    def __deepcopy__(self, memo: object) -> Away:
        return self  # as nobody changes it

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.what}, {self._numel} elements of {self.dtype})"


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


Buffer = torch.Tensor | Away
Name = TypeVar("Name")


def tensor_of(buffer: Buffer) -> torch.Tensor:
    """A buffer as a tensor on the device that computes: itself, or a copy of what is away."""
    return buffer.read() if isinstance(buffer, Away) else buffer


def owned(buffer: Buffer) -> Buffer:
    """What becomes a buffer of another tree: a copy that was shown is no copy of anything any more."""
    if isinstance(buffer, torch.Tensor) and _SHOWN in vars(buffer):
        return private.counted(buffer, torch.empty(0, dtype=buffer.dtype, device=buffer.device))
    return buffer


def all_owned(buffers: Mapping[Name, Buffer]) -> tuple[dict[Name, Buffer], bool]:
    """`owned` of all of a tree's buffers, and whether any is away."""
    own, away = dict(buffers), False
    if not _any_shown and {torch.Tensor}.issuperset(map(type, own.values())):
        return own, False
    for name, x in own.items():
        if isinstance(x, Away):
            away = True
        elif isinstance(x, torch.Tensor) and _SHOWN in vars(x):
            own[name] = owned(x)
    return own, away


def shown(buffer: Buffer) -> torch.Tensor:
    """The same for somebody who may write to it."""
    return buffer.shown(buffer.read()) if isinstance(buffer, Away) else buffer


@dataclass(frozen=True)
class Placed:
    """A flat buffer as it is stored, wherever the parts of its format lie."""

    format: Format
    parts: tuple[Buffer, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.format.dtype

    @property
    def away(self) -> bool:
        for part in self.parts:
            if isinstance(part, Away):
                return True
        return False

    @property
    def device(self) -> torch.device:
        """The device that computes with it."""
        return self.parts[0].device

    def numel(self) -> int:
        return self.parts[0].numel() * self.format.parts[0].every

    def of(self, dtype: torch.dtype) -> Placed:
        """What of it is needed for its values in a dtype: all of it, or its first part."""
        return Placed(Plain(dtype), self.parts[:1]) if dtype == self.format.upper else self

    def start(self, targets: Sequence[torch.Tensor] = ()) -> Callable[[], Stored]:
        """Begins to bring what is away to the device, into `targets` where there are any; the result waits for it."""
        waits = [
            part.start_read(targets[i] if targets else None) if isinstance(part, Away) else lambda here=part: here
            for i, part in enumerate(self.parts)
        ]
        return lambda: Stored(self.format, tuple([wait() for wait in waits]))

    def stored(self) -> Stored:
        """Its parts on the device, for somebody who may write to them."""
        if not self.away:
            return Stored(self.format, self.parts)  # type: ignore[arg-type]
        parts = zip(self.parts, self.start()().parts, strict=True)
        return Stored(self.format, tuple([x.shown(copy) if isinstance(x, Away) else copy for x, copy in parts]))
