"""What a unit reaches beside its tensors: the containers and objects in its arguments, its closure and its module.

A unit is one node of the derivative, so what it reads and writes there must enter and leave the node with the rest. A
`Reach` finds these places. While the unit runs it fills them with the unit's own tensors; afterwards it puts back what
was there, and says what the unit changed, whose tensors become outputs of the node.
"""

from __future__ import annotations

import builtins
import collections
import dis
import functools
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fzero._containers import (
    ATOMS,
    MANY,
    Attributes,
    Bound,
    Cell,
    ClassAttributes,
    Container,
    Content,
    Defaults,
    Globals,
    Params,
    Snapshot,
    children,
    container_of,
    exchanges,
    is_registered,
    moves,
    replaced,
)
from fzero._handle import Handle
from fzero._random import GENERATORS, drawn_by

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_NAMED = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)  # hold nothing to exchange


class Found:
    """What a search found, without a judgement on its tensors, which derivatives of the moment decide.

    Attributes:
        tensors: each with whether it lies among the arguments.
        ids: of everything that was seen, which the containers keep alive.
        modules: that were passed.
        generators: random ones.
        iterators: of Python's own, of which nothing tells where they are.
        vacant: dicts of hooks that were empty, of which there are many.
        settled: whether it can be kept.
    """

    def __init__(self, seen: Iterable[int] = ()) -> None:
        self.tensors: list[tuple[torch.Tensor, bool]] = []
        self.generators: list[Any] = []
        self.iterators: list[Iterator[Any]] = []
        self.containers: list[Container] = []
        self.ids: set[int] = set(seen)
        self.modules: list[nn.Module] = []
        self.vacant: list[Any] = []
        self.settled = True
        self._snapshot: Snapshot | None = None

    @functools.cached_property
    def exchanging(self) -> list[Container]:
        """The containers with something that `replaced` may give another for."""
        return [container for container in self.containers if any(map(exchanges, container.found.values()))]

    def holds(self) -> bool:
        """Whether all that was found is as it was."""
        if self._snapshot is None:
            found = all(container.differs(container.found) is None for container in self.containers)
            return found and not any(self.vacant)
        return self._snapshot.holds()

    def keep(self) -> None:
        """Makes `holds` quick and thorough: where it says so, a search would find the same again."""
        self._snapshot = Snapshot(self.containers, self.vacant)

    def search(self, value: Any, argument: bool) -> None:
        kind, number = type(value), id(value)
        if number in self.ids or kind in ATOMS:
            return
        if isinstance(value, torch.Tensor):
            self.ids.add(number)
            self.tensors.append((value, argument))
            return
        if kind is tuple or kind is frozenset or (isinstance(value, tuple) and hasattr(value, "_fields")):
            for item in value:
                self.search(item, argument)
            return
        if isinstance(value, GENERATORS):
            self.ids.add(id(value))
            self.generators.append(value)
            return
        if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            self.function(value, False)
            return
        if argument and isinstance(value, Iterator):
            raise TypeError(
                f"A unit got a {kind.__name__} as an argument, expected what can be read more than once, a list or a "
                "tuple: a unit may run again."
            )
        how = container_of(value)
        if isinstance(value, (dict, list, set, collections.deque)) and len(value) > MANY:
            self.settled = False
            return
        if how is not None and (isinstance(value, (dict, list)) or not is_registered(kind)):
            self.ids.add(id(value))
            container = how(value)
            self.containers.append(container)
            entries = argument and kind in (dict, list)  # of an argument, which is most likely read
            for item in container.found.values():
                self.search(item, entries)
            if isinstance(value, nn.Module):
                self._module(value)
            if isinstance(value, dict) and getattr(value, "__dict__", None):
                self._content(Attributes(value))
        elif is_registered(kind):
            self.settled = False
            for item in children(value)[0]:
                self.search(item, argument)
        elif isinstance(value, Iterator):
            self.iterators.append(value)

    def function(self, fn: Any, top: bool) -> None:
        """Looks through what a function closes over, its defaults, its object, and the globals that it names."""
        if not isinstance(fn, (types.FunctionType, types.MethodType, functools.partial)):
            if top and not isinstance(fn, (types.BuiltinFunctionType, type)):
                self.search(fn, False)  # an object that is called
            return
        if id(fn) in self.ids:
            return
        self.ids.add(id(fn))
        if isinstance(fn, functools.partial):
            self.function(fn.func, top)
            self._content(Bound(fn))
            self.search(fn.keywords, False)
            return
        if isinstance(fn, types.MethodType):
            self.search(fn.__self__, False)
            fn = fn.__func__
        if not isinstance(fn, types.FunctionType):
            return
        if fn.__globals__.get("__name__", "").startswith("fzero._"):  # ours, around one of the user's
            if inner := vars(fn).get("__wrapped__"):
                self.function(inner, top)
            return
        for cell in fn.__closure__ or ():
            self._content(Cell(cell))
        if fn.__defaults__:
            self._content(Defaults(fn))
        self.search(fn.__kwdefaults__, False)
        self._content(Attributes(fn))
        names = _global_names(fn.__code__)
        values = {name: fn.__globals__.get(name) for name in names}
        variables = [name for name, value in values.items() if not isinstance(value, _NAMED)]
        if variables:
            self._content(Globals(fn.__globals__, variables))
        self.generators += [own for value in values.values() if (own := drawn_by(value)) is not None]
        for value in values.values():  # of the same file or notebook
            if isinstance(value, types.FunctionType) and value.__globals__ is fn.__globals__:
                self.function(value, False)

    def _module(self, module: nn.Module) -> None:
        """What its submodules, its hooks and its forward reach."""
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
            if id(type(module)) not in self.ids:
                self.ids.add(id(type(module)))
                self._content(ClassAttributes(type(module)))

    def _content(self, container: Container) -> None:
        self.containers.append(container)
        for item in container.found.values():
            self.search(item, False)


@functools.lru_cache(4096)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """The globals that a function reads or writes, beside those that Python itself has."""
    operations = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL")
    names = {i.argval for i in dis.get_instructions(code) if i.opname in operations}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names.update(_global_names(inner))
    return tuple(sorted(names - vars(builtins).keys()))


class Surroundings:
    """What a function or a module reaches, found once; at each call it is seen whether that is still so.

    A search takes 0.2 ms in a transformer's block, the look 0.01 ms.
    """

    def __init__(self, of: Any) -> None:
        self.of = of
        self._own = {id(m) for m in of.modules()} if isinstance(of, nn.Module) else set()
        self._kept: Found | None = None

    def found(self, seen: set[int]) -> Found:
        """What is there now, without what was seen before."""
        if self._kept is None or not self._kept.holds():
            self._kept = None
            found = self._search(())
            # what is kept alive is no tensor of a graph
            if found.settled and not any(isinstance(x, Handle) or moves(x) for x, _ in found.tensors):
                self._kept = found
                found.keep()
        else:
            found = self._kept
        return found if seen.isdisjoint(found.ids) else self._search(seen)

    def params(self, found: Found) -> list[Container]:
        """The params of modules around the unit."""
        around = [module._parameters for module in found.modules if id(module) not in self._own]
        return [container for own in around if own and (container := Params(own)).found]

    def _search(self, seen: Iterable[int]) -> Found:
        found = Found(seen)
        found.function(self.of, True)
        return found


class Reach:
    """The places that one call reaches.

    Args:
        arguments: all of whose tensors enter the unit.
        around: what the unit's function or module reaches.

    Attributes:
        tensors: that enter the unit: every one among the arguments; elsewhere those that something differentiates and
            that it reads.
        constants: the others, which stay where they are.
        handles: in the order in which they were found.
        generators: random ones, which a second run must find as the first one did.
        iterators: which a second run would find where the first one left them.
    """

    def __init__(self, arguments: Sequence[Any], around: Surroundings) -> None:
        own = Found()
        for value in arguments:
            own.search(value, True)
        other = around.found(own.ids)
        self._parts = (_Part(own), _Part(other))
        self.tensors: list[torch.Tensor] = []
        self.constants: list[torch.Tensor] = []
        self.handles: list[Handle] = []
        self.generators = [*own.generators, *other.generators]
        self.iterators = [*own.iterators, *other.iterators]
        self._elsewhere: list[torch.Tensor] = []  # in objects, and differentiated
        self._read: frozenset[int] = frozenset()
        for tensor, argument in (*own.tensors, *other.tensors):
            self._tensor(tensor, argument)
        for container in around.params(other):
            own.containers.append(container)
            for tensor in container.found.values():
                if not self.knows(tensor):
                    own.ids.add(id(tensor))
                    self._tensor(tensor, False)

    def _tensor(self, tensor: torch.Tensor, argument: bool) -> None:
        if isinstance(tensor, Handle):
            self.handles.append(tensor)
        elif argument:
            self.tensors.append(tensor)
        elif moves(tensor):
            self._elsewhere.append(tensor)
        else:
            self.constants.append(tensor)

    def knows(self, value: Any) -> bool:
        return any(id(value) in part.found.ids for part in self._parts)

    @property
    def containers(self) -> list[Container]:
        return [container for part in self._parts for container in part.containers]

    # ---- what lies in objects

    def reads(self, places: frozenset[int]) -> None:
        """Lets those at these places enter the unit too."""
        own = [self._elsewhere[place] for place in sorted(places - self._read) if place < len(self._elsewhere)]
        self.tensors += own
        self._read |= places

    def stand_ins(self, make: Callable[[torch.Tensor, int], torch.Tensor]) -> dict[int, torch.Tensor]:
        """Id of every other -> what stands for it inside."""
        return {id(x): make(x, i) for i, x in enumerate(self._elsewhere) if i not in self._read}

    def unread(self, mapping: Mapping[int, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The others, each with what stands for it."""
        return [(x, mapping[id(x)]) for i, x in enumerate(self._elsewhere) if i not in self._read]

    # ---- filling, and seeing what changed

    def fill(self, mapping: Mapping[int, torch.Tensor]) -> Filling:
        """Puts the unit's own tensors into the places, which are as they were found; what was put, for `put_again`."""
        for part in self._parts:
            part.fill(mapping)
        return [(part, dict(part.entered)) for part in self._parts if part.entered]

    def entered(self, container: Container) -> Content:
        """What a container was filled with."""
        return next((own for part in self._parts if (own := part.entered.get(id(container)))), container.found)

    def changes(self) -> list[tuple[Container, Content]]:
        """The containers that are not as they were filled, each with its content."""
        return [change for part in self._parts for change in part.changes()]

    def leave(self, stays: Sequence[Container] = ()) -> None:
        """After `changes`: puts back what was found, but for some."""
        for part in self._parts:
            if part.differs:
                part.restore([(c, c.found) for c in part.containers if c not in stays])

    def restore(self) -> None:
        """Puts back what was found."""
        for part in self._parts:
            part.restore()

    def clear(self) -> Before:
        """Puts back what was found, for a second run at any time later; what was there, for `put_back`."""
        before = [(part, part.now()) for part in self._parts]
        for part, contents in before:
            if contents is not None:
                part.restore()
        return before


class _Part:
    """The containers of one search, during one call.

    Attributes:
        entered: id of a container -> what it was filled with, where that is not what was found.
        differs: whether anything was not as it was found when `changes` was asked for.
    """

    def __init__(self, found: Found) -> None:
        self.found = found
        self.containers = found.containers
        self.entered: dict[int, Content] = {}
        self.differs = False

    def is_as_found(self) -> bool:
        if not self.entered and self.found.holds():
            return True
        known = {id(container.of) for container in self.containers}
        hooks = [one for one in self.found.vacant if one and id(one) not in known]
        self.containers = [*self.containers, *map(_once_empty, hooks)]
        return False

    def fill(self, mapping: Mapping[int, torch.Tensor]) -> None:
        for container in self.found.exchanging:
            content = {key: replaced(value, mapping) for key, value in container.found.items()}
            if not all(map(operator.is_, content.values(), container.found.values())):
                container.write(content)
                self.entered[id(container)] = content

    def changes(self) -> list[tuple[Container, Content]]:
        self.differs = not self.is_as_found()
        if not self.differs:
            return []
        return [
            (container, now)
            for container in self.containers
            if container.observed
            and (now := container.differs(self.entered.get(id(container), container.found))) is not None
        ]

    def now(self) -> list[tuple[Container, Content]] | None:
        """What is in the containers at this moment; None for what was found there."""
        return None if self.is_as_found() else [(container, container.read()) for container in self.containers]

    def restore(self, contents: Iterable[tuple[Container, Content]] | None = None) -> None:
        """Puts back what was found, or other contents."""
        if contents is None and not self.is_as_found():
            contents = [(container, container.found) for container in self.containers]
        for container, content in contents or ():
            container.put(content)
        self.entered = {}


Before = list[tuple[_Part, list[tuple[Container, Content]] | None]]
Filling = list[tuple[_Part, dict[int, Content]]]


def put_back(before: Before) -> None:
    """Puts the places back to what they were before `Reach.clear` or `put_again`."""
    for part, contents in before:
        part.restore(contents)


def put_again(filling: Filling) -> Before:
    """Puts what the unit was run with into the places, where parts of it may run again (torch.utils.checkpoint).

    Whatever else such a part reads it finds as it is at that time, in plain torch too.
    """
    before: Before = []
    for part, entered in filling:
        containers = [container for container in part.containers if id(container) in entered]
        before.append((part, [(container, container.read()) for container in containers]))
        for container in containers:
            container.write(entered[id(container)])
    return before


def _once_empty(hooks: Any) -> Container:
    container = Container(hooks)
    container.found = {}
    return container
