"""What values consist of: tensors are exchanged in immutable ones, found in all, and names are read off code."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from fzero.capture.contents import exchanges, is_library, names_of, replaced, tensors_in

ONE, TWO = torch.ones(1), torch.ones(2)


class Pair(NamedTuple):
    first: Any
    second: Any


def test_exchanged_in_what_is_built_and_not_in_what_is_filled() -> None:
    inside = [ONE]
    value = (ONE, Pair(TWO, (ONE, frozenset({TWO}))), inside, "text")
    new: Any = replaced(value, {id(ONE): TWO})
    assert new[0] is TWO and isinstance(new[1], Pair) and new[1].first is TWO and new[1].second[0] is TWO
    assert new[2] is inside and inside[0] is ONE  # a list stays, and is filled elsewhere
    assert replaced(value, {}) is value
    assert exchanges(value) and not exchanges(("text", inside, 3))


def test_tensors_are_found_through_objects_once() -> None:
    held: Any = SimpleNamespace(pair=Pair(ONE, None), more={"x": [TWO, ONE]})
    held.itself = held
    assert [*map(id, tensors_in(held, lambda _: False))] == [id(ONE), id(TWO)]
    assert not [*tensors_in(held, lambda value: value is held)]


def test_names_in_code_and_in_code_inside_it() -> None:
    def outer(x: Any) -> Any:
        global written
        import math

        written = x

        def inner() -> Any:
            return ONE.shape, math.pi

        return inner

    names = names_of(outer.__code__)
    assert names.reads == {"ONE"} and names.assigns == {"written"} and names.imports == {"math"}
    assert {"shape", "pi"} <= names.attributes


def test_libraries_are_told_by_their_first_name() -> None:
    assert is_library("torch.nn.modules") and is_library("json") and not is_library("__main__")
