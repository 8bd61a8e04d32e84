"""Refuses torch's own collectives of what is differentiated: each rank would get a part of the gradient alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.utils.checkpoint import CheckpointFunction

from fzero.base import private, pytree
from fzero.base.refusals import place_of
from fzero.comm import backend, divergence
from fzero.purity.observer import Arguments, Caller

_GATHER, _SCATTER = "gather(x, ax, dim)", "reduce_scatter(x, ax, dim)"
_SPLIT, _EXCHANGE, _SHIFT = "split(x, ax, dim)", "all_to_all(x, ax, split, concat)", "ring_shift(x, ax)"
# what an operator's name begins with -> torch's name of it, the map that is meant
_MAPS: Mapping[str, tuple[str, str]] = {
    "allreduce": ("all_reduce", "sum(x, ax)"),
    "all_reduce": ("all_reduce", "sum(x, ax)"),
    "reduce_scatter": ("reduce_scatter", _SCATTER),
    "reduce_scatter_single": ("reduce_scatter_tensor", _SCATTER),
    "_reduce_scatter": ("reduce_scatter_tensor", _SCATTER),
    "reduce": ("reduce", "sum(x, ax)"),
    "allgather": ("all_gather", _GATHER),
    "_allgather": ("all_gather_into_tensor", _GATHER),
    "all_gather": ("all_gather_into_tensor", _GATHER),
    "gather": ("gather", _GATHER),
    "scatter": ("scatter", _SPLIT),
    "broadcast": ("broadcast", "gather(x[None], ax, 0)[source]"),
    "alltoall": ("all_to_all", _EXCHANGE),
    "all_to_all": ("all_to_all", _EXCHANGE),
    "send": ("send", _SHIFT),
    "isend": ("isend", _SHIFT),
    "recv": ("recv", _SHIFT),
    "irecv": ("irecv", _SHIFT),
    "batch_p2p_ops": ("batch_isend_irecv", _SHIFT),
}
_SENDS = ("send", "isend")
_SCATTERED = (
    "{} calls torch.distributed's 'scatter'{} where torch.func runs it, which keeps the memory of tensors from it in "
    "later runs. Send all of them to every rank (torch.distributed.broadcast), and take this rank's there."
)


class Collectives:
    """The rule of one run of a step's function.

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

    def look(self, operator: str, caller: Caller, args: Arguments) -> Arguments:
        namespace, _, name = operator.rpartition("::")
        found = max((key for key in _MAPS if name.startswith(key)), key=len, default=None)
        if found is None:
            return args
        self._communicates = True
        read = name in _SENDS or (namespace.startswith("_") and not name.endswith("_") and name != "irecv")
        written = args[:0] if read else args[1:2] if (namespace, name) == ("", "gather") else args[:1]
        given: object = args if caller.records else written  # otherwise what is made of the others is a constant
        if caller.functions:  # what they are given is differentiated, and not what they compute
            real = any(isinstance(x, torch.Tensor) and x.is_floating_point() for x in pytree.flatten(args)[0])
            given = caller.functions[0].f_locals["args"] if real and self._is_wrong(caller) else ()
        operands = [x for x in pytree.flatten(given)[0] if isinstance(x, torch.Tensor) and caller.differentiates(x)]
        said = _refused(self._who, *_MAPS[found], operands[0], _is_reentrant(caller)) if operands else ""
        if not said and found == "scatter" and any(_is_wrapper(x) for x in pytree.flatten(args[1:])[0]):
            said = _SCATTERED.format(self._who, place_of())
        if said and self._error is None:
            self._error = ValueError(said)
            if self._run:
                divergence.tell_of_refusal(self._run, str(self._error))
        copies = {id(private.unwrapped(x)): private.unwrapped(x).clone() for x in operands}
        # torch.func gives what lies in lists of lists as it is
        return tuple(_replaced(x, lambda x: copies.get(id(x), x)) for x in args)

    def _is_wrong(self, caller: Caller) -> bool:
        """Tells whether a Function is torch's own, and its derivative is not the one, or not known yet."""
        if _is_reentrant(caller):
            return True
        own = [frame for frame in caller.frames if backend.is_differentiable(frame.f_globals["__name__"])]
        return bool(own) and (self._cuts or not all(backend.adds(frame.f_locals.get("op")) for frame in own))

    def refuses(self) -> bool:
        return self._error is not None

    def end(self) -> None:
        if self._error is not None:
            raise self._error
        told = divergence.refusal_of(self._run) if self._communicates and self._run else None
        if told is not None:
            raise ValueError(told)


def of_collectives(who: str, run: str, cuts: bool) -> Mapping[str, Collectives]:
    """The rule of one run, for an observer."""
    return dict.fromkeys(backend.COLLECTIVES, Collectives(who, run, cuts))


def _is_reentrant(caller: Caller) -> bool:
    """Tells whether what is called here will be differentiated when it runs again, by torch.utils.checkpoint."""
    return bool(caller.functions) and caller.functions[0].f_locals["cls"] is CheckpointFunction


def _is_wrapper(x: object) -> bool:
    return isinstance(x, torch.Tensor) and private.is_wrapper(x)


def _refused(who: str, name: str, meant: str, x: torch.Tensor, reentrant: bool) -> str:
    unseen = "; of a constant inside of torch.utils.checkpoint that shows with use_reentrant=False" if reentrant else ""
    return (
        f"{who} communicates a tensor of shape {tuple(x.shape)} that is differentiated by torch.distributed's {name!r}"
        f"{place_of()}, which has no derivative: every rank would get a part of its gradient alone. Write "
        f"fz.parallel.{meant}, where ax = fz.parallel.axis(mesh, name) is of these ranks; or communicate x.detach(), "
        f"where the value is a constant to the gradient{unseen}."
    )


def _replaced(x: object, by: Callable[[torch.Tensor], torch.Tensor]) -> object:
    if isinstance(x, list):
        return [_replaced(each, by) for each in x]
    return by(private.unwrapped(x)) if isinstance(x, torch.Tensor) else x
