"""Messages as bytes: every value of the vocabulary comes back as it was, and nothing can be run by what comes."""

from __future__ import annotations

import collections
import functools
import os
import pickle

import numpy as np
import pytest
import torch
from channel_peers import messages, same
from hypothesis import given, settings

from fzero.base import pytree
from fzero.channels import BadMessage, vocabulary

Point = collections.namedtuple("Point", "x y")


@settings(max_examples=100)
@given(messages)
def test_messages_come_back(message: object) -> None:
    assert same(vocabulary.decode(*vocabulary.encode(message)), message)


class Runs:
    def __reduce__(self) -> object:
        return os.system, ("true",)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "Ran out of input"),
        (b"q", "no message"),
        (pickle.dumps(Runs()), "it names posix.system"),
        (pickle.dumps(Point(1, 2)), "it names .*Point"),
        (vocabulary.encode(Point(1, 2))[0].replace(b"Point", b"Other"), "not imported"),
        (vocabulary.encode(Point(1, 2))[0].replace(b"Point", b"TOKEN"), "not imported"),
        (pickle.dumps(torch.zeros), "it names"),
        (vocabulary.encode(torch.zeros(1))[0], "out of range"),
        (vocabulary.encode([1])[0][:-1], "no message"),
    ],
)
def test_what_is_no_message(data: bytes, words: str) -> None:
    with pytest.raises(BadMessage, match=words):
        vocabulary.decode(data, ())


def deep() -> list[object]:
    return functools.reduce(lambda inner, _: [inner], range(100_000), [])


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        (object(), TypeError, "builtins.object"),
        (collections.defaultdict(int), TypeError, "defaultdict"),
        *((kind(b"1"), TypeError, f"builtins.{kind.__name__}") for kind in (set, frozenset, bytearray)),
        (np.float64(1.0), TypeError, "numpy.float64"),
        (torch.quint8, TypeError, "quint8"),
        (torch.ones(2, requires_grad=True), TypeError, "requires a gradient.*detach"),
        (torch.nn.Parameter(torch.ones(2), requires_grad=False), TypeError, "a Parameter.*detach"),
        (torch.ones(2).to_sparse(), TypeError, "sparse"),
        (torch.ones(2, device="meta"), TypeError, "meta"),
        (deep(), ValueError, "too many containers"),
    ],
)
def test_what_cannot_be_sent(value: object, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=f"connection.send: .*{words}"):
        vocabulary.encode(["beside", value])


def test_a_tensor_inside_a_transform() -> None:
    with pytest.raises(TypeError, match="outside of that transform"):
        torch.func.grad(lambda x: vocabulary.encode(x) and x)(torch.ones(()))


def test_kinds_come_back() -> None:
    for message in (torch.Size((2, 3)), Point(1, [2.5]), collections.OrderedDict(a=torch.float16), pytree.Count(3)):
        got = vocabulary.decode(*vocabulary.encode(message))
        assert type(got) is type(message) and repr(got) == repr(message)


def test_what_holds_itself_arrives_so() -> None:
    message: list[object] = []
    message.append({"above": (message,)})
    got = vocabulary.decode(*vocabulary.encode(message))
    assert got[0]["above"][0] is got
