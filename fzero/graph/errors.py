"""What cannot be traced, as an error that names the line."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from fzero.base.refusals import is_ours, place_of

one_at_a_time = threading.RLock()  # torch's tracer is one for all threads; no rank waits for another in a trace
_VALUES = ("DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode")


@contextlib.contextmanager
def naming() -> Iterator[None]:
    """Around a trace."""
    try:
        yield
    except Exception as error:
        name = type(error).__name__
        if name in _VALUES:
            operator = getattr(error, "func", "an operator")
            what = (
                "makes a tensor whose shape depends on values"
                if name == "DynamicOutputShapeException"
                else "asks for the value of a tensor"
            )
            raise ValueError(
                f"jit: the function{place_of(error)} {what} ({operator}), and a graph has none. Write torch.where(...) "
                "in the place of a branch or a mask, torch.cond for two functions, and leave .item() and float(...) "
                "out; a number that shapes depend on is a static argument (static_argnums=)."
            ) from error
        if is_ours(error):
            raise
        raise ValueError(
            f"jit: the function{place_of(error)} cannot be traced: {type(error).__name__}: {error} In a trace tensors "
            "have no values and no memory. Leave that line to torch's operators, or out of the function."
        ) from error
