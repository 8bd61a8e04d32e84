"""The search for what a unit reaches: arguments, closures, objects, modules with their hooks, classes, global names."""

from __future__ import annotations

import builtins
import collections
import functools
import itertools
import operator
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fzero.base.random import GENERATORS, drawn_by
from fzero.capture.containers import BYTES, Attributes, ClassAttributes, Container, Globals, has_attributes, size_of
from fzero.capture.contents import (
    ATOMS,
    BOUND,
    MANY,
    apart,
    attributes_of,
    containers_of,
    exchanges,
    functions_of,
    is_library,
    is_tuple,
    is_weak,
    names_of,
    parts_of,
    referent,
)

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_NAMED = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)  # hold nothing to exchange
_ENTRIES = (list, set, collections.deque)
_UNCALLED = frozenset({"__del__", "__repr__", "__str__", "__getstate__", "__setstate__", "__reduce__"})
_COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch.fx")
_MISSING = object()


class Snapshot:
    """Keeps what containers held, to compare it by identity in a few microseconds for ten modules."""

    def __init__(self, containers: Sequence[Container], vacant: Sequence[object]) -> None:
        raw = [own for container in containers if (own := container.raw) is not None]
        self._dicts = [own for own in raw if isinstance(own, dict)]
        self._lists = [own for own in raw if not isinstance(own, dict)]
        self._others = [container for container in containers if container.raw is None]
        self._vacant, self._hooks = vacant, RemovableHandle.next_id  # torch counts the hooks that are put into any dict
        self._lengths = self._count()
        self._owners, self._names = [], []
        for container in containers:
            if isinstance(container.raw, dict):
                self._names += container.found
                self._owners += [container.raw] * len(container.found)
        self._values = [*self._read()]
        # of what users fill the order counts too
        self._ordered = [c.of for c in containers if isinstance(c.raw, dict) and c.raw is c.of]
        self._keys = [*itertools.chain.from_iterable(map(dict.keys, self._ordered))]

    def _count(self) -> list[int]:
        return [*map(dict.__len__, self._dicts), *map(len, self._lists)]

    def _read(self) -> Iterator[object]:
        """All values; not by iterating, which would touch what every module has and what is none of its content."""
        found = map(dict.get, self._owners, self._names, itertools.repeat(_MISSING))
        return itertools.chain(found, itertools.chain.from_iterable(self._lists))

    def holds(self) -> bool:
        """Tells whether everything is as it was."""
        return (
            (self._hooks == RemovableHandle.next_id or self._still_vacant())
            and self._count() == self._lengths
            and all(map(operator.is_, self._read(), self._values))
            and all(map(operator.is_, itertools.chain.from_iterable(self._ordered), self._keys))
            and all(container.differs(container.found) is None for container in self._others)
        )

    def _still_vacant(self) -> bool:
        self._hooks = RemovableHandle.next_id
        return not any(self._vacant)


class Found:
    """Keeps what a search found, without a judgement on its tensors, which derivatives of the moment decide."""

    def __init__(self, seen: Iterable[int] = ()) -> None:
        self.tensors: list[tuple[torch.Tensor, bool]] = []  # each with whether it lies among the arguments
        self.generators: list[object] = []  # random ones
        self.iterators: list[Iterator[object]] = []  # of Python's own, of which nothing tells where they are
        self.long: list[object] = []  # what is too long to be looked through
        self.containers: list[Container] = []
        self.ids: set[int] = set(seen)  # of everything that was seen, which the containers keep alive
        self.modules: list[nn.Module] = []
        self.vacant: list[object] = []  # the many dicts of hooks, and of arguments' attributes, that were empty
        self.settled = True  # whether it can be kept
        self.names = {"forward"}  # of attributes and globals, in all code that was seen
        self._snapshot: Snapshot | None = None
        self._spaces: dict[int, type | types.ModuleType] = {}  # of the user's; what is named in them is looked at
        self._classes: list[type] = []  # of modules of libraries

    @functools.cached_property
    def exchanging(self) -> list[Container]:
        """The containers with something that `replaced` may give another for."""
        return [container for container in self.containers if any(map(exchanges, container.found.values()))]

    def holds(self) -> bool:
        """Tells whether all that was found is as it was."""
        if self._snapshot is None:
            found = all(container.differs(container.found) is None for container in self.containers)
            return found and not any(self.vacant)
        return self._snapshot.holds()

    def keep(self) -> None:
        """Makes `holds` quick and thorough: where it says so, a search would find the same again."""
        self._snapshot = Snapshot(self.containers, self.vacant)

    def search(self, value: object, argument: bool) -> None:
        kind, number = type(value), id(value)
        if number in self.ids or (_is_torchs(kind.__module__, _COMPILERS) and not isinstance(value, nn.Module)):
            return
        if isinstance(value, torch.Tensor):  # the most frequent
            self.ids.add(number)
            self.tensors.append((value, argument))
            if has_attributes(value):
                if (own := vars(value)) or not argument:
                    self._content(Attributes(value))
                else:
                    self.vacant.append(own)
        elif isinstance(value, (type, types.ModuleType)):
            self._space(value)
        elif kind in ATOMS:
            return
        elif isinstance(value, BOUND):
            self.search(value.__self__, False)
        elif kind is frozenset or is_tuple(kind):
            for item in parts_of(value):
                self.search(item, argument)
            own = attributes_of(value)
            if own or (own is not None and not argument):
                self.search(own, False)
            elif own is not None:
                self.vacant.append(own)
        elif isinstance(value, GENERATORS):
            self.ids.add(number)
            self.generators.append(value)
        elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            self.function(value, False)
        else:
            self._object(value, argument)

    def _object(self, value: object, argument: bool) -> None:
        kind = type(value)
        if is_weak(value):
            if isinstance(own := referent(value), nn.Module):
                self.settled = False  # what is kept would keep it alive
                self.search(own, False)
            return
        if argument and isinstance(value, Iterator) and kind not in BYTES:
            raise TypeError(
                f"A unit got a {kind.__name__} as an argument, expected what can be read more than once, a list or a "
                "tuple: a unit may run again."
            )
        entries = value.values() if isinstance(value, dict) else value if isinstance(value, _ENTRIES) else ()
        # of an argument numbers, as anything else is an input
        many = len(entries) > MANY and (not argument or {*map(type, entries)} <= ATOMS)
        if many or (isinstance(value, BYTES) and kind in BYTES and size_of(value) > MANY):
            self.settled = False
            self.long.append(value)
        elif containers := containers_of(value):
            self.ids.add(id(value))
            if isinstance(value, dict) and any(isinstance(key, torch.Tensor) for key in value):
                raise TypeError(
                    f"A unit reaches a {kind.__name__} whose keys are tensors, expected other keys: its inputs are "
                    "other objects inside, which would not be found. Take names or numbers for keys."
                )
            # the entries of an argument are most likely read
            self._content(containers[0], argument and kind in (dict, list))
            if isinstance(value, nn.Module):
                self._module(value)
            else:
                self._space(kind)
            for container in containers[1:]:
                self._content(container)
        elif (own := apart(value)) is not None:
            self.settled = False
            for part in own[0]:
                self.search(part, argument)
        elif isinstance(value, Iterator):
            self.iterators.append(value)
        elif isinstance(value, np.ndarray) and value.size > MANY and value.flags.writeable:
            self.long.append(value)

    def function(self, fn: object, top: bool) -> None:
        """Looks through what a function closes over, its defaults, its object, and the globals that it names."""
        if not isinstance(fn, (types.FunctionType, types.MethodType, functools.partial)):
            if top and not isinstance(fn, (types.BuiltinFunctionType, type)):
                self.search(fn, False)  # an object that is called
            return
        if id(fn) in self.ids:
            return
        self.ids.add(id(fn))
        if isinstance(fn, types.MethodType):
            self.search(fn.__self__, False)
            self.function(fn.__func__, top)
            return
        if isinstance(fn, functools.partial):
            self.function(fn.func, top)
        elif fn.__globals__.get("__name__", "").startswith("fzero."):  # ours, around one of the user's
            if inner := vars(fn).get("__wrapped__"):
                self.function(inner, top)
            return
        for container in containers_of(fn):
            self.ids.add(id(container.of))
            self._content(container)
        if not isinstance(fn, types.FunctionType):
            return
        if _is_torchs(fn.__globals__.get("__name__")):  # what those name is torch's own, as a stance of its compiler
            return
        names = names_of(fn.__code__)
        variables = sorted((names.reads | names.assigns) - vars(builtins).keys())
        self._named(fn.__globals__, {name: fn.__globals__.get(name) for name in variables})
        package = fn.__globals__.get("__package__")  # of whose own modules the whole name is not told
        for name in sorted(names.imports):
            module = sys.modules.get(name) or sys.modules.get(f"{package}.{name}")
            self._named(fn.__globals__, {name: module} if module is not None else {})
        new = names.attributes - self.names
        if new:
            self.names |= new
            for space in [*self._spaces.values()]:
                self._within(space, new)

    def _named(self, where: dict[str, object], values: Mapping[str, object]) -> None:
        """Looks at variables of a file or notebook, and at what its names stand for in the user's files."""
        variables = [name for name, value in values.items() if not isinstance(value, _NAMED) or _is_bound(value)]
        if variables:
            self._content(Globals(where, variables))
        for value in values.values():
            self.generators += [] if (own := drawn_by(value)) is None else [own]
            if isinstance(value, (type, types.ModuleType)):
                self._space(value)
            elif isinstance(value, types.FunctionType):
                if value.__globals__ is where or _is_users(value.__module__):
                    self.function(value, False)

    def _space(self, space: type | types.ModuleType) -> None:
        """Looks at a class, with those that it is made of, or a module, where it is the user's."""
        for own in space.__mro__ if isinstance(space, type) else (space,):
            if id(own) in self._spaces or not _is_users(own.__module__ if isinstance(own, type) else own.__name__):
                continue
            self._spaces[id(own)] = own  # not among the ids: arguments are often of a class that the function names
            if isinstance(own, type):
                self._content(ClassAttributes(own))
            self._within(own, self.names)

    def _within(self, space: type | types.ModuleType, names: Collection[str]) -> None:
        """Looks at what has one of some names in a class or a module, and at what Python calls by itself."""
        if isinstance(space, types.ModuleType):
            self._named(vars(space), {name: value for name, value in vars(space).items() if name in names})
            return
        for name, value in [*vars(space).items()]:
            made = name == "__init__" and issubclass(space, nn.Module)  # elsewhere
            if name in names or (name.startswith("__") and name not in _UNCALLED and not made):
                for function in functions_of(value):
                    if _is_users(function.__module__):
                        self.function(function, False)

    def _module(self, module: nn.Module) -> None:
        """Looks at what its submodules, its hooks and its forward reach."""
        self.modules.append(module)
        for child in module._modules.values():
            self.search(child, False)
        for name in _HOOKS:
            hooks = vars(module)[name]
            if hooks:
                self.search(hooks, False)
            else:
                self.vacant.append(hooks)
        if not type(module).__module__.startswith("torch.nn.modules."):
            self.function(type(module).forward, False)
            self._space(type(module))
            if type(module) not in (*self._spaces.values(), *self._classes):
                self._classes.append(type(module))
                self._content(ClassAttributes(type(module)))

    def _content(self, container: Container, argument: bool = False) -> None:
        self.containers.append(container)
        for item in container.found.values():
            self.search(item, argument)


def _is_bound(value: object) -> bool:
    return isinstance(value, BOUND) and not isinstance(value.__self__, (types.ModuleType, type(None)))


@functools.lru_cache(4096)
def _is_torchs(name: str | None, packages: tuple[str, ...] = ("torch",)) -> bool:
    return name is not None and any(name == each or name.startswith(f"{each}.") for each in packages)


@functools.lru_cache(4096)
def _is_users(name: str | None) -> bool:
    """Tells whether a module is the user's own, and none of an installed library."""
    if name is None or is_library(name):
        return False
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return "site-packages" not in file and "dist-packages" not in file
