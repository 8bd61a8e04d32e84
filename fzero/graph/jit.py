"""The graphs of a step, one for each signature of each verb, and those of functions, kept from a first call on."""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, Unpack

import torch

from fzero.base import private, pytree
from fzero.base.context import during, in_differentiated, jitting, proves
from fzero.base.thread_state import without_values
from fzero.comm import backend, pieces
from fzero.engine.carry import Carry
from fzero.engine.outcome import Outcome, wanted_of
from fzero.engine.weighing import counted
from fzero.graph import of_torch, operators
from fzero.graph.errors import need_open, need_plain, need_streams, refusing
from fzero.graph.numbers import as_tensor, marked, number_of, written_out
from fzero.graph.program import Run, compiled, compiling, in_pieces, joined, leave_unused
from fzero.graph.regions import By, StepRegions, with_regions
from fzero.graph.run import Asked, GraphRun, Program, forward_only
from fzero.graph.signatures import (
    Flat,
    Identity,
    ambient_of,
    closed_over,
    is_state,
    meta_of,
    order_of,
    over_axes,
    value_of,
)
from fzero.graph.trace import Traced, result_of, trace
from fzero.state.beyond import here
from fzero.state.train_state import TrainState
from fzero.stores.memories import DEVICE
from fzero.stores.memories import name_of as memory_name
from fzero.table.counting import Mask
from fzero.table.handle import name_of
from fzero.table.spec import Spec

P = TypeVar("P")
Inputs = Sequence[object]
Key = tuple[object, ...]
MANY, KEPT = 10, 64  # traces that are said; programs that are kept


def place() -> object:
    """This rank, where there are others: its messages, and first runs, are its own."""
    return weakref.ref(world) if (world := backend.world()) is not None else None


class Programs(Generic[P]):
    """Programs by signatures.

    Attributes:
        traces: how many signatures were traced.
    """

    def __init__(self, backend: str, static: Collection[int], fallback: bool) -> None:
        self.backend, self.static, self.fallback = backend, tuple(static), fallback
        self.traces = 0
        self._plain = False  # after a trace that failed, where that may be
        self._programs: dict[object, P] = {}
        self._begun: dict[object, bool] = {}  # what had its first run, and whether it was traced then
        self._heard: dict[object, list[tuple[int, ...]]] = {}  # what ranks told each other there

    def called(
        self,
        name: str,
        first: object,
        own: Callable[[], Any],
        make: Callable[[], P],
        leaves: Callable[[Any, P], tuple[Sequence[object], Sequence[object]]],
        ranks: bool,
    ) -> tuple[Any, P | None]:
        """What a run without a graph returns, if it is the first one or nothing can be traced, and the program.

        Both return the same leaves, or the function is refused.

        The first run proves that the function is pure. On several ranks it is the first call of all, which all make at
        once, whatever shapes each is given: messages come in one order, and no rank may send what others do not.

        Args:
            first: what such a run is made for once.
            leaves: of such a run's result, and what those of a program are: dtypes, types of numbers, None of values.
            ranks: whether there are others, which run their graphs once this has had one.
        """
        out = None
        if first not in self._begun:
            with during(pieces.heard, self._heard):
                out = own()
            self._begun[first] = False
            if len(self._begun) > KEPT:
                del self._begun[next(iter(self._begun))]
        try:
            program = make()
        except Exception as error:
            if not self.fallback or (ranks and self._begun.get(first)):
                raise
            self._plain = True
            warnings.warn(f"jit: {name} runs without a graph: {error}", stacklevel=5)
            return own() if out is None else out, None
        if out is not None:
            found, kinds = leaves(out, program)
            if len(found) != len(kinds) or not all(map(_is, found, kinds)):
                del self._begun[first]
                raise ValueError(
                    f"jit: {name} returns other leaves in a graph than without. Let nothing but its arguments decide "
                    "what it returns, return a state in the place of a count of it, and make a number of Python whose "
                    "type it asks for a static argument (static_argnums=)."
                )
            self._begun[first] = True
        return out, program

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        with refusing(), during(pieces.heard, self._heard):
            yield

    def taken(self, inputs: Sequence[object], is_leaf: pytree.Test | None = None) -> list[object]:
        """Inputs with numbers of Python as tensors, but for those that are static."""
        for i in self.static:
            if i < len(inputs) and pytree.tensors_in(inputs[i]):
                raise ValueError(f"jit: got a tensor in input {i}, which is static; expected values, such as numbers.")
        own = enumerate(inputs)
        return [x if i in self.static else pytree.map_leaves(as_tensor, x, is_leaf) for i, x in own]

    def add(self, key: object, program: P, now: Callable[[], str]) -> P:
        """Keeps a program.

        Args:
            now: says for what it was traced.
        """
        self.traces += 1
        if self.traces == MANY:
            warnings.warn(
                f"jit: traced for the {MANY}th time, now for {now()}. Each set of shapes, dtypes and static values is "
                "traced and compiled anew. Pad batches to a few lengths, and give numbers that change as tensors.",
                stacklevel=4,
            )
        if len(self._programs) >= KEPT:
            del self._programs[next(iter(self._programs))]
        self._programs[key] = program
        return program

    def is_plain(self) -> bool:
        """Tells whether a call runs without a graph, which nothing that goes on or looks around it would see."""
        return self._plain or private.transforms() or in_differentiated() or private.dispatch_modes()


def _is(x: object, kind: object) -> bool:
    return x.dtype == kind if isinstance(x, torch.Tensor) else kind is None or type(x) is kind


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
        return out if program is None or out is not None else GraphRun(program, step, state, given, wanted, **asked)

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

        def leaves(out: Any, program: Program) -> tuple[list[object], list[object]]:
            found = pytree.flatten((out.outputs, out.aux) if isinstance(out, Outcome) else out)[0]
            result = pytree.flatten(program.split([x.meta["val"] for x in result_of(program.traced.forward)])[:2])[0]
            return found, [x.dtype if isinstance(x, torch.Tensor) else None for x in result]

        return *self.called(step.name, first, own, make, leaves, place() is not None), given

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
        program = self._program(self._key("vjp", step, state, given, ()), step, state, given, [])
        return joined(program.forward_graph, program.pullback_graph, program.traced)

    def lower(self, step: Spec, state: TrainState, *inputs: object) -> None:
        """Traces and compiles a call of the step, and runs nothing."""
        self.graph(step, state, *inputs)


def need_traceable(step: Spec, state: TrainState) -> None:
    """Refuses what no graph takes."""
    for row in step.table(state.layout).rows:
        memories = [memory for memory in (*row.memories, row.activations) if memory != DEVICE]
        found = [f"states or activations in {memory_name(memory)} (fz.offload)" for memory in memories]
        found += ["names to put on the host (fz.remat(offload=...))"] if row.names.offload else []
        found += ["fz.compile"] if row.compile else []
        for what in found:
            raise ValueError(f"jit: got leaf {row.path!r} with {what}, which graphs do not take. Leave it or jit out.")


# ---- of functions


class Made(NamedTuple):
    """The program of one signature: what runs, the form of its result, its graph, and what that calls."""

    run: Run
    result: Flat
    traced: Traced
    effects: operators.Effects


class Function(Programs[Made]):
    """A function of states and tensors that runs as one graph for each signature."""

    def __init__(self, fn: Callable[..., Any], backend: str, fallback: bool, static: Collection[int]) -> None:
        super().__init__(backend, static, fallback)
        self.fn = fn
        functools.update_wrapper(self, fn, updated=())

    def __reduce__(self) -> tuple[object, ...]:
        return Function, (self.fn, self.backend, self.fallback, self.static)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        if self.is_plain():
            return self.fn(*args, **kwargs)
        given, key = self._given(args, kwargs)
        if torch.is_grad_enabled() and any(x.requires_grad for x in given.tensors):
            return self.fn(*args, **kwargs)  # plain autograd goes through it
        here = place()
        first = key[1:] if here is None else (here, given.form[-1])
        make = lambda: self._programs.get(key) or self._add(key, given)
        leaves = lambda out, made: (pytree.ordered(out, is_leaf=is_state)[0], made.result.leaves)
        own = lambda: self.fn(*args, **kwargs)
        out, made = self.called(name_of(self.fn), first, own, make, leaves, here is not None)
        if made is None or out is not None:
            return out
        with torch.no_grad(), made.effects.running(given.axes, given.updates) as axes:
            out = made.result.made(made.run([x.detach() for x in given.tensors]), values=True)
        return over_axes(out, axes)

    def graph(self, *args: object, **kwargs: object) -> torch.fx.GraphModule:
        """The graph of a call with such arguments."""
        given, key = self._given(args, kwargs)
        return (self._programs.get(key) or self._add(key, given)).traced.forward

    def lower(self, *args: object, **kwargs: object) -> Function:
        """Traces and compiles a call with such arguments ahead of time, and runs nothing."""
        self.graph(*args, **kwargs)
        return self

    def _given(self, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[Flat, Key]:
        named = pytree.map_leaves(as_tensor, dict(kwargs), is_state)
        given = Flat((self.taken(args, is_state), named))
        metas = tuple(map(meta_of, given.tensors))
        return given, (metas, (given.form, place()), ambient_of("cpu"), closed_over(self.fn))

    def _add(self, key: Key, given: Flat) -> Made:
        results, grad = list[Flat](), torch.is_grad_enabled()

        def run(tensors: Sequence[torch.Tensor]) -> Any:
            args, kwargs = given.made(tensors, values=False)
            with torch.set_grad_enabled(grad):
                out = self.fn(*args, **kwargs)
            need_open(pytree.leaves(out))
            results[:] = [Flat(out)]
            return results[0].tensors, range(len(results[0].tensors)), ()

        def traced_here(inline: bool, by: By) -> tuple[Traced, StepRegions]:
            with without_values() as mode:
                own = [marked(mode.from_tensor(x.detach()), number_of(x)) for x in given.tensors]
                regions = StepRegions(mode, table, inline, effects := operators.Effects(given.axes), by)
                parts = during(jitting, regions), during(operators.tracing, regions), during(pieces.graph, effects)
                with during(proves, False), parts[0], parts[1], parts[2]:
                    return trace(run, own, (), table, level=True), regions

        table = of_torch.decompositions(self.backend)
        with self.tracing():
            traced, regions = with_regions(traced_here)
        leave_unused(traced.forward, regions.traced)
        every = [traced.forward, *[each for region in regions.traced for each in (region.forward, region.pullback)]]
        nodes = [node for module in every for node in module.graph.nodes]
        need_plain(nodes)
        need_streams(nodes)
        closed: list[Any] = [getattr(node.graph.owning_module, node.target) for node in nodes if node.op == "get_attr"]
        if torch.is_grad_enabled() and any(x.requires_grad for x in closed):
            raise ValueError(
                "jit: the function closes over a tensor that plain autograd differentiates, whose gradient a graph "
                "would not give. Give it as an input, or detach() it."
            )
        graph = in_pieces(traced.forward) if self.backend == "inductor" else traced.forward
        run_of = compiled(graph, compiling(regions.traced, self.backend))

        def changed() -> str:
            shapes = f"tensors of shapes {[tuple(x.shape) for x in given.tensors]}"
            parts = shapes, "states or values", "dtypes", "tensors that it closes over"
            last: Key = next(reversed(self._programs))  # type: ignore[assignment]
            other = [part for part, old, new in zip(parts, last, key, strict=True) if old != new]
            return f"other {' and '.join(other)} of {name_of(self.fn)}"

        return self.add(key, Made(run_of, results[0], traced, regions.effects), changed)
