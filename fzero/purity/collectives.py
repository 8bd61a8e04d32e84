"""Refuses torch's own collectives of what is differentiated: each rank would get a part of the gradient alone."""

from __future__ import annotations

import contextvars
from collections.abc import Mapping, Sequence
from types import FrameType

import torch
from torch.utils.checkpoint import CheckpointFunction

from fzero.base import private, pytree
from fzero.base.context import variable
from fzero.base.places import Place
from fzero.comm import backend, divergence
from fzero.purity.caller import frames_here, place_here
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


class Collectives:
    """The rule of one run of a step's function, as a context.

    The run goes on, as the other ranks wait for what this one sends, and is refused at its end.

    Args:
        who: whose function it is.
        run: `Axis.run`, if other ranks run it too.
        cuts: whether leaves are cut over a tensor axis.
    """

    def __init__(self, who: str, run: str, cuts: bool) -> None:
        self._who, self._run, self._cuts = who, run, cuts
        self._error: ValueError | None = None
        self._communicates = False
        self._if_not_known = ""  # what is said of the operator that is called if torch knows no derivative of it

    def __enter__(self) -> None:
        self._token = current.set(self)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        current.reset(self._token)
        if error is not None and not isinstance(error, Exception):
            return
        if self._error is not None:
            raise self._error
        told = divergence.refusal_of(self._run) if self._communicates and self._run else None
        if told is not None:
            raise ValueError(told)

    def refuses(self) -> bool:
        """Tells whether the run is refused at its end."""
        return self._error is not None

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
        operator = module.startswith("torch._ops") and not name.endswith("_")  # which torch may know a derivative of
        read = name in _SENDS or (operator and name != "irecv")
        written = operands[:0] if read else operands[1:2] if name == "gather" else operands[:1]
        given: object = operands if torch.is_grad_enabled() else written  # what is made of the others is a constant
        functions = _functions(frames := frames_here())
        reentrant = bool(functions) and functions[0].f_locals["cls"] is CheckpointFunction
        if functions:  # what they are given is differentiated, and not what they compute
            real = any(isinstance(x, torch.Tensor) and x.is_floating_point() for x in pytree.flatten(operands)[0])
            given = functions[0].f_locals["args"] if real and (reentrant or self._is_wrong(frames)) else ()
        tensors = [x for x in pytree.flatten(given)[0] if isinstance(x, torch.Tensor) and private.is_differentiated(x)]
        said = _differentiated(name.rstrip("_"), meant, tensors[0], place, reentrant) if tensors else ""
        if operator and not functions and not self._is_wrong(frames):
            self._if_not_known = said
            return args, kwargs
        if said:
            self._refuse(said)
        elif name == "scatter" and any(map(_is_wrapper, pytree.flatten(operands[1:])[0])):
            self._refuse(_SCATTERED.format(place))
        copies = {id(x): private.unwrapped(x).clone() for x in tensors}
        return pytree.map_leaves(lambda x: copies.get(id(x), x), (args, dict(kwargs or {})))  # type: ignore[return-value]

    def operated(self, namespace: str, name: str, place: Place) -> None:
        """Looks at an operator, as it is done."""
        frames = frames_here()
        if namespace != "c10d" and self._if_not_known and not _functions(frames):
            self._refuse(self._if_not_known)
        if namespace == "c10d" and _meant(name) and all(x.f_code.co_name != "__torch_function__" for x in frames):
            self._refuse(
                f"calls the method {name!r} of a process group ({place}), whose operands do not say whether they are "
                "differentiated. Call the function of torch.distributed."
            )

    def _refuse(self, what: str) -> None:
        if self._error is None:
            self._error = ValueError(f"{self._who} {what}")
            if self._run:
                divergence.tell_of_refusal(self._run, str(self._error))

    def _is_wrong(self, frames: Sequence[FrameType]) -> bool:
        """Tells whether a Function is torch's own, and its derivative is not the one, or not known yet."""
        own = [frame for frame in frames if backend.is_differentiable(frame.f_globals["__name__"])]
        return bool(own) and (self._cuts or not all(backend.adds(frame.f_locals.get("op")) for frame in own))


current: contextvars.ContextVar[Collectives | None] = variable("collectives", None)
_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


def _functions(frames: Sequence[FrameType]) -> list[FrameType]:
    """The calls of autograd Functions in whose forward an operation is, the innermost first."""
    return [frame for frame in frames if frame.f_code is _APPLY]


def _meant(name: str) -> str:
    """The map that does what a function does; "" if it communicates no tensors."""
    known = [key for key in _MAPS if name.replace("_", "").startswith(key)]
    return _MAPS[max(known, key=len)] if known else ""


def _is_wrapper(x: object) -> bool:
    return isinstance(x, torch.Tensor) and private.is_wrapper(x)


def _differentiated(name: str, meant: str, x: torch.Tensor, place: Place, reentrant: bool) -> str:
    unseen = "; of a constant inside of torch.utils.checkpoint that shows with use_reentrant=False" if reentrant else ""
    return (
        f"communicates a tensor of shape {tuple(x.shape)} that is differentiated by torch.distributed's {name!r} "
        f"({place}), which has no derivative: every rank would get a part of its gradient alone. Write "
        f"fz.parallel.{meant}, where ax = fz.parallel.axis(mesh, name) is of these ranks; or communicate x.detach(), "
        f"where the value is a constant to the gradient{unseen}."
    )
