"""One run of the step's function: the tree that it receives, of handles and full leaves, and what its units share.

And which run, and which unit of it, goes on at the moment.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from fzero.base.context import during
from fzero.base.node import Op, Tensors, active, apply
from fzero.base.random import Seeds, seeded
from fzero.capture.handle import Handle
from fzero.engine.delivery import Delivery, Gates, gate
from fzero.engine.schedule import Schedule
from fzero.engine.use import Use
from fzero.table.layout import Key, Layout
from fzero.table.rows import Table

# the leaves of the step whose function runs, also inside its units
running: contextvars.ContextVar[Layout | None] = contextvars.ContextVar("fzero_running", default=None)
current: contextvars.ContextVar[Traversal | None] = contextvars.ContextVar("fzero_traversal", default=None)
# (run, index) of the leaves that the unit that is running has; None outside of units
here: contextvars.ContextVar[Mapping[tuple[int, int], torch.Tensor] | None] = contextvars.ContextVar(
    "fzero_here", default=None
)


@contextlib.contextmanager
def inside(leaves: Mapping[tuple[int, int], torch.Tensor] | None) -> Iterator[None]:
    """Within a unit another one is a plain call; `leaves` are those that it has, None where all are full."""
    with during(current, None), during(here, leaves):
        yield


class Traversal:
    """One run of the step's function: what its units share. Lives as long as that run's graph, never longer."""

    def __init__(
        self, layout: Layout, table: Table, uses: Mapping[Key, Use], seed: tuple[int, ...], device: str
    ) -> None:
        self.layout, self.table, self.uses, self.device = layout, table, uses, device
        self.acts = bool(table.acting)  # whether there is anything to do where a unit is used
        self.retain_graph = False
        self.records = False  # whether plain autograd was on where the function began
        self.gates = Gates()
        self.tokens: dict[Key, torch.Tensor] = {}  # group -> its stored buffer, as its uses see it
        self.nodes: dict[Key, object] = {}  # group -> its gate's node of the graph
        self.schedule = Schedule(uses)
        self.origins: dict[int, int] = {}  # id of a full leaf -> its index, while the function runs
        self.next_seed = Seeds(*seed).next

    def leaves(self, primals: Mapping[Key, torch.Tensor]) -> list[torch.Tensor]:
        """The leaves of the tree that the function receives, in leaf order: full tensors, or handles."""
        out: dict[int, torch.Tensor] = {}
        for key, primal in primals.items():
            group = self.layout.groups[key]
            if active((primal,)):
                primal = gate(self.gates, key, primal)
                self.nodes[key] = primal.grad_fn
            if group.unit in self.table.acting:
                self.tokens[key] = primal
                for slot in group.slots:
                    out[slot.leaf] = self._handle(key, slot.leaf, primal)
            else:
                views = apply(LeavesOp(self, key), active((primal,)), primal)
                for slot, view in zip(group.slots, views, strict=True):
                    out[slot.leaf] = view
                    self.origins[id(view)] = slot.leaf
        return [out[index] for index in range(len(self.layout.rows))]

    def handle(self, index: int) -> Handle:
        """A handle of a leaf of a unit."""
        key, _ = self.layout.key_of[self.layout.rows[index].path]
        return self._handle(key, index, self.tokens[key])

    def _handle(self, key: Key, index: int, token: torch.Tensor) -> Handle:
        return Handle(self, key, index, self.layout.rows[index], self.uses[key].compute, token)

    @property
    def delivery(self) -> Delivery | None:
        """The delivery of the pullback that is running, where it has one."""
        return self.gates.delivery

    def wants(self, key: Key) -> bool:
        """Tells whether the pass of autograd that is running asks for the cotangent of a group."""
        return self.delivery is None or self.delivery.wants(key)

    def collect(self, key: Key, cotangents: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """This rank's share of the reduced cotangent of a group, from those of its leaves; a list of them is emptied.

        Where cotangents are delivered None, otherwise what has arrived.
        """
        full = self.schedule.buffer(key, self.layout.groups[key].numel)
        self.layout.groups[key].join_into(full, cotangents)
        if isinstance(cotangents, list):
            cotangents.clear()
        if self.delivery is not None:
            self.delivery.add(key, full)
            return None
        arrived: list[torch.Tensor] = []
        self.schedule.reduce(key, full, arrived.append)
        self.schedule.finish_reduction()
        return arrived[0].to(self.uses[key].reduce)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Units that are called inside draw their seeds from here."""
        self.records = torch.is_grad_enabled()
        try:
            with during(current, self), during(running, self.layout), seeded(self.next_seed()):
                yield
        finally:
            self.origins = {}


def autocast(device: str, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
    """torch.autocast where there is a dtype, otherwise what the caller's own says."""
    return torch.autocast(device, dtype=dtype, cache_enabled=False) if dtype else contextlib.nullcontext()


def origins_of(values: Sequence[object]) -> tuple[Layout | None, tuple[int, ...]]:
    """The layout that some values come from, and for each its leaf's number from 1; negative for a handle, else 0."""
    traversal = next((x.owner for x in values if isinstance(x, Handle)), None) or current.get()
    if traversal is None:
        return None, (0,) * len(values)
    full = traversal.origins.get
    return traversal.layout, tuple(-1 - x.index if isinstance(x, Handle) else full(id(x), -1) + 1 for x in values)


class LeavesOp(Op):
    """A group's shard -> its leaves in full, outside of units: all that the function sees, or the one that it reads.

    Args:
        only: the leaf that is read, for whose use alone the group is gathered; None for all.
    """

    def __init__(self, traversal: Traversal, key: Key, only: int | None = None) -> None:
        group, use = traversal.layout.groups[key], traversal.uses[key]

        def taken(views: Mapping[int, torch.Tensor]) -> Tensors:
            return tuple(views.values()) if only is None else (views[only].clone(),)

        super().__init__(lambda primal: taken(group.views(use.apply(primal))), None, traversal.device)
        self.traversal, self.key, self.group, self.only, self._taken = traversal, key, group, only, taken
        # made before the function runs, it would be pulled back last of all, with every unit's cotangents waiting
        self.early = only is None
        if only is not None:
            traversal.schedule.called((key,))

    def run(self, tensors: Tensors, wanted: Sequence[int]) -> Tensors:
        return self._taken(self.group.cut(self.traversal.schedule.take(self.key)[0]))

    def back(
        self, tensors: Callable[[], Tensors], wanted: Sequence[int], cotangents: Sequence[torch.Tensor | None]
    ) -> dict[int, torch.Tensor]:
        if not self.traversal.wants(self.key):
            return {}
        if self.only is not None:
            cotangents = [cotangents[0] if slot.leaf == self.only else None for slot in self.group.slots]
        shard = self.traversal.collect(self.key, cotangents)
        return {0: shard} if shard is not None else {}


def read(handle: Handle) -> torch.Tensor:
    """A unit's leaf in full, outside that unit, differentiable."""
    op = LeavesOp(handle.owner, handle.key, handle.index)
    return apply(op, active((handle.primal,)), handle.primal)[0]
