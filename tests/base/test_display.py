"""What plans and steps print."""

from __future__ import annotations

import torch

import fzero as fz
from fzero.base.display import counted, in_bytes

STEP = fz.train_step(lambda p, x: (p["<b>"] * x).sum(), fz.chain(fz.clip_by_global_norm(1.0), fz.adamw(0.1)))
PARAMS = {"<b>": torch.ones(4, 3), "c": torch.ones(2)}


def test_counts_and_bytes_in_words() -> None:
    words = [counted(1, "leaf"), counted(2, "leaf"), counted(1, "rank"), counted(1234, "rank")]
    assert words == ["1 leaf", "2 leaves", "1 rank", "1,234 ranks"]
    assert [in_bytes(n) for n in (3, 2048, 3 << 19)] == ["3 B", "2.00 KiB", "1.50 MiB"]


def test_steps_and_plans_show_their_table_and_are_short_in_words() -> None:
    step = fz.accumulate(fz.shard_zero3(STEP), 4)
    lines = [line.split() for line in str(step).splitlines()[1:3]]
    assert lines == [["policy", "*", "Policy()"], ["axis", "*", "shard_zero3(axis='dp')"]]
    assert "accumulate: 4 microbatches" in str(step) and "chain(clip_by_global_norm, adamw)" in repr(step)
    assert len(repr(fz.whole(fz.sgd(0.1)))) < 60
    assert repr(fz.GradientTransformation(lambda p: (), sum)) == "GradientTransformation(sum)"  # type: ignore[arg-type]
    plan = fz.plan(step, PARAMS, world_size=2)
    assert "2 leaves, 14 parameters, 1 unit, 2 ranks" in str(plan)
    assert "sent per step without accumulation" in str(plan) and len(repr(plan)) < 80
    assert "sent per step 0 B" in str(fz.plan(STEP, PARAMS)) and ", 1 rank\n" in str(fz.plan(STEP, PARAMS))
