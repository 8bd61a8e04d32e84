"""An update in one pass over memory has the same bits in one piece, in chunks, and with other groups in one buffer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import updates
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

import fzero as fz
from fzero.kernels import build, onepass
from fzero.testing import run_ranks

STAGES = [lambda step: step, fz.shard_zero1, fz.shard_zero2, fz.shard_zero3]


def test_chunks_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "kernel", lambda *_: None)  # the eager path
    run = lambda: updates.updated("lion", fz.Policy.compact16(), 64 * 37, False)
    whole = run()
    monkeypatch.setattr(onepass, "CHUNK", 64)
    assert all(torch.equal(a, b) for a, b in zip(whole, run(), strict=True))


def after_updates(optimizer: str, policy: str, sizes: list[int], stage: int, late: bool) -> list[torch.Tensor]:
    """All buffers after three updates of as many units; the last one is frozen in the first update, if it is `late`."""
    drawn = lambda seed: torch.randn(sum(sizes), generator=torch.Generator().manual_seed(seed)).split(sizes)
    units = lambda seed: [{"w": each} for each in drawn(seed)]
    step = fz.train_step(lambda p: p, updates.OPTIMIZERS[optimizer](), updates.POLICIES[policy])
    step = STAGES[stage](step)
    state = step.init(units(1), seed=3)
    if late:
        first = fz.freeze(step, f"{len(sizes) - 1}.w")
        state, metrics = first.update(fz.convert(state, first), units(2))
        assert not metrics["skipped"]
        state = fz.convert(state, step)
    for seed in (3, 4):
        state, metrics = step.update(state, units(seed))
        assert not metrics["skipped"]
    return [x.clone() for x in tree_leaves(state) if isinstance(x, torch.Tensor)]


@example("adamw", "float32", [700, 64, 63], 3, 2, True, False)  # of other counts
@example("lion", "bf16", [64, 64, 700], 0, 1, False, False)  # rounded stochastically
@example("sgd", "bf16 params, float32 moments", [30_000] * 5, 0, 1, False, False)  # more than one batch takes
@example("adamw", "float32", [700, 4097, 30_000, 70_000], 2, 2, True, True)  # with a kernel, and without
@given(
    optimizer=st.sampled_from(sorted(updates.OPTIMIZERS)),
    policy=st.sampled_from(sorted(updates.POLICIES)),
    sizes=st.lists(st.sampled_from([1, 63, 64, 700, 4097, 30_000, 70_000]), min_size=2, max_size=7),
    stage=st.integers(0, 3),
    world=st.integers(1, 3),
    late=st.booleans(),
    kernels=st.booleans(),
)
def test_small_groups_together_have_the_bits_of_each_by_itself(
    optimizer: str, policy: str, sizes: list[int], stage: int, world: int, late: bool, kernels: bool
) -> None:
    batches, most = onepass._batches, list[int]()

    def looked_at(pieces: Iterable[onepass.Piece]) -> Any:
        for own in batches(pieces):
            most.append(sum(piece.grads.numel() for piece in own))
            yield own

    def each(pieces: Iterable[onepass.Piece]) -> Any:
        return ([piece] for piece in pieces)

    def run(how: Any, kernels: bool) -> list[torch.Tensor]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(onepass, "_batches", how)
            if not kernels:
                patch.setattr(build, "kernel", lambda *_: None)
            return run_ranks(lambda _: after_updates(optimizer, policy, sizes, stage, late), world)[0]

    together, apart = run(looked_at, kernels), run(each, False)
    assert len(together) == len(apart)
    assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))
    assert max(most, default=0) < onepass.LARGE
