"""What one run of a unit puts out: the tensors in its result and in what it changed, and how they share memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fzero import _tree
from fzero._containers import containers_of
from fzero._handle import Handle


class Slot:
    """Stands for a tensor that the call puts out."""

    __slots__ = ("constant", "index")

    def __init__(self, index: int, constant: bool = False) -> None:
        self.index, self.constant = index, constant

    def outside(self, out: Sequence[torch.Tensor]) -> torch.Tensor:
        return out[self.index].detach() if self.constant else out[self.index]


class Exports:
    """The tensors that one run put out, and what they lie in."""

    def __init__(self, knows: Callable[[Any], bool], origins: Mapping[int, torch.Tensor]) -> None:
        self.tensors: list[torch.Tensor] = []
        self._knows, self._origins = knows, origins
        self._index: dict[int, int] = {}
        self._objects: dict[int, Any] = {}
        self.returned: set[int] = set()  # ids of inputs that were put out as they are
        self.filled: list[tuple[Any, dict[Any, Any]]] = []  # containers that the unit made, with their content

    def of(self, value: Any) -> Any:
        """The value, with slots for tensors; an object that the unit made stays, and is filled in `finish`."""
        if isinstance(value, torch.Tensor):
            return value if isinstance(value, Handle) else self._tensor(value)
        leaves, spec = _tree.flatten(value, is_leaf=self._knows)
        if len(leaves) == 1 and leaves[0] is value:
            return self._object(value)
        return _Tree(spec, [self.of(leaf) for leaf in leaves])

    def _tensor(self, tensor: torch.Tensor) -> Any:
        origin = self._origins.get(id(tensor))
        if origin is not None:
            self.returned.add(id(origin))
            return origin
        index = self._index.setdefault(id(tensor), len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(tensor)
        return Slot(index)

    def _object(self, value: Any) -> Any:
        if self._knows(value) or id(value) in self._objects:
            return value
        self._objects[id(value)] = value
        for container in containers_of(value):
            count = len(self.tensors)
            content = {key: self.of(item) for key, item in container.found.items()}
            if len(self.tensors) > count or any(content[k] is not v for k, v in container.found.items()):
                self.filled.append((container, content))
        return value


class _Tree:
    __slots__ = ("leaves", "spec")

    def __init__(self, spec: Any, leaves: list[Any]) -> None:
        self.spec, self.leaves = spec, leaves


def built(template: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(template, Slot):
        return tensors[template.index]
    if isinstance(template, _Tree):
        return _tree.unflatten(template.spec, [built(leaf, tensors) for leaf in template.leaves])
    return template


def has_slots(template: Any) -> bool:
    if isinstance(template, _Tree):
        return any(map(has_slots, template.leaves))
    return isinstance(template, Slot)


class View:
    """A tensor that outside is a view of another: of an input, or of what a slot stands for.

    Args:
        base: what it is a view of, outside.
        inner: the tensor, inside.
        whole: what it is a view of, inside.
        constant: whether no derivative goes through it.
    """

    __slots__ = ("base", "constant", "offset", "size", "stride")

    def __init__(self, base: Any, inner: torch.Tensor, whole: torch.Tensor, constant: bool) -> None:
        self.base, self.constant = base, constant
        self.size, self.stride = inner.shape, inner.stride()
        self.offset = inner.storage_offset() - whole.storage_offset()

    def outside(self, out: Sequence[torch.Tensor]) -> torch.Tensor:
        base = out[self.base.index] if isinstance(self.base, Slot) else self.base
        base = base.detach() if self.constant else base
        return base.as_strided(self.size, self.stride, base.storage_offset() + self.offset)


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    if tensor._base is None:
        raise ValueError(
            f"A unit returns several tensors that overlap in memory (one of shape {tuple(tensor.shape)}), and nothing "
            "says what they are views of. Return the whole tensor and slice it outside, or return clones."
        )
    return tensor._base


def taken(tensor: torch.Tensor, how: str) -> torch.Tensor:
    if how == "copy":
        return tensor.resolve_conj().resolve_neg().clone()
    return base_of(tensor) if how == "base" else tensor


def reading(tensor: torch.Tensor) -> tuple[int, torch.dtype, bool, bool]:
    """A tensor's memory and how it is read: among those of one reading, a view is told by its size and strides."""
    strided = tensor.layout == torch.strided
    return memory(tensor), tensor.dtype, strided and tensor.is_conj(), strided and tensor.is_neg()


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The range of elements of its storage that a tensor lies in."""
    low = int(tensor.storage_offset())
    if tensor.numel() == 0:
        return low, low
    return low, low + 1 + sum((int(n) - 1) * int(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def overlap(tensors: Sequence[torch.Tensor]) -> bool:
    spans = sorted(map(span, tensors))
    return any(b[0] < a[1] for a, b in itertools.pairwise(spans))


def memory(tensor: torch.Tensor) -> int:
    """What tensors that share memory have in common."""
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # a sparse tensor has none
        return id(tensor)
