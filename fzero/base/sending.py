"""Whether functions may send something to other ranks by torch.distributed, by what they name and hold."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Sequence

import torch

from fzero.base.rebound import is_of_library, names_of

_PLACE = "torch.distributed"
_TELL = {"get_rank", "get_world_size", "is_initialized", "is_available", "get_backend"}  # and send nothing


def sends(found: Sequence[object]) -> bool:
    """Tells whether functions, of which this was `reached`, may send something by torch.distributed.

    They name a function of it that does not only tell of ranks, or hold one, or a group.
    """
    own = [x for x in found if isinstance(x, types.FunctionType) and not is_of_library(x.__module__)]
    names = {name for fn in own for name in names_of(fn)}
    called = [x for x in found if isinstance(x, (types.FunctionType, types.BuiltinFunctionType, type))]
    others = [type(x).__module__ for x in found if not isinstance(x, (torch.Tensor, types.ModuleType))]
    modules = [x.__name__ for x in found if isinstance(x, types.ModuleType)]
    held = [getattr(x, "__module__", "") for x in called if getattr(x, "__name__", "") not in _TELL]
    if any(str(name).startswith(_PLACE) for name in (*others, *held)):
        return True
    there = [name for name in (*modules, *names) if name == "distributed" or name.startswith(_PLACE)]
    return any(name not in ("distributed", _PLACE) for name in there) or bool(there and names & _functions())


@functools.cache
def _functions() -> frozenset[str]:
    """The names of those that may send something."""
    own = vars(sys.modules[_PLACE]).items()
    named = [name for name, x in own if callable(x) and str(getattr(x, "__module__", "")).startswith(_PLACE)]
    return frozenset(named) - _TELL
