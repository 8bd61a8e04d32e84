"""Lines of the caller's code: where something runs, and which of the frames that run are his."""

from __future__ import annotations

import functools
import linecache
import sys
import types
from collections.abc import Collection, Iterator
from types import CodeType, FrameType
from typing import NamedTuple

from fzero.base.refusals import is_library


class Place(NamedTuple):
    """A line of the caller's code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        if not self.line:
            return self.function
        text = linecache.getline(self.file, self.line).strip()
        return f"{self.file}:{self.line}, in {self.function}" + (f": `{text}`" if text else "")


def frames(until: Collection[CodeType], looking: Collection[str] = ()) -> Iterator[FrameType]:
    """The frames that run, the innermost first, up to one of `until`, but for those of the modules `looking`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in until:
        if frame.f_globals.get("__name__") not in looking:
            yield frame
        frame = frame.f_back


def definition_of(fn: object) -> Place | None:
    """The line that a function, or the forward of a module, begins with; None of one that is not the caller's."""
    own = function_of(fn)
    return None if own is None else Place(own.__code__.co_filename, own.__code__.co_firstlineno, own.__code__.co_name)


def function_of(fn: object) -> types.FunctionType | None:
    """The caller's function: what this library makes of a function holds it in a closure or as an argument."""
    todo, seen = [fn], 0
    while todo and (seen := seen + 1) < 50:
        fn = todo.pop(0)
        if isinstance(fn, functools.partial):
            todo += [fn.func, *filter(callable, fn.args)]
            continue
        own = getattr(fn, "__func__", getattr(fn, "forward", fn))
        own = getattr(own, "__func__", own)
        code = getattr(own, "__code__", None)
        if code is not None and not is_library(code.co_filename):
            return own  # type: ignore[return-value]
        if code is not None:
            filled = [cell for cell in getattr(own, "__closure__", None) or () if cell != types.CellType()]
            todo += [cell.cell_contents for cell in filled if callable(cell.cell_contents)]
    return None


def place_in(frame: FrameType) -> Place:
    return Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


# ---- of an operation that a mode looks at

NOWHERE = Place("", 0, "a module of torch's")
_THREADS = "torch.testing._internal.distributed."  # collectives of ranks that are threads
_OWN = "fzero.", _THREADS
_PASS_ON = "fzero.purity", "fzero.base.random", "fzero.base.places"  # which call an operator for somebody else


def place_here() -> Place | None:
    """The innermost line of the user's that runs; None if this library calls an operation itself."""
    direct = True
    for frame in frames(()):
        module = str(frame.f_globals.get("__name__"))
        passes = module.startswith(_PASS_ON) or frame.f_code.co_name == "__torch_function__"
        if direct and module.startswith(_OWN) and not passes:
            return None
        if not is_library(frame.f_code.co_filename):
            return place_in(frame)
        torchs = module.startswith(("torch.", "contextlib")) and not module.startswith("torch.nn")
        direct = direct and (passes or torchs)
    return NOWHERE


def is_a_threads() -> bool:
    """Tells whether the operation that is looked at is one of a collective of ranks that are threads.

    torch 2.11 shows these to whoever looks, and not the functions that a user calls for them.
    """
    modules = (str(frame.f_globals.get("__name__")) for frame in frames(()))
    return next((own for own in modules if not own.startswith("fzero.")), "").startswith(_THREADS)


def frames_here() -> list[FrameType]:
    """The frames that run, the innermost first, up to this library's, which has called the user's function."""
    found = []
    for frame in frames(()):
        module = str(frame.f_globals.get("__name__"))
        if module.startswith("fzero.") and not module.startswith(("fzero.purity", "fzero.base.")):
            break
        found.append(frame)
    return found
