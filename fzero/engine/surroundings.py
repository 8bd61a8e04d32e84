"""What a second run of a unit finds as its call did: function modes, and what its function closes over."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Sequence

from fzero.base import private
from fzero.base.places import is_library


def own_modes() -> list[object]:
    """The user's torch function modes that are on."""
    return [mode for mode in private.function_modes() if not type(mode).__module__.startswith("fzero.")]


def under_modes(modes: Sequence[object]) -> contextlib.AbstractContextManager[None]:
    """Inside, the user's function modes are these."""
    if [*map(id, own_modes())] == [*map(id, modes)]:
        return contextlib.nullcontext()
    return private.under_function_modes(modes)


def closed(fn: Callable[..., object]) -> Callable[..., object]:
    """A function that closes over what `fn` closes over now, whatever those variables name when it is called."""
    if isinstance(fn, functools.partial):
        own = closed(fn.func)
        return fn if own is fn.func else functools.partial(own, *fn.args, **fn.keywords)
    if not isinstance(fn, types.FunctionType) or not fn.__closure__ or is_library(fn.__code__.co_filename):
        return fn
    cells = tuple([_filled(cell) for cell in fn.__closure__])
    new = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, cells)
    new.__kwdefaults__ = fn.__kwdefaults__
    return new


def _filled(cell: types.CellType) -> types.CellType:
    try:
        return types.CellType(cell.cell_contents)
    except ValueError:  # of a variable that has no value yet
        return cell
