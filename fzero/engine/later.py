"""What the first half of a pullback leaves to the second: of each unit that it came by, and of the run around them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from fzero.engine.halves import Part, apart_from
from fzero.table.layout import Key

Collect = Callable[[Key, Sequence["torch.Tensor | None"]], object]


class Later:
    """The second half of one unit's call.

    Args:
        sizes: the unit's groups, and how many leaves each of them has.
        found: the cotangents of the leaves, as far as they are known.
        parts: what the others are computed from.
    """

    def __init__(
        self,
        sizes: Sequence[tuple[Key, int]],
        found: list[torch.Tensor | None],
        leaves: Sequence[torch.Tensor],
        parts: Sequence[Part],
        retain_graph: bool,
    ) -> None:
        self._sizes, self._found, self._leaves, self._parts = sizes, found, leaves, parts
        self._retain_graph = retain_graph

    def own(self, storages: Collection[int]) -> None:
        """Copies what lies in these storages, which are other people's, too."""
        self._found = [None if x is None else apart_from(x, storages) for x in self._found]
        for part in self._parts:
            part.own(storages)

    def pull(self, collect: Collect) -> None:
        """Hands on the cotangents of each group's leaves, in the order of a pullback as a whole."""
        found, self._found = self._found, []
        for part in self._parts:
            pulled = part.pull([self._leaves[i] for i in part.params], self._retain_graph)
            for i, grad in zip(part.params, pulled, strict=True):
                found[i] = grad
        self._parts, self._leaves = (), ()
        for key, size in reversed(self._sizes):
            grads = found[len(found) - size :]
            del found[len(found) - size :]
            collect(key, grads)


class Late:
    """The units that the first half of a pullback came by.

    Args:
        alone: numbers of those whose leaves nothing else uses.

    Attributes:
        waits: whether anything may; not any more once a user's Function acts, which might write to it.
    """

    def __init__(self, alone: Collection[int] = ()) -> None:
        self.alone = alone
        self.units: dict[int, Later] = {}
        self.waits = True

    def settle(self, collect: Collect) -> None:
        """Hands on what waits, and nothing will."""
        self.waits = False
        for unit in self.units.values():
            unit.pull(collect)
        self.units.clear()

    def put(self, number: int, unit: Later, collect: Collect, at_once: bool) -> None:
        """Takes what is left of a unit; where that may not wait, or is better not kept, hands it on."""
        if at_once or not self.waits:
            unit.pull(collect)
        else:
            self.units[number] = unit

    def own(self, storages: Collection[int]) -> None:
        for unit in self.units.values():
            unit.own(storages)
