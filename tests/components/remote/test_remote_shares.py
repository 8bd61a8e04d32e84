"""What a rank computes of its share only: nothing overflows, no number is one of a share, no share is empty."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import fzero as fz

D = torch.float64


def built(rank: int, fn: Any, dtype: torch.dtype = D, shard: bool = True) -> Any:
    step = fz.train_step(fn, fz.sgd(0.1))
    return (fz.shard_zero1(step) if shard else step), {"w": torch.ones(3, dtype=dtype)}


def remote(fn: Any, ranks: int = 2, **options: Any) -> Any:
    return fz.remote(functools.partial(built, fn=fn, **options), ranks, "threads", timeout=10)


def rows_and_mean(p: Any, x: torch.Tensor) -> Any:
    return x * p["w"], (x * p["w"]).mean()


@pytest.mark.parametrize(("ranks", "rows"), [(2, 3), (2, 4), (3, 4)])
def test_cotangents_overflow_where_those_of_one_process_do(ranks: int, rows: int) -> None:
    """Loss scaling puts them close to it."""
    x = torch.full((rows, 3), 1 / 16, dtype=torch.float16)
    cts = (torch.full((rows, 3), 40000.0).half(), torch.tensor(60000.0).half())
    step, params = built(0, rows_and_mean, torch.float16, shard=False)
    _, pull = step.vjp(step.init(params), x)
    grads, inputs = pull(cts)
    with remote(rows_and_mean, ranks, dtype=torch.float16) as own:
        _, theirs = own.vjp(own.init(), x)
        their_grads, their_inputs = theirs(cts)
        torch.testing.assert_close(fz.gather(their_grads), fz.gather(grads), rtol=2e-3, atol=0)
        torch.testing.assert_close(fz.fetch(their_inputs), inputs, rtol=2e-3, atol=0)


def of_a_mean(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x.mean() * p["w"].sum()


def test_a_batch_with_fewer_examples_than_ranks_is_refused() -> None:
    """Given as values and as a handle, in each call; one of no examples is what it is in one process."""
    x = torch.ones(1, dtype=D)
    with remote(lambda p, x: x * p["w"].sum(), 1) as first, remote(of_a_mean) as own:
        state = own.init()
        passes = own.passes(state, 1)
        for few in (x, first.forward(first.init(), x)):
            uses = [own.forward, own.vjp, own, lambda _, few: passes.forward(0, (few,), (0,))]
            for use in uses:
                with pytest.raises(ValueError, match="split over 2 data ranks; expected a size of at least 2"):
                    fz.fetch(use(state, few))
        assert fz.fetch(own.forward(state, torch.ones(0, dtype=D))).isnan()
        assert fz.fetch(own(state, torch.ones(3, dtype=D))[1]["skipped"]).item() is False


def counted(p: Any, x: torch.Tensor, n: torch.Tensor, kind: str) -> Any:
    made: dict[str, Any] = {
        "count": (x > 0).sum(),
        "rows": x.shape[0],
        "size": x.shape,
        "float": 0.5,
        "nested": {"a": [(1,)]},
        "handed on": n,
        "bool": torch.tensor(True),
        "of a share": (x > 1).any(),
        "python": (True, None, "text", torch.float32),
        "signs": (x > 0).long(),
    }
    return x * p["w"], made[kind]


def aux_counted(p: Any, x: torch.Tensor, n: torch.Tensor, kind: str) -> Any:
    out, aux = counted(p, x, n, kind)
    return out.mean(), aux


def built_aux(rank: int) -> Any:
    return fz.shard_zero1(fz.train_step(aux_counted, fz.sgd(0.1), has_aux=True)), {"w": torch.ones(3, dtype=D)}


def test_numbers_that_may_be_of_a_share_are_refused() -> None:
    """Also where they happen to be the same on all ranks; what all have is good, and one rank has all of the batch."""
    x, n = torch.ones(4, 3, dtype=D), torch.tensor(7)
    params = {"w": torch.ones(3, dtype=D)}
    for ranks in (1, 2):
        with remote(counted, ranks) as own, fz.remote(built_aux, ranks, "threads") as other:
            state, theirs = own.init(), other.init()
            for kind in ("count", "rows", "size", "float", "nested", "handed on", "bool", "python", "signs"):
                uses = [
                    lambda kind=kind: own.forward(state, x, n, kind)[1],
                    lambda kind=kind: own.vjp(state, x, n, kind)[0][1],
                    lambda kind=kind: other(theirs, x, n, kind)[1]["aux"],
                ]
                for use in uses:
                    if ranks == 1 or kind in ("handed on", "bool", "python", "signs"):
                        assert repr(fz.fetch(use())) == repr(counted(params, x, n, kind)[1])
                    else:
                        with pytest.raises(ValueError, match="a number without dims"):
                            use()
            if ranks == 2:
                with pytest.raises(ValueError, match="return it without a dim"):
                    fz.fetch(own.forward(state, torch.tensor([[1.0] * 3, [2.0] * 3], dtype=D), n, "of a share"))
