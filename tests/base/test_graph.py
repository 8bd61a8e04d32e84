"""Walks over plain autograd's graph."""

from __future__ import annotations

import pytest
import torch

from fzero.base.graph import gradients, joint_outputs, refuse_foreign_leaves


def leaf(*values: float) -> torch.Tensor:
    return torch.tensor(values, requires_grad=True)


def test_what_is_not_used_has_no_gradient() -> None:
    x, unused = leaf(2.0), leaf(3.0)
    out = [x * x, torch.ones(1)]
    assert [g if g is None else g.item() for g in gradients(out, [x, unused], [torch.ones(1)] * 2, False)] == [
        4.0,
        None,
    ]
    assert gradients(out, [x], [None, None], False) == [None]


def test_a_leaf_that_is_closed_over_is_refused() -> None:
    x, foreign = leaf(1.0), leaf(2.0)
    refuse_foreign_leaves([x * 2], [x])
    refuse_foreign_leaves([x * foreign], [x], is_foreign=lambda found: found is not foreign)
    with pytest.raises(ValueError, match=r"closes over a tensor of shape \(1,\)"):
        refuse_foreign_leaves([x * foreign], [x])


def test_outputs_that_depend_on_one_another() -> None:
    x = leaf(1.0)
    y = x.exp()
    assert joint_outputs([y, y * 2, x.sin()]) == {0: frozenset({1})}
