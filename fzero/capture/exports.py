"""The tensors that one run of a unit puts out, in its result and in what it changed, and how they share memory."""

from __future__ import annotations

import itertools
import operator
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fzero.base import private, texts
from fzero.capture.containers import Cell, Container, Content, has_attributes
from fzero.capture.contents import ATOMS, apart, attributes_of, containers_of, is_tuple
from fzero.capture.handle import Valueless, storage_of

Reading = tuple[int, torch.dtype, bool, bool]
_LAZY = (types.GeneratorType, map, filter)
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def alike(inner: torch.Tensor, outer: torch.Tensor) -> torch.Tensor:
    """Gives what stands for a tensor inside its class, and the two one dict for what its user sets on either."""
    if has_attributes(outer) and has_attributes(inner):  # of a fake one only what wraps it seems to be plain
        kind = torch.Tensor if type(outer) in _PLAIN else type(outer)
        if type(inner) is not kind and not (kind is torch.Tensor and type(inner) in _PLAIN):
            inner = inner.as_subclass(kind)  # below a level of torch.func the class is that of what it wraps
        inner.__dict__ = vars(outer)  # type: ignore[assignment]
    return inner


class Slot(NamedTuple):
    """Stands for a tensor that the call puts out."""

    index: int
    constant: bool = False

    def outside(self, out: Sequence[torch.Tensor]) -> torch.Tensor:
        return out[self.index].detach() if self.constant else out[self.index]


class Exports:
    """The tensors that one run put out, and what they lie in."""

    def __init__(self, unit: str, knows: Callable[[object], bool], origins: Mapping[int, torch.Tensor]) -> None:
        self.tensors: list[torch.Tensor] = []
        self._unit = unit
        self._knows, self._origins = knows, origins
        self._index: dict[int, int] = {}
        self._objects: dict[int, object] = {}
        self.returned: set[int] = set()  # ids of inputs that were put out as they are
        self.dressed: dict[int, tuple[type, Content]] = {}
        self.filled: list[tuple[Container, Content]] = []  # that the unit made

    def of(self, value: object) -> object:
        """The value, with slots for tensors; an object that the unit made stays, and is filled in `finish`."""
        if isinstance(value, torch.Tensor):
            return value if isinstance(value, Valueless) else self._tensor(value)
        if type(value) in ATOMS or self._knows(value):
            return value
        if isinstance(value, _LAZY):
            raise TypeError(
                f"Unit {self._unit!r} puts out a {type(value).__name__}, which would compute when the unit has ended, "
                "expected what is computed. Return a list: list(...)."
            )
        if (own := apart(value)) is None:
            return self._object(value)
        parts, make = own
        new = [self.of(part) for part in parts]
        if is_tuple(type(value)) and (attributes := attributes_of(value)):
            self.of(attributes)
        return value if all(map(operator.is_, new, parts)) else _Made(make, new)

    def _tensor(self, tensor: torch.Tensor) -> object:
        if tensor.is_nested:
            raise TypeError(
                f"Unit {self._unit!r} puts out a nested tensor, expected ordinary ones, whose memory can be told. "
                "Return its values and offsets, and make the nested tensor outside."
            )
        if tensor.layout in texts.COMPRESSED:
            if self._knows(tensor):
                return tensor
            raise TypeError(
                f"Unit {self._unit!r} puts out a sparse tensor in compressed form (CSR, CSC, BSR, BSC), expected COO "
                "or dense ones. Return x.to_sparse() or its values, and make the compressed tensor where it is used."
            )
        origin = self._origins.get(id(tensor))
        if origin is not None:
            self.returned.add(id(origin))
            return origin
        if self._knows(tensor):  # a constant
            return tensor
        index = self._index.setdefault(id(tensor), len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(tensor)
            if has_attributes(tensor) and (type(tensor) not in _PLAIN or vars(tensor)):
                kind = torch.Tensor if type(tensor) in _PLAIN else type(tensor)
                self.dressed[index] = kind, {name: self.of(value) for name, value in vars(tensor).items()}
        return Slot(index)

    def _object(self, value: object) -> object:
        if id(value) in self._objects:
            return value
        self._objects[id(value)] = value
        if isinstance(value, types.MethodType):
            self.of(value.__self__)
            return value
        for container in containers_of(value):
            if isinstance(container, Cell) and self._knows(container.of):
                continue
            count = len(self.tensors)
            content = {key: self.of(item) for key, item in container.found.items()}
            if len(self.tensors) > count or any(content[k] is not v for k, v in container.found.items()):
                self.filled.append((container, content))
        return value


class _Made(NamedTuple):
    """An immutable value, which is made of its parts when the tensors among them are known."""

    make: Callable[[list[object]], object]
    parts: list[object]


def built(template: object, tensors: Sequence[torch.Tensor]) -> object:
    if isinstance(template, Slot):
        return tensors[template.index]
    if isinstance(template, _Made):
        return template.make([built(part, tensors) for part in template.parts])
    return template


class View:
    """A tensor that outside is a view of `base`, as `inner` is one of `whole` inside."""

    def __init__(self, base: Slot | torch.Tensor, inner: torch.Tensor, whole: torch.Tensor, constant: bool) -> None:
        self.base, self.constant = base, constant  # no derivative goes through a constant one
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


def reading(tensor: torch.Tensor) -> Reading:
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
    """Returns a number that tensors which share memory have in common."""
    return storage_of(tensor) or id(tensor)


# how an output leaves the node
TAKES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda x: x,
    "base": base_of,
    "copy": lambda x: x.resolve_conj().resolve_neg().clone(),
}


class Outlets:
    """Which tensors leave the node, and which are views of those, or of inputs, outside.

    Args:
        out: the tensors of one run: `count` that were put out, then inputs that were changed in place.
        inputs: the tensors that the run was given; `outer` the same outside.
        own: memory of the gathered buffers.
        moving: places of the inputs that are differentiated.
        leaves: ids of what the graph of the run begins with.
    """

    def __init__(
        self,
        out: Sequence[torch.Tensor],
        count: int,
        inputs: Sequence[torch.Tensor],
        outer: Sequence[torch.Tensor],
        own: Collection[int],
        moving: Collection[int],
        leaves: Collection[int],
    ) -> None:
        self._leaves = leaves
        self.chosen: list[tuple[str, int]] = []
        self.recipes: list[Any] = [None] * len(out)  # how each comes from what the node puts out
        self.returned: set[int] = set()  # places of inputs that are put out, or views of them
        if private.level() > 0 or any(map(private.is_wrapped, out)):
            for i in range(len(out)):
                self._put_out(i, "as it is", False)
            return
        places = {reading(x): i for i, x in enumerate(inputs)}
        families: dict[Reading, list[int]] = {}
        for i, tensor in enumerate(out[:count]):
            families.setdefault(reading(tensor), []).append(i)
        self.returned = {places[family] for family in families if family in places}
        first = {key[0]: key for key in reversed((*places, *families))}  # how a memory is read by who comes first
        for family, members in families.items():
            place = places.get(family)
            if place is not None and inputs[place].stride() == outer[place].stride():
                for i in members:
                    constant = place in moving and self._is_constant(out[i])
                    self.recipes[i] = View(outer[place], out[i], inputs[place], constant)
                continue
            copied = family[0] in own or first[family[0]] != family  # of a param, or a real part beside the whole
            if not copied and overlap([out[i] for i in members]):
                self._put_out_views(out, members)
                continue
            for i in members:
                self._put_out(i, "copy" if copied else "as it is", self._is_constant(out[i]))
        for i in range(count, len(out)):
            self._put_out(i, "as it is", False)

    def taken(self, out: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Returns what the node puts out, from the tensors of any of its runs."""
        return tuple(TAKES[how](out[i]) for how, i in self.chosen)

    def _put_out(self, i: int, how: str, constant: bool) -> Slot:
        self.recipes[i] = slot = Slot(len(self.chosen), constant)
        self.chosen.append((how, i))
        return slot

    def _put_out_views(self, out: Sequence[torch.Tensor], members: Sequence[int]) -> None:
        """Outputs that overlap: what they are views of leaves the node, and they are views of that outside too."""
        constant = {i for i in members if self._is_constant(out[i])}
        moving = [i for i in members if i not in constant] or members
        spans = {i: span(out[i]) for i in members}
        whole = max(moving, key=lambda i: out[i].numel())
        low, high = spans[whole]
        covers = out[whole].numel() == high - low and all(low <= a and b <= high for a, b in spans.values())
        base = out[whole] if covers else base_of(out[whole])
        if reading(base) != reading(out[whole]):  # real and imaginary parts
            for i in members:
                self._put_out(i, "copy", i in constant)
            return
        slot = self._put_out(whole, "as it is" if covers else "base", False)
        for i in members:
            self.recipes[i] = View(slot, out[i], base, i in constant)

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        """Tells whether nothing differentiates what is put out, where something is differentiated at all."""
        if not torch.is_grad_enabled():
            return False
        # a view that was taken without gradients says that it needs one, as what it is a view of does
        blind = tensor.grad_fn is None and id(tensor) not in self._leaves
        return not tensor.requires_grad or blind


def differs_unseen(inner: torch.Tensor, outer: torch.Tensor) -> bool:
    """Tells whether a copy differs from what it was made of, although no operation wrote to it."""
    outer = private.unwrapped(outer)
    if inner.layout != torch.strided or inner.is_meta or private.version(inner):
        return False
    if inner.data_ptr() == outer.data_ptr():
        return False
    both = [x.detach().resolve_conj().resolve_neg() for x in (inner, outer)]
    one, other = [torch.view_as_real(x) if x.is_complex() else x for x in both]
    return not bool(((one == other) | ((one != one) & (other != other))).all())


def geometry(x: torch.Tensor) -> object:
    return (x.shape, x.stride()) if x.layout == torch.strided else x.shape


def refuse_aliases(unit: str, mutated: Collection[int], tensors: Sequence[torch.Tensor]) -> None:
    """Refuses to change an input in place, in a copy, of which another one that shares its memory knows nothing.

    Args:
        mutated: places of the inputs that are changed.
        tensors: the inputs, as the unit's caller has them.
    """
    for i, own in enumerate(tensors):
        for j, other in enumerate(tensors if i in mutated else ()):
            if i != j and memory(private.unwrapped(other)) == memory(private.unwrapped(own)):
                raise ValueError(
                    f"Unit {unit!r} changes one of its inputs in place, of shape {tuple(own.shape)}, which shares its "
                    f"memory with another one, of shape {tuple(other.shape)}. Give the unit one of them and take the "
                    "other from it inside, or a clone of it."
                )
