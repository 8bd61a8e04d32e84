"""Functions and values that hold tensors, with others in their place: closures, partials, methods, dataclasses."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import hashlib
import numbers
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import TypeVar

import torch

from fzero.base import private

T = TypeVar("T")
Lift = Callable[[torch.Tensor], object]
_NO_VALUE = types.CellType()  # of a variable that has none

_OURS = {"fzero", "torch", "functorch", "optree", "numpy"}
_LIBRARIES = sys.stdlib_module_names | _OURS | {"einops"}
_EMPTY = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Generator})
_OF_TORCH = torch.nn.Module, torch.optim.Optimizer, torch.distributions.Distribution, torch.utils.data.Dataset


def rebound(value: T, lift: Lift) -> T:
    """The value with `lift(tensor)` for every tensor that it holds; the value itself where that changes nothing.

    What a function holds is what it closes over, its defaults, and what functools.partial has bound; a method's is what
    its object holds, which is a dataclass. Objects of other classes are left alone. Copied is what leads to a tensor
    that changes, and nothing else; a function that writes to a copy, as one that counts its calls, is not pure.
    """
    found, parents = _walked(value, parts_of)
    # what is copied, once, as functions may close over themselves and share what they hold: id -> it, and the new value
    new: dict[int, tuple[object, object]] = {id(tensor): (tensor, lift(tensor)) for tensor in _tensors(found)}
    todo = [key for key, (tensor, lifted) in new.items() if lifted is not tensor]
    touched = set(todo)
    for key in todo:  # which grows
        above = [each for each in parents.get(key, ()) if each not in touched]
        touched.update(above)
        todo += above

    def copied(x: object) -> object:
        if id(x) in touched and id(x) not in new:
            new[id(x)] = x, x
            if isinstance(x, types.FunctionType):
                cells = x.__closure__ or ()
                own = [c if c == _NO_VALUE or id(c.cell_contents) not in touched else types.CellType() for c in cells]
                out = types.FunctionType(x.__code__, x.__globals__, x.__name__, None, tuple(own) or None)
                new[id(x)] = x, out
                for cell, old in zip(own, cells, strict=True):
                    if cell is not old:
                        cell.cell_contents = copied(old.cell_contents)
                out.__defaults__, out.__kwdefaults__ = copied(x.__defaults__), copied(x.__kwdefaults__)  # type: ignore[assignment]
                out.__dict__.update({name: copied(each) for name, each in vars(x).items()})
                out.__qualname__, out.__module__ = x.__qualname__, x.__module__
            else:
                parts, make = _apart(x)
                new[id(x)] = x, make(*map(copied, parts))
        return new[id(x)][1] if id(x) in touched else x

    return copied(value)  # type: ignore[return-value]


def tensors_held(value: object) -> list[torch.Tensor]:
    """The tensors that `rebound` finds, each once."""
    return _tensors(_walked(value, parts_of)[0])


def tensors_reached(value: object) -> list[torch.Tensor]:
    """Those, and what objects and classes among a value hold; not what functions find by a global name."""
    return _tensors(_walked(value, _reached)[0])


def tensors_inside(value: object) -> list[torch.Tensor]:
    """The tensors in containers and objects of any class, but for those of functions and of what else is called."""
    return _tensors(_walked(value, lambda each: iter(()) if callable(each) else _reached(each))[0])


def holds_others(value: object) -> bool:
    """Tells whether a value leads to something to call that is neither this library's nor torch's."""
    return any(is_others(x) for x in _walked(value, parts_of)[0] if callable(x) and not isinstance(x, type))


def is_others(fn: object) -> bool:
    """Tells whether something to call is neither this library's nor torch's, whatever it says of itself.

    What torch makes of another's function, as `torch.no_grad()` and `torch.compile` do, is the other's.
    """

    def called(each: object) -> Iterator[object]:
        if _library_of(each) not in (None, "fzero"):
            parts = (*parts_of(each), getattr(each, "__wrapped__", None))
            yield from [x for x in parts if callable(x) and not isinstance(x, type)]

    return any(_library_of(each) is None for each in _walked(fn, called)[0])


def _library_of(fn: object) -> str | None:
    """Torch, this library or Python, where something to call is made by it; None where it is another's."""
    if isinstance(fn, types.MethodType):
        return _library_of(fn.__self__) and _library_of(fn.__func__)
    module = fn.__globals__.get("__name__") if isinstance(fn, types.FunctionType) else type(fn).__module__
    name = str(module).partition(".")[0]
    return name if name in ("torch", "fzero", "builtins", "functools", "operator") else None


def _walked(value: object, children: Callable[[object], Iterator[object]]) -> tuple[list[object], dict[int, list[int]]]:
    """All that a value leads to, each once, and for each one's id those of what leads to it."""
    parents: dict[int, list[int]] = {}
    todo, seen = [value], {id(value): value}
    for each in todo:  # which grows
        for child in children(each) if not isinstance(each, torch.Tensor) else ():
            if type(child) in _EMPTY:
                continue
            parents.setdefault(id(child), []).append(id(each))
            if id(child) not in seen:
                seen[id(child)] = child
                todo.append(child)
    return todo, parents


def _tensors(values: list[object]) -> list[torch.Tensor]:
    return [x for x in values if isinstance(x, torch.Tensor)]


def parts_of(value: object) -> Iterator[object]:
    """What a value holds itself: what `rebound` looks into."""
    if isinstance(value, types.FunctionType):
        yield from [cell.cell_contents for cell in value.__closure__ or () if cell != _NO_VALUE]
        yield from (value.__defaults__, value.__kwdefaults__, *vars(value).values())
    elif isinstance(value, (staticmethod, classmethod)):
        yield value.__func__
    else:
        yield from _apart(value)[0]


def _apart(value: object) -> tuple[Sequence[object], Callable[..., object]]:
    """What a value holds that is no function, and what makes such a value of others."""
    if isinstance(value, types.MethodType):
        return (value.__self__,), functools.partial(types.MethodType, value.__func__)
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords), lambda fn, args, named: functools.partial(fn, *args, **named)
    if type(value) is dict:
        return [*value.values()], lambda *own: dict(zip(value, own, strict=True))
    if isinstance(value, (tuple, list)):
        return value, functools.partial(_sequence, value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [each.name for each in dataclasses.fields(value) if hasattr(value, each.name)]
        return [getattr(value, name) for name in names], functools.partial(_dataclass, value, names)
    return (), lambda: value


def _sequence(value: tuple[object, ...] | list[object], *own: object) -> object:
    if isinstance(value, tuple):
        new = tuple.__new__(type(value), own)
        getattr(new, "__dict__", {}).update(getattr(value, "__dict__", {}))
        return new
    out = copy.copy(value)
    list.__setitem__(out, slice(None), own)
    return out


def _dataclass(value: object, names: Sequence[str], *own: object) -> object:
    out = copy.copy(value)  # with what is no field, but for what was computed of them
    for name in list(getattr(out, "__dict__", {})):
        if isinstance(getattr(type(value), name, None), functools.cached_property):
            del vars(out)[name]
    for name, x in zip(names, own, strict=True):
        object.__setattr__(out, name, x)
    return out


def _reached(value: object) -> Iterator[object]:
    yield from parts_of(value)
    if isinstance(value, Mapping):
        yield from value
        yield from value.values()
    elif isinstance(value, (list, tuple, Set, collections.deque)):
        yield from value
    if _holds_attributes(value):
        yield from dict(getattr(value, "__dict__", {})).values()
        slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
        yield from [getattr(value, name) for name in slots if hasattr(value, name)]


def _holds_attributes(value: object) -> bool:
    """Tells whether a user may have put tensors at an object or a class."""
    if isinstance(value, type):
        return str(value.__module__).partition(".")[0] not in _LIBRARIES
    kind = str(type(value).__module__).partition(".")[0]
    return not isinstance(value, types.ModuleType) and (kind not in _OURS or isinstance(value, _OF_TORCH))


def _slots(kind: type) -> Sequence[str]:
    own = vars(kind).get("__slots__", ())
    return (own,) if isinstance(own, str) else tuple(own)


# ---- what is compared among ranks


def made_with(value: object) -> str:
    """The numbers and words that this library's functions among a value hold, with their names; not others' functions'.

    Numbers as floats, of tensors a single one, whatever kind each is of. Each is said once, and a digest tells of where
    they are: all functions of a chain lead to its members, at every level of nesting.
    """
    words: dict[str, None] = {}
    whole = _content("", value, words, {})
    return f"{', '.join(words)} ({whole[:8]})"


def _content(name: str, value: object, words: dict[str, None], seen: dict[tuple[int, str], tuple[object, str]]) -> str:
    """A digest of what an object holds, also where equal ones are not the same; "" of nothing."""
    if isinstance(value, torch.Tensor):
        if value.ndim or private.is_wrapper(value) or private.is_fake(value) or value.is_meta:
            return ""
        value = value.item() if value.is_complex() else float(value)
    elif isinstance(value, numbers.Real):
        value = float(value)
    if isinstance(value, (float, complex, str)):
        words[own := f"{name}={value!r}"] = None
        return own
    if callable(value) and is_others(value):
        return ""
    if (id(value), name) not in seen:
        seen[id(value), name] = value, ""  # held, as another one might get its id; what leads to itself adds nothing
        parts = [_content(own or name, part, words, seen) for own, part in _named_parts(value)]
        parts = [part for part in parts if part]
        seen[id(value), name] = value, hashlib.sha256(repr(parts).encode()).hexdigest() if parts else ""
    return seen[id(value), name][1]


def _named_parts(value: object) -> Iterator[tuple[str, object]]:
    """What a value holds, in an order that is the same for equal ones."""
    if isinstance(value, dict):
        yield from sorted([(str(key), part) for key, part in value.items()], key=lambda pair: pair[0])
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from [(each.name, getattr(value, each.name, None)) for each in dataclasses.fields(value)]
    else:
        yield from [("", part) for part in parts_of(value)]
