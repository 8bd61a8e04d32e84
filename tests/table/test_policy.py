"""Policies: dtypes for every use of a leaf, by path, and combinations that cannot be."""

from __future__ import annotations

import torch

import fzero as fz

BF16 = torch.bfloat16


def rows(policy: object) -> dict[str, fz.Policy]:
    step = fz.train_step(lambda p: p, fz.adamw(0.1), policy)  # type: ignore[arg-type]
    params = {"norm": torch.ones(2, dtype=torch.float32), "up": torch.ones(2, dtype=BF16)}
    return {row.path: row.policy for row in fz.plan(step, params).rows}


def test_what_is_not_said_is_the_leafs_own() -> None:
    found = rows(fz.Policy(compute=BF16))
    assert found["norm"].param == torch.float32 and found["norm"].compute == BF16
    assert found["up"].param == BF16 and found["up"].computes_as_stored and not found["norm"].computes_as_stored


def test_the_first_pattern_that_matches_decides() -> None:
    found = rows(fz.Policy.by_path({"norm": fz.Policy(), "*": fz.Policy(moment=torch.float32)}))
    assert found["norm"].compute == torch.float32 and found["up"].moment == torch.float32
