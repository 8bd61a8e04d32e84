"""Where the cotangents of a run's params are added up: to the sums of earlier microbatches, or to those that begin."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from fzero.base import pages
from fzero.base.hooks import register
from fzero.engine.leaves import Leaves
from fzero.engine.outcome import tensors_of
from fzero.engine.weights import Waiting
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
        self._views: dict[Key, dict[int, torch.Tensor]] = {}
        for key in leaves.keys:
            total, use, group = given.get(key), uses[key], self._layout.groups[key]
            if total is None or total.dtype != use.reduce:
                self.fresh[key] = total = pages.empty(group.numel, use.reduce, use.device)
                self._views[key] = group.cut(total)
            else:
                self._views[key] = leaves.cut(key, total)
            self._totals[key] = total

    def place(self, number: int) -> tuple[torch.Tensor, bool]:
        """Where a param's cotangent belongs, and whether its sum begins."""
        key, slot = self._leaves.params[number]
        return self._views[key][slot.leaf], key in self.fresh

    def add(self, found: Mapping[int, torch.Tensor | None], added: Collection[int]) -> None:
        """Adds all cotangents, but for those that were added already."""
        params = self._leaves.params
        if len(added) == len(params) and not self.fresh:  # of those that begin the gaps are to be filled, too
            return
        by_key: dict[Key, list[tuple[torch.Tensor | None, bool]]] = {key: [] for key in self._views}
        for number, param in enumerate(params):
            by_key[param.key].append((found.get(number), number in added))
        for key, leaves in by_key.items():
            group, grads = self._layout.groups[key], [leaf for leaf, _ in leaves]
            if key in self.fresh:
                group.join_into(self._totals[key], grads, [is_there for _, is_there in leaves])
            else:
                group.add_into(self._totals[key], grads)

    def add_strays(self, params: Sequence[torch.Tensor]) -> None:
        """Adds what a backward within the pullback has found by itself, as checkpoints that save nothing do."""
        for number, param in enumerate(params):
            if param.grad is not None:
                self.place(number)[0].add_(param.grad)
                param.grad = None

    def takes(self, params: Sequence[torch.Tensor]) -> bool:
        """Tells whether autograd can add cotangents of these params by itself."""
        return not self.fresh and all(self.place(i)[0].dtype == own.dtype for i, own in enumerate(params))

    def pull(
        self,
        outputs: Sequence[torch.Tensor],
        cotangents: Sequence[torch.Tensor],
        params: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        retain_graph: bool,
    ) -> list[torch.Tensor | None]:
        """The cotangents of inputs; autograd adds those of the params, as they come."""
        if not (params or inputs):
            return []
        for number, param in enumerate(params):
            param.grad = self.place(number)[0]
        return pull_back(outputs, cotangents, params, inputs, retain_graph, [*params, *inputs])[1]


def pull_back(
    outputs: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    retain_graph: bool,
    asked: Sequence[torch.Tensor] | None = None,
) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
    """What torch's own `backward` leaves in the `grad` of params, which it empties, and the cotangents of inputs.

    With nothing else asked for it is the user's: all Functions run, hooks of every kind are called, and what they
    assign to `grad` counts.

    Args:
        asked: leaves; without them all that there are, also those that the function closes over.
    """
    found: list[torch.Tensor | None] = [None] * len(inputs)

    def note(place: int, grad: torch.Tensor | None) -> None:
        if grad is not None:
            before = found[place]  # there, where a backward within this one has come by, too
            found[place] = grad.clone() if before is None else before + grad  # some backward may write to it later on

    # as they come: what autograd keeps in `grad` may have other strides
    handles = [register(x.register_hook, functools.partial(note, i)) for i, x in enumerate(inputs)]
    try:
        if outputs:
            torch.autograd.backward(outputs, cotangents, retain_graph, inputs=asked)
        own = [x.grad for x in params] if asked is None else []
        return [None if x is None else x.detach() for x in own], found
    finally:
        for handle in handles:
            handle.remove()
        for leaf in (*params, *inputs):
            leaf.grad = None


class Waits(NamedTuple):
    """What one pass has found of the cotangents of params, and is to be added to their sums.

    Attributes:
        found: by number; those in `added`, and products that wait, are not among them.
        gained: whether adding some of them took less than what autograd does.
        sums: those of earlier microbatches, where they were known.
    """

    found: dict[int, torch.Tensor | None]
    added: set[int]
    gained: bool
    later: list[Waiting]
    sums: Adding | None
    retain_graph: bool

    def add_to(self, sums: Adding) -> bool:
        """Adds all of it; tells whether those of other microbatches are better added in this way, too."""
        gains = [waiting.add(*sums.place(waiting.weight.number)) for waiting in self.later]
        self.later.clear()
        sums.add(self.found, self.added)
        return self.gained or any(gains) or any(map(_is_sparse, self.found.values()))


def _is_sparse(x: torch.Tensor | None) -> bool:
    return x is not None and x.layout != torch.strided
