"""How cotangents come to the last stage of a pipeline: of a step's loss, and by the pullback of its vjp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fzero.base import pytree
from fzero.base.arguments import need_bool
from fzero.base.follow import follows
from fzero.comm.axis import Axis
from fzero.comm.linear import meaned
from fzero.components.call import Call, goes_forward, need_constants, told
from fzero.components.parts import PerStage
from fzero.components.remote.component import fetch
from fzero.components.remote.handle import Value
from fzero.engine.outcome import need_structure, scalar_loss
from fzero.state.beyond import here
from fzero.state.checks import need_derivatives
from fzero.table.counting import Counts
from fzero.table.microbatch import Microbatches, Part, mean_of, parts_of

WHO = "pipeline(state, *inputs)"


class Losses:
    """What a step keeps of the last stage's outputs: their losses, or how their cotangent is split."""

    def __init__(self, micro: Microbatches, cotangent: object) -> None:
        self._micro, self._cotangent = micro, cotangent
        self._counts = Counts()
        self._losses: dict[int, Any] = {}  # by microbatch
        self._pieces: dict[int, object] = {}
        self.times = 1.0  # by what to divide the sum of the gradients

    def begin(self, counts: Counts) -> None:
        """A call begins, whose microbatches will count so."""
        self._counts = counts

    def note(self, microbatch: int, output: object) -> object:
        """Takes the loss of an output, or notes its form; returns what else is to be kept of it."""
        if isinstance(output, Value) and self._cotangent is None:
            # nothing is waited for: that it is a loss shows at the end
            self._losses[microbatch] = output
            factors = self._counts.factors
            share = factors[microbatch] if factors else 1 / self._micro.count
            self._pieces[microbatch] = torch.full_like(output, share)  # type: ignore[arg-type]
            return None
        alone = isinstance(output, torch.Tensor) and output.ndim == 0 and output.is_floating_point()
        if self._cotangent is None or alone:
            self._losses[microbatch] = scalar_loss(output, WHO)
        if not self._pieces:
            several = self._micro.count > 1 or self._counts.factors
            cotangent = self._cotangent
            if cotangent is not None:
                need_structure(cotangent, pytree.flatten(output)[1])
            else:
                cotangent = torch.ones_like(mean_of([output]) if several else output)  # type: ignore[arg-type]
            likely = self._micro.parts_like(known_parts(output), self._counts.sizes, microbatch)
            pieces, self.times = self._micro.split_cotangent(cotangent, likely, self._counts.factors)
            self._pieces = dict(enumerate(pieces))
        return None

    def piece(self, microbatch: int) -> object:
        """The cotangent of a microbatch's outputs."""
        return self._pieces[microbatch]

    def mean(self, axis: Axis | None) -> torch.Tensor | None:
        """Over microbatches and ranks; None where the outputs are none.

        Args:
            axis: of the last stage's ranks; None where it has taken means itself.
        """
        if not self._losses:
            return None
        losses = [fetch(self._losses[i]) for i in sorted(self._losses)]
        if axis is None:
            for loss in losses:
                self._need_exact(scalar_loss(loss, WHO))
            return mean_of(losses, self._counts.factors)
        loss = mean_of(losses, self._counts.factors)
        return meaned(axis, loss) if follows(loss) else axis.mean(loss, "the loss")

    def _need_exact(self, loss: torch.Tensor) -> None:
        """Refuses a loss whose cotangent its dtype does not hold, which was a fraction of it all the same."""
        count = self._micro.count
        if loss.dtype.itemsize < 4 and (count & (count - 1) or self._counts.factors):
            raise ValueError(
                f"pipeline: got a loss of {loss.dtype} from a component on ranks of its own, in {count} microbatches; "
                f"expected one of float32, which holds 1 / {count} nearly, or a power of two of equal ones. Return "
                "loss.float()."
            )


def known_parts(output: object) -> list[Part]:
    """`parts_of` outputs, of which handles are waited for."""
    form = lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, Value) else x
    return parts_of(pytree.map_leaves(form, output))


class PipelinePullback:
    """The pullback of `pipeline.vjp`: takes the outputs' cotangent, returns (grads, input cotangents)."""

    def __init__(self, call: Call, inputs: Sequence[object]) -> None:
        self._micro, self._inputs = call.micro, inputs
        self._call: Call | None = call
        self._number = call.line.count if call.line is not None else 0
        self._line = call.line
        found = call.flow.outputs
        self._counts = call.counts
        self._parts = [known_parts(found[i]) for i in sorted(found)]
        self._spec = pytree.flatten(found[0])[1] if found else None
        found.clear()
        call.flow.auxes.clear()

    def __call__(
        self, cotangent: object, retain_graph: bool = False, create_graph: bool = False
    ) -> tuple[PerStage, tuple[Any, ...]]:
        """Pulls a cotangent of the outputs back: the backward tasks of the schedule.

        Args:
            cotangent: the outputs' structure; `None` for an output counts as zero. Places that do not have the last
                stage give anything.
            retain_graph: keep what is needed to call again; otherwise it is freed.
            create_graph: is refused: a pipeline is differentiated once.

        Returns:
            The grads of every component, and one cotangent per input, `None` where it was not differentiated.
        """
        verb = f"the pullback of call {self._number}"
        checked = lambda: self._checked(cotangent, retain_graph, create_graph)
        call, cotangent = told(self._line, verb, checked)
        self._call = None
        pieces: list[object] = []
        times = list[Any]((1.0,))

        def asked(microbatch: int) -> object:
            if not pieces:
                need_structure(cotangent, self._spec)
                found, times[0] = self._micro.split_cotangent(cotangent, self._parts, self._counts.factors)
                pieces.extend(found)
            return pieces[microbatch]

        try:
            call.run(verb, lambda task: not goes_forward(task), asked, retain_graph)
            factor = call.known(lambda: times[0])
            grads = call.grads(factor)
            cotangents = call.input_cotangents(self._inputs, factor)
        finally:
            if call.is_intact:  # also after an error: of a wrong cotangent, for one
                self._call = call
        return grads, cotangents

    def _checked(self, cotangent: object, retain_graph: object, create_graph: object) -> tuple[Call, object]:
        need_bool(retain_graph, "pullback", "retain_graph")
        if need_bool(create_graph, "pullback", "create_graph") or create_graph:
            raise ValueError(
                "pullback: got create_graph=True, expected False: a pipeline's pullback cannot be differentiated. "
                "Take second derivatives of the stages' functions, one after the other, in one step: fz.hvp."
            )
        need_derivatives("pullback")
        cotangent = here(cotangent)
        if self._call is None:
            raise RuntimeError(
                "The pullback of this pipeline was used up by an earlier call, which freed what it kept. Pass "
                "retain_graph=True to every call but the last."
            )
        if self._call.line is not None:
            need_constants("pullback", cotangent=cotangent)
        return self._call, cotangent
