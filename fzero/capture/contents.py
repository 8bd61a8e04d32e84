"""Which objects a unit's call takes apart, and how: what is mutable is filled, what is not is built anew."""

from __future__ import annotations

import collections
import dis
import functools
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import optree
import torch

from fzero.base import pytree
from fzero.base.random import GENERATORS
from fzero.capture.containers import (
    BYTES,
    Array,
    Attributes,
    Bound,
    Bytes,
    Cell,
    Container,
    Defaults,
    List,
    Objects,
    Raised,
    Set,
    Slots,
    slots_of,
)

ATOMS = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, slice, range, type(Ellipsis)),
        *(torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout, type(torch)),
        *(types.GetSetDescriptorType, type),
    }
)
MANY = 4096  # entries: longer lists, dicts and arrays hold data, and are not looked through in every call
# ours (steps, states), and what leads to much that no function computes with
_CLOSED = frozenset(
    "fzero logging threading importlib inspect multiprocessing concurrent asyncio socket pathlib".split()
)

# their functions know nothing of the user's global names
_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "fzero", "numpy", "optree"}) - {"__main__"}


class Names(NamedTuple):
    """The names in a function's code and in code nested in it: globals, attributes, imported modules."""

    reads: frozenset[str]
    assigns: frozenset[str]
    attributes: frozenset[str]
    imports: frozenset[str]


@functools.lru_cache(4096)
def names_of(code: types.CodeType) -> Names:
    kinds = (("LOAD_GLOBAL", "LOAD_NAME"), ("STORE_GLOBAL", "DELETE_GLOBAL"), ("IMPORT_NAME",))
    instructions = [*dis.get_instructions(code)]
    reads, assigns, imports = ({i.argval for i in instructions if i.opname in kind} for kind in kinds)
    own = (reads, assigns, set(code.co_names), imports)
    nested = [names_of(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)]
    return Names(*(frozenset(part.union(*parts)) for part, *parts in zip(own, *nested, strict=True)))


def is_library(name: object) -> bool:
    return str(name).partition(".")[0] in _LIBRARIES


def container_of(value: Any) -> type[Container] | None:
    """How an object is read and written, if it is mutable and its content can be seen."""
    kind = type(value)
    if kind in (dict, collections.OrderedDict, collections.defaultdict):
        return Container
    if kind in (list, collections.deque):
        return List
    if kind is set:
        return Set
    if kind in BYTES:
        return Bytes
    if kind is np.ndarray:
        if value.size > MANY or not value.flags.writeable:
            return None
        return Objects if value.dtype.hasobject else Array
    if kind in ATOMS or kind in weakref.ProxyTypes or isinstance(value, (type, types.ModuleType, *GENERATORS)):
        return None
    if kind.__module__.partition(".")[0] in _CLOSED and not isinstance(value, dict):
        return None
    if is_tuple(kind):
        return None
    if isinstance(value, BaseException):
        return Raised
    if isinstance(value, dict):  # a subclass; what it has as attributes too (ModelOutput) follows its items
        return Container
    if isinstance(value, (list, collections.deque)):
        return List
    if isinstance(value, set):
        return Set
    if hasattr(value, "__dict__"):
        return Attributes
    return Slots if _is_users(kind) and slots_of(kind) else None


def _is_users(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in ("builtins", "torch", "numpy", "collections", "weakref", "re")


def containers_of(value: Any) -> list[Container]:
    """How one object is read and written: a dict's or list's subclass by its items and its attributes.

    Of a function that is what it closes over, its defaults and its attributes.
    """
    if isinstance(value, types.FunctionType):
        cells = [Cell(cell) for cell in value.__closure__ or ()]
        defaults = [Defaults(value)] if value.__defaults__ else []
        return [*cells, *defaults, *([Container(own)] if (own := value.__kwdefaults__) else []), Attributes(value)]
    if isinstance(value, functools.partial):
        return [Bound(value), Container(value.keywords), Attributes(value)]
    if is_tuple(type(value)):  # its items are its own for ever
        return [Container(own)] if (own := attributes_of(value)) else []
    how = container_of(value)
    if how is None:
        return []
    found = [how(value)]
    if how not in (Attributes, Raised) and getattr(value, "__dict__", None):
        found.append(Attributes(value))
    if how not in (Slots, Raised) and _is_users(type(value)) and slots_of(type(value)):
        found.append(Slots(value))
    return found


@functools.lru_cache(4096)
def is_tuple(kind: type) -> bool:
    """Whether objects of a type are a tuple, perhaps with a name and attributes; not a record of Python's own."""
    return issubclass(kind, tuple) and kind is not torch.Size and not optree.is_structseq_class(kind)


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object of a subclass of tuple."""
    return getattr(value, "__dict__", None)


def tuple_of(kind: type, items: Iterable[object], own: dict[str, Any] | None) -> Any:
    """A tuple with other items; what its user sets on either of the two is one."""
    made = tuple.__new__(kind, items)
    if own is not None:
        vars(made)  # makes room for it
        made.__dict__ = own
    return made


def is_registered(kind: type) -> bool:
    """Whether optree takes a type apart by its own rules."""
    return optree.register_pytree_node.get(kind) is not None  # type: ignore[attr-defined]


def is_built(value: Any) -> bool:
    """Whether optree takes it apart, and nothing can be written into it: with other content it is another object."""
    return is_registered(type(value)) and container_of(value) is None


def children(value: Any) -> tuple[list[Any], Any]:
    """One level of a registered node."""
    return optree.tree_flatten(value, is_leaf=lambda x: x is not value, none_is_leaf=True)


def replaced(value: Any, by: Mapping[int, Any]) -> Any:
    """A value with tensors exchanged, by id; containers stay the objects that they are, only their content changes."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return by.get(id(value), value)
    if kind in ATOMS or kind is dict or kind is list:  # as `is_built` would find
        return value
    if kind is frozenset:
        parts = {replaced(item, by) for item in value}
        return value if all(any(a is b for b in value) for a in parts) else frozenset(parts)
    if is_tuple(kind):
        items = [replaced(item, by) for item in tuple.__iter__(value)]
        if all(map(operator.is_, items, tuple.__iter__(value))):
            return value
        return tuple(items) if kind is tuple else tuple_of(kind, items, attributes_of(value))
    if is_built(value):
        below, spec = children(value)
        items = [replaced(item, by) for item in below]
        if all(a is b for a, b in zip(items, below, strict=True)):
            return value
        return pytree.unflatten(spec, items)
    return value


def exchanges(value: Any) -> bool:
    """Whether `replaced` can give something else for it."""
    kind = type(value)
    if kind in ATOMS:
        return False
    if is_tuple(kind):
        return any(map(exchanges, tuple.__iter__(value)))
    if kind is frozenset:
        return any(map(exchanges, value))
    return isinstance(value, torch.Tensor) or is_built(value)


def tensors_in(value: Any, known: Callable[[object], bool], seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """The tensors in a value that a unit made, containers and objects taken apart; those that are known are not."""
    kind, seen = type(value), set() if seen is None else seen
    if kind in ATOMS or id(value) in seen or known(value):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
        return
    if is_tuple(kind):
        items: Iterable[object] = [*tuple.__iter__(value), *(attributes_of(value) or {}).values()]
    elif containers := containers_of(value):
        items = [item for container in containers for item in container.found.values()]
    elif is_registered(kind):
        items = children(value)[0]
    else:
        return
    for item in [*items]:
        yield from tensors_in(item, known, seen)
