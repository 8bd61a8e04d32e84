"""How an object that a unit reaches is read and written: a dict, a list, attributes, slots, a function's variable."""

from __future__ import annotations

import abc
import array
import collections
import functools
import io
import operator
import types
from collections.abc import Sequence
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


class List(Container):
    __slots__ = ()

    def read(self) -> Content:
        return dict(enumerate(_kind_of(self.of).__iter__(self.of)))

    def write(self, content: Content) -> None:
        own = _kind_of(self.of)  # not a subclass's
        own.clear(self.of)
        own.extend(self.of, content.values())


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


class Slots(_Behind):
    __slots__ = ()

    def read(self) -> Content:
        names = [name for cls in type(self.of).__mro__ for name in slot_names(cls)]
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
        return dict(enumerate(set.__iter__(self.of)))

    def write(self, content: Content) -> None:
        set.clear(self.of)
        set.update(self.of, content.values())


BYTES = (bytearray, array.array, io.StringIO, io.BytesIO)


def size_of(value: Any) -> int:
    """Of one of `BYTES`."""
    if isinstance(value, io.BytesIO):
        return value.getbuffer().nbytes
    return value.tell() if isinstance(value, io.StringIO) else len(value)


class Bytes(_Behind):
    __slots__ = ()

    def read(self) -> Content:
        if isinstance(self.of, (io.StringIO, io.BytesIO)):
            return {"": (self.of.getvalue(), self.of.tell())}
        return {"": bytes(self.of) if isinstance(self.of, bytearray) else self.of.tobytes()}

    def write(self, content: Content) -> None:
        if isinstance(self.of, (io.StringIO, io.BytesIO)):
            value, place = content[""]
            self.of.seek(0)
            self.of.truncate()
            self.of.write(value)
            self.of.seek(place)
        elif isinstance(self.of, bytearray):
            self.of[:] = content[""]
        else:
            self.of[:] = array.array(self.of.typecode, content[""])

    def differs(self, content: Content) -> Content | None:
        now = self.read()
        return None if now == content else now


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
        return {k: v for k, v in own if not (k.startswith("__") or isinstance(v, _OF_CLASSES))}

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
    return not private.is_dispatched(type(tensor))


def moves(tensor: torch.Tensor) -> bool:
    """Whether some derivative or map of the moment takes part in a tensor."""
    return private.is_wrapped(tensor) or private.is_differentiated(tensor)


def slot_names(cls: type) -> tuple[str, ...]:
    slots = cls.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(n for n in slots if n not in ("__dict__", "__weakref__"))
    own = cls.__name__.lstrip("_")  # as Python names what is private to a class
    return tuple(f"_{own}{n}" if own and n.startswith("__") and not n.endswith("__") else n for n in names)


def _kind_of(value: Any) -> Any:
    return list if isinstance(value, list) else collections.deque
