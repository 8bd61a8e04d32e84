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
from fzero.graph.alike import ambient_of, closed_over, meta_of
from fzero.graph.errors import one_at_a_time, tracing
from fzero.graph.numbers import as_number
from fzero.graph.opened import value_of
from fzero.graph.programs import Programs, place
from fzero.graph.run import Asked, GraphRun, Program, forward_only, made
from fzero.state.beyond import here
from fzero.state.train_state import TrainState
from fzero.stores.put import DEVICE, name_of
from fzero.table.counting import Mask
from fzero.table.spec import Spec


def as_tensor(x: Any) -> Any:
    """A number of Python as a tensor; a tensor whose values are written out."""
    if isinstance(x, torch.Tensor):
        return x.resolve_conj().resolve_neg() if x.is_conj() or x.is_neg() else x
    return as_number(x) if type(x) in (int, float) else x


class Jit(Programs[Program]):
    """The programs of a step and of what other transforms make of it."""

    def __init__(self, backend: str, static: Collection[int], fallback: bool) -> None:
        super().__init__(backend, static, fallback)
        self._begun: set[object] = set()

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

    def numbers(self, step: Spec, inputs: Sequence[object]) -> tuple[object, ...]:
        """Inputs with Python's numbers as tensors, but for static ones and what is carried."""
        first = int(step.carries)
        still = {*range(first), *[i + first for i in self.static]}
        return tuple(x if i in still else pytree.map_leaves(as_tensor, x) for i, x in enumerate(inputs))

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
        if self.is_plain():
            return own()
        given, wanted = self.numbers(step, inputs), wanted_of(inputs, argnums)
        out, program = self._called("vjp", step, state, given, wanted, asked["seed"], own)
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
        inputs: Sequence[object],
        own: Callable[[], Any],
        *,
        seed: tuple[int, ...],
        mask: Mask | None,
    ) -> tuple[object, object]:
        """Outputs and aux."""
        if self.is_plain():
            return own()
        given = self.numbers(step, inputs)
        out, program = self._called("forward", step, state, given, None, seed, own)
        if program is None:
            return out
        return forward_only(program, step, state, given, seed, mask) if out is None else out

    def _called(
        self,
        verb: str,
        step: Spec,
        state: TrainState,
        given: Sequence[object],
        wanted: Sequence[int] | None,
        seed: tuple[int, ...],
        own: Callable[[], Any],
    ) -> tuple[Any, Program | None]:
        """What a run without a graph returns, which the first one under a signature is; and the program of later ones.

        On several ranks it is the first call of a verb, which all make at once, whatever shapes each is given:
        messages come in one order.
        """
        key = self._key(verb, step, state, given, wanted or ())
        out: Any = None
        first = key if place() is None else (*key[:4], state.params.axis.identity, place())
        if first not in self._begun:
            need_traceable(step, state)
            with during(pieces.heard, self._heard):
                out = own()
            self._begun.add(first)
        program = self._program(key, step, state, given, wanted, seed)
        return own() if out is None and program is None else out, program

    def _program(
        self,
        key: object,
        step: Spec,
        state: TrainState,
        inputs: Sequence[object],
        wanted: Sequence[int] | None,
        seed: tuple[int, ...],
    ) -> Program | None:
        """The program of a call; None where it cannot be traced, and need not."""

        def make() -> Program:
            with one_at_a_time:
                if (known := self._known(key)) is not None:  # another rank's thread was first
                    return known
                with tracing(), during(pieces.heard, self._heard):
                    program = made(step, state, inputs, wanted, seed, self.backend)
                shapes = lambda: [tuple(x.shape) for x in pytree.leaves(tuple(inputs)) if isinstance(x, torch.Tensor)]
                own = (key, place()) if program.call.messages else key
                return self.add(own, program, lambda: f"inputs of shapes {shapes()}")

        return self._known(key) or self.or_plain(step.name, make)

    def _known(self, key: object) -> Program | None:
        return self._programs.get(key) or self._programs.get((key, place()))

    def graph(self, step: Spec, state: TrainState, *inputs: object) -> torch.fx.GraphModule:
        """The graph of `step.vjp(state, *inputs)` by the params, for one microbatch."""
        program = self._ahead(step, state, inputs)
        if program is None:
            raise ValueError("graph: got a call that cannot be traced, which fallback=True runs without a graph.")
        return program.joined()

    def lower(self, step: Spec, state: TrainState, *inputs: object) -> None:
        """Traces and compiles a call of the step, and runs nothing."""
        self._ahead(step, state, inputs)

    def _ahead(self, step: Spec, state: TrainState, inputs: Sequence[object]) -> Program | None:
        need_traceable(step, state)
        parts, _ = counted(step.microbatches, state, here(tuple(inputs)))
        given = self.numbers(step, Carry(step, state).given(next(iter(parts))))
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
