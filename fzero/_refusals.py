"""Refusals that code around must not swallow: whoever catches every error would go on with something else."""

from __future__ import annotations

import contextvars
import traceback
from pathlib import Path
from typing import TypeVar

import torch

Error = TypeVar("Error", bound=BaseException)
_said: contextvars.ContextVar[list[BaseException] | None] = contextvars.ContextVar("fzero_refusals", default=None)


def noted(error: Error) -> Error:
    """The error, of which `heard` will know even where a caller's `except` has taken it."""
    said = _said.get()
    if said is not None:
        said.append(error)
    return error


class heard:
    """Raises at its end what was noted inside, whatever became of it there."""

    __slots__ = ("said", "token")

    def __enter__(self) -> None:
        self.said: list[BaseException] = []
        self.token = _said.set(self.said)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        _said.reset(self.token)
        if self.said and error is not self.said[0]:
            raise self.said[0]


def is_ours(error: BaseException) -> bool:
    """Whether fzero itself raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("fzero.")


def place_of(error: BaseException) -> str:
    """Where an error was raised: the innermost function of the user's, or of all."""
    return _place(traceback.extract_tb(error.__traceback__))


def place_now() -> str:
    """The same of what is running."""
    return _place(traceback.extract_stack())


def _place(frames: traceback.StackSummary) -> str:
    libraries = [Path(file).parent for file in (torch.__file__, __file__)]
    users = [frame for frame in frames if not any(own in Path(frame.filename).parents for own in libraries)]
    frame = (users or frames)[-1]
    return f" (in {frame.name!r}, {Path(frame.filename).name}, line {frame.lineno})"


# ---- of what a unit does


def twice(unit: str, error: BaseException) -> str:
    return (
        f"Unit {unit!r} does what torch.func refuses ({first_words(error)}), and is differentiated more than once (by "
        "torch.func inside the step's function, fz.hvp, vmap), where torch.func runs it. Leave the operation out, or "
        "write one in its place that torch.func takes: of torch.utils.checkpoint fz.remat(step), which recomputes "
        "units under any derivative; of an autograd.Function one with setup_context; of tensors whose memory is read "
        "(indices, lengths) lists of numbers; of compressed sparse tensors COO or dense ones."
    )


def first_words(error: BaseException) -> str:
    return str(error).partition(". ")[0][:100]


def another_run(unit: str) -> str:
    return (
        f"Unit {unit!r} did something else when it ran again (fz.remat, a derivative of a derivative) than when it was "
        "called: it read or put out other tensors. What decides that must be the same then: no clock, no file, no "
        "counter in an object of another library, no id() of a tensor. Take what changes as an argument of the unit."
    )


def reshapes(unit: str) -> str:
    return (
        f"Unit {unit!r} gives one of its inputs another shape in place (unsqueeze_, squeeze_, resize_, transpose_), "
        "which its caller would not see. Take the form that is not in place: x = x.unsqueeze(0)."
    )


def writes_leaf(unit: str) -> str:
    return (
        f"Unit {unit!r} writes to one of its leaves in place. Params change in step.update only: compute with a copy "
        "(w = w.clone()), or use the operation that is not in place."
    )
