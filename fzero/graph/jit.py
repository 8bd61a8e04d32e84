"""The graphs of a step: one for each signature of each verb, kept from its first call on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Unpack

import torch

from fzero.base import pytree
from fzero.engine.carry import Carry
from fzero.engine.outcome import wanted_of
from fzero.engine.weighing import counted
from fzero.graph.flatten import value_of
from fzero.graph.numbers import written_out
from fzero.graph.programs import Programs, place
from fzero.graph.run import Asked, GraphRun, Program, forward_only
from fzero.graph.signatures import Identity, ambient_of, closed_over, meta_of, order_of
from fzero.state.beyond import here
from fzero.state.train_state import TrainState
from fzero.stores.put import DEVICE, name_of
from fzero.table.counting import Mask
from fzero.table.spec import Spec

Inputs = Sequence[object]


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

    def run(
        self,
        step: Spec,
        state: TrainState,
        inputs: Inputs,
        own: Callable[[], Any],
        *,
        argnums: Collection[int] | None,
        **asked: Unpack[Asked],
    ) -> Any:
        """A run of the function. A step's first one is one without a graph, which proves that the function is pure."""
        wanted = wanted_of(inputs, argnums)
        out, program, given = self._called("vjp", step, state, inputs, wanted, own)
        if program is None:
            return out
        if out is None:
            return GraphRun(program, step, state, given, wanted, **asked)
        program.need_dtypes(out.meta)
        return out

    def forward(
        self,
        step: Spec,
        state: TrainState,
        inputs: Inputs,
        own: Callable[[], Any],
        *,
        seed: tuple[int, ...],
        mask: Mask | None,
    ) -> Any:
        """Outputs and aux."""
        out, program, given = self._called("forward", step, state, inputs, None, own)
        return out if program is None or out is not None else forward_only(program, step, state, given, seed, mask)

    def _called(
        self,
        verb: str,
        step: Spec,
        state: TrainState,
        inputs: Inputs,
        wanted: Sequence[int] | None,
        own: Callable[[], Any],
    ) -> tuple[Any, Program | None, Inputs]:
        """What a run without a graph returns, if this is one; the program, if there is one, and what it is given."""
        if self.is_plain():
            return own(), None, ()
        given = self._given(step, inputs)
        key = self._key(verb, step, state, given, wanted or ())
        first = key if place() is None else (*key[:4], state.params.axis.identity, place())
        if first not in self._begun:
            need_traceable(step, state)
        make = lambda: self._program(key, step, state, given, wanted)
        return *self.called(step.name, first, own, make), given

    def _given(self, step: Spec, inputs: Inputs) -> Inputs:
        """Inputs with numbers of Python as tensors, but for static ones and what is carried."""
        first = int(step.carries)
        return *[pytree.map_leaves(written_out, x) for x in inputs[:first]], *self.taken(inputs[first:])

    def _key(
        self, verb: str, step: Spec, state: TrainState, inputs: Inputs, wanted: Sequence[int]
    ) -> tuple[object, ...]:
        flat, spec = pytree.ordered(tuple(inputs))
        forms = tuple(meta_of(x) if isinstance(x, torch.Tensor) else value_of(x) for x in flat)
        own = forms, tuple(wanted), ambient_of(state.params.device.type), state.params.axis.ranks, closed_over(step.fn)
        rows = step.rules, step.has_aux, step.carries, step.microbatches.means
        return verb, step.fn, state.layout, rows, spec, *own, order_of(Identity(state.params.structure))

    def _program(
        self, key: object, step: Spec, state: TrainState, inputs: Inputs, wanted: Sequence[int] | None
    ) -> Program:
        known = lambda: self._programs.get(key) or self._programs.get((key, place()))
        if (program := known()) is not None:
            return program
        with self.tracing():
            if (program := known()) is None:  # else another rank's thread was first
                program = Program(step, state, inputs, wanted, self.backend)
                shapes = lambda: f"inputs of shapes {[tuple(x.shape) for x in pytree.tensors_in(*inputs)]}"
                self.add((key, place()) if program.sends else key, program, shapes)
            return program

    def graph(self, step: Spec, state: TrainState, *inputs: object) -> torch.fx.GraphModule:
        """The graph of `step.vjp(state, *inputs)` by the params, for one microbatch."""
        need_traceable(step, state)
        parts, _ = counted(step.microbatches, state, here(tuple(inputs)))
        given = self._given(step, Carry(step, state).given(next(iter(parts))))
        return self._program(self._key("vjp", step, state, given, ()), step, state, given, []).joined()

    def lower(self, step: Spec, state: TrainState, *inputs: object) -> None:
        """Traces and compiles a call of the step, and runs nothing."""
        self.graph(step, state, *inputs)


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
