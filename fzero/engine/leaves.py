"""The params of one call in full, as the leaves with which graphs of plain autograd begin; where their cotangents are
added up."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from fzero.base import pages, private
from fzero.base.follow import is_transformed
from fzero.comm.axis import Axis
from fzero.engine.function import traversal_of
from fzero.engine.outcome import tensors_of
from fzero.engine.traversal import Traversal
from fzero.engine.use import Use
from fzero.state.train_state import TrainState
from fzero.stores.away import Buffer
from fzero.table.counting import Mask
from fzero.table.handle import storage_of
from fzero.table.layout import Key, Slot
from fzero.table.spec import Spec


class _Place(NamedTuple):
    key: Key
    slot: Slot


class Leaves:
    """The params of one call in full, with which the graphs of all its microbatches begin.

    Attributes:
        params: where those lie that are differentiated.
        keys: of their groups.
        numbers: of the params of each group.
        used: takes the leaves of which no graph shows that they are used, if somebody asks for them.
    """

    def __init__(self, traversal: Traversal, axis: Axis) -> None:
        self._traversal, self.uses, self.layout = traversal, traversal.uses, traversal.layout
        self._axis = axis
        self.params: list[_Place] = []
        views: dict[int, tuple[torch.Tensor, bool, str]] = {}
        for key, group in self.layout.groups.items():
            cut, trains = group.cut(self.uses[key].value()), not group.row.frozen
            for slot in group.slots:
                views[slot.leaf] = cut[slot.leaf], trains, slot.path
                if trains:
                    self.params.append(_Place(key, slot))
        self._views = [views[index] for index in range(len(self.layout.rows))]
        self._storages = {storage_of(view) for view, *_ in self._views}
        self.keys = tuple(dict.fromkeys(param.key for param in self.params))
        self.numbers: dict[Key, list[int]] = {key: [] for key in self.keys}
        for number, (key, _) in enumerate(self.params):
            self.numbers[key].append(number)
        self.used: set[int] | None = None

    def made(self) -> list[torch.Tensor]:
        """The leaves of the tree for one microbatch, in their order: what is done to one is no other one's."""
        return [view.detach().requires_grad_(trains) for view, trains, _ in self._views]

    @staticmethod
    def of(step: Spec, state: TrainState, unreduced: bool) -> Leaves | None:
        """The leaves, where there is nothing to gather, to reduce or to do for units; None otherwise."""
        table = step.table(state.layout)
        if table.acting or table.compiled or private.dispatch_modes() or is_transformed():
            return None  # whoever differentiates around it goes on through the graph
        axis = state.params.axis
        if axis.tensor is not None or axis.further or (axis.ranks > 1 and not unreduced):
            return None
        traversal = traversal_of(step, state, (), unreduced)[0]
        rows = traversal.layout.groups
        if not all(_is_at_hand(use, rows[key].row.frozen) for key, use in traversal.uses.items()):
            return None
        return Leaves(traversal, axis)

    def traversal(self, seed: tuple[int, ...], leaves: Sequence[torch.Tensor], mask: Mask) -> Traversal:
        """Another run over the same buffers."""
        own = self._traversal
        out = Traversal(own.layout, own.table, own.uses, seed, own.device, self._axis)
        out.means, out.mask, out.run = own.means, mask, own.run
        out.given = leaves
        return out

    def given_out(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Outputs without their graph; what lies in the leaves' own memory is copied, as others may write to it."""
        return [x.detach().clone() if storage_of(x) in self._storages else x.detach() for x in outputs]

    def check(self, leaves: Sequence[torch.Tensor]) -> None:
        """Refuses what a function did to the leaves themselves."""
        for leaf, (view, trains, path) in zip(leaves, self._views, strict=True):
            if (leaf.data_ptr(), leaf.requires_grad) != (view.data_ptr(), trains):
                raise ValueError(
                    f"step: the function sets .requires_grad, or the memory, of leaf {path!r}. Params change in "
                    "step.update only: compute with a copy (w = w.clone()), detach() it where no gradient is wanted, "
                    "or freeze it: fz.freeze(step, pattern)."
                )


def _is_at_hand(use: Use, frozen: bool) -> bool:
    if use.transient or use.gather8 or (not frozen and use.axis.ranks > 1):
        return False
    # cotangents of leaves are not rounded on their way to their sum
    return frozen or torch.promote_types(use.compute, use.wire) == use.wire == torch.promote_types(use.wire, use.reduce)


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
