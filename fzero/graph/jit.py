"""The graphs of a step: one for each signature of each verb, kept from its first call on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from fzero.base import private, pytree
from fzero.base.context import in_differentiated
from fzero.engine.carry import Carry
from fzero.engine.outcome import wanted_of
from fzero.engine.run import Run
from fzero.engine.weighing import counted
from fzero.graph.errors import naming, one_at_a_time
from fzero.graph.run import GraphRun, Program, forward_only, made
from fzero.state.beyond import here
from fzero.state.train_state import TrainState
from fzero.stores.put import DEVICE, name_of
from fzero.table.counting import Mask
from fzero.table.spec import Spec


class Jit:
    """The programs of a step and of what other transforms make of it.

    Attributes:
        traces: how many signatures were traced.
    """

    def __init__(self, backend: str, static: Collection[int], fallback: bool) -> None:
        self.backend, self.static, self.fallback = backend, tuple(static), fallback
        self._plain = False  # after a trace that failed, where that may be
        self._programs: dict[object, Program] = {}
        self._begun: set[object] = set()

    def __reduce__(self) -> tuple[object, ...]:
        return Jit, (self.backend, self.static, self.fallback)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Jit) and self.__reduce__() == other.__reduce__()

    def __hash__(self) -> int:
        return hash(self.__reduce__())

    def __repr__(self) -> str:
        return self.backend

    @property
    def traces(self) -> int:
        return len(self._programs)

    def _key(self, verb: str, step: Spec, state: TrainState, inputs: Sequence[Any], wanted: Sequence[int]) -> object:
        flat, spec = pytree.flatten(tuple(inputs))
        forms = tuple(
            (tuple(x.shape), x.stride(), x.dtype, x.device) if isinstance(x, torch.Tensor) else (type(x), x)
            for x in flat
        )
        device = state.params.device.type
        ambient = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), torch.get_default_dtype()
        return verb, step.fn, state.layout, _rows(step), spec, forms, tuple(wanted), ambient, state.params.axis.ranks

    def numbers(self, inputs: Sequence[object]) -> tuple[object, ...]:
        """Inputs with Python's numbers as tensors, but for static ones."""

        def traced(x: Any) -> Any:
            if type(x) is float:
                return torch.tensor(x, dtype=torch.float64, device="cpu")
            return torch.tensor(x, device="cpu") if type(x) is int else x

        return tuple(
            x if i in self.static else pytree.map_leaves(traced, x) for i, x in enumerate(inputs)
        )

    def run(
        self,
        step: Spec,
        state: TrainState,
        inputs: Sequence[object],
        own: Callable[[], Any],
        *,
        argnums: Collection[int] | None,
        seed: tuple[int, ...],
        scale: float,
        unreduced: bool,
        alone: bool,
        partial: bool,
        mask: Mask,
        again: Callable[[], Run],
    ) -> Any:
        """A run of the function. A step's first one is one without a graph, which proves that the function is pure."""
        if self._plain or _surrounded():
            return own()
        given = self.numbers(inputs)
        wanted = wanted_of(given, argnums)
        out = self._first("vjp", step, state, own)
        program = self._program("vjp", step, state, given, wanted, seed)
        if out is not None or program is None:
            return out or own()
        return GraphRun(
            program, step, state, given, argnums, seed, scale, unreduced, alone, partial, mask, again
        )

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
        if self._plain or _surrounded():
            return own()
        given = self.numbers(inputs)
        out = self._first("forward", step, state, own)
        program = self._program("forward", step, state, given, None, seed)
        if out is not None or program is None:
            return out or own()
        return forward_only(program, step, state, given, seed, mask)

    def _first(self, verb: str, step: Spec, state: TrainState, own: Callable[[], Any]) -> Any:
        """What a verb's first call returns; None in later ones.

        It is the first one on all ranks at once, also where later ones are given other shapes: messages come in one
        order.
        """
        axis = state.params.axis
        key = verb, step.fn, state.layout, _rows(step), axis.identity, axis.rank
        if key in self._begun:
            return None
        need_traceable(step, state)
        out = own()
        self._begun.add(key)
        return out

    def _program(
        self,
        verb: str,
        step: Spec,
        state: TrainState,
        inputs: Sequence[object],
        wanted: Sequence[int] | None,
        seed: tuple[int, ...],
    ) -> Program | None:
        """The program of a call; None where it cannot be traced, and need not."""
        key = self._key(verb, step, state, inputs, wanted or ())
        known = self._programs.get(key)
        if known is not None:
            return known
        try:
            with one_at_a_time, naming():
                known = self._programs.get(key) or made(step, state, inputs, wanted, seed, self.backend)
        except Exception as error:
            if not self.fallback:
                raise
            self._plain = True
            warnings.warn(f"jit: {step.name} runs without a graph: {error}", stacklevel=2)
            return None
        self._programs[key] = known
        self._tell(inputs)
        return known

    def _tell(self, inputs: Sequence[object]) -> None:
        """Says once that a step was traced for the tenth time."""
        if len(self._programs) == MANY:
            shapes = [tuple(x.shape) for x in pytree.leaves(tuple(inputs)) if isinstance(x, torch.Tensor)]
            warnings.warn(
                f"jit: traced for the {MANY}th time, now for inputs of shapes {shapes}. Each set of shapes, dtypes and "
                "static values is traced and compiled anew. Pad batches to a few lengths, and give numbers that change "
                "as tensors.",
                stacklevel=2,
            )

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
        given = self.numbers(Carry(step, state).given(next(iter(parts))))
        seed = (state.seed, state.step, state.params.axis.data_rank, 0, 0)
        return self._program("vjp", step, state, given, wanted_of(given, ()), seed)


MANY = 10


def _rows(step: Spec) -> tuple[object, ...]:
    return step.rules, step.has_aux, step.carries, step.microbatches.means


def _surrounded() -> bool:
    return private.transforms() or in_differentiated() or private.dispatch_modes()


def need_traceable(step: Spec, state: TrainState) -> None:
    """Refuses what no graph takes."""
    for row in step.table(state.layout).rows:
        memories = [memory for memory in (*row.memories, row.activations) if memory != DEVICE]
        what = (
            f"states or activations in {name_of(memories[0])} (fz.offload)"
            if memories
            else "names to keep (fz.remat(save=...))"
            if row.names.all
            else "fz.compile"
            if row.compile
            else ""
        )
        if what:
            raise ValueError(f"jit: got leaf {row.path!r} with {what}, which graphs do not take. Leave it or jit out.")
    if state.params.axis.tensor is not None or state.params.axis.further:
        raise ValueError("jit: got a step over a tensor or sequence axis, which graphs do not take yet. Leave jit out.")
