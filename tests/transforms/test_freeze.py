"""fz.freeze: leaves that are used, and stay."""

from __future__ import annotations

import torch

import fzero as fz
from fzero.testing import assert_trees_equal

F64 = torch.float64


def test_frozen_leaves_have_rows_without_grads_and_moments() -> None:
    step = fz.freeze(fz.train_step(lambda p, x: x, fz.sgd(0.1)), "base.*")
    base, head = step.rows([("base.w", (2,), F64), ("head", (2,), F64)])
    assert base.frozen and base.grads is None and base.moments is None
    assert not head.frozen and head.grads is not None and head.moments is not None


def test_gradients_by_a_states_params_may_hold_those_of_frozen_leaves() -> None:
    step = fz.freeze(fz.train_step(lambda p, x: (p["w"] * x).sum() * p["b"].sum(), fz.adamw(0.1)), "b")
    state, x = step.init({"w": torch.ones(3), "b": torch.full((2,), 0.5)}), torch.arange(3.0)
    grads = torch.func.grad(lambda params: step.forward(state.replace(params=params), x))(state.params)
    found, metrics = step.update(state, grads)
    want, wanted = step(state, x)
    assert_trees_equal(fz.gather(found.params), fz.gather(want.params))
    assert metrics["grad_norm"] == wanted["grad_norm"]
    kept, _ = step.update(step.add_grads(state, grads), grads)
    assert_trees_equal(fz.gather(kept.params)["b"], torch.full((2,), 0.5))
