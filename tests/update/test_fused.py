"""An update inside the pullback has the bits of one after it, however it comes to know the norm."""

from __future__ import annotations

import pytest
import scenarios

import fzero as fz
from fzero.testing import assert_trees_equal, run_ranks


@pytest.mark.parametrize("norm", ["twice", "held"])
def test_clipped_by_the_norm_of_all(norm: str) -> None:
    loss, params = scenarios.stack()

    def rank_main(rank: int) -> None:
        plain = fz.shard_zero3(fz.train_step(loss, fz.chain(fz.clip_by_global_norm(0.1), fz.sgd(0.1))))
        batch = scenarios.vector_batches(2)[rank]
        (want, _), (found, _) = (step(step.init(params), *batch) for step in (plain, fz.fuse_update(plain, norm=norm)))
        assert_trees_equal(fz.gather(found.params), fz.gather(want.params))

    run_ranks(rank_main, 2)
