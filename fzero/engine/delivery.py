"""Cotangents of params are added up group by group while a function is pulled back, outside of autograd.

Autograd adds what it is given as soon as it is given it. A reduction that is still in flight therefore never enters the
graph: a unit hands its cotangent to the `Delivery` of the running pullback, which adds up what has arrived, and returns
nothing. Through the graph goes only what is there already: the cotangents of units that are differentiated twice.

The forward has counted the uses of each group. A sum is complete when as many have been pulled back; a group of which
some use is not, as nothing that is differentiated depends on it, is handed on at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch

from fzero.base import pages
from fzero.engine.schedule import Schedule
from fzero.state.placing import settle
from fzero.state.sharded import Sharded
from fzero.stores.away import Buffer
from fzero.table.layout import Key


class Delivery:
    """Adds up one pullback's cotangents of params, and hands each group's sum on once it is complete.

    Sums are in `reduce` dtype. What a group's uses, its unreduced part and its share of second derivatives bring is
    added in the order in which the pullback comes by them, which is the same on every rank.

    Args:
        found: is filled with the sum of each group that is differentiated, in `grad` dtype and in its memory.
        receive: `receive(key, shard)` takes each sum in its place.
        unreduced: full cotangents of earlier microbatches, to be added before the reduction.
        partial: whether sums stay in `reduce` dtype, as others will be added to them.

    Attributes:
        into: sums of earlier microbatches in `reduce` dtype, to which those of a group that is used once may be added.
        used: takes the leaves that have a cotangent, if somebody asks for them.
    """

    def __init__(
        self,
        schedule: Schedule,
        params: Sharded,
        found: dict[Key, Buffer],
        receive: Callable[[Key, torch.Tensor], object] | None = None,
        unreduced: Mapping[Key, torch.Tensor] | None = None,
        partial: bool = False,
    ) -> None:
        self.schedule, self.params, self.layout = schedule, params, params.layout
        self.found, self.receive, self.partial = found, receive, partial
        self.unreduced = dict(unreduced or {})
        self.into: Mapping[Key, torch.Tensor] = {}
        self.used: set[int] | None = None
        self._sums: dict[Key, torch.Tensor] = {}
        self._under_way: set[Key] = set()
        self._left = dict(schedule.used)  # how many uses have not been pulled back
        self._delivered: set[Key] = set()

    def note(self, key: Key, leaves: Sequence[object] | None = None) -> None:
        """Notes which leaves of a group have a cotangent; all of them if nobody knows."""
        assert self.used is not None
        slots = self.layout.groups[key].slots
        self.used.update(slot.leaf for i, slot in enumerate(slots) if leaves is None or leaves[i] is not None)

    def add_into(self, key: Key, leaves: Sequence[torch.Tensor | None]) -> bool:
        """Adds all there is for a group to the sum of earlier microbatches, where that gives the same bits."""
        total, use = self.into.get(key), self.schedule.uses[key]
        if total is None or key in self.unreduced or use.axis.ranks > 1 or total.dtype != use.reduce:
            return False
        if self.schedule.used[key] != 1:  # all of it is to be rounded once
            return False
        if any(leaf is not None and not leaf.dtype == use.wire == total.dtype for leaf in leaves):
            return False  # they would be rounded, or copied on their way
        self.layout.groups[key].add_into(total, leaves)
        self._delivered.add(key)
        return True

    def add(self, key: Key, full: torch.Tensor) -> None:
        """Starts to reduce a full cotangent of a group, which is the schedule's buffer."""
        if key in self.unreduced:
            earlier = self.unreduced.pop(key)  # a second pullback will want it again
            full = full.add_(earlier) if full.dtype == earlier.dtype else earlier + full
        self._left[key] -= 1
        if self.schedule.uses[key].axis.ranks == 1:
            self._arrived(key, full)
            return
        self._under_way.add(key)
        self.schedule.reduce(key, full, functools.partial(self._arrived, key))

    def _arrived(self, key: Key, shard: torch.Tensor) -> None:
        self._under_way.discard(key)
        self._add_up(key, shard)
        if not self._left[key]:
            self._deliver(key)

    def _add_up(self, key: Key, shard: torch.Tensor) -> None:
        total = self._sums.get(key)
        if total is not None:
            shard = total.to(self.schedule.uses[key].reduce).add_(shard)
        self._sums[key] = shard

    def _deliver(self, key: Key) -> None:
        use = self.schedule.uses[key]
        if key in self.unreduced:
            self._add_up(key, use.axis.reduce_scatter(self.unreduced.pop(key), use.tag))
        total = self._sums.pop(key, None)
        dtype = use.reduce if self.partial else use.grad
        if total is None:
            numel = self.layout.groups[key].numel // use.axis.size
            total = pages.zeros(numel, dtype, use.device)
        self._delivered.add(key)
        if self.receive is None:
            self.found[key] = settle(self.params, key, "grads", total.to(dtype))
        else:
            self.receive(key, total.to(dtype))

    def finish(self, graph: Mapping[Key, torch.Tensor | None]) -> None:
        """Delivers what is left: the last reduction in flight, and groups of which not every use was pulled back.

        Args:
            graph: what came through the graph, of uses that other derivatives go through.
        """
        self.schedule.finish_reductions()
        assert not self._under_way
        for key, cotangent in graph.items():
            if cotangent is not None:
                assert key not in self._delivered
                self._add_up(key, cotangent.clone())  # autograd may hold on to it
                if self.used is not None:
                    self.note(key)
        for key in self.layout.trainable:
            if key not in self._delivered:
                self._deliver(key)
