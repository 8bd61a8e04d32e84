"""Two blocks in double precision, and functions that call them as units: what many tests of units begin with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fzero as fz
from fzero.testing import run_ranks

F64 = torch.float64
SHARDS: dict[str, Any] = {"remat": fz.remat, "ZeRO-3": fz.shard_zero3}
FORMS: dict[str, Callable[[fz.Step], fz.Step]] = {
    "plain": lambda step: step,
    "remat": fz.remat,
    "ZeRO-1": fz.shard_zero1,
    "ZeRO-2": fz.shard_zero2,
    "ZeRO-3": fz.shard_zero3,
    "ZeRO-3, remat": lambda step: fz.remat(fz.shard_zero3(step)),
    "microbatches": lambda step: fz.accumulate(step, 2),
    "fused": lambda step: fz.fuse_update(fz.shard_zero1(step)),
}
X = torch.randn(3, 4, dtype=F64, generator=torch.Generator().manual_seed(1))


def forms(*names: str) -> dict[str, Callable[[fz.Step], fz.Step]]:
    return {name: FORMS[name] for name in names}


def params_of(seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return {
        "blocks": [{"w": torch.randn(4, 4, dtype=F64, generator=generator)} for _ in range(2)],
        "s": torch.ones((), dtype=F64),
    }


def block_of(body: Any) -> Any:
    """fn(params, x), whose units are `body(q, x)`."""
    unit = fz.unit(body)

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        for q in p["blocks"]:
            x = unit(q, x)
        return x.square().mean()

    return fn


def refused(fn: Any, error: type[Exception], match: str, shard: Any = fz.remat) -> None:
    """On two ranks, in the first step."""

    def rank_main(rank: int) -> None:
        step = shard(fz.train_step(fn, fz.sgd(0.1)))
        state = step.init(params_of())
        with pytest.raises(error, match=match):
            step(state, X)

    run_ranks(rank_main, 2)
