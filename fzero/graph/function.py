"""A function of states and tensors as one graph: it is traced through the steps that it calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fzero.base import pytree
from fzero.base.context import during, jitting, proves
from fzero.comm import pieces
from fzero.graph import of_torch, operators, program
from fzero.graph.errors import need_plain, need_streams
from fzero.graph.jit import Programs, place
from fzero.graph.numbers import as_tensor, marked, number_of
from fzero.graph.operators import Effects
from fzero.graph.regions import By, StepRegions, with_regions
from fzero.graph.signatures import Flat, ambient_of, closed_over, is_state, meta_of, over_axes
from fzero.graph.trace import Traced, trace
from fzero.table.handle import name_of

Key = tuple[object, ...]


class Made(NamedTuple):
    """The program of one signature: what runs, the form of its result, its graph, and what that calls."""

    run: program.Run
    result: Flat
    traced: Traced
    effects: Effects


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
        own, ranks = lambda: self.fn(*args, **kwargs), here is not None and bool(self.traces)
        out, made = self.called(name_of(self.fn), first, own, make, leaves, ranks)
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
                results[:] = [Flat(self.fn(*args, **kwargs))]
            return results[0].tensors, range(len(results[0].tensors)), ()

        def traced_here(inline: bool, by: By) -> tuple[Traced, StepRegions]:
            with of_torch.fake_mode() as mode:
                own = [marked(mode.from_tensor(x.detach()), number_of(x)) for x in given.tensors]
                regions = StepRegions(mode, table, inline, effects := Effects(given.axes), by)
                parts = during(jitting, regions), during(operators.tracing, regions), during(pieces.graph, effects)
                with during(proves, False), parts[0], parts[1], parts[2]:
                    return trace(run, own, (), table, level=True), regions

        table = of_torch.decompositions(self.backend)
        with self.tracing():
            traced, regions = with_regions(traced_here)
        program.leave_unused(traced.forward, regions.traced)
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
        graph = program.in_pieces(traced.forward) if self.backend == "inductor" else traced.forward
        program_of = program.compiled(graph, program.compiling(regions.traced, self.backend))

        def changed() -> str:
            shapes = f"tensors of shapes {[tuple(x.shape) for x in given.tensors]}"
            parts = shapes, "states or values", "dtypes", "tensors that it closes over"
            last: Key = next(reversed(self._programs))  # type: ignore[assignment]
            other = [part for part, old, new in zip(parts, last, key, strict=True) if old != new]
            return f"other {' and '.join(other)} of {name_of(self.fn)}"

        return self.add(key, Made(program_of, results[0], traced, regions.effects), changed)
