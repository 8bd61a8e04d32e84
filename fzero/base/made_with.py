"""What functions of this library were made with, to compare it among ranks."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Iterator

import torch

from fzero.base import private
from fzero.base.rebound import is_others, parts_of


def made_with(value: object) -> str:
    """The numbers and words that this library's functions among a value hold, with their names; not others' functions'.

    Numbers as floats, of tensors a single one, whatever kind each is of. Each object is gone through once.
    """
    words = list[str]()
    _say("", value, words, {})
    return ", ".join(words)


def _say(name: str, value: object, words: list[str], seen: dict[int, object]) -> None:
    if isinstance(value, torch.Tensor):
        if value.ndim or private.is_wrapper(value) or private.is_fake(value) or value.is_meta:
            return
        value = value.item() if value.is_complex() else float(value)
    elif isinstance(value, numbers.Real):
        value = float(value)
    if isinstance(value, (float, complex, str)):
        words.append(f"{name}={value!r}")
    elif id(value) not in seen and not (callable(value) and is_others(value)):
        seen[id(value)] = value  # held, as another one might get its id
        for own, part in _parts(value):
            _say(own or name, part, words, seen)


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """What a value holds, in an order that is the same for equal ones."""
    if isinstance(value, dict):
        yield from sorted([(str(key), part) for key, part in value.items()], key=lambda pair: pair[0])
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from [(each.name, getattr(value, each.name, None)) for each in dataclasses.fields(value)]
    else:
        yield from [("", part) for part in parts_of(value)]
