"""The pullback of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fzero.base import pytree
from fzero.base.arguments import need_bool
from fzero.components.call import Call, goes_forward, need_constants, told
from fzero.components.losses import known_parts
from fzero.components.parts import PerStage
from fzero.engine.outcome import need_structure
from fzero.schedules.task import Task
from fzero.state.beyond import here
from fzero.state.checks import need_derivatives


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
            call.run(verb, _goes_back, asked, retain_graph)
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


def _goes_back(task: Task) -> bool:
    return not goes_forward(task)
