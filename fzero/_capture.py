"""What a unit closes over: a traced tensor among it would silently lose its gradient, so it is refused."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from fzero import _private, _tree
from fzero._node import closed_over

_strict: contextvars.ContextVar[bool] = contextvars.ContextVar("fzero_strict_capture", default=False)


def is_strict() -> bool:
    return _strict.get()


def guard() -> contextlib.AbstractContextManager[Any]:
    """Around a unit's body: the thorough check where it is on, otherwise nothing."""
    return _CaptureGuard() if _strict.get() else contextlib.nullcontext()


class _CaptureGuard(torch.overrides.TorchFunctionMode):
    """Looks at every operand inside a unit: none may come from an outer level. The thorough, slow check."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _private.level() == 0:
            for leaf in _tree.flatten((args, kwargs or {}))[0]:
                if isinstance(leaf, torch.Tensor) and _private.is_wrapped(leaf):
                    raise ValueError(closed_over(leaf))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def strict_capture(enabled: bool = True) -> Iterator[None]:
    """Checks every operand inside every unit for tensors that the unit closed over."""
    token = _strict.set(enabled)
    try:
        yield
    finally:
        _strict.reset(token)


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


def refuse_caches(arguments: Iterable[Any]) -> None:
    """A key-value cache, as Hugging Face's models pass to their layers, is written by the unit that it is given to."""
    for argument in arguments:
        if hasattr(type(argument), "get_seq_length") and hasattr(type(argument), "update"):
            raise TypeError(
                f"A unit that is differentiated got a {type(argument).__name__}, a cache that it would write to; a "
                "unit that is recomputed would write twice, and what is written carries no gradient. Call the model "
                "with use_cache=False; under step.forward a cache may be used."
            )


def is_kept(leaf: torch.Tensor, ours: set[int]) -> bool:
    """Whether a Python object refers to a leaf, beside tensors, the graph, and containers with ids among ours.

    Walks the heap: only for a leaf under suspicion.
    """
    passing = (torch.Tensor, torch.autograd.graph.Node, types.FrameType)
    return any(
        id(holder) not in ours and not isinstance(holder, passing) and type(holder).__module__ != "torch.autograd"
        for holder in gc.get_referrers(leaf)
    )


def containers(tree: Any) -> set[int]:
    """The ids of the dicts, lists and tuples that a tree of arguments consists of."""
    if not isinstance(tree, (dict, list, tuple)):
        return set()
    inner = tree.values() if isinstance(tree, dict) else tree
    return {id(tree)}.union(*map(containers, inner))


def captured(fn: Any) -> Iterator[Any]:
    """What a function holds on to: in its closure, its defaults, or bound by functools.partial."""
    fn = getattr(fn, "__func__", fn)
    for cell in getattr(fn, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty cell
            yield from _contents(cell.cell_contents)
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
