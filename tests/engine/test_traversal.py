"""One run's tree: which leaves are handles, where they come from, and that a unit within a unit is a plain call."""

from __future__ import annotations

from typing import Any

import torch
from units import X, params_of

import fzero as fz
from fzero.engine.traversal import Present, current, here, inside, origins_of
from fzero.table.handle import Handle
from fzero.testing import run_ranks


def test_leaves_of_units_are_handles_and_others_are_full_and_both_are_known() -> None:
    unit = fz.unit(lambda q, x: torch.tanh(x @ q["w"]))

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        w, s = p["blocks"][0]["w"], p["s"]
        assert isinstance(w, Handle) and not isinstance(s, Handle)
        layout, numbers = origins_of([w, s, x])
        assert layout is not None and [layout.rows[abs(n) - 1].path for n in numbers[:2]] == ["blocks.0.w", "s"]
        assert numbers[0] < 0 < numbers[1] and numbers[2] == 0
        return (unit(p["blocks"][0], x) * s).sum()

    def rank_main(rank: int) -> None:
        step = fz.shard_zero3(fz.train_step(fn, fz.sgd(0.1)))
        step(step.init(params_of()), X)
        assert origins_of([X]) == (None, (0,))

    run_ranks(rank_main, 2)


def test_a_unit_within_a_unit_is_a_plain_call() -> None:
    ran: list[Any] = []

    def inner(q: Any, x: torch.Tensor) -> torch.Tensor:
        ran.append(current.get())
        return torch.tanh(x @ q["w"])

    outer = fz.unit(lambda q, x: fz.unit(inner)(q, x))

    def rank_main(rank: int) -> None:
        step = fz.shard_zero3(fz.train_step(lambda p, x: outer(p["blocks"][0], x).sum(), fz.sgd(0.1)))
        step(step.init(params_of()), X)

    run_ranks(rank_main, 1)
    assert ran and all(one is None for one in ran)


def test_inside_says_which_leaves_the_unit_has() -> None:
    leaves: Present = {}
    with inside(leaves):
        assert here.get() is leaves and current.get() is None
    assert here.get() is None
