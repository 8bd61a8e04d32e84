"""fz.autocast: float64 stays as it is; matrices and the function compute in the dtype."""

from __future__ import annotations

import contextlib
from typing import Any

import exactness
import optree
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fzero as fz
from fzero.testing import run_ranks

F64 = torch.float64


def test_matrices_are_cast_and_vectors_are_not() -> None:
    step = fz.autocast(fz.train_step(lambda p, x: x, fz.sgd(0.1)))
    leaves = [("w", (2, 2), torch.float32), ("b", (2,), torch.float32), ("d", (2, 2), F64)]
    assert [row.policy.compute for row in step.rows(leaves)] == [torch.bfloat16, torch.float32, F64]
    assert all(row.autocast == torch.bfloat16 for row in step.rows(leaves))


def _cast(enabled: bool | None) -> contextlib.AbstractContextManager[Any]:
    """torch.autocast, or what is there already."""
    return contextlib.nullcontext() if enabled is None else torch.autocast("cpu", torch.bfloat16, enabled=enabled)


def _block(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["w"] + p["b"]).float()


# which blocks a pattern casts, and whether the function around them too
PATTERNS: dict[str, tuple[tuple[int, ...], bool]] = {
    "*": ((0, 1), True),
    "blocks.*": ((0, 1), False),
    "blocks.1.*": ((1,), False),
    "none": ((), False),
}


@settings(max_examples=15, deadline=None)
@given(
    stage=st.integers(0, 3),
    pattern=st.sampled_from([*PATTERNS]),
    around=st.sampled_from((None, True, False)),
    remat=st.booleans(),
)
def test_drawn_inside_and_around(stage: int, pattern: str, around: bool | None, remat: bool) -> None:
    """Where a step's rows say nothing, a caller's own autocast holds, and what is cast is cast as there."""
    generator = torch.Generator().manual_seed(0)
    params = {"blocks": [{"w": torch.randn(5, 5, generator=generator), "b": torch.ones(5)} for _ in range(2)]}
    batches = torch.randn(2, 4, 5, generator=generator)
    unit, (cast, whole) = fz.unit(_block), PATTERNS[pattern]

    def fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        for p in params["blocks"]:
            x = unit(p, x)
        return (x @ x.t()).float().square().mean()

    def plain(params: Any, x: torch.Tensor) -> torch.Tensor:
        with _cast(True if whole else None):
            for i, p in enumerate(params["blocks"]):
                with _cast(True if i in cast else None):
                    x = _block(p, x)
            return (x @ x.t()).float().square().mean()

    def rank_main(rank: int) -> Any:
        step = exactness.SHARDS[stage](fz.train_step(fn, fz.sgd(0.1)))
        if pattern != "none":
            step = fz.autocast(step) if whole else fz.autocast(step, pattern=pattern)
        step = fz.remat(step) if remat else step
        state = step.init(params)
        for _ in range(3):  # later calls of a unit go another way than its first
            with _cast(around):
                loss, pullback = step.vjp(state, batches[rank])
                grads = fz.gather(pullback(torch.ones_like(loss))[0])
        return loss.detach(), grads

    ranks = 2 if stage else 1
    with _cast(around):
        want = [torch.func.grad_and_value(plain)(params, x) for x in batches[:ranks]]
    mean = optree.tree_map(lambda *grads: torch.stack(grads).mean(0), *[grads for grads, _ in want])
    for (loss, grads), (_, plain_loss) in zip(run_ranks(rank_main, ranks), want, strict=True):
        torch.testing.assert_close(loss, plain_loss, rtol=1e-6, atol=1e-7)
        fz.testing.assert_trees_close(grads, mean, rtol=1e-5)
