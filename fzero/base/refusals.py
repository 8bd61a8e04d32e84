"""Refusals: noted ones survive a caller's `except`, and those of torch's own are said in the words of this library."""

from __future__ import annotations

import contextlib
import contextvars
import dis
import functools
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
import typing_extensions

from fzero.base import private, texts
from fzero.base.context import variable

Error = TypeVar("Error", bound=BaseException)
_LIBRARIES = [Path(torch.__file__).parent, Path(__file__).parent.parent, Path(contextlib.__file__).parent]
_LIBRARIES += [Path(typing_extensions.__file__)]  # torch's deprecated functions are called by it
_RAISE = dis.opmap["RAISE_VARARGS"]
_said: contextvars.ContextVar[list[BaseException] | None] = variable("refusals", None)


def noted(error: Error) -> Error:
    """The error itself, which `heard` will know of even where a caller's `except` has taken it."""
    said = _said.get()
    if said is not None:
        said.append(error)
    return error


@contextlib.contextmanager
def noting() -> Iterator[None]:
    """Notes an error that is raised inside."""
    try:
        yield
    except Exception as error:
        noted(error)
        raise


class heard:
    """Raises at its end what was noted inside, whatever became of it there."""

    def __enter__(self) -> None:
        self.said: list[BaseException] = []
        self.token = _said.set(self.said)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        _said.reset(self.token)
        if self.said and error is not self.said[0]:
            raise self.said[0]


@contextlib.contextmanager
def of_hooks_around() -> Iterator[None]:
    """Names saved-tensor hooks around the call of a step, where torch.func begins."""
    try:
        yield
    except RuntimeError as error:
        if not texts.says(error, texts.UNDER_HOOKS):
            raise
        raise TypeError(
            "step: called within saved-tensor hooks (torch.autograd.graph.save_on_cpu, or a unit under "
            "fz.offload(activations=...) or names of fz.remat), which torch.func does not support. Call it outside; "
            "fz.remat(step, offload=...) keeps what units name in the host's memory."
        ) from error


def need_no_strays(what: str, leaves: Iterable[torch.Tensor]) -> None:
    """Refuses gradients that a backward within a pullback has found by itself: they belong to nobody."""
    stray = next((x for x in leaves if x.grad is not None), None)
    if stray is not None:
        raise ValueError(
            f"{what} calls torch.autograd.backward within itself or its pullback, which adds to the gradient of a leaf "
            f"of shape {tuple(stray.shape)} that nobody sees. Write torch.autograd.grad, or checkpoint(..., "
            "use_reentrant=False)."
        )


def of_derivatives() -> tuple[str, ...]:
    """The words of torch's refusals of what a derivative, or a derivative's derivative, cannot do."""
    return texts.REFUSED if private.level() else (texts.SAVED_HOOKS,)


def refuse_writes(version: int, expected: int, shape: torch.Size) -> None:
    """Refuses to pull back through a tensor that was written to since, in torch's words."""
    if version != expected:
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been {texts.WRITES_SAVED}: of shape "
            f"{tuple(shape)}, it is at version {version}; expected version {expected} instead. Change a copy: "
            "x = x.clone(), or use the operation that is not in place."
        )


def is_ours(error: BaseException) -> bool:
    """True if fzero itself raised it: not what a function of torch raises that its code calls."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or not last.tb_frame.f_globals.get("__name__", "").startswith("fzero."):
        return False
    return last.tb_frame.f_code.co_code[last.tb_lasti] == _RAISE


@functools.lru_cache(4096)
def is_library(path: str) -> bool:
    """Tells whether a file is this library's, torch's or Python's, and so no code of the caller's."""
    return any(own in (Path(path), *Path(path).parents) for own in _LIBRARIES)


def place_of(error: BaseException | None = None) -> str:
    """The innermost function of the user's, or of all, that raised an error, or that runs where there is none."""
    frames = traceback.extract_tb(error.__traceback__) if error is not None else traceback.extract_stack()
    users = [frame for frame in frames if not is_library(frame.filename)]
    frame = (users or frames)[-1]
    return f" (in {frame.name!r}, {Path(frame.filename).name}, line {frame.lineno})"


@contextlib.contextmanager
def of_higher_order(what: str) -> Iterator[None]:
    """Says of an error that a higher-order operator of torch's raises, and no function that it runs, what it is.

    Args:
        what: calls it.
    """
    try:
        yield
    except Exception as error:
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        files = [file for file in files if file != "<string>"]  # which torch writes
        inside = [i for i, file in enumerate(files) if "_higher_order_ops" in Path(file).parts]
        if isinstance(error, KeyError) or not inside:  # a KeyError is functorch's, and dealt with elsewhere
            raise
        # torch fails to trace an operator's function, as where that closes over a tensor
        traces = isinstance(error, (RuntimeError, AssertionError)) and any(
            text in str(error) for text in ("INTERNAL ASSERT", "TensorWrapper", "FakeTensor")
        )
        if not (traces or all(map(is_library, files[inside[0] :]))):
            raise
        raise TypeError(higher_order(what, type(error).__name__, first_words(error))) from error


# ---- of what a unit does


def first_words(error: BaseException) -> str:
    return str(error).partition(". ")[0][:100]


def sparse(unit: str) -> str:
    return (
        f"The derivative of {unit} has a sparse tensor in it, and is differentiated itself (fz.hvp, torch.func inside "
        "the step's function), for which torch has no way here. Say sparse=False to torch.nn.Embedding, EmbeddingBag "
        "and the functions of these names."
    )


_INSTEAD = (
    "Take fz.remat(step) for torch.utils.checkpoint; an autograd.Function that has setup_context; torch.func.grad for "
    "backward(), requires_grad_() and retain_grad(); x.detach() where no gradient is wanted; torch.no_grad() for "
    "torch.inference_mode(); a copy (x.clone()) for a write in place, x.data = y or copy.deepcopy(x); lists of numbers "
    "for tensors whose memory is read (indices, lengths); COO or dense tensors for compressed sparse ones; Python's "
    "own `if` and `while` for torch.cond and while_loop"
)


def twice(unit: str, error: BaseException) -> str:
    return (
        f"Unit {unit!r} does what torch.func refuses ({first_words(error)}), and is differentiated more than once (by "
        f"torch.func inside the step's function, fz.hvp, vmap), where torch.func runs it. {_INSTEAD}."
    )


higher_order = (  # called with what calls it, and the error
    "{} calls a higher-order operator (torch.cond, while_loop, flex_attention, ...) that torch does not run here "
    "({}: {}). Where a function is looked at, as in its first run, it runs as it is written, and not compiled. Let the "
    "operator's functions return tuples, and give them as operands what they close over, params too; or take Python's "
    "own `if` and `while`, or torch.where."
).format
# each is called with the unit's name
under_hooks = (
    "Unit {!r} calls a derivative of torch.func within saved-tensor hooks, which are at work where fz.remat keeps "
    "values by names or fz.offload puts activations away. Differentiate by torch.autograd.grad in the unit, or leave "
    "that out for it."
).format
writes_leaf = (
    "Unit {!r} writes to one of its leaves in place. Params change in step.update only: compute with a copy "
    "(w = w.clone()), or use the operation that is not in place."
).format
writes_param = (  # called with the leaf, the operator and its place
    "{} is written to in place, by {}{}. Params change in step.update only: compute with a copy (w = w.clone()), or "
    "use the operation that is not in place; cast a module (module.to(dtype)) before fz.functional. What follows "
    "another param slowly (a momentum encoder) is computed from a state's params between steps."
).format
freed = (  # called with what reads
    "{} reads a leaf of a unit whose memory was given back when that unit ended: it was kept in a way that cannot be "
    "seen (a lazy iterator, a cache, an object of another library). Return what is computed of it, or keep a copy "
    "(w.clone())."
).format


# ---- of what a step's function does


def refuse_outside(error: Exception) -> None:
    """Refuses what torch refused outside of units, by the words of this library."""
    if texts.says(error, *texts.REFUSED, texts.WRITES_CAPTURED, texts.RETAIN_GRAD, texts.NOT_USED):
        raise TypeError(
            f"step: the function does what torch refuses of what is differentiated{place_of(error)}: "
            f"{first_words(error)}. {_INSTEAD}. Or make what does it a unit (fz.unit, also without params), which "
            "plain autograd runs."
        ) from error
    if texts.says(error, texts.NO_MAP):
        raise TypeError(
            f"step: the function computes a whole batch at once{place_of(error)}, and something in it can not: "
            f"{first_words(error)}. Cotangents of torch.autograd.grad(..., is_grads_batched=True) do not go through "
            "every unit: take torch.func.jacrev, or torch.func.vmap of torch.func.vjp."
        ) from error
    if texts.says(error, texts.NESTED_FORWARD):
        raise TypeError(
            f"step: torch.autograd.forward_ad goes through a unit that is a node of the graph{place_of(error)}, as one "
            "under fz.remat is, which torch does not support. Take torch.func.jvp."
        ) from error
    if texts.says(error, texts.WRITES_LEAF):
        raise ValueError(
            "step: the function writes in place to one of its params, or to an input that is differentiated. Compute "
            "with a copy (w = w.clone()), or use operations that are not in place."
        ) from error
    if texts.says(error, *texts.FREED):
        raise ValueError(freed(f"step: the function{place_of(error)}")) from error
