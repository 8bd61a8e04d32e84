"""How an object that a unit reaches is read and written: a dict, a list, attributes, slots, a function's variable."""

from __future__ import annotations

import collections
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import optree
import torch
from torch import nn

from fzero import _private, _tree
from fzero._handle import Handle
from fzero._random import GENERATORS

ATOMS = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, slice, range, type(Ellipsis)),
        *(torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout, type(torch)),
        *(types.BuiltinFunctionType, types.MethodWrapperType, types.GetSetDescriptorType, type),
    }
)
# a module's own, which say what it is; recurrent layers keep lists of their weights, written anew in every forward
_OWN = frozenset({*vars(nn.Module()), "_flat_weights", "_flat_weight_refs"} - {"training"})
MANY = 4096  # entries: longer lists, dicts and arrays hold data, and are not looked through in every call
# ours (steps, states), and what leads to much that no function computes with
_CLOSED = frozenset(
    "fzero logging threading importlib inspect multiprocessing concurrent asyncio socket pathlib".split()
)
Content = dict[Any, Any]


class Container:
    """One mutable object, and its content as key -> value when it was found."""

    __slots__ = ("found", "of")
    observed = True  # whether what a unit changes here is changed for its caller

    def __init__(self, of: Any) -> None:
        self.of = of
        self.found: Content = self.read()

    def read(self) -> Content:
        return dict(self.of)

    def write(self, content: Content) -> None:
        own = collections.OrderedDict if isinstance(self.of, collections.OrderedDict) else dict  # not a subclass's
        own.clear(self.of)
        for key, value in content.items():
            own.__setitem__(self.of, key, value)

    def differs(self, content: Content) -> Content | None:
        """What is in it now, if that is something else."""
        now = self.read()
        same = len(now) == len(content) and all(map(operator.is_, now, content))
        return None if same and all(map(operator.is_, now.values(), content.values())) else now

    def put(self, content: Content) -> None:
        if self.differs(content) is not None:
            self.write(content)

    @property
    def raw(self) -> Any:
        """A dict or list that changes whenever the content does; None where there is none."""
        return self.of


class _List(Container):
    __slots__ = ()

    def read(self) -> Content:
        return dict(enumerate(self.of))

    def write(self, content: Content) -> None:
        self.of.clear()
        self.of.extend(content.values())


class Attributes(Container):
    """An object's __dict__; of a module what it has beside its params, buffers and submodules."""

    __slots__ = ()

    def read(self) -> Content:
        own = vars(self.of)
        if isinstance(self.of, nn.Module):
            return {name: value for name, value in own.items() if name not in _OWN}
        return dict(own)

    def write(self, content: Content) -> None:
        own = vars(self.of)
        for name in [name for name in self.read() if name not in content]:
            del own[name]
        own.update(content)

    @property
    def raw(self) -> Any:
        return vars(self.of)


class _Behind(Container):
    """One whose content no dict or list shows."""

    __slots__ = ()

    @property
    def raw(self) -> Any:
        return None


class _Slots(_Behind):
    __slots__ = ()

    def read(self) -> Content:
        names = [name for cls in type(self.of).__mro__ for name in _slot_names(cls)]
        return {name: getattr(self.of, name) for name in names if hasattr(self.of, name)}

    def write(self, content: Content) -> None:
        for name in self.read():
            if name not in content:
                object.__delattr__(self.of, name)
        for name, value in content.items():
            object.__setattr__(self.of, name, value)


class Cell(_Behind):
    """A variable that a function shares with the one around it."""

    __slots__ = ()

    def read(self) -> Content:
        try:
            return {"": self.of.cell_contents}
        except ValueError:  # an empty cell
            return {}

    def write(self, content: Content) -> None:
        if content:
            self.of.cell_contents = content[""]


class Defaults(_Behind):
    """The values of a function's last parameters where a call does not say them."""

    __slots__ = ()

    def read(self) -> Content:
        return dict(enumerate(self.of.__defaults__ or ()))

    def write(self, content: Content) -> None:
        self.of.__defaults__ = tuple(content.values())


class Bound(_Behind):
    """The positional arguments that a functools.partial holds."""

    __slots__ = ()

    def read(self) -> Content:
        return dict(enumerate(self.of.args))

    def write(self, content: Content) -> None:
        self.of.__setstate__((self.of.func, tuple(content.values()), self.of.keywords, vars(self.of)))


class Set(_Behind):
    __slots__ = ()

    def read(self) -> Content:
        return dict(enumerate(self.of))

    def write(self, content: Content) -> None:
        self.of.clear()
        self.of.update(content.values())


class Array(_Behind):
    """A numpy array, as bytes."""

    __slots__ = ()

    def read(self) -> Content:
        return {"": self.of.tobytes()}

    def write(self, content: Content) -> None:
        np.copyto(self.of, np.frombuffer(content[""], self.of.dtype).reshape(self.of.shape))

    def differs(self, content: Content) -> Content | None:
        now = self.read()
        return None if now == content else now


class Objects(_Behind):
    """A numpy array of objects."""

    __slots__ = ()

    def read(self) -> Content:
        return dict(enumerate(self.of.flat))

    def write(self, content: Content) -> None:
        for place, value in content.items():
            self.of.flat[place] = value


class Raised(_Behind):
    """An error: what it was made with, and its attributes."""

    __slots__ = ()

    def read(self) -> Content:
        return {**vars(self.of), "args": self.of.args}

    def write(self, content: Content) -> None:
        self.of.args = content["args"]
        vars(self.of).update({name: value for name, value in content.items() if name != "args"})


class Globals(_Behind):
    """Global variables that a function reads or writes."""

    __slots__ = ("names",)

    def __init__(self, of: Any, names: Sequence[str]) -> None:
        self.names = names
        super().__init__(of)

    def read(self) -> Content:
        return {name: self.of[name] for name in self.names if name in self.of}

    def write(self, content: Content) -> None:
        for name in self.names:
            if name in content:
                self.of[name] = content[name]
            else:
                self.of.pop(name, None)


class ClassAttributes(_Behind):
    """What a class has beside its functions and its documentation."""

    __slots__ = ("whole",)

    def read(self) -> Content:
        own = vars(self.of).items()
        return {k: v for k, v in own if not (k.startswith("__") or callable(v) or hasattr(v, "__get__"))}

    def write(self, content: Content) -> None:
        for name in [name for name in self.read() if name not in content]:
            delattr(self.of, name)
        for name, value in content.items():
            setattr(self.of, name, value)

    def differs(self, content: Content) -> Content | None:
        whole = [*vars(self.of).values()]
        if content is self.found and len(whole) == len(self.whole) and all(map(operator.is_, whole, self.whole)):
            return None
        return super().differs(content)

    def __init__(self, of: Any) -> None:
        self.whole = [*vars(of).values()]
        super().__init__(of)


class Params(Container):
    """The differentiated params of a module around the unit, which hooks and wrapped forwards inside it may read."""

    __slots__ = ("keys",)
    observed = False  # nobody may write there, which is seen elsewhere

    def __init__(self, of: Any) -> None:
        self.keys = [name for name, x in of.items() if x is not None and not isinstance(x, Handle) and moves(x)]
        super().__init__(of)

    def read(self) -> Content:
        return {name: self.of[name] for name in self.keys if name in self.of}

    def write(self, content: Content) -> None:
        self.of.update(content)


def has_attributes(tensor: torch.Tensor) -> bool:
    """Whether what its user sets on a tensor is all that it has beside its values."""
    return type(tensor).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl  # type: ignore[attr-defined]


def moves(tensor: torch.Tensor) -> bool:
    """Whether some derivative or map of the moment takes part in a tensor."""
    return _private.is_wrapped(tensor) or _private.is_differentiated(tensor)


def _slot_names(cls: type) -> tuple[str, ...]:
    slots = cls.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(n for n in slots if n not in ("__dict__", "__weakref__"))


def container_of(value: Any) -> type[Container] | None:
    """How an object is read and written, if it is mutable and its content can be seen."""
    kind = type(value)
    if kind in (dict, collections.OrderedDict, collections.defaultdict):
        return Container
    if kind in (list, collections.deque):
        return _List
    if kind is set:
        return Set
    if kind is np.ndarray:
        if value.size > MANY or not value.flags.writeable:
            return None
        return Objects if value.dtype.hasobject else Array
    if kind in ATOMS or kind in weakref.ProxyTypes or isinstance(value, (type, types.ModuleType, *GENERATORS)):
        return None
    if kind.__module__.partition(".")[0] in _CLOSED and not isinstance(value, dict):
        return None
    if isinstance(value, BaseException):
        return Raised
    if isinstance(value, dict):  # a dict's subclass; what it has as attributes too (ModelOutput) follows its items
        return Container
    if hasattr(value, "__dict__"):
        return Attributes
    return _Slots if any(_slot_names(cls) for cls in kind.__mro__) and _is_users(kind) else None


def _is_users(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in ("builtins", "torch", "numpy", "collections", "weakref", "re")


def containers_of(value: Any) -> list[Container]:
    """How one object is read and written: a dict's subclass by its items, and by its attributes if it has some."""
    how = container_of(value)
    if how is None:
        return []
    found = [how(value)]
    if isinstance(value, dict) and getattr(value, "__dict__", None):
        found.append(Attributes(value))
    return found


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
    if isinstance(value, tuple) and (kind is tuple or hasattr(value, "_fields")):
        items = [replaced(item, by) for item in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return tuple(items) if kind is tuple else kind(*items)
    if is_built(value):
        below, spec = children(value)
        items = [replaced(item, by) for item in below]
        if all(a is b for a, b in zip(items, below, strict=True)):
            return value
        return _tree.unflatten(spec, items)
    return value


def exchanges(value: Any) -> bool:
    """Whether `replaced` can give something else for it."""
    kind = type(value)
    if kind in ATOMS:
        return False
    if kind is frozenset or (isinstance(value, tuple) and (kind is tuple or hasattr(value, "_fields"))):
        return any(map(exchanges, value))
    return isinstance(value, torch.Tensor) or is_built(value)


def tensors_in(value: Any, known: Callable[[Any], bool], seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """The tensors in a value that a unit made, containers and objects taken apart; those that are known are not."""
    kind, seen = type(value), set() if seen is None else seen
    if kind in ATOMS or id(value) in seen or known(value):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, tuple) and (kind is tuple or hasattr(value, "_fields")):
        items: Iterable[Any] = value
    elif containers := containers_of(value):
        items = [item for container in containers for item in container.found.values()]
    elif is_registered(kind):
        items = children(value)[0]
    else:
        return
    for item in [*items]:
        yield from tensors_in(item, known, seen)
