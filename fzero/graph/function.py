"""A function of states and tensors as one graph: it is traced through the steps that it calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fzero.base.context import during, jitting, proves
from fzero.comm import pieces
from fzero.graph import of_torch, operators, passes, program
from fzero.graph.alike import ambient_of, closed_over, meta_of
from fzero.graph.bodies import Bodies
from fzero.graph.errors import need_plain, tracing
from fzero.graph.hosts import Hosts
from fzero.graph.nodes import draws
from fzero.graph.numbers import marked, number_of
from fzero.graph.opened import Opened, kinds_of, over_axes, value_of
from fzero.graph.programs import KEPT, Programs, place
from fzero.graph.regions import Inline
from fzero.graph.run import compiled_call
from fzero.graph.trace import Traced, trace
from fzero.table.handle import name_of

Key = tuple[object, ...]


class Made(NamedTuple):
    """The program of one signature: what runs, the form of its result, its graph, and what that calls."""

    run: program.Run
    result: Opened
    traced: Traced
    hosts: Hosts


class Function(Programs[Made]):
    """A function of states and tensors that runs as one graph for each signature."""

    def __init__(self, fn: Callable[..., Any], backend: str, fallback: bool, static: Collection[int]) -> None:
        super().__init__(backend, static, fallback)
        self.fn = fn
        self._kinds: dict[Key, dict[Key, list[type]]] = {}  # of results without a graph, by their form in one
        functools.update_wrapper(self, fn, updated=())

    def __reduce__(self) -> tuple[object, ...]:
        return Function, (self.fn, self.backend, self.fallback, self.static)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        if self.is_plain():
            return self.fn(*args, **kwargs)
        given, key = self._given(args, kwargs)
        if torch.is_grad_enabled() and any(x.requires_grad for x in given.tensors):
            return self.fn(*args, **kwargs)  # plain autograd goes through it
        # each signature runs without a graph first, whatever its shapes; on several ranks only the first call of all
        # does, which all make at once: no rank may send what others do not
        here = place()
        begun = key[1:] if here is None else (here, given.form[-1])
        kinds = self._kinds.get(begun, {})
        made = self._program(key, given) if kinds else None
        if made is None or not (here or made.result.leaves in kinds):
            with during(pieces.heard, self._heard):
                out = self.fn(*args, **kwargs)
            made = self._program(key, given)
            kinds = self._kinds.setdefault(begun, {})
            types = kinds_of(out)
            if len(self._kinds) > KEPT:
                del self._kinds[next(iter(self._kinds))]
            if made is not None and len(made.result.leaves) != len(types):
                raise ValueError(
                    f"jit: {name_of(self.fn)} returns {len(made.result.leaves)} leaves in a graph, and {len(types)} "
                    "without; expected as many. Let nothing but its arguments decide what it returns."
                )
            kinds[made.result.leaves if made else ()] = types
            return out
        axes = made.hosts.axes_of_run(given.axes)
        with torch.no_grad(), made.hosts.running(axes, given.updates):
            out = made.run([x.detach() for x in given.tensors])
        out = made.result.made(out, values=True, kinds=kinds.get(made.result.leaves, ()))
        return over_axes(out, {old.identity: axis for old, axis in zip(made.hosts.axes, axes, strict=True)})

    def _program(self, key: Key, given: Opened) -> Made | None:
        """The program of a call; None where it cannot be traced, and need not."""
        if self._plain:
            return None
        others = place() is not None and bool(self.traces)
        return self._programs.get(key) or self.or_plain(name_of(self.fn), lambda: self._add(key, given), others)

    def graph(self, *args: object, **kwargs: object) -> torch.fx.GraphModule:
        """The graph of a call with such arguments."""
        return self._ahead(args, kwargs).traced.forward

    def lower(self, *args: object, **kwargs: object) -> Function:
        """Traces and compiles a call with such arguments ahead of time, and runs nothing."""
        self._ahead(args, kwargs)
        return self

    def _ahead(self, args: Sequence[object], kwargs: Mapping[str, object]) -> Made:
        given, key = self._given(args, kwargs)
        return self._programs.get(key) or self._add(key, given)

    def _given(self, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[Opened, Key]:
        fixed = {i: args[i] for i in self.static if i < len(args)}
        rest = [None if i in fixed else x for i, x in enumerate(args)]
        given = Opened((rest, dict(kwargs)), numbers=True)
        given.fixed = fixed  # type: ignore[attr-defined]
        metas = tuple(map(meta_of, given.tensors))
        own = tuple((i, value_of(x)) for i, x in fixed.items())
        return given, (metas, (given.form, place()), own, ambient_of("cpu"), closed_over(self.fn))

    def _add(self, key: Key, given: Opened) -> Made:
        results: list[Opened] = []

        def run(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            rest, kwargs = given.made(tensors, values=False)
            args = [given.fixed.get(i, x) for i, x in enumerate(rest)]  # type: ignore[attr-defined]
            results[:] = [Opened(self.fn(*args, **kwargs), numbers=False)]
            return tuple(results[0].tensors)

        table = of_torch.decompositions(self.backend)
        for inline in (False, True):
            with tracing(), during(pieces.heard, self._heard), (mode := of_torch.fake_mode()):
                own = [marked(mode.from_tensor(x.detach()), number_of(x)) for x in given.tensors]
                bodies = Bodies(mode, table, inline, hosts := Hosts(given.axes))
                parts = during(jitting, bodies), during(operators.tracing, bodies), during(pieces.graph, hosts)
                with during(proves, False), parts[0], parts[1], parts[2]:
                    try:
                        traced = trace(run, own, (), table, level=True)
                    except Inline:
                        continue
            break
        passes.of_use(traced.forward, bodies.regions, bodies.silent)
        every = [traced.forward, *[each for region in bodies.regions for each in (region.forward, region.pullback)]]
        for module in every:
            need_plain(module.graph.nodes)
        drawing = next((node for module in every for node in module.graph.nodes if draws(node)), None)
        if drawing is not None:
            raise ValueError(
                f"jit: the function draws random numbers ({drawing.target}) outside of steps, from torch's default "
                "generator, which a graph would leave as it is. Give the noise as an input, or draw in a step's "
                "function, whose seed is the state's."
            )
        program_of = compiled_call(traced, bodies.regions, self.backend)
        if torch.is_grad_enabled() and any(x.requires_grad for x in traced.constants):
            raise ValueError(
                "jit: the function closes over a tensor that plain autograd differentiates, whose gradient a graph "
                "would not give. Give it as an input, or detach() it."
            )

        def changed() -> str:
            shapes = f"tensors of shapes {[tuple(x.shape) for x in given.tensors]}"
            parts = shapes, "states or values", "static arguments", "dtypes", "tensors that it closes over"
            last: Key = next(reversed(self._programs))  # type: ignore[assignment]
            other = [part for part, old, new in zip(parts, last, key, strict=True) if old != new]
            return f"other {' and '.join(other)} of {name_of(self.fn)}"

        return self.add(key, Made(program_of, results[0], traced, hosts), changed)
