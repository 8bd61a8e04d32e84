"""Values as bytes: pickled, and read by an unpickler that calls nothing but what stands here, so that no code is run.

None, bool, int, float (to the bit), str, bytes, list, tuple, dict, the kinds below, NamedTuples that the reader's
process has imported, and leaves, which are not among the bytes: each takes its place in a list. Other subclasses of
these are refused: a numpy.float64 would need its class.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fzero.base import pytree
from fzero.channels.tensors import DTYPES, NUMBERS, need_plain
from fzero.channels.wire import BadMessage

Kinds = Mapping[type, tuple[Callable[[Any], Sequence[object]], Callable[..., object]]]
KINDS: Kinds = {  # to values of the vocabulary, and back from them
    torch.dtype: (lambda dtype: (_number(dtype),), DTYPES.__getitem__),
    torch.Size: (tuple, lambda *sizes: torch.Size(sizes)),
    OrderedDict: (lambda own: (list(own.items()),), OrderedDict),
    pytree.Count: (lambda count: (count.said,), pytree.Count.of),
}


def encode(message: object) -> tuple[bytes, list[torch.Tensor]]:
    """The bytes of a message, and its tensors in the order in which they occur; one that occurs twice is there once.

    Raises:
        TypeError: it holds a value outside the vocabulary, or a tensor that is more than its values.
        ValueError: it is too deep.

    Example:
        >>> from fzero.channels.vocabulary import decode, encode
        >>> data, tensors = encode(["step", 3, {"loss": 0.5}])
        >>> decode(data, tensors)
        ['step', 3, {'loss': 0.5}]
    """
    pickler = Pickler(_is_plain)
    try:
        return pickler.dumped(message), pickler.leaves
    except RecursionError:
        raise ValueError("connection.send: too many containers within one another. Send a flatter message.") from None


def decode(data: bytes | bytearray, leaves: Sequence[object]) -> Any:
    """The message of these bytes and leaves."""
    try:
        return Unpickler(data, leaves).load()
    except Exception as error:
        raise BadMessage(f"what came is no message: {error!r}") from None


class Pickler(pickle.Pickler):
    """Writes one value.

    Args:
        is_leaf: tells whether a value that is no number, string or plain container goes to `leaves`.
        kinds: what else is known.
    """

    def __init__(self, is_leaf: Callable[[object], bool], kinds: Kinds = KINDS) -> None:
        self._out = io.BytesIO()
        super().__init__(self._out, 3)  # later ones write sets and bytearrays without a word
        self._is_leaf, self._kinds = is_leaf, kinds
        self.leaves: list[Any] = []

    def dumped(self, value: object) -> bytes:
        self.dump(value)
        return self._out.getvalue()

    def reducer_override(self, value: Any) -> object:
        """Of all that pickle does not write by itself: what `Unpickler` makes it of."""
        kind = type(value)
        if self._is_leaf(value):
            self.leaves.append(value)
            return made, ("leaf", len(self.leaves) - 1)
        if kind in self._kinds:
            return made, (kind.__name__, *self._kinds[kind][0](value))
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return made, ("namedtuple", kind.__module__, kind.__qualname__, *value)
        if value is made:
            return NotImplemented  # as a name
        raise self.refused(value)

    def refused(self, value: object) -> TypeError:
        """What is said of a value outside the vocabulary."""
        kind = value if isinstance(value, type) and value in (set, frozenset, bytearray) else type(value)
        return TypeError(
            f"connection.send: got a value of type {kind.__module__}.{kind.__qualname__}, expected None, bool, int, "
            "float, str, bytes, list, tuple, dict, torch.dtype or torch.Tensor, and no subclass of these. Convert it."
        )


class Unpickler(pickle.Unpickler):
    """Reads what a `Pickler` of the same kinds has written."""

    def __init__(self, data: bytes | bytearray, leaves: Sequence[object], kinds: Kinds = KINDS) -> None:
        super().__init__(io.BytesIO(data))
        makers: dict[str, Callable[..., object]] = {kind.__name__: make for kind, (_, make) in kinds.items()}
        makers |= {"leaf": leaves.__getitem__, "namedtuple": _named_tuple}
        self._make = lambda kind, *args: makers[kind](*args)  # not of itself: leaves die with the last who uses them

    def find_class(self, module: str, name: str) -> Callable[..., object]:
        if (module, name) != (__name__, made.__name__):
            raise BadMessage(f"it names {module}.{name}")
        return self._make


def made(kind: str, *args: object) -> object:
    """Stands for what the reader makes of some values."""
    raise NotImplementedError


def _is_plain(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        need_plain(value)
        return True
    return False


def _number(dtype: torch.dtype) -> int:
    if dtype not in NUMBERS:
        raise TypeError(f"connection.send: got {dtype}, expected a dtype of tensors that can be sent.")
    return NUMBERS[dtype]


def _named_tuple(module: str, name: str, *values: object) -> object:
    """A NamedTuple, of those that are imported here; its own code is not run."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, tuple) and len(getattr(found, "_fields", ())) == len(values)):
        raise TypeError(
            f"a value of the NamedTuple {module}.{name} arrived, which is not imported in this process; expected one "
            f"that is. Import {module} here, or send a dict"
        )
    return tuple.__new__(found, values)
