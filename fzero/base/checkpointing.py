"""torch.utils.checkpoint over what draws from a thread's own stream: the private parts of torch for that, in one place.

Checkpoint notes the state of torch's default generator, and sets it for the recomputation. Where a region draws from a
stream of its own, that is the wrong one, and setting it would disturb other threads: the region takes this over.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import CodeType, FrameType
from typing import Any

Region = Callable[[], AbstractContextManager[Any]]


def take_over(here: Callable[[], Region]) -> None:
    """Called before a draw: each checkpoint around it that would replay the default generator replays `here()` instead.

    Args:
        here: makes a region that starts where the stream is now, and may be entered by any thread, any number of times.
    """
    module = sys.modules.get("torch.utils.checkpoint")
    if module is None:
        return
    takers = _takers(module)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in takers:
            takers[frame.f_code](frame.f_locals, here)
        frame = frame.f_back


@functools.cache
def _takers(module: Any) -> dict[CodeType, Callable[[dict[str, object], Callable[[], Region]], None]]:
    """By the function of torch's that calls what will run again."""
    return {
        inspect.unwrap(module.checkpoint).__code__: _take_generator,
        module.CheckpointFunction.forward.__code__: _take_function,
    }


def _take_function(variables: dict[str, Any], here: Callable[[], Region]) -> None:
    """With `use_reentrant=True`: the context of an autograd Function keeps what runs again."""
    context = variables["ctx"]
    if context.preserve_rng_state:
        context.preserve_rng_state = False
        context.run_function = _within(here(), context.run_function)


def _take_generator(variables: dict[str, Any], here: Callable[[], Region]) -> None:
    """With `use_reentrant=False`: a closure keeps it, made by a Python generator that waits for the forward's end."""
    if "gen" not in variables:
        return
    again = variables["gen"].gi_frame.f_locals["recompute_fn"]
    cells = dict(zip(again.__code__.co_freevars, again.__closure__, strict=True))
    if cells["preserve_rng_state"].cell_contents:
        cells["preserve_rng_state"].cell_contents = False
        cells["fn"].cell_contents = _within(here(), cells["fn"].cell_contents)


def _within(region: Region, fn: Callable[..., Any]) -> Callable[..., object]:
    @functools.wraps(fn, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        with region():
            return fn(*args, **kwargs)

    return run
