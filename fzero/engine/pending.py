"""The pullback of one run in two halves: `Pending` is made by the first, and is the second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fzero.base import private
from fzero.base.hooks import without_compiled_autograd
from fzero.engine.delivery import Delivery
from fzero.engine.halves import Part, Split
from fzero.engine.later import Late
from fzero.engine.traversal import Traversal
from fzero.stores.away import Buffer
from fzero.table.handle import storage_of
from fzero.table.layout import Key


class Ends(NamedTuple):
    """The ends of a run's graph: what its level of torch.func differentiates."""

    outputs: Sequence[torch.Tensor]
    inputs: Sequence[torch.Tensor]
    primals: dict[Key, torch.Tensor]


class Pending:
    """What is left of a run's pullback once the cotangents of its inputs are known.

    Args:
        delivery: receives the cotangents of the params, which are then in `found`.
        retain_graph: whether either half will be asked for again.
    """

    def __init__(
        self, traversal: Traversal, ends: Ends, delivery: Delivery, found: dict[Key, Buffer], retain_graph: bool
    ) -> None:
        self.traversal, self.delivery, self.found, self.retain_graph = traversal, delivery, found, retain_graph
        self._keys, self._primals = list(ends.primals), list(ends.primals.values())
        self._parts: list[Part] = []
        self._graph: dict[Key, torch.Tensor | None] = {}
        self._late = Late()

    def inputs(self, ends: Ends, cotangents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The first half: the cotangents of the inputs."""
        traversal = self.traversal
        units = {}
        for op in traversal.schedule.calls():
            node = op.node() if op.node is not None else None
            if node is not None:
                units[node] = op.number, len(op.keys)
        split = Split(ends.outputs, ends.inputs, self._primals, units)
        self._late.alone = {number for node, (number, _) in units.items() if split.is_alone(node)}
        traversal.late = self._late if split.native else None
        try:
            with without_compiled_autograd(), private.outside_inference():
                found, early, self._parts = split.pull(cotangents, self.retain_graph)
            self._graph.update((self._keys[i], grad) for i, grad in early.items())
        finally:
            traversal.late = None
        out = [
            torch.zeros_like(private.unwrapped(x)) if g is None else g for g, x in zip(found, ends.inputs, strict=True)
        ]
        if not split.native or not self._late.waits:  # some may be a Function's, who writes to them again
            out = [x.clone() for x in out]
        # whoever has these may write to them before the second half
        others = {storage_of(private.unwrapped(x)) for x in (*cotangents, *out, *ends.inputs, *ends.outputs)}
        for each in (self._late, *self._parts):
            each.own(others)
        if not self._late.waits:
            self._deliver()
        return out

    def params(self) -> None:
        """The second half: delivers the cotangents of the params."""
        self._deliver()
        self.delivery.finish(self._graph)

    def _deliver(self) -> None:
        """Delivers what waits."""
        with without_compiled_autograd(), private.outside_inference():
            parts, self._parts = self._parts, []
            for part in parts:
                for number in part.units:
                    later = self._late.units.pop(number, None)
                    if later is not None:
                        later.pull(self.traversal.collect)
                pulled = part.pull([self._primals[i] for i in part.params], self.retain_graph)
                self._graph.update((self._keys[i], grad) for i, grad in zip(part.params, pulled, strict=True))
        assert not self._late.units
