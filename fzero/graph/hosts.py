"""What a function's graph calls besides torch's operators: messages between ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fzero.base import private
from fzero.base.context import during
from fzero.comm.axis import Axis
from fzero.graph import operators

Run = Callable[[Sequence[torch.Tensor], Sequence[Axis]], Sequence[torch.Tensor]]
Form = tuple[tuple[int, ...], torch.dtype, torch.device]


class _Call(NamedTuple):
    """`run(xs, axes) -> outputs`, and the form of each output."""

    run: Run
    forms: Sequence[Form]


class Hosts:
    """The calls of one graph, by number, and the axes that they send over.

    Args:
        given: the axes of the states that the function is given.
    """

    def __init__(self, given: Sequence[Axis]) -> None:
        self.calls: list[_Call] = []
        self.axes = [*given]
        self._given = len(given)
        self._origins: dict[int, Axis] = {}  # of components that begin in the function

    def begun(self, axis: Axis, origin: Axis) -> Axis:
        """The axis of a component that begins in the function: in each run it is another one."""
        self._origins[len(self.axes)] = origin
        self.axes.append(axis)
        return axis

    def place_of(self, axis: Axis) -> int:
        """The number of an axis."""
        for place, own in enumerate(self.axes):
            if own is axis or (axis.identity and own.identity == axis.identity):
                return place
        self.axes.append(axis)
        return len(self.axes) - 1

    def axes_of_run(self, given: Sequence[Axis]) -> list[Axis]:
        """The axes of one run, which all ranks begin."""
        out = [*given, *self.axes[self._given :]]
        for place, origin in self._origins.items():
            out[place] = origin.of_component(self.axes[place].component)
        return out

    def running(self, axes: Sequence[Axis], updates: Sequence[int]) -> during[operators.Hosting | None]:
        """Around a run.

        Args:
            updates: of each state that is given, how many it has had.
        """
        counts = [*updates, *[0] * (len(axes) - len(updates))]
        own = [axis.of_next_run(count) for axis, count in zip(axes, counts, strict=True)] if self.calls else []
        return during(operators.hosting, lambda xs, number: self.calls[number].run(xs, own))

    def sent(self, axis: Axis, verb: str, x: torch.Tensor, rows: int | None, tag: object, *more: Any) -> torch.Tensor:
        """The result of `axis.verb(x, tag, *more)`, a message between ranks.

        Args:
            rows: its leading dim; None where it has the shape of `x`.
        """
        assert private.in_function() or not private.is_differentiated(x), "a message without its derivative"
        place, whole = self.place_of(axis), axis.group is None

        def run(xs: Sequence[torch.Tensor], axes: Sequence[Axis]) -> Sequence[torch.Tensor]:
            own = axes[place].uncut if whole else axes[place]
            return [getattr(own, verb)(xs[0], tag, *more)]

        shape = tuple(x.shape) if rows is None else (rows, *x.shape[1:])
        return self.call(run, [x], [(shape, *(more or (x.dtype,)), x.device)])[0]

    def call(self, run: Run, xs: Sequence[torch.Tensor], forms: Sequence[Form]) -> list[torch.Tensor]:
        """What `run` makes of tensors, as a node of the graph."""
        self.calls.append(_Call(run, forms))
        return operators.host(len(self.calls) - 1, xs)

    def without_values(self, number: int) -> list[torch.Tensor]:
        """What a call returns in a trace."""
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in self.calls[number].forms]
