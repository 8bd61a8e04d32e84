"""Lookahead (Zhang et al. 2019, 1907.08610): slow weights that follow the params, which go on from them."""

from __future__ import annotations

import functools

from fzero.base.arguments import need_int, need_number
from fzero.kernels.onepass import math_dtype
from fzero.state.sharded import Sharded
from fzero.table.spec import Extra, S, need_step


def lookahead(step: S, every: int = 6, alpha: float = 0.5) -> S:
    """After every `every`-th applied update `slow = slow + alpha * (params - slow)`, and the params go on from there.

    The slow weights are `state.extra["lookahead"]`: they begin with init's params, and are of the leaves that are
    trained, in float32, or float64 where params are, also where these are stored in fewer bits. They lie where a leaf's
    moments do (`fz.offload`), and are saved and converted like them. Updates are counted by `state.step`, so that one
    that is skipped counts as none. The optimizer's moments stay. Each group is changed as soon as the optimizer has
    written to it, before it is put away or gathered, and rounded as an update rounds, with random bits of its own.
    `fz.ema` averages what the params are afterwards, in whatever order both are said. The slow weights' outputs are
    those of `step.forward(state.replace(params=state.extra["lookahead"]), *inputs)`.

    Args:
        step: any step.
        every: applied updates from one such change of the params to the next, at least 1; the paper's k.
        alpha: in [0, 1]: how far the slow weights go towards the params.

    Raises:
        TypeError, ValueError: one of these is no such number.

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
    extra = Extra("lookahead", said, _begun, _stays, kind="a lookahead", wide=True, changes=changes, every=int(every))
    return step.with_state(extra)


def _begun(params: Sharded) -> Sharded:
    return params.only(params.layout.trainable).map(lambda p: p.to(math_dtype(p.dtype)))


def _followed(alpha: float, slow: Sharded, params: Sharded) -> tuple[Sharded, Sharded]:
    new = slow.map(lambda s, p: s + alpha * (p - s), params)
    return new, new


def _stays(slow: Sharded, params: Sharded, applied: bool) -> Sharded:
    return slow
