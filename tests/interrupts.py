"""An interrupt at a chosen one of the points of a call where Python looks for signals; what a thread then has."""

from __future__ import annotations

import contextvars
import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

_C: Any = torch._C


class Points:
    """A profile function that counts the points: functions that begin, and calls of C's that end.

    It raises at one of them or after it: not in finalizers, whose errors Python drops, nor in generators, which may be
    ended in one.

    Args:
        at: the number of the point; 0 for none.
        error: what it raises.
        within: the file whose functions' points count; "" for all.

    Attributes:
        count: of the points so far.
        place: of the one where it was raised; "" before.
        dropped: whether Python has dropped it, as it does where an object ends.
    """

    def __init__(self, at: int = 0, error: type[BaseException] = KeyboardInterrupt, within: str = "") -> None:
        self.at, self.error, self.within, self.count, self.place = at, error, within, 0, ""
        self.dropped = False

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if event not in ("call", "c_return") or arg is sys.setprofile:
            return
        if self.within and frame.f_code.co_filename != self.within:
            return
        self.count += 1
        if 0 < self.at <= self.count and not _finalizes(frame):
            sys.setprofile(None)
            self.place = f"{event} in {frame.f_code.co_qualname}, {frame.f_code.co_filename}:{frame.f_lineno}"
            raise self.error

    def during(self, call: Callable[[], object]) -> object:
        hook = sys.unraisablehook
        sys.unraisablehook = self._note_dropped
        sys.setprofile(self)
        try:
            return call()
        finally:
            sys.setprofile(None)
            sys.unraisablehook = hook

    def _note_dropped(self, about: Any) -> None:
        self.dropped = self.dropped or isinstance(about.exc_value, self.error)


def _finalizes(frame: FrameType | None) -> bool:
    collecting = [getattr(callback, "__code__", None) for callback in gc.callbacks]
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("__del__", "<genexpr>") or "weakref" in code.co_filename or code in collecting:
            return True
        frame = frame.f_back
    return False


def thread_state() -> dict[str, object]:
    """What a call must leave as it was, by name."""
    values = contextvars.copy_context().items()
    found: dict[str, object] = {x.name: value for x, value in values if x.name.startswith("fzero_")}
    found["grad mode"] = torch.is_grad_enabled()
    found["inference mode"] = torch.is_inference_mode_enabled()
    found["autocast"] = torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()
    found["function modes"] = _C._len_torch_function_stack()
    found["dispatch modes"] = _C._len_torch_dispatch_stack()
    found["levels"] = _C._functorch.get_dynamic_layer_stack_depth()
    found["hooks"] = _C._autograd._saved_tensors_hooks_is_enabled()
    found["forward mode"] = torch.autograd.forward_ad._current_level
    found["generator"] = torch.get_rng_state().sum().item() if not found["levels"] else None
    return found
