"""Refuses torch's own collectives of what is differentiated: each rank would get a part of the gradient alone."""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Mapping

import torch

from fzero.base import private, pytree
from fzero.base.context import variable
from fzero.base.places import Place, frames_here, place_here
from fzero.comm import backend, divergence
from fzero.table.handle import Function, Named, Operands

# what the name of a function or an operator begins with, without "_" -> the map that is meant
_MAPS: Mapping[str, str] = {
    **dict.fromkeys(("allreduce", "reduce"), "sum(x, ax)"),
    **dict.fromkeys(("allgather", "gather"), "gather(x, ax, dim)"),
    "reducescatter": "reduce_scatter(x, ax, dim)",
    "scatter": "split(x, ax, dim)",
    "broadcast": "gather(x[None], ax, 0)[source]",
    "alltoall": "all_to_all(x, ax, split, concat)",
    **dict.fromkeys(("send", "isend", "recv", "irecv", "batchp2p"), "ring_shift(x, ax)"),
}
_SENDS = ("send", "isend")
_SCATTERED = (
    "calls torch.distributed's 'scatter' ({}) where torch.func runs it, which keeps the memory of tensors from it in "
    "later runs. Send all of them to every rank (torch.distributed.broadcast), and take this rank's there."
)


# since torch 2.14 it is no function of Python's
_APPLY = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)
_TORCHS = ("torch.distributed", "torch.utils.checkpoint")  # whose Functions give no derivative of a step's loss


class Collectives:
    """The rule of one run of a step's function, as a context.

    The run goes on, as the other ranks wait for what this one sends, and is refused at its end.

    Args:
        who: whose function it is.
        run: `Axis.run`, if other ranks run it too.

    Attributes:
        error: what refuses the run.
    """

    def __init__(self, who: str, run: str) -> None:
        self._who, self._run, self._communicates = who, run, False
        self.error: ValueError | None = None

    def __enter__(self) -> None:
        self._token = current.set(self)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        current.reset(self._token)
        if error is not None and not isinstance(error, Exception):
            return
        if self.error is not None:
            raise self.error
        told = divergence.refusal_of(self._run) if self._communicates and self._run else None
        if told is not None:
            raise ValueError(told)

    def called(self, func: Function, args: Operands, kwargs: Named) -> tuple[Operands, Named]:
        """Looks at a function of torch; what it is to be called with."""
        module = getattr(func, "__module__", None) or ""
        if backend.COLLECTIVES.isdisjoint((module, module.rpartition(".")[2])):  # a function's, an operator's
            return args, kwargs
        name = func.__name__.partition(".")[0]
        meant, place = _meant(name), place_here()
        if not meant or place is None:
            return args, kwargs
        self._communicates = True
        operands = (*args, *(kwargs or {}).values())
        read = name in _SENDS or (module.startswith("torch._ops") and not name.endswith("_") and name != "irecv")
        written = operands[:0] if read else operands[1:2] if name == "gather" else operands[:1]
        given: object = operands if torch.is_grad_enabled() else written  # what is made of the others is a constant
        functions = _functions_here()
        if functions:  # what they are given is differentiated, and not what they compute; a user's has its derivative
            torchs = all(module.startswith(_TORCHS) for module, _ in functions)
            real = any(x.is_floating_point() for x in pytree.tensors_in(operands))
            tensors = functions[0][1] if torchs and real else []
        else:
            tensors = _differentiated(given)
        if tensors:
            self._refuse(
                f"communicates a tensor of shape {tuple(tensors[0].shape)} that is differentiated by "
                f"torch.distributed's {name.rstrip('_')!r} ({place}), which has no derivative, or that of the sum of "
                f"all ranks' losses. Write fz.parallel.{meant}, where ax = fz.parallel.axis(mesh, name) is of these "
                "ranks; or communicate x.detach(), where the value is a constant to the gradient (in "
                "torch.utils.checkpoint with use_reentrant=False)."
            )
        elif name == "scatter" and any(map(private.is_wrapper, pytree.tensors_in(operands[1:]))):
            self._refuse(_SCATTERED.format(place))
        copies = {id(x): private.unwrapped(x).clone() for x in tensors}
        return pytree.map_leaves(lambda x: copies.get(id(x), x), (args, dict(kwargs or {})))  # type: ignore[return-value]

    def operated(self, name: str, place: Place) -> None:
        """Looks at an operator that communicates: a method of a group has called it if no function did."""
        if _meant(name) and all(frame.f_code.co_name != "__torch_function__" for frame in frames_here()):
            self._refuse(
                f"calls the method {name!r} of a process group ({place}), whose operands do not say whether they are "
                "differentiated. Call the function of torch.distributed. (torch 2.11 shows only all_reduce and "
                "gathers of tensors as functions: call others outside of the step.)"
            )

    def _refuse(self, what: str) -> None:
        if self.error is None:
            self.error = ValueError(f"{self._who} {what}")
            if self._run:
                divergence.tell_of_refusal(self._run, str(self.error))


current: contextvars.ContextVar[Collectives | None] = variable("collectives", None)


def _meant(name: str) -> str:
    """The map that does what a function does; "" if it communicates no tensors."""
    known = [key for key in _MAPS if name.replace("_", "").startswith(key)]
    return _MAPS[max(known, key=len)] if known else ""


def _differentiated(tree: object) -> list[torch.Tensor]:
    return [x for x in pytree.tensors_in(tree) if private.is_differentiated(x)]


def _functions_here() -> list[tuple[str, list[torch.Tensor]]]:
    """The autograd Functions that run, the innermost first: the module of each, and what of it is differentiated."""
    if _APPLY is not None:
        calls = [frame.f_locals for frame in frames_here() if frame.f_code is _APPLY]
        return [(call["cls"].__module__, _differentiated(call["args"])) for call in calls]
    kinds, codes, found = [torch.autograd.Function], dict[object, str](), list[tuple[str, list[torch.Tensor]]]()
    for kind in kinds:  # which grows
        kinds += kind.__subclasses__()
        codes.setdefault(getattr(inspect.unwrap(kind.forward), "__code__", None), kind.__module__)
    for frame in frames_here():
        code, own = frame.f_code, frame.f_locals
        if code in codes:
            count = code.co_argcount + bool(code.co_flags & inspect.CO_VARARGS)
            first, *others = [own.get(name) for name in code.co_varnames[:count]] or [None]
            if (needs := getattr(first, "needs_input_grad", None)) is not None:  # others may have new values by now
                flat = [*others[:-1], *(others[-1] or ())] if code.co_flags & inspect.CO_VARARGS else others
                tensors = [x for x, own in zip(flat, needs, strict=False) if own and isinstance(x, torch.Tensor)]
            else:
                tensors = _differentiated([first, *others])
            found.append((codes[code], tensors))
    return found
