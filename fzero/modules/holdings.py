"""The search for what a module leads to, and on which way: attributes, hooks, closures, bound objects, global names."""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import gc
import itertools
import logging
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from fzero.base.random import is_shared
from fzero.modules.contents import (
    ATOMS,
    BOUND,
    attributes_of,
    contents_of,
    functions_of,
    is_library,
    is_weak,
    names_of,
    referent,
)

Item = TypeVar("Item")
Part = tuple[str, object, bool]  # label, object, whether it is data of what holds it
Parts = Iterator[Part]
Build = tuple[Any, ...]  # function, arguments, state, items, pairs
HOOKS = {name: name[1:-1].replace("_", " ") for name in vars(nn.Module()) if name.endswith("hooks")}
REGISTRIES = {"_buffers": "buffer", "_parameters": "param", "_modules": "submodule"}
_LABELS = HOOKS | REGISTRIES
_CALLABLES = (types.FunctionType, types.MethodType, functools.partial, *BOUND)
SEQUENCES = (list, tuple, set, frozenset, collections.deque)
MAPPINGS = (dict, collections.OrderedDict)
WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
_ATOMS = (
    *(*ATOMS, type(NotImplemented), enum.Enum, types.CodeType, types.FrameType, types.TracebackType),
    *(types.GenericAlias, logging.Logger, torch.UntypedStorage, torch.TypedStorage),
)


def is_atom(x: object) -> bool:
    """Tells whether an object leads nowhere, as far as a copy is concerned."""
    if type(x) in ATOMS:
        return True
    if is_weak(x):
        return False
    if isinstance(x, types.BuiltinFunctionType):
        return x.__self__ is None or isinstance(x.__self__, (types.ModuleType, type))
    return isinstance(x, _ATOMS) or is_shared(x)


def globals_of(function: types.FunctionType) -> dict[str, object]:
    """The global names that a function reads, with their values; none of a library's functions."""
    if is_library(dict.get(function.__globals__, "__name__")):
        return {}
    found = {}
    for name in sorted(names_of(function.__code__).reads):
        try:
            found[name] = function.__globals__[name]  # those of a private copy answer with the copy
        except KeyError:
            continue
    return found


def reduced(x: object) -> Build | None:
    """Returns how an object says that it is built, or None where it does not."""
    try:
        said = x.__reduce_ex__(4)
    except Exception:  # whatever its class raises to say that it cannot be taken apart
        return None
    if isinstance(said, str):
        return None
    build, arguments, state, items, pairs = (*said, None, None, None)[:5]
    return build, tuple(arguments or ()), state, list(items or ()), list(pairs or ())


def rebuilt(x: types.MethodType | functools.partial[object], inner: Callable[[object], Any]) -> object:
    """A bound method or a partial function anew, of other parts."""
    if isinstance(x, types.MethodType):
        return types.MethodType(inner(x.__func__), inner(x.__self__))
    new = type(x)(inner(x.func), *map(inner, x.args), **{name: inner(value) for name, value in x.keywords.items()})
    vars(new).update({name: inner(value) for name, value in vars(x).items()})
    return new


def _methods(cls: type, start: Iterable[str]) -> Parts:
    """Finds what a class has under these names, and under those that the functions found use as attributes."""
    names, seen = sorted(start), set[str]()
    while names:
        name = names.pop()
        if name in seen:
            continue
        seen.add(name)
        for base in cls.__mro__:
            member = vars(base).get(name)
            if isinstance(member, (nn.Module, torch.Tensor)):
                yield f"the method {base.__name__}.{name}", member, False
            for function in functions_of(member):
                yield f"the method {base.__name__}.{name}", function, False
                names += sorted(_attribute_names(function))


def _attribute_names(function: types.FunctionType, depth: int = 3) -> frozenset[str]:
    """Returns the names that a function, or one which it wraps, uses as attributes."""
    names = names_of(function.__code__).attributes
    for cell in function.__closure__ or () if depth else ():
        inner = contents_of(cell)
        if isinstance(inner, types.FunctionType):
            names |= _attribute_names(inner, depth - 1)
    return names


def snapshot(items: Callable[[], Iterable[Item]]) -> list[Item]:
    """What a container holds now. Other threads, and finalizers that run meanwhile, may make it larger or smaller."""
    for _ in range(100):
        with contextlib.suppress(RuntimeError):
            return list(items())
    return list(items())


class Holdings:
    """Everything that is reached from a module, breadth first; what only hooks and functions hold is not its own."""

    def __init__(self, root: nn.Module) -> None:
        self.objects: dict[int, object] = {}  # by their ids, which stay valid so
        self.owned: set[int] = set()  # ids of the module's own data: modules, tensors, containers, instances
        self.users: dict[int, list[int]] = collections.defaultdict(list)  # id -> ids of the objects that hold it
        self.builds: dict[int, Build | None] = {}  # id -> how an instance is built
        self.paths = {id(module): path for path, module in root.named_modules()}
        self._first: dict[int, tuple[int, str]] = {}
        self._registries: dict[int, str] = {}  # id of a module's dict -> the name of its attribute
        self._classes: dict[type, list[Part]] = {}
        mine: collections.deque[tuple[object, str, object]] = collections.deque([(None, "", root)])
        others: collections.deque[tuple[object, str, object]] = collections.deque(_global_hooks())
        while mine or others:
            own = bool(mine)
            user, label, x = (mine or others).popleft()
            if own and isinstance(x, _CALLABLES) and not is_weak(x):  # what it holds is its own affair
                others.append((user, label, x))
                continue
            self.users[id(x)].append(id(user))
            if id(x) in self.objects:
                continue
            self.objects[id(x)] = x
            self._first[id(x)] = (id(user), label)
            if own:
                self.owned.add(id(x))
            for label, part, is_data in self._parts(x):
                if not is_atom(part):
                    (mine if own and is_data else others).append((x, label, part))

    def reaching(self, targets: Iterable[int]) -> set[int]:
        """The ids of all objects that lead to one of these."""
        waiting, found = list(targets), set[int]()
        while waiting:
            for user in self.users.get(waiting.pop(), ()):
                if user not in found and user in self.objects:
                    found.add(user)
                    waiting.append(user)
        return found

    def way(self, target: int) -> str:
        """Says how an object is reached, from the module that is nearest to it on that way."""
        labels: list[str] = []
        here = target
        while here in self._first:
            here, label = self._first[here]
            labels.append(label)
            if here in self.paths:
                path = self.paths[here]
                labels.append(f"submodule {path!r}" if path else "the module")
                break
        return ", ".join(label for label in reversed(labels) if label)

    def _parts(self, x: object) -> Parts:
        if isinstance(x, (torch.Tensor, torch.Generator)):
            return
        if is_weak(x):
            yield "a weak reference", referent(x), True
        elif isinstance(x, nn.Module):
            yield from self._parts_of_module(x)
        elif isinstance(x, dict) and type(x) in MAPPINGS:
            own = self._registries.get(id(x), "")
            for key, value in snapshot(x.items):
                yield f"a key of a {type(x).__name__}", key, True
                name = getattr(value, "__qualname__", type(value).__name__) if own in HOOKS else repr(key)
                yield f"{_LABELS.get(own, 'entry')} {name}", value, own not in HOOKS
        elif isinstance(x, SEQUENCES) and type(x) in SEQUENCES:
            yield from ((f"item {i}", item, True) for i, item in enumerate(snapshot(x.__iter__)))
        elif isinstance(x, types.FunctionType):
            yield from _parts_of_function(x)
        elif isinstance(x, types.CellType):
            yield "its value", contents_of(x), True
        elif isinstance(x, (types.MethodType, *BOUND)):
            yield "the object that it is bound to", x.__self__, False
            function = getattr(x, "__func__", None)
            yield "its function", function, False
            if isinstance(function, types.FunctionType):
                yield from _methods(type(x.__self__), _attribute_names(function))
        elif isinstance(x, functools.partial):
            for part in (x.func, *x.args, *x.keywords.values(), *vars(x).values()):
                yield "an argument of functools.partial", part, False
        elif isinstance(x, WEAK):
            for entry in snapshot(x.items if not isinstance(x, weakref.WeakSet) else lambda: zip(x, strict=True)):
                yield from (("an entry of a weak container", part, True) for part in entry)
        elif isinstance(x, types.GeneratorType):
            frame = x.gi_frame
            yield from ((f"local {name!r}", v, False) for name, v in (frame.f_locals if frame else {}).items())
        elif type(x).__module__.partition(".")[0] != "numpy":
            yield from self._parts_of_instance(x)

    def _parts_of_module(self, module: nn.Module) -> Parts:
        for name, value in snapshot(vars(module).items):
            if name in _LABELS:
                self._registries[id(value)] = name
            yield "" if name in _LABELS else f"attribute {name!r}", value, True
        cls = type(module)
        if cls not in self._classes:
            self._classes[cls] = list(_methods(cls, ("forward", "__call__")))
        yield from self._classes[cls]

    def _parts_of_instance(self, x: object) -> Parts:
        build, own = reduced(x), attributes_of(x)
        self.builds[id(x)], inside = build, f"inside of a {type(x).__name__}"
        if build is None:
            yield from _attributes(own or {}, True)
            yield from ((inside, part, True) for part in gc.get_referents(x) if part is not own)
        else:
            _, arguments, state, items, pairs = build
            for part in state if isinstance(state, tuple) and len(state) == 2 else (state,):
                if isinstance(part, dict):
                    yield from _attributes(part, True)
                else:
                    yield f"state of a {type(x).__name__}", part, True
            yield from ((inside, part, True) for part in (*arguments, *items, *itertools.chain(*pairs)))
        if callable(x):
            yield from _methods(type(x), ("__call__",))


def _attributes(own: Mapping[str, object], is_data: bool) -> Parts:
    return ((f"attribute {name!r}", value, is_data) for name, value in snapshot(own.items))


def _parts_of_function(function: types.FunctionType) -> Parts:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        yield f"closure variable {name!r}", cell, False
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield "a default argument", value, False
    yield from _attributes(vars(function), False)
    for name, value in globals_of(function).items():
        yield f"the global name {name!r}", value, False
        if isinstance(value, (types.ModuleType, type)):
            for attribute in sorted(names_of(function.__code__).attributes & vars(value).keys()):
                held = vars(value)[attribute]
                if isinstance(held, (nn.Module, torch.Tensor)):
                    yield f"the global name '{name}.{attribute}'", held, False


def _global_hooks() -> Iterator[tuple[None, str, object]]:
    for name, hooks in vars(torch_module).items():
        if name.startswith("_global_") and isinstance(hooks, dict):
            for hook in filter(callable, hooks.values()):
                name = getattr(hook, "__qualname__", type(hook).__name__)
                yield None, f"the hook {name} of all modules", hook
