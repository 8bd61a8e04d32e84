"""What a unit closes over: a traced tensor among it would silently lose its gradient, so it is refused."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fzero import _private
from fzero._node import closed_over


def refuse_captures(fn: Callable[..., Any], depth: int = 3) -> None:
    """A unit runs below every functorch level, where a captured traced tensor would silently lose its gradient."""
    if _private.level() == 0:
        return  # plain autograd: the walk over the unit's own graph finds it
    for value in captured(fn):
        if isinstance(value, torch.Tensor):
            if _private.is_wrapped(value) and _private.is_differentiated(value):
                raise ValueError(closed_over(value))
        elif depth and callable(value):
            refuse_captures(value, depth - 1)


def captured(fn: Any) -> Iterator[Any]:
    """What a function holds on to: in its closure, its defaults, or bound by functools.partial."""
    fn = getattr(fn, "__func__", fn)
    for cell in getattr(fn, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty cell
            yield cell.cell_contents
    if isinstance(fn, functools.partial):
        yield fn.func
        yield from _contents((fn.args, fn.keywords))
    yield from _contents((getattr(fn, "__defaults__", None), getattr(fn, "__kwdefaults__", None)))


def _contents(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _contents(item)
    else:
        yield value
