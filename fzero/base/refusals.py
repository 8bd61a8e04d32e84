"""Refusals: noted ones survive a caller's `except`, and those of torch's own are said in the words of this library."""

from __future__ import annotations

import contextlib
import contextvars
import dis
import functools
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
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


def is_ours(error: BaseException) -> bool:
    """True if fzero itself raised it: not what a function of torch raises that its code calls."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or not last.tb_frame.f_globals.get("__name__", "").startswith("fzero."):
        return False
    return last.tb_frame.f_code.co_code[last.tb_lasti] == _RAISE


def frames_of(error: BaseException) -> list[FrameType]:
    """The frames that an error has left, the innermost last."""
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


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


def _traces(error: Exception) -> bool:
    """Tells whether torch fails to trace an operator's function, as where that closes over a tensor."""
    return isinstance(error, (RuntimeError, AssertionError)) and any(
        text in str(error) for text in ("INTERNAL ASSERT", "TensorWrapper", "FakeTensor")
    )


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
        if (
            isinstance(error, KeyError)
            or not inside
            or not (all(map(is_library, files[inside[0] :])) or _traces(error))
        ):
            raise  # a KeyError is functorch's, and dealt with elsewhere
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


def twice(unit: str, error: BaseException) -> str:
    return (
        f"Unit {unit!r} does what torch.func refuses ({first_words(error)}), and is differentiated more than once (by "
        "torch.func inside the step's function, fz.hvp, vmap), where torch.func runs it. Leave the operation out, or "
        "write one in its place that torch.func takes: of torch.utils.checkpoint fz.remat(step), which recomputes "
        "units under any derivative; of an autograd.Function one with setup_context; of tensors whose memory is read "
        "(indices, lengths) lists of numbers; of compressed sparse tensors COO or dense ones."
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

# what functorch refuses outside of units, and what to write instead
_OUTSIDE = {
    texts.REQUIRES_GRAD: "calls requires_grad_() outside of units{place}, which torch.func does not let see its "
    "levels. Differentiate inside by torch.func.grad or torch.func.vjp, ask for the input's cotangent "
    "(step.vjp(state, x)), or take plain autograd: fz.tape. Models with gradient_checkpointing_enable() do so: leave "
    "that out (gradient_checkpointing_disable()), and recompute by fz.remat(step).",
    texts.NO_MEMORY: "calls an operator outside of units{place} that torch.func cannot run, as it reads its "
    "tensors' memory (packed sequences do; so does ctc_loss where lengths are lists: give it tensors). Make what calls "
    "it a unit (fz.unit, also without params; units=, of a whole module by units='net' and apply(params['net'], ...)), "
    "or take plain autograd: fz.tape.",
    texts.NO_STORAGE: "copies a tensor or asks for its memory outside of units{place}, as copy.deepcopy does, which "
    "torch.func does not let. Take x.detach().clone(), make what calls it a unit (fz.unit), or take plain autograd: "
    "fz.tape.",
    texts.NO_COPY: "calls copy.deepcopy outside of units{place} with what leads to a param, which is computed here. "
    "Take copies before the step runs, or x.detach().clone() of tensors.",
    texts.WRITES_CAPTURED: "writes in place{place} to a tensor that its run does not differentiate, outside of units: "
    "an input of integers, or a constant. Write to a copy, or give what writes one (x.clone(), inside the function), "
    "or take the operation that is not in place (torch.distributed.reduce_scatter for reduce_scatter_tensor, on gloo).",
    texts.SETS_DATA: "assigns to x.data outside of units{place}, which torch.func does not support. Assign to the "
    "name, x = ..., or write to a copy.",
    texts.NO_LEAF: "sets requires_grad of a tensor that is computed, as params are{place}. Take "
    "x = x.detach() where no gradient is wanted; params that are not trained are said by fz.freeze.",
    texts.RETAIN_GRAD: "calls retain_grad{place}, which torch.func does not support: there is no x.grad. Ask for "
    "the gradient by torch.func.grad inside, or take plain autograd: fz.tape.",
    texts.NOT_USED: "asks torch.autograd.grad for a derivative{place} that its run does not know: by an input that "
    "its caller set requires_grad of, say, while torch.func differentiates. Take torch.func.grad or torch.func.vjp "
    "inside, or plain autograd: fz.tape.",
    texts.NO_STRIDES: "uses a sparse tensor in compressed form (CSR, CSC, BSR, BSC) outside of units{place}, which "
    "torch.func does not support. Make what uses it a unit (fz.unit, also without params), or take COO: to_sparse().",
    texts.BACKWARD: "calls backward() outside of units{place}, which torch.func does not support. Differentiate "
    "inside by torch.func.grad or torch.func.vjp, or make what calls it a unit (fz.unit).",
    texts.OLD_FUNCTION: "calls an autograd.Function without setup_context outside of units{place}, which torch.func "
    "does not support (a full backward hook on a module that is a unit is one: put it on a module inside). Make what "
    "calls it a unit (fz.unit), or take plain autograd: fz.tape.",
    texts.HIGHER_ORDER: "calls a higher-order operator (torch.cond, while_loop) outside of units{place}, which "
    "torch.func does not take. Make what calls it a unit (fz.unit), or take Python's own `if` and `while`, or "
    "torch.where.",
    texts.IN_INFERENCE: "computes in torch.inference_mode outside of units{place}, which torch.func does not support. "
    "Take torch.no_grad(), which is the same to the rest of the function.",
    texts.SAVED_HOOKS: "uses saved-tensor hooks (torch.utils.checkpoint does) outside of units{place}, where "
    "torch.func does not support them. Make what calls it a unit (units= in train_step, or fz.unit), or leave the "
    "checkpoint out: fz.remat(step) recomputes units.",
}


def refuse_outside(error: Exception) -> None:
    """Refuses what torch refused outside of units, by the words of this library."""
    for text, what in _OUTSIDE.items():
        if texts.says(error, text):
            raise TypeError(f"step: the function {what.format(place=place_of(error))}") from error
    if texts.says(error, texts.WRITES_LEAF):
        raise ValueError(
            "step: the function writes in place to one of its params, or to an input that is differentiated. Compute "
            "with a copy (w = w.clone()), or use operations that are not in place."
        ) from error
    if texts.says(error, *texts.FREED):
        raise ValueError(freed(f"step: the function{place_of(error)}")) from error
