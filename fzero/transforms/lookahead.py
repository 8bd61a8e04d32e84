"""Lookahead (Zhang et al. 2019, 1907.08610): slow weights that follow the params, which go on from them."""

from __future__ import annotations

import functools

from fzero.base.arguments import need_int, need_number, renamed
from fzero.state.sharded import Sharded
from fzero.table.spec import Extra, S, need_step
from fzero.transforms.ema import begun


@renamed(sync_period="every", slow_step_size="alpha")
def lookahead(step: S, every: int = 6, alpha: float = 0.5) -> S:
    """Lookahead: slow weights follow the params, and every few updates the params go on from the slow weights.

    After every `every`-th applied update, `slow = slow + alpha * (params - slow)` and then `params = slow`.

    - The slow weights are `state.extra["lookahead"]`, sharded and offloaded as moments are, and saved with the state.
    - They begin with the params of `init`, in float32 (float64 for float64 params). The params are rounded as by an
      update.
    - Skipped updates do not count. The optimizer's moments stay as they are.
    - `fz.ema` averages the params after this change, whichever of the two comes first.
    - Evaluate them with `step.forward(state.replace(params=state.extra["lookahead"]), *inputs)`.

    Args:
        step: any step.
        every: the number of applied updates from one change to the next, at least 1. The paper's k.
        alpha: in [0, 1]: how far the slow weights go towards the params.

    Returns:
        A new step.

    Raises:
        TypeError, ValueError: `every` or `alpha` is no such number.

    Source:
        Zhang et al. 2019, arXiv 1907.08610, algorithm 1.

    Example:
        >>> step = fz.lookahead(fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(1.0)), every=2)
        >>> state = step.init({"w": torch.zeros(1)})
        >>> for _ in range(3):
        ...     state, _ = step(state, torch.ones(1))
        ...     print(fz.gather(state.params)["w"], fz.gather(state.extra["lookahead"])["w"])
        tensor([-1.]) tensor([0.])
        tensor([-1.]) tensor([-1.])
        tensor([-2.]) tensor([-1.])
    """
    need_step(step, "lookahead")
    need_int(every, "lookahead", "every", "a number of updates", 1)
    need_number(alpha, "lookahead", "alpha", "a number in [0, 1]")
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"lookahead: got alpha={alpha}, expected a number in [0, 1].")
    said = f"lookahead(every={int(every)}, alpha={float(alpha)})"
    changes = functools.partial(_followed, float(alpha))
    extra = Extra("lookahead", said, begun, kind="a lookahead", changes=changes, every=int(every))
    return step.with_state(extra)


def _followed(alpha: float, slow: Sharded, params: Sharded) -> tuple[Sharded, Sharded]:
    new = slow.map(lambda s, p: s + alpha * (p - s), params)
    return new, new
