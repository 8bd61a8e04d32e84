"""Buffers that lie elsewhere: what is read of them is a copy, and a write to it is not lost without a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from memories import MEMORIES

import fzero as fz
from fzero.state.sharded import trees_of

X = torch.ones(4, 6)


def write_to_a_leaf(tree: Any) -> None:
    tree["w"].mul_(2)


def write_to_a_view(tree: Any) -> None:
    tree["w"][1:].zero_()


def write_to_buffers(tree: Any) -> None:
    next(iter(tree.buffers.values())).add_(1)


def write_to_leaves(tree: Any) -> None:
    for leaf in optree.tree_leaves(tree):
        leaf.add_(1)


def write_through_a_map(tree: Any) -> None:
    tree.map(lambda x: x.neg_())


WRITES = (write_to_a_leaf, write_to_a_view, write_to_buffers, write_to_leaves, write_through_a_map)
TREES: dict[str, Callable[[Any, Any], Any]] = {
    "params": lambda state, grads: state.params,
    "grads": lambda state, grads: grads,
    "moments": lambda state, grads: state.moments[1],
    "kept grads": lambda state, grads: state.grads,
}


@pytest.mark.parametrize("memory", MEMORIES, ids=["host", "disk"])
@pytest.mark.parametrize("kind", TREES)
def test_writes_to_what_was_read_are_refused(kind: str, memory: Any) -> None:
    step = fz.train_step(lambda p, x: (x @ p["w"]).square().mean(), fz.adamw(0.1))
    step = fz.offload(step, params=memory, grads=memory, moments=memory)
    for write in WRITES:
        state = step.init({"w": torch.ones(6)})
        grads, _ = step.vjp(state, X)[1](torch.ones(()))
        state = step.add_grads(state, grads)
        tree = trees_of(TREES[kind](state, grads))[0]
        read = tree["w"].sum(), tree.buffers  # reads change nothing
        step.update(state, grads)
        write(tree)
        with pytest.raises(RuntimeError, match=r"the (params|grads|moments) of unit '\(root\)': got a write in place"):
            step.update(state, grads)
        del read


@pytest.mark.parametrize("memory", MEMORIES, ids=["host", "disk"])
def test_values_made_from_what_was_read_are_used(memory: Any) -> None:
    step = fz.train_step(lambda p, x: (x @ p["w"]).square().mean(), fz.sgd(0.5))
    step = fz.offload(step, params=memory, grads=memory)
    state = step.init({"w": torch.ones(6)})
    grads, _ = step.vjp(state, X)[1](torch.ones(()))
    halved: Any = optree.tree_map(lambda x: x.mul_(0.5), grads)  # type: ignore[arg-type]
    new, _ = step.update(state, halved)
    want, _ = step.update(state, step.vjp(state, X)[1](torch.full((), 0.5))[0])
    assert torch.equal(fz.gather(new.params)["w"], fz.gather(want.params)["w"])
