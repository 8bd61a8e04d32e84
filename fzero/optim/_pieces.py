"""Optimizers of the user's own that are declared elementwise: on this rank's pieces of leaves, without an exchange."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fzero.base.arguments import named
from fzero.base.follow import is_transformed
from fzero.base.rebound import is_others
from fzero.optim._leaf_states import like_leaf, on_a_piece
from fzero.optim._whole import Extra, Whole, counted, on_whole_leaves
from fzero.state.owners import Leaves, joined
from fzero.state.sharded import Sharded
from fzero.table.layout import Key, Slot
from fzero.table.needs import need_optimizer
from fzero.table.optimizer import GradientTransformation


class PieceState(NamedTuple):
    """State of an optimizer that is declared elementwise: as `WholeState`, with that of small leaves in slices, too."""

    slices: tuple[Sharded, ...]
    rest: dict[str, object]


def of_slices(optimizer: GradientTransformation, who: str, argument: str = "optimizer") -> GradientTransformation:
    """One that may be given a step's trees: itself if it is fzero's, else on whole leaves, or on pieces of them."""
    need_optimizer(optimizer, who, argument)
    if not optimizer.elementwise:
        return on_whole_leaves(optimizer)
    if not is_others(optimizer.init) and not is_others(optimizer.update):
        return optimizer
    own = _Pieces(optimizer)
    metrics = own.metrics if optimizer.metrics else None
    return GradientTransformation(own.init, own.update, None, own.label, metrics, needs="all", elementwise=True)


@dataclass(frozen=True)
class _Pieces(Whole):
    """One that is declared elementwise, on this rank's flat pieces of leaves; under a transform, on whole leaves."""

    who = "elementwise"
    state = PieceState

    def label(self, path: str) -> str:
        return self.optimizer.label(path) if self.optimizer.label else "optimizer"

    def _leaves(self, params: Sharded, key: Key) -> Leaves:
        return super()._leaves(params, key) if is_transformed() else {slot.leaf: x for slot, x in params.pieces(key)}

    def _slice(self, params: Sharded, key: Key, leaves: Leaves) -> torch.Tensor:
        return super()._slice(params, key, leaves) if is_transformed() else joined(params, key, leaves)

    def _in_slices(self, slot: Slot, entries: Sequence[object], leaf: torch.Tensor) -> list[int]:
        found = like_leaf(entries, leaf)
        for i, x in enumerate(entries):
            if isinstance(x, torch.Tensor) and x.ndim and i not in found:
                raise TypeError(
                    f"elementwise: the state of leaf {slot.path!r} begins with {named(x)}, expected floating tensors "
                    "like the leaf (torch.zeros_like), 0-d tensors and numbers. fz.whole(optimizer) takes any tensors."
                )
        return found

    def _of(self, what: str, slot: Slot, on_meta: bool = False) -> contextlib.AbstractContextManager[None]:
        return on_a_piece(super()._of(what, slot, on_meta))

    def _updated(self, grads: Sharded, old: PieceState, params: Sharded, extra: Extra) -> tuple[Sharded, PieceState]:
        trees = (grads, params, *old.slices)
        rest, made = dict[str, object](), [dict[Key, torch.Tensor]() for _ in trees[1:]]
        for key in grads.groups:
            found = [Leaves() for _ in made]
            for each in zip(*[tree.pieces(key) for tree in trees], strict=True):
                slot, (g, p, *state) = each[0][0], [x for _, x in each]
                update, rest[slot.path], new = self._of_leaf(slot, old.rest[slot.path], g, p, state, params.draw, extra)
                for leaves, x in zip(found, (update, *new), strict=True):
                    leaves[slot.leaf] = x
            for buffers, leaves in zip(made, found, strict=True):
                buffers[key] = joined(params, key, leaves)
        updates, *after = [grads.with_buffers(buffers, 1.0) for buffers in made]
        return updates, PieceState(tuple(after), counted(old, rest))
