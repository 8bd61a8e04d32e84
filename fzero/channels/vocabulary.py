"""Values as bytes: a fixed vocabulary, of which nothing can be run.

None, bool, int of any size, float (to the bit), str, bytes, list, tuple, dict with keys of str or int, torch.dtype,
torch.Size (arrives as a tuple), and tensors, which are not among the bytes: each takes the next one of a list. Of other
types also subclasses are refused: a NamedTuple or numpy.float64 would arrive as something else.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import torch

from fzero.channels.errors import BadMessage
from fzero.channels.tensors import DTYPES, NUMBERS, need_plain

MAX_DEPTH = 64  # containers within containers

_INT, _FLOAT, _LENGTH = struct.Struct("<cq"), struct.Struct("<cd"), struct.Struct("<cI")
_LONGEST = (1 << 32) - 1  # bytes or elements of one value
_SMALL = 1 << 63


def encode(message: object) -> tuple[bytes, list[torch.Tensor]]:
    """The bytes of a message, and its tensors in the order in which they occur; one that occurs twice is there twice.

    Raises:
        TypeError: it holds a value outside the vocabulary, or a tensor that is more than its values.
        ValueError: it is too deep or too long.

    Example:
        >>> from fzero.channels.vocabulary import decode, encode
        >>> data, tensors = encode(["step", 3, {"loss": 0.5}])
        >>> decode(memoryview(data), tensors)
        ['step', 3, {'loss': 0.5}]
    """
    parts: list[bytes] = []
    tensors: list[torch.Tensor] = []
    _encode(message, parts.append, tensors, 0)
    return b"".join(parts), tensors


def _encode(value: object, put: Callable[[bytes], None], tensors: list[torch.Tensor], depth: int) -> None:
    kind = type(value)
    if kind is str:
        assert isinstance(value, str)
        _put_text(b"s", value.encode("utf-8", "surrogatepass"), put)
    elif kind is int:
        assert isinstance(value, int)
        if -_SMALL <= value < _SMALL:
            put(_INT.pack(b"i", value))
        else:
            _put_text(b"I", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True), put)
    elif value is None:
        put(b"N")
    elif kind is bool:
        put(b"T" if value else b"F")
    elif kind is float:
        put(_FLOAT.pack(b"d", value))
    elif kind is bytes:
        assert isinstance(value, bytes)
        _put_text(b"b", value, put)
    elif isinstance(value, torch.Tensor):
        need_plain(value)
        tensors.append(value)
        put(b"x")
    elif isinstance(value, torch.dtype):
        if value not in NUMBERS:
            raise TypeError(f"connection.send: got {value}, expected a dtype of tensors that can be sent.")
        put(b"y" + bytes((NUMBERS[value],)))
    elif kind in (list, tuple, dict, torch.Size):
        assert isinstance(value, (list, tuple, dict))
        if depth >= MAX_DEPTH:
            raise ValueError(
                f"connection.send: more than {MAX_DEPTH} containers lie within one another, or one within itself. "
                "Send a flatter message."
            )
        put(_LENGTH.pack(b"l" if kind is list else b"D" if kind is dict else b"t", _short(len(value))))
        if isinstance(value, dict):
            for key, child in value.items():
                if type(key) is not str and type(key) is not int:
                    raise TypeError(f"connection.send: a dict has the key {key!r}, expected keys of type str or int.")
                _encode(key, put, tensors, depth + 1)
                _encode(child, put, tensors, depth + 1)
        else:
            for child in value:
                _encode(child, put, tensors, depth + 1)
    else:
        raise TypeError(
            f"connection.send: got a value of type {kind.__module__}.{kind.__qualname__}, expected None, bool, int, "
            "float, str, bytes, list, tuple, dict, torch.dtype or torch.Tensor, and no subclass of these. Convert it."
        )


def _short(length: int) -> int:
    if length > _LONGEST:
        raise ValueError(f"connection.send: a value has {length} bytes or elements, expected at most {_LONGEST}.")
    return length


def _put_text(kind: bytes, data: bytes, put: Callable[[bytes], None]) -> None:
    put(_LENGTH.pack(kind, _short(len(data))))
    put(data)


def decode(data: memoryview, tensors: Sequence[torch.Tensor]) -> object:
    """The message of these bytes and tensors, all of which it takes.

    What it makes is at most in proportion to the bytes.

    Raises:
        BadMessage: they are none.
    """
    decoder = _Decoder(data, tensors)
    message = decoder.value(0)
    if decoder.at != len(data) or decoder.taken != len(tensors):
        raise BadMessage(
            f"{len(data) - decoder.at} bytes and {len(tensors) - decoder.taken} tensors are left behind the message"
        )
    return message


class _Decoder:
    """Goes through the bytes."""

    def __init__(self, data: memoryview, tensors: Sequence[torch.Tensor]) -> None:
        self.data, self.tensors, self.at, self.taken = data, tensors, 0, 0

    def _take(self, count: int) -> memoryview:
        begin, self.at = self.at, self.at + count
        if self.at > len(self.data):
            raise BadMessage(f"the message ends at byte {len(self.data)}, within a value of {count} bytes at {begin}")
        return self.data[begin : self.at]

    def _number(self, layout: struct.Struct) -> int | float:
        self.at -= 1  # the kind is a part of the layout
        return layout.unpack(self._take(layout.size))[1]

    def _count(self) -> int:
        count = int(self._number(_LENGTH))
        if count > len(self.data) - self.at:  # each element takes a byte at least
            raise BadMessage(f"a value of {count} bytes or elements, of which {len(self.data) - self.at} are there")
        return count

    def _text(self) -> str:
        try:
            return str(self._take(self._count()), "utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise BadMessage(f"a text is not UTF-8: {error}") from None

    def value(self, depth: int) -> object:
        kind = bytes(self._take(1))
        if kind == b"s":
            return self._text()
        if kind == b"i":
            return self._number(_INT)
        if kind == b"N":
            return None
        if kind == b"T" or kind == b"F":
            return kind == b"T"
        if kind == b"d":
            return self._number(_FLOAT)
        if kind == b"b":
            return bytes(self._take(self._count()))
        if kind == b"I":
            return int.from_bytes(self._take(self._count()), "little", signed=True)
        if kind == b"x":
            if self.taken == len(self.tensors):
                raise BadMessage(f"the message takes more than the {len(self.tensors)} tensors that came with it")
            self.taken += 1
            return self.tensors[self.taken - 1]
        if kind == b"y":
            number = self._take(1)[0]
            if number >= len(DTYPES):
                raise BadMessage(f"dtype {number} is unknown")
            return DTYPES[number]
        if kind in (b"l", b"t", b"D"):
            if depth >= MAX_DEPTH:
                raise BadMessage(f"more than {MAX_DEPTH} containers lie within one another")
            count = self._count()
            if kind == b"D":
                return self._dict(count, depth + 1)
            elements = [self.value(depth + 1) for _ in range(count)]
            return elements if kind == b"l" else tuple(elements)
        raise BadMessage(f"a value of the unknown kind {kind!r}")

    def _dict(self, count: int, depth: int) -> dict[str | int, object]:
        out: dict[str | int, object] = {}
        for _ in range(count):
            key = self.value(depth)
            if (type(key) is not str and type(key) is not int) or key in out:
                raise BadMessage(f"a dict has a key of type {type(key).__name__} that is none or was there before")
            out[key] = self.value(depth)  # type: ignore[index]
        return out
