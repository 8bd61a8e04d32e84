"""One run of the user's function: it may neither write to a state's memory nor give it out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from units import X, params_of

import fzero as fz
from fzero.testing import assert_trees_equal


@pytest.mark.parametrize("transform", [lambda step: step, fz.shard_zero3])
def test_a_write_to_a_leaf_is_refused_by_name(transform: Any) -> None:
    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            p["s"].mul_(2.0)
        return (x * p["s"]).sum()

    def rank_main(rank: int) -> None:
        step = transform(fz.train_step(fn, fz.sgd(0.1)))
        with pytest.raises(ValueError, match=r"(?s)'s'.*in place.*[Cc]ompute with a copy|in place.*Params change"):
            step(step.init(params_of()), X)

    fz.testing.run_ranks(rank_main, 1)


def test_what_it_returns_of_its_params_is_a_copy() -> None:
    step = fz.train_step(lambda p: p, fz.sgd(0.1))
    state = step.init(params_of())
    out = step.forward(state)
    with torch.no_grad():
        out["s"].zero_()
        out["blocks"][0]["w"].zero_()
    assert_trees_equal(fz.gather(state.params), params_of())
