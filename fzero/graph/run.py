"""One run of a traced step: its forward is one program, its pullback another."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict, Unpack

import torch

from fzero.base import private, pytree
from fzero.base.random import Seeds, seeded
from fzero.comm.divergence import failing
from fzero.engine.delivery import Delivery
from fzero.engine.function import traversal_of
from fzero.engine.outcome import Outcome, is_transformed, no_first_half
from fzero.engine.run import Run, delivery_of, guarded, need_unwritten
from fzero.engine.traversal import Traversal
from fzero.graph import of_torch, program
from fzero.graph.nodes import result_of
from fzero.graph.program import compiled, compiling, in_pieces, joined, scheduled
from fzero.graph.regions import traced as regions_of
from fzero.graph.unit_regions import UnitRegions
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
        returned: the forms of its outputs and aux; `collected`, how many values it collects, by name.
        keys: the groups, by their numbers in the graph.
        seeds: how many a run draws.
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

        def traced_here(inline: bool) -> UnitRegions:
            regions = UnitRegions(traversal, axis, table, inline, wanted is not None)
            own = regions.trace(step, state.params.structure, inputs, wanted or ())
            self.traced, self.returned, self.collected = own
            return regions

        regions = regions_of(traced_here)
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
        self.uses = [g for g, reached in zip(groups, self.traced.reached, strict=True) if g is not None and reached]

    def split(self, out: Sequence[torch.Tensor]) -> tuple[object, object, dict[str, list[torch.Tensor]]]:
        """The outputs, the aux, and what is collected by name."""
        outputs, others = self.returned
        rest = iter(out)
        real, still, aux = ([*itertools.islice(rest, len(places))] for places in (*outputs.places, *others.places))
        collected = {name: [*itertools.islice(rest, count)] for name, count in self.collected.items()}
        return outputs.join(real, still), others.join(aux), collected

    def need_dtypes(self, meta: Sequence[tuple[object, torch.dtype, object]]) -> None:
        """Refuses outputs of other dtypes than a run without a graph has."""
        outs = result_of(self.traced.forward)
        for i, (_, dtype, _) in zip(self.traced.real, meta, strict=True):
            if (got := outs[i].meta["val"].dtype) != dtype:
                raise ValueError(
                    f"jit: output {i} has {got} in the graph, and {dtype} without. A number of Python among the inputs "
                    "is a 0-d tensor there: where the function asks for its type, make it a static argument "
                    "(static_argnums=)."
                )

    def joined(self) -> torch.fx.GraphModule:
        """The forward and the pullback as one graph: inputs and cotangents in, outputs and input cotangents out."""
        return joined(self.forward_graph, self.pullback_graph, self.traced)


class Calls:
    """What a program's operators of the graph are, in one run of a step. A program of torch's operators needs none."""

    def __init__(self, traversal: Traversal, keys: Sequence[Key], seeds: Sequence[int]) -> None:
        self._schedule, self._keys, self.seeds = traversal.schedule, keys, seeds
        self.delivery: Delivery | None = None
        self.masked = False
        self._traversal = traversal

    def take(self, group: int) -> torch.Tensor:
        """The full buffer of a group."""
        return self._schedule.take(self._keys[group])[0]

    def ahead(self, groups: Sequence[int]) -> None:
        self._schedule.gather_ahead(tuple([self._keys[group] for group in groups]))

    def keep(self, group: int, full: torch.Tensor) -> None:
        """Holds on to one that the pullback begins with."""
        key = self._keys[group]
        if self._schedule.keeps and self._traversal.uses[key].transient:
            self._schedule.keep(key, full)

    def reduce(self, x: torch.Tensor, group: int) -> None:
        key = self._keys[group]
        use = self._traversal.uses[key]
        self._schedule.make_room(key)
        x = x.to(use.wire)
        assert self.delivery is not None
        self.delivery.add(key, x.zero_() if self.masked else x)

    def drawn(self, run: program.Run, xs: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
        """What a program that draws random numbers makes of tensors, by the number of its seed."""
        with seeded(self.seeds[seed]):
            return run(xs)


class Asked(TypedDict):
    """What a run is asked for, as in `Run`; `again` makes one of the same."""

    seed: tuple[int, ...]
    scale: float
    unreduced: bool
    alone: bool
    partial: bool
    mask: Mask
    again: Callable[[], Run]


class GraphRun(Outcome):
    """A forward by a program. `outputs`, `aux`, and the pullbacks of `Run`.

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
        mask, seed = asked["mask"], asked["seed"]
        super().__init__(state, inputs, (), asked["scale"], mask)
        self.wanted = wanted
        self._program, self._partial, self._again = program, asked["partial"], asked["again"]
        self.unreduced: dict[Key, torch.Tensor] = {}  # as of `Run`
        self._pulling = threading.RLock()
        flat, _ = pytree.flatten(tuple(inputs))
        traced = program.traced
        traversal, *_ = traversal_of(step, state, seed, asked["unreduced"], mask=mask)
        traversal.schedule.keeps = asked["alone"]
        self._traversal: Traversal | None = traversal
        own = [x.detach() for x in flat if isinstance(x, torch.Tensor)]
        calls, out = _forward(program, traversal, seed, own)
        self._calls: Calls | None = calls
        self._held: list[torch.Tensor] | None = [out[i] if i >= 0 else own[-1 - i] for i in traced.saved]
        self.returned = program.returned[0]
        self.outputs, self.aux, self.collected = program.split(out)
        self.meta = [(tuple(o.shape), o.dtype, o.device) for o in (out[i] for i in traced.real)]
        self._guarded = guarded([*[x for x in flat if isinstance(x, torch.Tensor)], *[out[i] for i in traced.real]])
        self._rest: dict[Key, Buffer] | None = None  # of a first half: the second
        self._metas = [(flat[place].shape, flat[place].dtype, flat[place].device) for place in wanted]

    def pull(
        self,
        cotangent: object,
        retain_graph: bool = False,
        create_graph: bool = False,
        receive: Callable[[Key, torch.Tensor], object] | None = None,
        before: Callable[[Sequence[Key]], object] | None = None,
        into: Mapping[Key, Buffer] | None = None,
    ) -> tuple[dict[Key, Buffer], list[torch.Tensor | None]]:
        """As of `Run`."""
        with self._pulling:
            self.need_graph()
            need_unwritten(self._guarded)
            self._rest = None
            if create_graph or is_transformed(cotangent):
                pulled = self._again().pull(cotangent, retain_graph, create_graph)
                if not retain_graph:
                    self.drop()
                return pulled
            assert self.state is not None and self._held is not None and self._traversal is not None
            assert self._calls is not None
            traversal, traced, params = self._traversal, self._program.traced, self.state.params
            found: dict[Key, Buffer] = {}

            cotangents = [c.contiguous() for c in self.scaled(cotangent)]
            traversal.schedule.used.update(dict.fromkeys(traversal.uses, 0))
            for group in self._program.uses:
                traversal.schedule.note_use((self._program.keys[group],))
            own = delivery_of(traversal, params, found, receive, self.unreduced, self._partial)
            self._calls.delivery, self._calls.masked = own, bool(self.mask.masked)
            held = [*self._held, *cotangents]
            if not retain_graph:
                self._held = None
            drawing = seeded(self._calls.seeds[0] if traced.draws[1] else None)
            with failing("a pullback"), torch.no_grad(), private.without_autocast():
                with traversal.schedule.pullback(before), drawing:
                    out = self._program.pullback(held, self._calls)
                    own.finish({})
            wanted = [
                torch.zeros(shape, dtype=dtype, device=device) if x is None else x
                for x, (shape, dtype, device) in zip(out, self._metas, strict=False)
            ]
            placed = self._placed(wanted)
            if not retain_graph:
                self.drop()
            return found, placed

    def pull_inputs(self, cotangent: object, retain_graph: bool = False) -> list[torch.Tensor | None]:
        """The first half of `pull`: a graph is pulled back as a whole, and the grads are kept."""
        grads, wanted = self.pull(cotangent, retain_graph)
        self._rest = grads
        return wanted

    def pull_params(self, into: Mapping[Key, Buffer] | None = None) -> dict[Key, Buffer]:
        """The second half of `pull`, once after the first."""
        rest, self._rest = self._rest, None
        if rest is None:
            raise RuntimeError(no_first_half("this forward"))
        return rest

    def note_use(self, used: set[int]) -> None:
        assert self._traversal is not None
        used.update(range(len(self._traversal.layout.rows)))

    def note_reached(self, used: set[int]) -> None:
        self.note_use(used)

    def is_used_up(self) -> bool:
        return self._held is None

    def drop(self) -> None:
        """Forgets what the forward saved, and the state."""
        self._held = self.state = self._traversal = self._calls = None
        self._guarded, self._again = [], _gone


def _gone() -> Run:
    raise AssertionError("a run that was used up")


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
