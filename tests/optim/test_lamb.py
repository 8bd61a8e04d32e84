"""LAMB and clipping by leaves, on plain trees; under ZeRO and in derivatives they are drawn in tests/whole_runs.py."""

from __future__ import annotations

import torch

import fzero as fz
from fzero.testing import assert_trees_close

P, G = {"w": torch.tensor([3.0, 4.0]), "b": torch.zeros(2)}, {"w": torch.tensor([1.0, -2.0]), "b": torch.ones(2)}


def test_each_leaf_takes_a_step_of_its_own_norm() -> None:
    optimizer = fz.lamb(0.1, eps=0.0)
    updates, state = optimizer.update(G, optimizer.init(P), P)
    assert_trees_close(updates["w"], -0.1 * 5.0 * G["w"].sign() / 2**0.5, rtol=1e-6)
    assert_trees_close(updates["b"], -0.1 * G["b"], rtol=1e-6)  # without a norm of its own it is Adam's
    assert [own.count.value for own in state.rest.values()] == [1, 1]


def test_leaves_are_clipped_apart() -> None:
    clip, grads = fz.clip_by_block_norm(1.0), {**G, "c": torch.tensor([0.5]), "d": torch.zeros(3)}
    found, _ = clip.update(grads, clip.init(grads), grads)
    assert_trees_close(found["w"], G["w"] / 5**0.5, rtol=1e-6)
    assert_trees_close(found["b"], G["b"] / 2**0.5, rtol=1e-6)
    assert_trees_close((found["c"], found["d"]), (torch.tensor([0.5]), torch.zeros(3)))
