"""One run of the step's function: the tree that it receives, of handles and full leaves, and what its units share."""

from __future__ import annotations

import collections
import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fzero._handle import Handle
from fzero._layout import Layout
from fzero._node import Op, Tensors, active, apply
from fzero._random import Seeds, seeded
from fzero._schedule import Schedule
from fzero._use import Use

# the leaves of the step whose function runs, also inside its units
running: contextvars.ContextVar[Layout | None] = contextvars.ContextVar("fzero_running", default=None)
current: contextvars.ContextVar[Traversal | None] = contextvars.ContextVar("fzero_traversal", default=None)


class Traversal:
    """One run of the step's function: what its units share. Lives as long as that run's graph, never longer."""

    def __init__(
        self,
        layout: Layout,
        uses: Mapping[str, Use],
        sharded: bool,
        remat: bool,
        compiles: bool,
        seed: tuple[int, ...],
        device: str,
    ) -> None:
        self.layout, self.uses, self.remat, self.compiles, self.device = layout, uses, remat, compiles, device
        self.acts = sharded or remat or compiles  # whether there is anything to do where a unit is used
        self.retain_graph = False
        self.nested = False  # whether a unit was called under a derivative of the function's own
        self.delivery: Delivery | None = None
        self.schedule = Schedule(uses)
        self.origins: dict[int, int] = {}  # id of a full leaf -> its index, while the function runs
        self.next_seed = Seeds(*seed).next

    def is_split(self, key: str) -> bool:
        """Whether nothing is to be done at the use of a small group: its leaves are then differentiated themselves.

        That costs less than a node; a large one's grads had better be moved into its flat buffer one by one.
        """
        group = self.layout.groups[key]
        small = group.numel < 1 << 16
        return small and self.uses[key].trivial and not (group.unit and self.acts)

    def leaves(self, primals: Mapping[str, torch.Tensor | Sequence[torch.Tensor]]) -> list[Any]:
        """The leaves of the tree that the function receives, in leaf order: full tensors, or handles.

        Args:
            primals: the stored buffers, or of a group that is split its leaves.
        """
        out: list[Any] = [None] * len(self.layout.rows)
        for key, primal in primals.items():
            group = self.layout.groups[key]
            if isinstance(primal, torch.Tensor) and group.unit and self.acts:
                for slot in group.slots:
                    out[slot.leaf] = Handle(self, key, slot.leaf, primal)
            else:
                views = (
                    primal
                    if not isinstance(primal, torch.Tensor)
                    else apply(_Leaves(self, key), active((primal,)), primal)
                )
                for slot, view in zip(group.slots, views, strict=True):
                    out[slot.leaf] = view
                    self.origins[id(view)] = slot.leaf
        return out

    def collect(self, key: str, cotangents: Sequence[torch.Tensor | None], alone: bool) -> torch.Tensor | None:
        """This rank's share of the reduced cotangent of a group, from those of its leaves; a list of them is emptied.

        Where the cotangents are delivered elsewhere, a zero without memory, or None before a group's last use.

        Args:
            alone: whether no other cotangent will be added to it before the pullback's end.
        """
        full = self.schedule.buffer(key, self.layout.groups[key].numel)
        self.layout.groups[key].join_into(full, cotangents)
        if isinstance(cotangents, list):
            cotangents.clear()
        if self.delivery is not None:
            return self.delivery.reduce(key, full)
        return self.schedule.reduce(key, full, alone)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Units that are called inside draw their seeds from here."""
        token, outer = current.set(self), running.set(self.layout)
        try:
            with seeded(self.next_seed()):
                yield
        finally:
            current.reset(token)
            running.reset(outer)
            self.origins = {}


class Delivery:
    """Where one pullback's reduced cotangents go, group by group, instead of into its result.

    Args:
        receive: `receive(key, shard)`, called once for every group that is differentiated.
        unreduced: full cotangents that are to be added before the reduction.
    """

    def __init__(
        self,
        traversal: Traversal,
        receive: Callable[[str, torch.Tensor], Any],
        unreduced: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.traversal, self.receive, self.unreduced = traversal, receive, dict(unreduced or {})
        self._pulled: collections.Counter[str] = collections.Counter()
        self._sums: dict[str, torch.Tensor] = {}
        self._done: set[str] = set()

    def reduce(self, key: str, full: torch.Tensor) -> torch.Tensor | None:
        schedule = self.traversal.schedule
        if key in self.unreduced:
            full.add_(self.unreduced.pop(key))
        self._pulled[key] += 1
        last = self._pulled[key] >= schedule.uses_of(key)
        schedule.reduce(key, full, True, lambda shard: self._arrived(key, shard, last))
        use = self.traversal.uses[key]
        return torch.zeros((), dtype=use.grad, device=full.device).expand(use.shard.numel()) if last else None

    def _arrived(self, key: str, shard: torch.Tensor, last: bool) -> None:
        if key in self._sums:
            shard = self._sums.pop(key).add_(shard)
        if last:
            self._done.add(key)
            self.receive(key, shard)
        else:
            self._sums[key] = shard

    def finish(self) -> None:
        """Delivers what was not used, or not every time that it was called."""
        for key in self.traversal.layout.trainable:
            if key not in self._done:
                use = self.traversal.uses[key]
                if key in self.unreduced:
                    self.reduce(key, torch.zeros_like(self.unreduced[key]))
                    self.traversal.schedule.finish_reduction()
                if key not in self._done:
                    empty = torch.zeros(use.shard.numel(), dtype=use.grad, device=use.shard.device)
                    self.receive(key, self._sums.pop(key, empty))


def origins_of(values: Sequence[Any]) -> tuple[Layout | None, tuple[int, ...]]:
    """The layout that some values come from, and for each its leaf's number from 1; negative for a handle, else 0."""
    traversal = next((x.traversal for x in values if type(x) is Handle), None) or current.get()
    if traversal is None:
        return None, (0,) * len(values)
    full = traversal.origins.get
    return traversal.layout, tuple(-1 - x.index if type(x) is Handle else full(id(x), -1) + 1 for x in values)


class _Leaves(Op):
    """A group that is full where the function sees it: its shard -> its leaves.

    Made before the function runs, it would be pulled back last of all, with every unit's cotangents waiting.
    """

    early = True

    def __init__(self, traversal: Traversal, key: str) -> None:
        group, use = traversal.layout.groups[key], traversal.uses[key]
        super().__init__(lambda primal: tuple(group.views(use.apply(primal)).values()), None, traversal.device)
        self.traversal, self.key = traversal, key

    def run(self, tensors: Tensors, wanted: Sequence[int]) -> Tensors:
        full, _ = self.traversal.uses[self.key].value(tensors[0])
        return tuple(self.traversal.layout.groups[self.key].cut(full).values())

    def back(
        self, tensors: Tensors, wanted: Sequence[int], cotangents: Sequence[torch.Tensor | None]
    ) -> dict[int, torch.Tensor]:
        shard = self.traversal.collect(self.key, cotangents, alone=True)
        return {0: shard} if shard is not None else {}
