"""Whose line calls an operation that a mode looks at."""

from __future__ import annotations

from types import FrameType

from fzero.base.places import Place, frames, place_in
from fzero.base.refusals import is_library

NOWHERE = Place("", 0, "a module of torch's")
_OWN = "fzero.", "torch.testing._internal.distributed."  # the second are collectives of ranks that are threads
_PASS_ON = ("fzero.purity", "fzero.base.intercept")  # which call an operator for somebody else


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


def frames_here() -> list[FrameType]:
    """The frames that run, the innermost first, up to this library's, which has called the user's function."""
    found = []
    for frame in frames(()):
        module = str(frame.f_globals.get("__name__"))
        if module.startswith("fzero.") and not module.startswith(("fzero.purity", "fzero.base.")):
            break
        found.append(frame)
    return found
