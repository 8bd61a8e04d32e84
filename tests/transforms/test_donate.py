"""fz.donate: the state passed in is overwritten, and says who took it."""

from __future__ import annotations

from typing import Any

import exactness
import optree
import pytest
import scenarios
import torch

import fzero as fz

F64 = torch.float64


def test_what_every_transform_owes() -> None:
    exactness.owes(fz.donate)
    exactness.refuses_what_is_no_step(fz.donate)


def test_any_order_with_a_sharding_gives_the_same_bits() -> None:
    exactness.same_in_any_order(fz.donate, fz.shard_zero2)


def test_the_old_state_is_dead_and_its_memory_the_new_ones() -> None:
    loss, params = scenarios.stack()
    step, batch = fz.donate(fz.train_step(loss, fz.adamw(1e-2))), scenarios.vector_batches(1)[0]
    old: Any = step.init(params)
    pointers = {leaf.data_ptr() for leaf in optree.tree_leaves(old)}
    new: Any = step(old, *batch)[0]
    assert {leaf.data_ptr() for leaf in optree.tree_leaves(new)} == pointers
    for use in (lambda: old.params, lambda: step(old, *batch), lambda: fz.gather(old.moments), lambda: old.extra):
        with pytest.raises(RuntimeError, match="donated to the step that applied update 1"):
            use()
