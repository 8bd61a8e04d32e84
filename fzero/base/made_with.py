"""What functions of this library were made with, to compare it among ranks."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Iterator

import torch

from fzero.base import private
from fzero.base.rebound import is_others, parts_of

Named = tuple[str, object]


def made_with(value: object) -> str:
    """The numbers and words that this library's functions among a value hold, with their names; not others' functions'.

    Numbers as floats, of tensors a single one, whatever kind each is of.
    """
    return ", ".join(_said("", value, {}, {})[1])


_Content = tuple[object, ...]


def _said(
    name: str, value: object, seen: dict[tuple[int, str], tuple[object, _Content]], numbers_of: dict[_Content, int]
) -> tuple[_Content, list[str]]:
    """What an object holds, and that in words; what was said before, by its number.

    Each object is gone through once: all functions of a chain lead to its members, at every level of nesting.
    """
    if isinstance(value, torch.Tensor):
        if value.ndim or private.is_wrapper(value) or private.is_fake(value) or value.is_meta:
            return (), []
        value = value.item() if value.is_complex() else float(value)
    elif isinstance(value, numbers.Real):
        value = float(value)
    if isinstance(value, (float, complex, str)):
        text = f"{name}={value!r}"
        return (text,), [text]
    if callable(value) and is_others(value):
        return (), []
    if (id(value), name) in seen:
        content, words = seen[id(value), name][1], list[str]()
    else:
        seen[id(value), name] = value, ()  # held, as another one might get its id; what leads to itself adds nothing
        found = [_said(own or name, part, seen, numbers_of) for own, part in _parts(value)]
        content = tuple([numbers_of.get(each, each) for each, _ in found if each])
        words = [text for _, texts in found for text in texts]
        seen[id(value), name] = value, content
    if content in numbers_of:
        return content, [f"as {numbers_of[content]}"]
    if content:
        numbers_of[content] = len(numbers_of)
    return content, words


def _parts(value: object) -> Iterator[Named]:
    """What a value holds, in an order that is the same for equal ones."""
    if isinstance(value, dict):
        yield from sorted([(str(key), part) for key, part in value.items()], key=lambda pair: pair[0])
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from [(each.name, getattr(value, each.name, None)) for each in dataclasses.fields(value)]
    else:
        yield from [("", part) for part in parts_of(value)]
