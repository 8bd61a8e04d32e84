"""The graphs of a step: one for each signature of each verb, kept from its first call on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Unpack

import torch

from fzero.base import pytree
from fzero.base.context import during
from fzero.comm import pieces
from fzero.engine.batch import seed_of
from fzero.engine.carry import Carry
from fzero.engine.outcome import wanted_of
from fzero.engine.weighing import counted
from fzero.graph.errors import tracing
from fzero.graph.flatten import value_of
from fzero.graph.numbers import written_out
from fzero.graph.programs import Programs, place
from fzero.graph.run import Asked, GraphRun, Program, forward_only, made
from fzero.graph.signatures import ambient_of, closed_over, meta_of
from fzero.state.beyond import here
from fzero.state.train_state import TrainState
from fzero.stores.put import DEVICE, name_of
from fzero.table.counting import Mask
from fzero.table.spec import Spec


class Jit(Programs[Program]):
    """The programs of a step and of what other transforms make of it."""

    def __reduce__(self) -> tuple[object, ...]:
        return Jit, (self.backend, self.static, self.fallback)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Jit) and self.__reduce__() == other.__reduce__()

    def __hash__(self) -> int:
        return hash(self.__reduce__())

    def __repr__(self) -> str:
        return self.backend

    def _key(
        self, verb: str, step: Spec, state: TrainState, inputs: Sequence[Any], wanted: Sequence[int]
    ) -> tuple[object, ...]:
        flat, spec = pytree.flatten(tuple(inputs))
        forms = tuple(meta_of(x) if isinstance(x, torch.Tensor) else value_of(x) for x in flat)
        own = forms, tuple(wanted), ambient_of(state.params.device.type), state.params.axis.ranks, closed_over(step.fn)
        rows = step.rules, step.has_aux, step.carries, step.microbatches.means
        return verb, step.fn, state.layout, rows, spec, *own

    def _given(self, step: Spec, inputs: Sequence[object]) -> tuple[object, ...]:
        """Inputs with numbers of Python as tensors, but for static ones and what is carried."""
        first = int(step.carries)
        return *[pytree.map_leaves(written_out, x) for x in inputs[:first]], *self.taken(inputs[first:])

    def run(
        self,
        step: Spec,
        state: TrainState,
        inputs: Sequence[object],
        own: Callable[[], Any],
        *,
        argnums: Collection[int] | None,
        **asked: Unpack[Asked],
    ) -> Any:
        """A run of the function. A step's first one is one without a graph, which proves that the function is pure."""
        wanted = wanted_of(inputs, argnums)
        go = lambda program, given: GraphRun(program, step, state, given, wanted, **asked)
        return self._called("vjp", step, state, inputs, wanted, asked["seed"], own, go)

    def forward(
        self,
        step: Spec,
        state: TrainState,
        inputs: Sequence[object],
        own: Callable[[], Any],
        *,
        seed: tuple[int, ...],
        mask: Mask | None,
    ) -> tuple[object, object]:
        """Outputs and aux."""
        go = lambda program, given: forward_only(program, step, state, given, seed, mask)
        out: tuple[object, object] = self._called("forward", step, state, inputs, None, seed, own, go)
        return out

    def _called(
        self,
        verb: str,
        step: Spec,
        state: TrainState,
        inputs: Sequence[object],
        wanted: Sequence[int] | None,
        seed: tuple[int, ...],
        own: Callable[[], Any],
        go: Callable[[Program, Sequence[object]], Any],
    ) -> Any:
        """What a run without a graph returns, if this is one, or `go(program, inputs)`."""
        if self.is_plain():
            return own()
        given = self._given(step, inputs)
        key = self._key(verb, step, state, given, wanted or ())
        first = key if place() is None else (*key[:4], state.params.axis.identity, place())
        if first not in self._begun:
            need_traceable(step, state)
        make = lambda: self._program(key, step, state, given, wanted, seed)
        out, program = self.called(step.name, first, own, make)
        if verb == "vjp" and out is not None and program is not None:
            program.need_dtypes(out.meta)
        return go(program, given) if out is None and program is not None else out

    def _program(
        self,
        key: object,
        step: Spec,
        state: TrainState,
        inputs: Sequence[object],
        wanted: Sequence[int] | None,
        seed: tuple[int, ...],
    ) -> Program:
        if (known := self._known(key)) is not None:
            return known
        with tracing(), during(pieces.heard, self._heard):
            if (known := self._known(key)) is not None:  # another rank's thread was first
                return known
            program = made(step, state, inputs, wanted, seed, self.backend)
            shapes = lambda: [tuple(x.shape) for x in pytree.tensors_in(*inputs)]
            own = (key, place()) if program.sends else key
            return self.add(own, program, lambda: f"inputs of shapes {shapes()}")

    def _known(self, key: object) -> Program | None:
        return self._programs.get(key) or self._programs.get((key, place()))

    def graph(self, step: Spec, state: TrainState, *inputs: object) -> torch.fx.GraphModule:
        """The graph of `step.vjp(state, *inputs)` by the params, for one microbatch."""
        return self._ahead(step, state, inputs).joined()

    def lower(self, step: Spec, state: TrainState, *inputs: object) -> None:
        """Traces and compiles a call of the step, and runs nothing."""
        self._ahead(step, state, inputs)

    def _ahead(self, step: Spec, state: TrainState, inputs: Sequence[object]) -> Program:
        need_traceable(step, state)
        parts, _ = counted(step.microbatches, state, here(tuple(inputs)))
        given = self._given(step, Carry(step, state).given(next(iter(parts))))
        key = self._key("vjp", step, state, given, ())
        return self._program(key, step, state, given, [], seed_of(state, 0, 0))


def need_traceable(step: Spec, state: TrainState) -> None:
    """Refuses what no graph takes."""
    for row in step.table(state.layout).rows:
        memories = [memory for memory in (*row.memories, row.activations) if memory != DEVICE]
        what = (
            f"states or activations in {name_of(memories[0])} (fz.offload)"
            if memories
            else "names to put on the host (fz.remat(offload=...))"
            if row.names.offload
            else "fz.compile"
            if row.compile
            else ""
        )
        if what:
            raise ValueError(f"jit: got leaf {row.path!r} with {what}, which graphs do not take. Leave it or jit out.")
