"""Values as bytes: pickled, and read by an unpickler that knows no classes and functions, so that nothing can be run.

None, bool, int, float (to the bit), str, bytes, list, tuple, dict, torch.dtype, torch.Size (arrives as a tuple), and
tensors, which are not among the bytes: each takes its place in a list. A container that holds itself arrives
so. Subclasses of these are refused: a NamedTuple or numpy.float64 would need its class.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fzero.channels.errors import BadMessage
from fzero.channels.tensors import DTYPES, NUMBERS, need_plain


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
    out = io.BytesIO()
    pickler = _Pickler(out)
    try:
        pickler.dump(message)
    except RecursionError:
        raise ValueError("connection.send: too many containers within one another. Send a flatter message.") from None
    return out.getvalue(), pickler.tensors


def decode(data: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """The message of these bytes and tensors.

    Raises:
        BadMessage: they are none.
    """
    try:
        return _Unpickler(data, tensors).load()
    except Exception as error:
        raise BadMessage(f"what came is no message: {error!r}") from None


class _Pickler(pickle.Pickler):
    def __init__(self, out: io.BytesIO) -> None:
        super().__init__(out, 3)  # later ones write sets and bytearrays without a word
        self.tensors: list[torch.Tensor] = []

    def reducer_override(self, value: object) -> object:
        """Of all that pickle does not write by itself: what `_Unpickler` makes it of."""
        if isinstance(value, torch.Tensor):
            need_plain(value)
            self.tensors.append(value)
            return _tensor, (len(self.tensors) - 1,)
        if isinstance(value, torch.dtype):
            if value not in NUMBERS:
                raise TypeError(f"connection.send: got {value}, expected a dtype of tensors that can be sent.")
            return _dtype, (NUMBERS[value],)
        if type(value) is torch.Size:
            return _size, tuple(value)
        if any(value is known for known in (_tensor, _dtype, _size)):
            return NotImplemented  # as a name
        kind = value if isinstance(value, type) and value in (set, frozenset, bytearray) else type(value)
        raise TypeError(
            f"connection.send: got a value of type {kind.__module__}.{kind.__qualname__}, expected None, bool, int, "
            "float, str, bytes, list, tuple, dict, torch.dtype or torch.Tensor, and no subclass of these. Convert it."
        )


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensors = tensors

    def find_class(self, module: str, name: str) -> Callable[..., object]:
        known = {"_tensor": self._tensors.__getitem__, "_dtype": DTYPES.__getitem__, "_size": _size}
        if module != __name__ or name not in known:
            raise BadMessage(f"it names {module}.{name}")
        return known[name]


def _tensor(number: int) -> torch.Tensor:
    """Stands for a tensor of the list."""
    raise NotImplementedError


def _dtype(number: int) -> torch.dtype:
    """Stands for a dtype."""
    raise NotImplementedError


def _size(*sizes: int) -> tuple[int, ...]:
    return sizes
