"""The graphs of a step: one for each signature of each verb, kept from its first call on."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, Unpack

import torch

from fzero.base import private, pytree
from fzero.base.context import during, in_differentiated
from fzero.comm import backend, pieces
from fzero.engine.batch import seed_of
from fzero.engine.carry import Carry
from fzero.engine.outcome import wanted_of
from fzero.engine.weighing import counted
from fzero.graph.alike import closed_over
from fzero.graph.errors import tracing
from fzero.graph.opened import as_number, value_of
from fzero.graph.run import Asked, GraphRun, Program, forward_only, made
from fzero.graph.trace import ambient_of, meta_of
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


class Jit:
    """The programs of a step and of what other transforms make of it.

    Attributes:
        traces: how many signatures were traced.
    """

    def __init__(self, backend: str, static: Collection[int], fallback: bool) -> None:
        self.backend, self.static, self.fallback = backend, tuple(static), fallback
        self._plain = False  # after a trace that failed, where that may be
        self._programs: dict[object, Program] = {}
        self.traces = 0
        self._begun: set[object] = set()
        self._heard: dict[object, list[tuple[int, ...]]] = {}  # what ranks told each other in runs without a graph

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
        forms = tuple(
            meta_of(x) if isinstance(x, torch.Tensor) else value_of(x) for x in flat
        )
        own = forms, tuple(wanted), ambient_of(state.params.device.type), state.params.axis.ranks, closed_over(step.fn)
        return verb, step.fn, state.layout, _rows(step), spec, *own

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
        if self._plain or surrounded():
            return own()
        given = self.numbers(step, inputs)
        wanted = wanted_of(inputs, argnums)
        key = self._key("vjp", step, state, given, wanted)
        out = self._first(key, step, state, own)
        program = self._program(key, step, state, given, wanted, asked["seed"])
        if out is not None and program is not None:
            program.need_dtypes(out.meta)
        if out is not None or program is None:
            return out or own()
        return GraphRun(program, step, state, given, wanted, **asked)

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
        if self._plain or surrounded():
            return own()
        given = self.numbers(step, inputs)
        key = self._key("forward", step, state, given, ())
        out = self._first(key, step, state, own)
        program = self._program(key, step, state, given, None, seed)
        if out is not None or program is None:
            return out or own()
        return forward_only(program, step, state, given, seed, mask)

    def _first(self, key: tuple[object, ...], step: Spec, state: TrainState, own: Callable[[], Any]) -> Any:
        """What the first call under a signature returns; None in later ones.

        On several ranks it is the first call of a verb, which all make at once, whatever shapes each is given:
        messages come in one order.
        """
        key = key if place() is None else (*key[:4], state.params.axis.identity, place())
        if key in self._begun:
            return None
        need_traceable(step, state)
        with during(pieces.heard, self._heard):
            out = own()
        self._begun.add(key)
        return out

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
        known = self._known(key)
        if known is not None:
            return known
        try:
            with tracing(), during(pieces.heard, self._heard):
                known = self._known(key)
                if known is not None:  # another rank's thread was first
                    return known
                known = made(step, state, inputs, wanted, seed, self.backend)
                self._programs[(key, place()) if known.call.messages else key] = known
        except Exception as error:
            if not self.fallback:
                raise
            self._plain = True
            warnings.warn(f"jit: {step.name} runs without a graph: {error}", stacklevel=2)
            return None
        if len(self._programs) > KEPT:
            del self._programs[next(iter(self._programs))]
        self.traces += 1
        self._tell(inputs)
        return known

    def _known(self, key: object) -> Program | None:
        return self._programs.get(key) or self._programs.get((key, place()))

    def _tell(self, inputs: Sequence[object]) -> None:
        """Says once that a step was traced for the tenth time."""
        if self.traces == MANY:
            shapes = [tuple(x.shape) for x in pytree.leaves(tuple(inputs)) if isinstance(x, torch.Tensor)]
            warn_of_many(f"inputs of shapes {shapes}")

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


MANY, KEPT = 10, 64  # traces that are said; those that are kept


def _rows(step: Spec) -> tuple[object, ...]:
    return step.rules, step.has_aux, step.carries, step.microbatches.means


def place() -> object:
    """This rank, where there are others: its messages, and first runs, are its own."""
    return weakref.ref(world) if (world := backend.world()) is not None else None


def warn_of_many(now: str) -> None:
    """Says that something was traced so many times.

    Args:
        now: for what, the last time.
    """
    warnings.warn(
        f"jit: traced for the {MANY}th time, now for {now}. Each set of shapes, dtypes and static values is traced and "
        "compiled anew. Pad batches to a few lengths, and give numbers that change as tensors.",
        stacklevel=3,
    )


def surrounded() -> bool:
    """Tells whether something goes on through operators here, or looks at them, which would not see a graph."""
    return private.transforms() or in_differentiated() or private.dispatch_modes()


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
