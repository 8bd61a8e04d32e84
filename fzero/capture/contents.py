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
from typing import NamedTuple

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
_EXACTLY: dict[type, type[Container]] = {
    **dict.fromkeys((dict, collections.OrderedDict, collections.defaultdict), Container),
    **dict.fromkeys((list, collections.deque), List),
    **dict.fromkeys(BYTES, Bytes),
    set: Set,
}
# of a dict's subclass what it has as attributes too (ModelOutput) follows its items
_SUBCLASSES: tuple[tuple[tuple[type, ...], type[Container]], ...] = (
    *(((BaseException,), Raised), ((dict,), Container)),
    *(((list, collections.deque), List), ((set,), Set)),
)
# ours (steps, states), and what leads to much that no function computes with
_CLOSED = frozenset(
    "fzero logging threading importlib inspect multiprocessing concurrent asyncio socket pathlib".split()
)

# their functions know nothing of the user's global names
_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "fzero", "numpy", "optree"}) - {"__main__"}
BOUND = (types.BuiltinMethodType, types.MethodWrapperType)  # functions of Python's own; those of an object know it
Parts = list[object]


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


def is_weak(value: object) -> bool:
    return type(value) in weakref.ProxyTypes or isinstance(value, weakref.ref)


def referent(value: object) -> object:
    """Returns what a weak reference or a proxy refers to."""
    if isinstance(value, weakref.ref):
        return value()
    try:
        return value.__repr__.__self__
    except ReferenceError:
        return None


def functions_of(member: object) -> list[types.FunctionType]:
    """The user's functions that a member of a class is, wraps or, if it is a property, consists of."""
    parts = (member.fget, member.fset) if isinstance(member, property) else (member,)
    functions = [getattr(part, "__func__", getattr(part, "func", part)) for part in parts]
    return [f for f in functions if isinstance(f, types.FunctionType) and not is_library(f.__module__)]


def container_of(value: object) -> type[Container] | None:
    """Returns how an object is read and written, if it is mutable and its content can be seen."""
    kind = type(value)
    if kind in _EXACTLY:
        return _EXACTLY[kind]
    if kind is np.ndarray and isinstance(value, np.ndarray):
        if value.size > MANY or not value.flags.writeable:
            return None
        return Objects if value.dtype.hasobject else Array
    if kind in ATOMS or kind in weakref.ProxyTypes or isinstance(value, (type, types.ModuleType, *GENERATORS)):
        return None
    if (kind.__module__.partition(".")[0] in _CLOSED and not isinstance(value, dict)) or is_tuple(kind):
        return None
    for kinds, how in _SUBCLASSES:
        if isinstance(value, kinds):
            return how
    if hasattr(value, "__dict__"):
        return Attributes
    return Slots if _is_users(kind) and slots_of(kind) else None


def _is_users(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in ("builtins", "torch", "numpy", "collections", "weakref", "re")


def containers_of(value: object) -> list[Container]:
    """Returns all that can be written in an object: of a function its variables, defaults and attributes, say."""
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
    if how not in (Attributes, Raised) and attributes_of(value) is not None:
        found.append(Attributes(value))
    if how not in (Slots, Raised) and _is_users(type(value)) and slots_of(type(value)):
        found.append(Slots(value))
    return found


@functools.lru_cache(4096)
def is_tuple(kind: type) -> bool:
    """Tells whether objects of a type are tuples, perhaps with attributes, but no records of Python's own."""
    return issubclass(kind, tuple) and kind is not torch.Size and not optree.is_structseq_class(kind)


def attributes_of(value: object) -> dict[str, object] | None:
    return getattr(value, "__dict__", None)


def _tuple_of(kind: type, items: Iterable[object], own: dict[str, object] | None) -> object:
    """A tuple with other items; what its user sets on either of the two is one."""
    made = tuple.__new__(kind, items)
    if own is not None:
        vars(made)  # makes room for it
        made.__dict__ = own
    return made


def apart(value: object) -> tuple[Parts, Callable[[Parts], object]] | None:
    """The parts of a value that nothing can be written into, and what makes another one of other parts."""
    kind = type(value)
    if kind is tuple or kind is frozenset:
        return [*value], kind  # type: ignore[misc]
    if isinstance(value, tuple) and is_tuple(kind):
        own = attributes_of(value)  # whoever keeps the function keeps no part
        return [*tuple.__iter__(value)], lambda parts: _tuple_of(kind, parts, own)
    if kind in ATOMS or container_of(value) is not None or optree.register_pytree_node.get(kind) is None:  # type: ignore[attr-defined]
        return None
    parts, spec = pytree.flatten(value, is_leaf=lambda x: x is not value)
    return parts, functools.partial(pytree.unflatten, spec)


def parts_of(value: object) -> Parts:
    return own[0] if (own := apart(value)) is not None else []


def replaced(value: object, by: Mapping[int, torch.Tensor]) -> object:
    """A value with tensors exchanged, by id; containers stay the objects that they are, only their content changes."""
    if isinstance(value, torch.Tensor):
        return by.get(id(value), value)
    if (own := apart(value)) is None:
        return value
    parts, make = own
    new = [replaced(part, by) for part in parts]
    return value if all(map(operator.is_, new, parts)) else make(new)


def exchanges(value: object) -> bool:
    """Tells whether `replaced` can give something else for a value."""
    return isinstance(value, torch.Tensor) or any(map(exchanges, parts_of(value)))


def tensors_in(value: object, known: Callable[[object], bool], seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """The tensors in a value that a unit made, containers and objects taken apart; those that are known are not."""
    seen = set() if seen is None else seen
    if type(value) in ATOMS or id(value) in seen or known(value):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
        return
    held = (item for container in containers_of(value) for item in container.found.values())
    for item in (*parts_of(value), *held):
        yield from tensors_in(item, known, seen)
