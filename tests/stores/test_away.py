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


@pytest.mark.parametrize("memory", MEMORIES, ids=["host", "disk"])
def test_a_copy_that_becomes_a_buffer_is_no_copy_any_more(memory: Any) -> None:
    """An average that begins as the params and is written in place, also of leaves that are never updated."""

    def average(step: fz.Step) -> fz.Step:
        def update(kept: fz.Sharded, params: fz.Sharded, applied: bool) -> fz.Sharded:
            return kept.map(lambda a, p: a.mul_(0.9).add_(p, alpha=0.1), params)

        return step.with_state(fz.Extra("average", "average", lambda params: params.map(lambda p: p), update))

    plain = fz.train_step(lambda p, x: ((p["base"] @ x) * p["head"]).sum(), fz.sgd(0.1))
    params, x = {"base": torch.ones(4, 4), "head": torch.ones(4)}, torch.ones(4)
    for step in (plain, fz.freeze(plain, "base")):
        away, stays = average(fz.offload(step, params=memory)), average(step)
        first = state = away.init(params)
        want = stays.init(params)
        for _ in range(3):
            state, _ = away(state, x)
            want, _ = stays(want, x)
        assert torch.equal(fz.gather(state.params)["head"], fz.gather(want.params)["head"])
        assert torch.equal(fz.gather(state.extra["average"])["head"], fz.gather(want.extra["average"])["head"])
        assert torch.equal(fz.gather(first.params)["head"], torch.ones(4))
    leaves, spec = optree.tree_flatten(state)  # type: ignore[arg-type]
    other: Any = optree.tree_unflatten(spec, leaves)
    del leaves
    fz.donate(average(fz.offload(fz.freeze(plain, "base"), params=memory)))(other, x)
    assert torch.equal(fz.gather(state.params)["head"], fz.gather(want.params)["head"])


@pytest.mark.parametrize("memory", MEMORIES, ids=["host", "disk"])
def test_it_is_read_in_inference_mode(memory: Any) -> None:
    step = fz.train_step(lambda p, x: (x @ p["w"]).square().mean(), fz.adamw(0.1))
    step = fz.offload(step, params=memory, moments=memory)
    state = step.init({"w": torch.ones(6)})
    with torch.inference_mode():
        assert fz.gather(state.params)["w"].sum() == 6 and state.params["w"].sum() == 6
        assert fz.global_norm(state.params).item() == pytest.approx(6**0.5)
    step(state, X)
