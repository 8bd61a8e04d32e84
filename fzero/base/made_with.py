"""What functions of this library were made with, to compare it among ranks."""

from __future__ import annotations

import dataclasses
import hashlib
import numbers
from collections.abc import Iterator

import torch

from fzero.base import private
from fzero.base.rebound import is_others, parts_of


def made_with(value: object) -> str:
    """The numbers and words that this library's functions among a value hold, with their names; not others' functions'.

    Numbers as floats, of tensors a single one, whatever kind each is of. Each is said once, and a digest tells of where
    they are: all functions of a chain lead to its members, at every level of nesting.
    """
    words: dict[str, None] = {}
    whole = _content("", value, words, {})
    return f"{', '.join(words)} ({whole[:8]})"


def _content(name: str, value: object, words: dict[str, None], seen: dict[tuple[int, str], tuple[object, str]]) -> str:
    """A digest of what an object holds, also where equal ones are not the same; "" of nothing."""
    if isinstance(value, torch.Tensor):
        if value.ndim or private.is_wrapper(value) or private.is_fake(value) or value.is_meta:
            return ""
        value = value.item() if value.is_complex() else float(value)
    elif isinstance(value, numbers.Real):
        value = float(value)
    if isinstance(value, (float, complex, str)):
        words[own := f"{name}={value!r}"] = None
        return own
    if callable(value) and is_others(value):
        return ""
    if (id(value), name) not in seen:
        seen[id(value), name] = value, ""  # held, as another one might get its id; what leads to itself adds nothing
        parts = [_content(own or name, part, words, seen) for own, part in _parts(value)]
        parts = [part for part in parts if part]
        seen[id(value), name] = value, hashlib.sha256(repr(parts).encode()).hexdigest() if parts else ""
    return seen[id(value), name][1]


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """What a value holds, in an order that is the same for equal ones."""
    if isinstance(value, dict):
        yield from sorted([(str(key), part) for key, part in value.items()], key=lambda pair: pair[0])
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from [(each.name, getattr(value, each.name, None)) for each in dataclasses.fields(value)]
    else:
        yield from [("", part) for part in parts_of(value)]
