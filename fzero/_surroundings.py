"""What a unit reaches beside its tensors: the containers and objects in its arguments, its closure and its module.

A unit is one node of the derivative, so what it reads and writes there must enter and leave the node with the rest. A
`Reach` finds these places. While the unit runs it fills them with the unit's own tensors; afterwards it puts back what
was there, and says what the unit changed, whose tensors become outputs of the node.
"""

from __future__ import annotations

import collections
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import optree
import torch
from torch import nn

from fzero import _private, _tree
from fzero._handle import Handle

_ATOMS = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, slice, range, type(Ellipsis)),
        *(torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout, type(torch)),
        *(types.BuiltinFunctionType, types.MethodWrapperType, types.GetSetDescriptorType, type),
    }
)
# a module's own, which say what it is; recurrent layers keep lists of their weights, written anew in every forward
_OWN = frozenset({*vars(nn.Module()), "_flat_weights", "_flat_weight_refs"})
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_Content = dict[Any, Any]
MANY = 4096  # entries: a longer list or dict holds data, and is not looked through in every call


class Container:
    """One mutable object: its content as key -> value, when it was found and as it was last filled."""

    __slots__ = ("entered", "found", "of")

    def __init__(self, of: Any) -> None:
        self.of = of
        self.found: _Content = self.read()
        self.entered = self.found

    def read(self) -> _Content:
        return dict(self.of)

    def write(self, content: _Content) -> None:
        own = collections.OrderedDict if isinstance(self.of, collections.OrderedDict) else dict  # not a subclass's
        own.clear(self.of)
        for key, value in content.items():
            own.__setitem__(self.of, key, value)

    def changed(self) -> _Content | None:
        """Its content, where that is not what it was filled with."""
        now, entered = self.read(), self.entered
        if len(now) == len(entered) and all(
            a is b and entered[b] is v for (a, v), b in zip(now.items(), entered, strict=True)
        ):
            return None
        return now

    @property
    def name(self) -> str:
        return f"a {type(self.of).__name__}"


class _List(Container):
    __slots__ = ()

    def read(self) -> _Content:
        return dict(enumerate(self.of))

    def write(self, content: _Content) -> None:
        self.of.clear()
        self.of.extend(content.values())


class _Attributes(Container):
    """An object's __dict__; of a module what it has beside its params, buffers and submodules."""

    __slots__ = ()

    def read(self) -> _Content:
        own = vars(self.of)
        if isinstance(self.of, nn.Module):
            return {name: value for name, value in own.items() if name not in _OWN}
        return dict(own)

    def write(self, content: _Content) -> None:
        own = vars(self.of)
        for name in [name for name in self.read() if name not in content]:
            del own[name]
        own.update(content)


class _Slots(Container):
    __slots__ = ()

    def read(self) -> _Content:
        names = [name for cls in type(self.of).__mro__ for name in _slot_names(cls)]
        return {name: getattr(self.of, name) for name in names if hasattr(self.of, name)}

    def write(self, content: _Content) -> None:
        for name in self.read():
            if name not in content:
                object.__delattr__(self.of, name)
        for name, value in content.items():
            object.__setattr__(self.of, name, value)


class _Cell(Container):
    """A variable that a function shares with the one around it."""

    __slots__ = ()

    def read(self) -> _Content:
        try:
            return {"": self.of.cell_contents}
        except ValueError:  # an empty cell
            return {}

    def write(self, content: _Content) -> None:
        if content:
            self.of.cell_contents = content[""]


def _slot_names(cls: type) -> tuple[str, ...]:
    slots = cls.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(n for n in slots if n not in ("__dict__", "__weakref__"))


def _container_of(value: Any) -> type[Container] | None:
    """How an object is read and written, if it is mutable and its content can be seen."""
    kind = type(value)
    if kind in (dict, collections.OrderedDict, collections.defaultdict):
        return Container
    if kind in (list, collections.deque):
        return _List
    if kind in _ATOMS or kind in weakref.ProxyTypes or isinstance(value, (type, types.ModuleType, torch.Generator)):
        return None
    if kind.__module__.partition(".")[0] == "fzero" and not isinstance(value, dict):
        return None  # ours: steps, states
    if isinstance(value, dict):  # a dict's subclass; what it has as attributes too (ModelOutput) follows its items
        return Container
    if hasattr(value, "__dict__"):
        return _Attributes
    return _Slots if any(_slot_names(cls) for cls in kind.__mro__) and _is_users(kind) else None


def _is_users(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in ("builtins", "torch", "numpy", "collections", "weakref", "re")


class Reach:
    """The places that some roots reach.

    Attributes:
        tensors: that enter the unit: every one among the arguments; elsewhere those that something differentiates and
            that it reads.
        constants: the others, which stay where they are.
        handles: in the order in which they were found.
        generators: random ones, which a second run must find as the first one did.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.constants: list[torch.Tensor] = []
        self.handles: list[Handle] = []
        self.generators: list[torch.Generator] = []
        self.containers: list[Container] = []
        self._ids: set[int] = set()
        self._elsewhere: list[torch.Tensor] = []  # in objects, and differentiated
        self._read: frozenset[int] = frozenset()
        self._vacant: list[Any] = []  # containers that were empty, of which there are many

    # ---- finding

    def arguments(self, value: Any) -> None:
        """Looks through arguments: all of their tensors enter."""
        self._scan(value, True)

    def surroundings(self, fn: Any) -> None:
        """Looks through what a function closes over, its defaults, its object, and the globals that it names."""
        fn = getattr(fn, "__wrapped__", fn) if isinstance(fn, functools.partial) else fn
        self._function(fn, True)

    def _scan(self, value: Any, argument: bool) -> None:
        kind = type(value)
        if kind in _ATOMS or id(value) in self._ids:
            return
        if isinstance(value, torch.Tensor):
            self._tensor(value, argument)
            return
        if kind is tuple or (isinstance(value, tuple) and hasattr(value, "_fields")):
            for item in value:
                self._scan(item, argument)
            return
        if isinstance(value, torch.Generator):
            self._ids.add(id(value))
            self.generators.append(value)
            return
        if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            self._function(value, False)
            return
        how = _container_of(value)
        if isinstance(value, (dict, list, collections.deque)) and len(value) > MANY:
            return
        if how is not None and (isinstance(value, (dict, list)) or not _is_registered(kind)):
            self._ids.add(id(value))
            container = how(value)
            self.containers.append(container)
            entries = argument and kind in (dict, list)  # of an argument, which is most likely read
            for item in container.found.values():
                self._scan(item, entries and not isinstance(item, Handle))
            if isinstance(value, nn.Module):
                self._module(value)
            if isinstance(value, dict) and getattr(value, "__dict__", None):
                self._scan_attributes(value)
        elif _is_registered(kind):
            for item in _children(value)[0]:
                self._scan(item, argument)

    def _module(self, module: nn.Module) -> None:
        """What its submodules, its hooks and its forward reach."""
        for child in module._modules.values():
            self._scan(child, False)
        for name in _HOOKS:
            hooks = vars(module)[name]
            if hooks:
                self._scan(hooks, False)
            else:
                self._vacant.append(hooks)
        self._function(type(module).forward, False)

    def _scan_attributes(self, value: Any) -> None:
        container = _Attributes(value)
        self.containers.append(container)
        for item in container.found.values():
            self._scan(item, False)

    def _tensor(self, tensor: torch.Tensor, argument: bool) -> None:
        self._ids.add(id(tensor))
        if isinstance(tensor, Handle):
            self.handles.append(tensor)
        elif argument:
            self.tensors.append(tensor)
        elif _private.is_wrapped(tensor) or _private.is_differentiated(tensor):
            self._elsewhere.append(tensor)
        else:
            self.constants.append(tensor)

    def _function(self, fn: Any, top: bool) -> None:
        if not isinstance(fn, (types.FunctionType, types.MethodType, functools.partial)):
            if top and not isinstance(fn, (types.BuiltinFunctionType, type)):
                self._scan(fn, False)  # an object that is called
            return
        if id(fn) in self._ids:
            return
        self._ids.add(id(fn))
        if isinstance(fn, functools.partial):
            self._function(fn.func, top)
            self._scan(fn.args, False)
            self._scan(fn.keywords, False)
            return
        if isinstance(fn, types.MethodType):
            self._scan(fn.__self__, False)
            fn = fn.__func__
        if not isinstance(fn, types.FunctionType):
            return
        for cell in fn.__closure__ or ():
            container = _Cell(cell)
            content = container.found.get("")
            if type(content) in _ATOMS and not top:
                continue
            if not isinstance(content, torch.Tensor):  # a tensor that is closed over is refused elsewhere
                if isinstance(content, (int, float, str)) and not isinstance(content, bool):
                    self.containers.append(container)  # a counter
                self._scan(content, False)
        self._scan(fn.__defaults__, False)
        self._scan(fn.__kwdefaults__, False)
        if fn.__dict__:
            self._scan_attributes(fn)
        for name in fn.__code__.co_names:
            value = fn.__globals__.get(name)
            if type(value) not in _ATOMS and not isinstance(value, torch.Tensor) and not callable(value):
                self._scan(value, False)

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

    def fill(self, replaced: Callable[[Any], Any]) -> None:
        """Puts the unit's own tensors into the places; `restore` puts back what was found there."""
        self._occupied()
        for container in self.containers:
            content = {key: replaced(value) for key, value in container.found.items()}
            if all(content[key] is value for key, value in container.found.items()):
                content = container.found
            container.entered = content
            if container.changed() is not None:
                container.write(content)

    def changes(self) -> list[tuple[Container, _Content]]:
        """The containers that are not as they were filled, each with its content."""
        self._occupied()
        return [(container, now) for container in self.containers if (now := container.changed()) is not None]

    def restore(self, contents: Iterable[tuple[Container, _Content]] | None = None) -> None:
        """Puts back what was found, or other contents."""
        for container, content in contents or [(container, container.found) for container in self.containers]:
            container.entered = content
            if container.changed() is not None:
                container.write(content)

    def _occupied(self) -> None:
        """Counts those that are not empty any more among the containers; they were found empty."""
        for one in [one for one in self._vacant if one]:
            self._vacant = [other for other in self._vacant if other is not one]
            container = Container(one)
            container.found = container.entered = {}
            self.containers.append(container)

    def now(self) -> list[tuple[Container, _Content]]:
        """What is in the containers at this moment."""
        return [(container, container.read()) for container in self.containers]

    def knows(self, value: Any) -> bool:
        return id(value) in self._ids


def _is_registered(kind: type) -> bool:
    """Whether optree takes a type apart by its own rules."""
    return optree.register_pytree_node.get(kind) is not None  # type: ignore[attr-defined]


def _children(value: Any) -> tuple[list[Any], Any]:
    """One level of a registered node."""
    return optree.tree_flatten(value, is_leaf=lambda x: x is not value, none_is_leaf=True)


def replaced(value: Any, by: Mapping[int, Any]) -> Any:
    """A value with tensors exchanged, by id; containers stay the objects that they are, only their content changes."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if isinstance(value, torch.Tensor):
        return by.get(id(value), value)
    if isinstance(value, tuple) and (kind is tuple or hasattr(value, "_fields")):
        items = [replaced(item, by) for item in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return tuple(items) if kind is tuple else kind(*items)
    if _is_registered(kind) and not isinstance(value, (dict, list)):
        children, spec = _children(value)
        items = [replaced(item, by) for item in children]
        if all(a is b for a, b in zip(items, children, strict=True)):
            return value
        return _tree.unflatten(spec, items)
    return value


def tensors_in(value: Any, known: Callable[[Any], bool]) -> Iterator[torch.Tensor]:
    """The tensors in a value that a unit made, containers and objects taken apart; those that are known are not."""
    kind = type(value)
    if kind in _ATOMS or known(value):
        return
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, tuple) and (kind is tuple or hasattr(value, "_fields")):
        items: Iterable[Any] = value
    elif _container_of(value) is not None and (isinstance(value, (dict, list)) or not _is_registered(kind)):
        items = [item for container in containers_of(value) for item in container.found.values()]
    elif _is_registered(kind):
        items = _children(value)[0]
    else:
        return
    for item in items:
        yield from tensors_in(item, known)


def containers_of(value: Any) -> list[Container]:
    """How one object is read and written: a dict's subclass by its items, and by its attributes if it has some."""
    how = _container_of(value)
    if how is None:
        return []
    found = [how(value)]
    if isinstance(value, dict) and getattr(value, "__dict__", None):
        found.append(_Attributes(value))
    return found
