"""One run of a traced step: its forward is one program, its pullback another."""

from __future__ import annotations

import collections
import functools
import itertools
import threading
from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

import torch

from fzero.base import private, pytree
from fzero.base.random import Seeds, seeded
from fzero.comm.divergence import failing
from fzero.engine.function import traversal_of
from fzero.engine.outcome import Outcome, is_transformed
from fzero.engine.run import Run, guarded
from fzero.engine.traversal import Traversal
from fzero.graph import of_torch, program
from fzero.graph.program import compiled, compiling, in_pieces, scheduled
from fzero.graph.regions import with_regions
from fzero.graph.unit_regions import FunctionGraphs, UnitRegions
from fzero.state.train_state import TrainState
from fzero.stores.away import Buffer
from fzero.table.counting import Mask
from fzero.table.layout import Key
from fzero.table.spec import Spec


class Program:
    """A step's function, traced and compiled for one signature.

    Args:
        wanted: the places of the inputs that are differentiated; None for a forward alone.

    Attributes:
        traced: its graphs; `regions`, those of each unit's call.
        returned: the form of its outputs, and that of its aux and of what it collects.
        keys: the groups, by their numbers in the graph.
        seeds: how many a run draws.
        uses: how often each group's gradient is added to.
        sends: whether it has messages of its own.
    """

    def __init__(
        self,
        step: Spec,
        state: TrainState,
        inputs: Sequence[object],
        wanted: Sequence[int] | None,
        backend: str,
    ) -> None:
        traversal = traversal_of(step, state, (), derived=wanted is not None, runs=False)[0]
        table, axis = of_torch.decompositions(backend), state.params.axis

        def traced_here(inline: bool, _: object) -> tuple[UnitRegions, FunctionGraphs]:
            own = UnitRegions(traversal, axis, table, inline, wanted is not None)
            return own, own.trace(step, state.params.structure, inputs, wanted or ())

        regions, (self.traced, *self.returned) = with_regions(traced_here)
        self.regions = regions.traced
        self.keys, self.seeds, self.sends = regions.keys, regions.drawn, bool(regions.effects)
        groups: list[int | None] = [*[None] * len(wanted or ()), *[group for group, _ in regions.fulls]]
        own = compiling(regions.traced, backend, regions.seeds)
        self.forward_graph = scheduled(self.traced.forward)
        self.pullback_graph = scheduled(self.traced.pullback, groups)
        if backend == "inductor":
            self.forward_graph = in_pieces(self.forward_graph)
            self.pullback_graph = in_pieces(self.pullback_graph)
        self.forward = compiled(self.forward_graph, own, keeps=self.pullback_graph)
        self.pullback = compiled(self.pullback_graph, own)
        uses = [g for g, reached in zip(groups, self.traced.reached, strict=True) if g is not None and reached]
        self.uses = collections.Counter([self.keys[group] for group in uses])

    def split(self, out: Sequence[torch.Tensor]) -> tuple[object, object, dict[str, list[torch.Tensor]]]:
        """The outputs, the aux, and what is collected by name."""
        outputs, others = self.returned
        rest = iter(out)
        real, still = ([*itertools.islice(rest, len(places))] for places in outputs.places)
        return outputs.join(real, still), *others.join(rest)


class Calls:
    """What a program's operators of the graph are, in one run of a step. A program of torch's operators needs none."""

    def __init__(self, traversal: Traversal, keys: Sequence[Key], seeds: Sequence[int]) -> None:
        self.traversal, self._schedule, self.keys, self.seeds = traversal, traversal.schedule, keys, seeds

    def take(self, group: int) -> torch.Tensor:
        """The full buffer of a group."""
        return self._schedule.take(self.keys[group])[0]

    def ahead(self, groups: Sequence[int]) -> None:
        self._schedule.gather_ahead(tuple([self.keys[group] for group in groups]))

    def keep(self, group: int, full: torch.Tensor) -> None:
        """Holds on to one that the pullback begins with."""
        key = self.keys[group]
        if self._schedule.keeps and self.traversal.uses[key].transient:
            self._schedule.keep(key, full)

    def reduce(self, x: torch.Tensor, group: int) -> None:
        key, traversal = self.keys[group], self.traversal
        self._schedule.make_room(key)
        x = x.to(traversal.uses[key].wire)
        assert traversal.delivery is not None
        traversal.delivery.add(key, x.zero_() if traversal.mask.masked else x)

    def drawn(self, run: program.Run, xs: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
        """What a program that draws random numbers makes of tensors, by the number of its seed."""
        with seeded(self.seeds[seed]):
            return run(xs)


class Asked(TypedDict):
    """What a run is asked for, as in `Run`."""

    seed: tuple[int, ...]
    scale: float
    unreduced: bool
    alone: bool
    partial: bool
    mask: Mask


class GraphRun(Run):
    """A run whose forward and pullback are programs.

    Args:
        wanted: the places of the flat inputs that are differentiated.
    """

    def __init__(
        self,
        program: Program,
        step: Spec,
        state: TrainState,
        inputs: Sequence[object],
        wanted: list[int],
        **asked: Unpack[Asked],
    ) -> None:
        Outcome.__init__(self, state, inputs, (), asked["scale"], asked["mask"])
        self.wanted = wanted
        self.partial = asked["partial"]
        self.unreduced, self._pulling = {}, threading.RLock()
        self._ends = self._rest = self._used = None
        self.outer = self._leads_on = False
        self._overwrites = True  # no function of the user's runs in the pullback
        flat, _ = pytree.flatten(tuple(inputs))
        traversal, *_ = traversal_of(step, state, asked["seed"], asked["unreduced"], mask=self.mask)
        traversal.schedule.keeps = asked["alone"]
        self.traversal = traversal
        own = [x.detach() for x in flat if isinstance(x, torch.Tensor)]
        calls, out = _forward(program, traversal, asked["seed"], own)
        traversal.schedule.used.update(program.uses)
        held = [out[i] if i >= 0 else own[-1 - i] for i in program.traced.saved]
        metas = [(flat[place].shape, flat[place].dtype, flat[place].device) for place in wanted]
        self._pull = functools.partial(_pulled, program, calls, held, metas)
        self.returned = program.returned[0]
        self.outputs, self.aux, self.collected = program.split(out)
        real = [out[i] for i in program.traced.real]
        self.meta = [(tuple(o.shape), o.dtype, o.device) for o in real]
        self._guarded = guarded([*[x for x in flat if isinstance(x, torch.Tensor)], *real])

    def pull(
        self, cotangent: object, retain_graph: bool = False, create_graph: bool = False, *args: Any, **kwargs: Any
    ) -> tuple[dict[Key, Buffer], list[torch.Tensor | None]]:
        if create_graph or is_transformed(cotangent):
            raise ValueError(
                "pullback: got create_graph=True, or a transform of torch.func around a pullback of fz.jit, which is a "
                "graph without a derivative. Put the transform around step.vjp, too, or leave jit out."
            )
        return super().pull(cotangent, retain_graph, False, *args, **kwargs)

    def note_use(self, used: set[int]) -> None:
        assert self.traversal is not None
        used.update(range(len(self.traversal.layout.rows)))

    note_reached = note_use


def _pulled(
    program: Program,
    calls: Calls,
    held: list[torch.Tensor],
    metas: Sequence[tuple[torch.Size, torch.dtype, torch.device]],
    cotangents: Sequence[torch.Tensor],
    retain_graph: bool,
    create_graph: bool,
) -> tuple[dict[Key, torch.Tensor], list[torch.Tensor]]:
    """No cotangents of params, which are delivered as they come, and those of inputs."""
    given = [*held, *[c.contiguous() for c in cotangents]]
    if not retain_graph:
        held.clear()
    with private.without_autocast():
        found = program.pullback(given, calls)
    made = zip(found, metas, strict=False)
    return {}, [torch.zeros(own[0], dtype=own[1], device=own[2]) if x is None else x for x, own in made]


def forward_only(
    program: Program, step: Spec, state: TrainState, inputs: Sequence[object], seed: tuple[int, ...], mask: Mask | None
) -> tuple[object, object]:
    """Outputs and aux of a run that nothing pulls back."""
    traversal, *_ = traversal_of(step, state, seed, derived=False, mask=mask)
    given = [x.detach() for x in pytree.flatten(tuple(inputs))[0] if isinstance(x, torch.Tensor)]
    return program.split(_forward(program, traversal, seed, given)[1])[:2]


def _forward(
    program: Program, traversal: Traversal, seed: tuple[int, ...], given: Sequence[torch.Tensor]
) -> tuple[Calls, list[torch.Tensor]]:
    """The messages and the outputs of a forward."""
    seeds = Seeds(*seed)
    calls = Calls(traversal, program.keys, [seeds.next() for _ in range(program.seeds)])
    drawing = seeded(calls.seeds[0] if program.traced.draws[0] else None)
    with failing("a forward"), torch.no_grad(), traversal.schedule.forward(), drawing:
        return calls, program.forward([*given], calls)
