"""A unit's call is a node where its leaves are to be gathered, and a plain call elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from units import X, params_of

import fzero as fz
from fzero.testing import run_ranks


def test_outside_of_steps_a_unit_is_its_function() -> None:
    unit = fz.unit(lambda q, x: x @ q["w"])
    q = params_of()["blocks"][0]
    assert torch.equal(unit(q, X), X @ q["w"])
    assert torch.func.grad(lambda q: unit(q, X).sum())(q)["w"].shape == (4, 4)


def test_a_checkpoint_around_a_unit_is_refused() -> None:
    unit = fz.unit(lambda q, x: torch.tanh(x @ q["w"]))

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(unit, p["blocks"][0], x, use_reentrant=False).sum()  # type: ignore[union-attr]

    def rank_main(rank: int) -> None:
        step = fz.shard_zero3(fz.train_step(fn, fz.sgd(0.1)))
        with (
            pytest.raises(TypeError, match=r"checkpoint.*fz\.remat\(step\)"),
            fz.tape(step, step.init(params_of())) as run,
        ):
            run(X)

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("shard", [lambda step: step, fz.remat, fz.shard_zero3])
def test_leaves_of_two_units_that_autocast_has_in_two_dtypes(shard: Any) -> None:
    unit = fz.unit(lambda q, r, x: x @ q["w"] @ r["w"])

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        return unit(*p["blocks"], x).float().sum()

    def rank_main(rank: int) -> None:
        params = torch.utils._pytree.tree_map(lambda x: x.float(), params_of())  # type: ignore[attr-defined]
        step = shard(fz.autocast(fz.train_step(fn, fz.sgd(0.1)), pattern="blocks.0.*"))
        with pytest.raises(ValueError, match=r"leaves of unit 'blocks.0', unit 'blocks.1'.*expected one dtype"):
            step(step.init(params), X.float())

    run_ranks(rank_main, 1)
