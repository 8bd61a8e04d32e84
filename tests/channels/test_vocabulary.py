"""Messages as bytes: every value of the vocabulary comes back as it was, and nothing else comes out of any bytes."""

from __future__ import annotations

import collections
import struct
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from channel_peers import messages, same
from hypothesis import given, settings
from hypothesis import strategies as st

from fzero.channels import BadMessage, frames, tensors, vocabulary

Point = collections.namedtuple("Point", "x y")


def decoded(data: bytes, values: list[torch.Tensor] | None = None) -> object:
    return vocabulary.decode(memoryview(data), values or [])


@settings(max_examples=100)
@given(messages)
def test_messages_come_back(message: object) -> None:
    data, values = vocabulary.encode(message)
    assert same(decoded(data, values), message)
    rows = [tensors.Row(value.dtype, tuple(value.shape)) for value in values]
    assert tensors.unpack(memoryview(tensors.pack(rows)), sum(row.nbytes for row in rows)) == rows


@settings(max_examples=300)
@given(st.binary(max_size=60), st.integers(0, 3))
def test_any_bytes(data: bytes, count: int) -> None:
    """Also those that begin well."""
    for begin in (b"", b"l\x02\0\0\0", b"D\x01\0\0\0s\x01\0\0\0a", b"I\x04\0\0\0", b"t\xff\xff\xff\xff"):
        try:
            decoded(begin + data, [torch.zeros(1)] * count)
        except BadMessage:
            pass
        try:
            tensors.unpack(memoryview(data), 0)
        except BadMessage:
            pass
        try:
            frames.parse(data.ljust(frames.SIZE, b"\0"))
        except BadMessage:
            pass


@st.composite
def mutations(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """Bytes cut off, put in, left out or changed, several times."""
    steps = draw(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1), st.binary(min_size=1, max_size=9)), min_size=1))

    def mutated(data: bytes) -> bytes:
        for kind, place, piece in steps:
            at = int(place * len(data))
            behind = {0: at + len(piece), 1: at, 2: at + len(piece), 3: len(data)}[kind]
            data = data[:at] + (piece if kind < 2 else b"") + data[behind:]
        return data

    return mutated


@settings(max_examples=300)
@given(messages, mutations())
def test_changed_bytes(message: object, mutated: Callable[[bytes], bytes]) -> None:
    data, values = vocabulary.encode(message)
    try:
        decoded(mutated(data), values)
    except BadMessage:
        pass
    table = tensors.pack([tensors.Row(value.dtype, tuple(value.shape)) for value in values])
    try:
        rows = tensors.unpack(memoryview(mutated(table)), sum(value.nbytes for value in values))
    except BadMessage:
        return
    assert sum(row.nbytes for row in rows if row.place == tensors.INLINE) == sum(value.nbytes for value in values)


def test_lengths_that_are_not_there_take_no_memory() -> None:
    tracemalloc.start()
    try:
        for kind in b"lDtsbI":
            with pytest.raises(BadMessage):
                decoded(bytes((kind,)) + struct.pack("<I", 0xFFFFFFFF))
            with pytest.raises(BadMessage):
                decoded(bytes((kind,)) + struct.pack("<I", 1 << 20) + b"N" * 9)
        row = struct.pack("<BBBxI3Q", 0, 0, 3, 0, 1 << 60, 1 << 60, 1 << 60)
        with pytest.raises(BadMessage):
            tensors.unpack(memoryview(row), 100)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "ends at byte 0"),
        (b"q", "unknown kind"),
        (b"NN", "1 bytes and 0 tensors are left"),
        (b"x", "more than the 0 tensors"),
        (b"y\xff", "dtype 255"),
        (b"s\x01\0\0\0\xff", "UTF-8"),
        (b"D\x01\0\0\0NN", "key of type NoneType"),
        (b"D\x01\0\0\0l\0\0\0\0N", "key of type list"),
        (b"D\x02\0\0\0" + 2 * (b"i" + bytes(8) + b"N"), "there before"),
        (b"l\x01\0\0\0" * 65 + b"N", "more than 64 containers"),
    ],
)
def test_what_is_no_message(data: bytes, words: str) -> None:
    with pytest.raises(BadMessage, match=words):
        decoded(data)


def test_a_tensor_that_is_left_over() -> None:
    with pytest.raises(BadMessage, match="0 bytes and 1 tensors are left"):
        decoded(b"N", [torch.zeros(1)])


def circle() -> list[object]:
    out: list[object] = []
    out.append(out)
    return out


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        (object(), TypeError, "builtins.object"),
        ({1, 2}, TypeError, "builtins.set"),
        (Point(1, 2), TypeError, "Point"),
        (collections.OrderedDict(a=1), TypeError, "OrderedDict"),
        (np.float64(1.0), TypeError, "numpy.float64"),
        ({True: 1}, TypeError, "the key True"),
        ({(1, 2): 1}, TypeError, r"the key \(1, 2\)"),
        (torch.quint8, TypeError, "quint8"),
        (torch.ones(2, requires_grad=True), TypeError, "requires a gradient.*detach"),
        (torch.nn.Parameter(torch.ones(2), requires_grad=False), TypeError, "a Parameter.*detach"),
        (torch.ones(2).to_sparse(), TypeError, "sparse"),
        (torch.ones(2, device="meta"), TypeError, "meta"),
        (circle(), ValueError, "more than 64 containers"),
    ],
)
def test_what_cannot_be_sent(value: object, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=f"connection.send: .*{words}"):
        vocabulary.encode(["beside", value])


def test_a_tensor_inside_a_transform() -> None:
    with pytest.raises(TypeError, match="outside of that transform"):
        torch.func.grad(lambda x: vocabulary.encode(x) and x)(torch.ones(()))


def test_sizes_arrive_as_tuples() -> None:
    assert same(decoded(vocabulary.encode(torch.Size((2, 3)))[0]), (2, 3))
