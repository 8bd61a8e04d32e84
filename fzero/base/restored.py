"""What functions come to, put back as it was: variables, items, attributes, tensors, generators of random numbers."""

from __future__ import annotations

import array
import collections
import contextlib
import functools
import io
import operator
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch

from fzero.base import private
from fzero.base.random import GENERATORS, NUMPY, PYTHON, Replayed
from fzero.base.rebound import is_of_library, names_of

_MOST = 1 << 22  # elements of a tensor that is put back
Undo = Callable[[], object]
K = TypeVar("K")


@contextlib.contextmanager
def as_it_was(found: Sequence[object]) -> Iterator[None]:
    """Puts back what calls of functions change inside: a trial of them leaves nothing behind.

    Args:
        found: all that they come to, as `reached` finds it.
    """
    names = {name for each in found if isinstance(each, types.FunctionType) for name in names_of(each)}
    undo = [once for each in found for once in _undo(each, names)]
    with Replayed((*[each for each in found if isinstance(each, GENERATORS)], PYTHON, NUMPY)):
        try:
            yield
        finally:
            for once in undo:
                with contextlib.suppress(Exception):  # of a class that takes nothing back
                    once()


def cannot_be_put_back(found: Sequence[object]) -> str:
    """What of it nothing can put back, in words."""
    taken = [x for x in found if isinstance(x, Iterator) and not isinstance(x, io.IOBase)]
    if taken:
        return f"it takes from an iterator ({type(taken[0]).__name__}), which a trial cannot give back to"
    large = [x for x in found if isinstance(x, np.ndarray) and _is_kept(x) and x.size > _MOST]
    return f"it comes to an array of shape {large[0].shape}, which a trial would have to copy" if large else ""


def _is_kept(x: np.ndarray) -> bool:
    """Tells whether an array is put back: one that may be written to, and is in no file."""
    base: object = x
    while isinstance(base, np.ndarray):
        if isinstance(base, np.memmap):
            return False
        base = base.base
    return x.flags.writeable


def _undo(x: object, names: set[str]) -> Iterator[Undo]:
    """What puts back each part of an object.

    Args:
        names: that functions take from elsewhere: of modules and classes, nothing else is theirs.
    """
    if isinstance(x, GENERATORS):
        return
    if isinstance(x, torch.Tensor):
        if x.numel() <= _MOST and not private.is_wrapper(x):
            yield _undo_tensor(x)
    elif isinstance(x, np.ndarray):
        if _is_kept(x):
            values = x.copy()
            yield lambda: np.copyto(x, values)
    elif isinstance(x, types.FunctionType):
        for cell in x.__closure__ or ():
            yield _undo_cell(cell)
        yield _undo_names(x.__globals__, x.__globals__.__setitem__, x.__globals__.__delitem__, names)
        yield _undo_dict(vars(x))
    elif isinstance(x, (type, types.ModuleType)):
        if not is_of_library(x.__module__ if isinstance(x, type) else x.__name__):
            setter, deleter = functools.partial(setattr, x), functools.partial(delattr, x)
            yield _undo_names(vars(x), setter, deleter, names)
    else:
        yield from _undo_object(x)


def _undo_cell(cell: types.CellType) -> Undo:
    try:
        content = cell.cell_contents
    except ValueError:  # an empty one
        return lambda: None
    return lambda: setattr(cell, "cell_contents", content)


def _undo_names(
    own: Mapping[str, object],
    setter: Callable[[str, object], object],
    deleter: Callable[[str], object],
    names: set[str],
) -> Undo:
    before = {name: own[name] for name in names if name in own}

    def undo() -> None:
        for name in names:
            if name in before and own.get(name, own) is not before[name]:
                setter(name, before[name])
            elif name in own and name not in before:
                deleter(name)

    return undo


def _undo_object(x: object) -> Iterator[Undo]:
    if isinstance(x, dict):
        yield _undo_dict(x)
    elif isinstance(x, (list, collections.deque)):
        items = list(x)
        yield lambda: (x.clear(), x.extend(items)) if not _are(x, items) else None
    elif isinstance(x, set):
        members = set(x)
        yield lambda: (x.clear(), x.update(members)) if x != members else None
    elif isinstance(x, (bytearray, array.array)):
        content = x[:]
        yield lambda: operator.setitem(x, slice(None), content)
    attributes = getattr(x, "__dict__", None)
    if isinstance(attributes, dict):
        yield _undo_dict(attributes)
    slots = [each for kind in type(x).__mro__ if not is_of_library(kind.__module__) for each in vars(kind).values()]
    for slot in [each for each in slots if isinstance(each, types.MemberDescriptorType)]:
        try:
            yield functools.partial(slot.__set__, x, slot.__get__(x))
        except AttributeError:  # an empty one
            yield functools.partial(slot.__delete__, x)


def _are(x: Collection[object], items: Sequence[object]) -> bool:
    return len(x) == len(items) and all(map(operator.is_, x, items))


def _undo_tensor(x: torch.Tensor) -> Undo:
    values = x.detach().clone()

    def undo() -> None:
        if not torch.equal(x.detach(), values):
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
