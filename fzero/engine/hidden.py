"""Tensors that a transform around a run goes on through, and that the step's function comes to in ways nobody sees."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable

import torch
from torch.overrides import TorchFunctionMode

from fzero.base import private, pytree
from fzero.base.context import variable
from fzero.base.node import depth
from fzero.engine.traversal import here
from fzero.table.handle import writes

Refusal = Callable[[torch.Tensor], Exception]
# what is said of one, where somebody looks for them in a run on one rank too
looking: contextvars.ContextVar[Refusal | None] = variable("looking", None)


class Hidden(TorchFunctionMode):
    """Refuses operands of operations in a run that are of a level around it, and neither given nor held.

    Whatever the function computes is of the level that it runs in.

    Args:
        known: tensors that the function is given, or holds.
        refusal: what is raised of another one.
        mapped: whether one that is mapped only is refused too.
    """

    def __init__(self, known: Iterable[torch.Tensor], refusal: Refusal, mapped: bool) -> None:
        super().__init__()
        self._known, self._refusal, self._mapped = {id(x): x for x in known}, refusal, mapped
        self._level, self._here, self._depth = private.level(), here.get(), depth.get()

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        named: dict[str, object] = kwargs if isinstance(kwargs, dict) else {}
        out = func(*args, **named)
        if private.level() < self._level or here.get() is not self._here or depth.get() != self._depth:
            return out  # within a node, whose levels are others; a unit's operands are looked at where it is called
        if not pytree.tensors_in(out) and not writes(func, named):
            return out  # a look at a tensor, from which nothing goes on
        for operand in pytree.tensors_in(*args, *named.values()):
            x = self._from_around(operand)
            if x is not None and id(x) not in self._known:
                if private.is_differentiated(x) or (self._mapped and private.is_mapped(x)):
                    raise self._refusal(x)
        return out

    def _from_around(self, x: torch.Tensor) -> torch.Tensor | None:
        """The tensor of a level around the run that an operand is, or that a level within has wrapped straight away."""
        while (level := private.level_of(x)) > self._level:
            x = private.inner(x)
        return x if 0 < level < self._level else None


def on_ranks(x: torch.Tensor) -> ValueError:
    return ValueError(
        f"step: fn comes to a tensor of shape {tuple(x.shape)} that torch.func differentiates by an object, a class, a "
        "module, a global or a cache, where it cannot be given the derivatives of the mean over ranks; expected one "
        "that fn closes over. Say w = holder.w outside of fn and use w in it, or pass it as an input. Of a state or "
        "its params, which are slices, take w = fz.gather(state.params) there."
    )


def in_a_level(call: Callable[[], object]) -> object:
    """Runs a function in a level of its own, by which it is told what it computes from what it comes to."""
    split = list[pytree.Split]()

    def function(_: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        split[:] = [pytree.Split(call(), pytree.is_tensor)]
        (tensors,) = split[0].leaves
        split[0].leaves = []
        return torch.zeros((), device="cpu"), tuple(tensors)

    _, _, tensors = torch.func.vjp(function, torch.zeros((), device="cpu"), has_aux=True)  # type: ignore[misc]
    return split[0].join(tensors)
