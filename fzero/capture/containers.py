"""How an object that a unit reaches is read and written: a dict, a list, attributes, slots, a function's variable."""

from __future__ import annotations

import abc
import array
import collections
import functools
import io
import operator
import types
import zlib
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from fzero.base import private
from fzero.capture.handle import Handle

# a module's own, which say what it is; recurrent layers keep lists of their weights, written anew in every forward
_OWN = frozenset({*vars(nn.Module()), "_flat_weights", "_flat_weight_refs"} - {"training"})
# what a class consists of
_OF_CLASSES = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(types.MemberDescriptorType, types.GetSetDescriptorType, types.ClassMethodDescriptorType, type, type(abc.ABC)),
    *(classmethod, staticmethod, property, functools.cached_property),
)
Content = dict[Any, Any]


def is_same(now: Content, content: Content) -> bool:
    """Tells whether two contents have the same values, one by one."""
    return all(map(operator.is_, now.values(), content.values()))


class Container:
    """One mutable object, and its content as key -> value when it was found."""

    observed = True  # whether what a unit changes here is changed for its caller
    behind = False  # whether no dict or list shows its content

    def __init__(self, of: Any, found: Content | None = None) -> None:
        self.of = of
        self.found: Content = self.read() if found is None else found

    @property
    def own(self) -> Any:
        """The class whose methods read and write it: a subclass's may make what they return, or count."""
        return collections.OrderedDict if isinstance(self.of, collections.OrderedDict) else dict

    def read(self) -> Content:
        return dict(self.of) if type(self.of) is dict else dict(self.own.items(self.of))

    def write(self, content: Content) -> None:
        own = self.own
        own.clear(self.of)
        for key, value in content.items():
            own.__setitem__(self.of, key, value)

    def differs(self, content: Content) -> Content | None:
        """Returns what is in it now, if that is something else."""
        now = self.read()
        same = len(now) == len(content) and all(map(operator.is_, now, content))
        return None if same and is_same(now, content) else now

    def put(self, content: Content) -> None:
        if self.differs(content) is not None:
            self.write(content)

    @property
    def raw(self) -> Any:
        """A dict or list that changes whenever the content does; None where there is none."""
        return None if self.behind else self.of


class List(Container):
    """A list or a deque, perhaps of a subclass, whose own methods are not asked."""

    @property
    def kind(self) -> Any:
        return list if isinstance(self.of, list) else collections.deque

    def read(self) -> Content:
        return dict(enumerate(self.kind.__iter__(self.of)))

    def write(self, content: Content) -> None:
        self.kind.clear(self.of)
        self.kind.extend(self.of, content.values())


class Attributes(Container):
    """An object's __dict__; of a module what it has beside its params, buffers and submodules."""

    def read(self) -> Content:
        own = vars(self.of)
        if isinstance(self.of, nn.Module):
            return {name: value for name, value in own.items() if name not in _OWN}
        return dict(own)

    def write(self, content: Content) -> None:
        own = vars(self.of)
        for name in self.read().keys() - content.keys():
            del own[name]
        own.update(content)

    @property
    def raw(self) -> Any:
        return vars(self.of)


class _Behind(Container):
    behind = True


class _Data(_Behind):
    """One whose content is a value, no object."""

    def differs(self, content: Content) -> Content | None:
        now = self.read()
        return None if now == content else now


class Slots(_Behind):
    def read(self) -> Content:
        return {name: getattr(self.of, name) for name in slots_of(type(self.of)) if hasattr(self.of, name)}

    def write(self, content: Content) -> None:
        for name in self.read().keys() - content.keys():
            object.__delattr__(self.of, name)
        for name, value in content.items():
            object.__setattr__(self.of, name, value)


class Cell(_Behind):
    """A variable that a function shares with the one around it."""

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

    def read(self) -> Content:
        return dict(enumerate(self.of.__defaults__ or ()))

    def write(self, content: Content) -> None:
        self.of.__defaults__ = tuple(content.values())


class Bound(_Behind):
    """The positional arguments that a functools.partial holds."""

    def read(self) -> Content:
        return dict(enumerate(self.of.args))

    def write(self, content: Content) -> None:
        self.of.__setstate__((self.of.func, tuple(content.values()), self.of.keywords, vars(self.of)))


class Set(_Behind):
    def read(self) -> Content:
        return dict(enumerate(set.__iter__(self.of)))

    def write(self, content: Content) -> None:
        set.clear(self.of)
        set.update(self.of, content.values())


_STREAMS = (io.StringIO, io.BytesIO)
BYTES = (bytearray, array.array, *_STREAMS)


def size_of(value: bytearray | array.array[float] | io.StringIO | io.BytesIO) -> int:
    if isinstance(value, io.BytesIO):
        return value.getbuffer().nbytes
    return value.tell() if isinstance(value, io.StringIO) else len(value)


class Bytes(_Data):
    def read(self) -> Content:
        if type(self.of) in _STREAMS:
            return {"": self.of.__getstate__()[:-1]}  # without attributes
        return {"": bytes(self.of)}

    def write(self, content: Content) -> None:
        if type(self.of) in _STREAMS:
            self.of.__setstate__((*content[""], None))
        elif isinstance(self.of, bytearray):
            self.of[:] = content[""]
        else:
            self.of[:] = array.array(self.of.typecode, content[""])


class Array(_Data):
    """A numpy array, as bytes."""

    def read(self) -> Content:
        return {"": self.of.tobytes()}

    def write(self, content: Content) -> None:
        np.copyto(self.of, np.frombuffer(content[""], self.of.dtype).reshape(self.of.shape))


class Objects(_Behind):
    """A numpy array of objects."""

    def read(self) -> Content:
        return dict(enumerate(self.of.flat))

    def write(self, content: Content) -> None:
        for place, value in content.items():
            self.of.flat[place] = value


class Raised(_Behind):
    """An error: what it was made with, and its attributes."""

    def read(self) -> Content:
        return {**vars(self.of), "args": self.of.args}

    def write(self, content: Content) -> None:
        self.of.args = content["args"]
        vars(self.of).update({name: value for name, value in content.items() if name != "args"})


class Globals(_Behind):
    """Global variables that a function reads or writes."""

    def __init__(self, of: dict[str, Any], names: Sequence[str]) -> None:
        self.names = names
        super().__init__(of)

    def read(self) -> Content:
        return {name: self.of[name] for name in self.names if name in self.of}

    def write(self, content: Content) -> None:
        for name in self.read().keys() - content.keys():
            del self.of[name]
        self.of.update(content)


class ClassAttributes(_Behind):
    """The attributes that a class has beside its functions and its documentation."""

    def __init__(self, of: type) -> None:
        self.whole = [*vars(of).values()]
        super().__init__(of)

    def read(self) -> Content:
        own = vars(self.of).items()
        return {k: v for k, v in own if not (k.startswith("__") or isinstance(v, _OF_CLASSES))}

    def write(self, content: Content) -> None:
        for name in self.read().keys() - content.keys():
            delattr(self.of, name)
        for name, value in content.items():
            setattr(self.of, name, value)

    def differs(self, content: Content) -> Content | None:
        whole = [*vars(self.of).values()]
        if content is self.found and len(whole) == len(self.whole) and all(map(operator.is_, whole, self.whole)):
            return None
        return super().differs(content)


class Params(Globals):
    """The differentiated params of a module around the unit, which hooks and wrapped forwards inside it may read."""

    observed = False  # nobody may write there, which is seen elsewhere

    def __init__(self, of: dict[str, Any]) -> None:
        super().__init__(of, [k for k, x in of.items() if x is not None and not isinstance(x, Handle) and moves(x)])


def has_attributes(tensor: torch.Tensor) -> bool:
    """Tells whether what its user sets on a tensor is all that it has beside its values."""
    return not private.is_dispatched(type(tensor))


def moves(tensor: torch.Tensor) -> bool:
    """Tells whether some derivative or map of the moment takes part in a tensor."""
    return private.is_wrapped(tensor) or private.is_differentiated(tensor)


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


def mark(long: object, thorough: bool) -> int:
    """Returns what shows a change of something long: its length, thoroughly also its content, which takes a while."""
    if isinstance(long, np.ndarray):
        return zlib.crc32(long.tobytes()) if thorough else 0
    if isinstance(long, BYTES):
        return hash(Bytes(long).found[""]) if thorough else size_of(long)
    assert isinstance(long, Collection)
    values = long.values() if isinstance(long, dict) else ()
    return hash((len(long), *map(id, long), *map(id, values))) if thorough else len(long)

def moved_on(container: Container, now: Content) -> bool:
    """Tells whether a container holds other values than it was found with; tensors are looked at elsewhere."""
    pairs = [(container.found.get(key), now.get(key)) for key in {*container.found, *now}]
    return any(a is not b and not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor) for a, b in pairs)
