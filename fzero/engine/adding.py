"""Where the cotangents of a run's params are added up: to the sums of earlier microbatches, or to those that begin."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from fzero.base import pages
from fzero.engine.leaves import Leaves
from fzero.engine.outcome import tensors_of
from fzero.stores.away import Buffer
from fzero.table.layout import Key


class Adding:
    """The sums of one pullback.

    Args:
        into: sums of earlier microbatches.

    Attributes:
        fresh: those that begin.
    """

    def __init__(self, leaves: Leaves, into: Mapping[Key, Buffer] | None) -> None:
        self._leaves, self._layout = leaves, leaves.layout
        given, uses = tensors_of(into), leaves.uses
        self.fresh: dict[Key, torch.Tensor] = {}
        self._totals: dict[Key, torch.Tensor] = {}
        for key in leaves.keys:
            total, use, group = given.get(key), uses[key], self._layout.groups[key]
            if total is None or total.dtype != use.reduce:
                self.fresh[key] = total = pages.empty(group.numel, use.reduce, use.device)
            self._totals[key] = total

    def places(self, numbers: Collection[int]) -> dict[int, tuple[torch.Tensor, bool]]:
        """Where some params' cotangents belong, and whether their sum begins."""
        found = {}
        for number in numbers:
            key, slot = self._leaves.params[number]
            view = self._totals[key].narrow(0, slot.offset, slot.numel).view(slot.shape)
            found[number] = view, key in self.fresh
        return found

    def add(self, found: Mapping[int, torch.Tensor | None], added: Collection[int] = ()) -> None:
        """Adds all cotangents, but for those that were added already."""
        for key, numbers in self._leaves.numbers.items():
            group, grads = self._layout.groups[key], [found.get(i) for i in numbers]
            if key in self.fresh:
                there = [i in added for i in numbers] if added else ()
                group.join_into(self._totals[key], grads, there)
            else:
                group.add_into(self._totals[key], grads)
