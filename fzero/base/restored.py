"""What functions come to, put back as it was: variables, items, attributes, tensors, generators of random numbers."""

from __future__ import annotations

import collections
import contextlib
import types
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import torch

from fzero.base import private
from fzero.base.random import GENERATORS, NUMPY, PYTHON, Replayed
from fzero.base.rebound import names_of, reached

_MOST = 1 << 22  # elements of a tensor that is put back
Undo = Callable[[], object]
K = TypeVar("K")


@contextlib.contextmanager
def as_it_was(value: object) -> Iterator[None]:
    """Puts back what calls of functions among a value change inside: a trial of them leaves nothing behind.

    Raises:
        TypeError: they come to an iterator, which nothing can put back.
    """
    found = reached(value)
    for each in found:
        if isinstance(each, Iterator):
            raise TypeError(f"it takes from an iterator ({type(each).__name__}), which a trial cannot give back to")
    undo = [once for each in found for once in _undo(each)]
    with Replayed((*[each for each in found if isinstance(each, GENERATORS)], PYTHON, NUMPY)):
        try:
            yield
        finally:
            for once in undo:
                once()


def _undo(x: object) -> Iterator[Undo]:
    """What puts back each part of an object."""
    if isinstance(x, GENERATORS):
        return
    if isinstance(x, torch.Tensor):
        if x.numel() <= _MOST and not private.is_wrapper(x):
            yield _undo_tensor(x)
    elif isinstance(x, np.ndarray):
        values = x.copy()
        yield lambda: np.copyto(x, values) if x.flags.writeable else None
    elif isinstance(x, types.FunctionType):
        yield from _undo_function(x)
    elif isinstance(x, type):
        own = {name: each for name, each in vars(x).items() if not name.startswith("__")}
        yield lambda: [setattr(x, name, each) for name, each in own.items() if vars(x).get(name) is not each]
    elif not isinstance(x, types.ModuleType):
        yield from _undo_object(x)


def _undo_function(x: types.FunctionType) -> Iterator[Undo]:
    for cell in x.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty one
            yield _undo_attribute(cell, "cell_contents", cell.cell_contents)
    named = {name: x.__globals__[name] for name in names_of(x) if name in x.__globals__}
    yield lambda: x.__globals__.update(named)
    yield _undo_dict(vars(x))


def _undo_object(x: object) -> Iterator[Undo]:
    if isinstance(x, dict):
        yield _undo_dict(x)
    elif isinstance(x, (list, collections.deque)):
        items = list(x)
        yield lambda: (x.clear(), x.extend(items))
    elif isinstance(x, set):
        members = set(x)
        yield lambda: (x.clear(), x.update(members))
    attributes = getattr(x, "__dict__", None)
    if isinstance(attributes, dict):
        yield _undo_dict(attributes)
    for name in [name for kind in type(x).__mro__ for name in _slots(kind) if hasattr(x, name)]:
        yield _undo_attribute(x, name, getattr(x, name))


def _undo_attribute(x: object, name: str, value: object) -> Undo:
    return lambda: None if getattr(x, name) is value else object.__setattr__(x, name, value)


def _undo_tensor(x: torch.Tensor) -> Undo:
    values, version = x.detach().clone(), private.version(x)

    def undo() -> None:
        if private.version(x) != version:
            with torch.no_grad():
                x.copy_(values)

    return undo


def _undo_dict(own: dict[K, object]) -> Undo:
    items = dict(own)

    def undo() -> None:
        if own.keys() != items.keys() or any(own[key] is not x for key, x in items.items()):
            own.clear()
            own.update(items)

    return undo


def _slots(kind: type) -> tuple[str, ...]:
    own = vars(kind).get("__slots__", ())
    return tuple(name for name in ((own,) if isinstance(own, str) else own) if not name.startswith("__"))
