"""A search finds what a function reaches, keeps it while it is as it was, and refuses what could be read once only."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from fzero.capture.contents import MANY
from fzero.capture.found import Found

GLOBAL = torch.ones(3)


def found_by(fn: Any) -> Found:
    found = Found()
    found.function(fn, True)
    return found


def test_closures_defaults_globals_and_objects() -> None:
    closed, default, held = torch.ones(1), torch.ones(2), {"x": [torch.ones(4)]}

    def helper() -> Any:
        return held

    def fn(x: Any = default) -> Any:
        return closed, GLOBAL, helper

    shapes = sorted(tuple(x.shape) for x, _ in found_by(fn).tensors)
    assert shapes == [(1,), (2,), (3,), (4,)]


def test_a_module_with_its_hooks() -> None:
    module, seen = nn.Linear(1, 1), torch.ones(5)
    module.register_forward_hook(lambda *_: seen.sum())
    found = found_by(module)
    assert found.modules == [module] and any(x is seen for x, _ in found.tensors)


def test_what_was_found_holds_until_something_is_put_there() -> None:
    box: dict[str, Any] = {"x": 1}
    found = found_by(lambda: box)
    found.keep()
    assert found.holds()
    box["y"] = 2
    assert not found.holds()


class Named(tuple[Any, ...]):
    pass


def test_an_attribute_that_a_tuple_is_given_later_is_seen() -> None:
    pair = Named((1, 2))
    found = found_by(lambda: pair)
    found.keep()
    assert found.holds()
    pair.note = torch.ones(1)  # type: ignore[attr-defined]
    assert not found.holds()


def test_generators_long_lists_and_iterators() -> None:
    generator, long = random.Random(0), [0] * (MANY + 1)
    found = Found()
    for value in (generator, long, iter([1])):
        found.search(value, False)
    assert found.generators == [generator] and found.long == [long] and len(found.iterators) == 1
    with pytest.raises(TypeError, match=r"got a list_iterator as an argument, expected .*a list or a tuple"):
        found.search(iter([2]), True)
