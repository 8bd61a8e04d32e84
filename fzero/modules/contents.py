"""What objects consist of, as far as a module leads to them: their content, the names in their code, their parts."""

from __future__ import annotations

import collections
import dis
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import optree
import torch

from fzero.base import pytree

ATOMS = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, slice, range, type(Ellipsis)),
        *(torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout, type(torch)),
        *(types.GetSetDescriptorType, type),
    }
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


def attributes_of(value: object) -> dict[str, object] | None:
    return getattr(value, "__dict__", None)


@functools.lru_cache(4096)
def slots_of(kind: type) -> tuple[str, ...]:
    """The names of a class's slots and of those that it is made of, as Python names what is private to a class."""
    found = []
    for cls in kind.__mro__:
        slots, own = cls.__dict__.get("__slots__", ()), cls.__name__.lstrip("_")
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                hidden = own and name.startswith("__") and not name.endswith("__")
                found.append(f"_{own}{name}" if hidden else name)
    return tuple(found)


def contents_of(cell: types.CellType) -> object:
    """The value of a variable that functions share; None of an empty one."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def fill(new: Any, of: object, inner: Callable[[object], object]) -> None:
    """Fills an empty object with copies of what is in another one of its class.

    Args:
        inner: copies one thing.
    """
    if isinstance(of, types.CellType):
        try:
            new.cell_contents = inner(of.cell_contents)
        except ValueError:  # an empty one
            return
    elif isinstance(of, dict):
        own: Any = collections.OrderedDict if isinstance(of, collections.OrderedDict) else dict
        for key, value in list(own.items(of)):
            own.__setitem__(new, inner(key), inner(value))
    elif isinstance(of, (list, collections.deque)):
        kind: Any = list if isinstance(of, list) else collections.deque
        kind.extend(new, [inner(x) for x in kind.__iter__(of)])
    elif isinstance(of, set):
        set.update(new, [inner(x) for x in set.__iter__(of)])
    elif hasattr(of, "__dict__"):
        vars(new).update({name: inner(value) for name, value in vars(of).items()})
    else:
        for name in slots_of(type(of)):
            if hasattr(of, name):
                object.__setattr__(new, name, inner(getattr(of, name)))


@functools.lru_cache(4096)
def _is_tuple(kind: type) -> bool:
    """Tells whether objects of a type are tuples, perhaps with attributes, but no records of Python's own."""
    return issubclass(kind, tuple) and kind is not torch.Size and not optree.is_structseq_class(kind)


def _tuple_of(kind: type, items: Iterable[object], own: dict[str, object] | None) -> object:
    """A tuple with other items; what its user sets on either of the two is one."""
    made = tuple.__new__(kind, items)
    if own is not None:
        vars(made)  # makes room for it
        made.__dict__ = own
    return made


def apart(value: tuple[object, ...]) -> tuple[Parts, Callable[[Parts], object]] | None:
    """The parts of a tuple, and what makes another one of other parts; None of one that cannot be made."""
    kind = type(value)
    if kind is tuple:
        return [*value], kind  # type: ignore[return-value]
    if _is_tuple(kind):
        own = attributes_of(value)  # whoever keeps the function keeps no part
        return [*tuple.__iter__(value)], lambda parts: _tuple_of(kind, parts, own)
    if optree.register_pytree_node.get(kind) is None:  # type: ignore[attr-defined]
        return None
    parts, spec = pytree.flatten(value, is_leaf=lambda x: x is not value)
    return parts, functools.partial(pytree.unflatten, spec)
