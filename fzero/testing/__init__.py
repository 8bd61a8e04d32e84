"""Chex-like asserts on trees, memory and communication; ranks on threads or processes; `strategies` for Hypothesis."""

from fzero.comm.divergence import checked_collectives, recorded_collectives
from fzero.comm.hazards import hazards
from fzero.planning.live import LiveBytes
from fzero.purity.strict import strict
from fzero.testing._asserts import (
    assert_all_finite,
    assert_collectives,
    assert_no_alias,
    assert_not_mutated,
    assert_peak_bytes,
    assert_same_spec,
    assert_trees_close,
    assert_trees_equal,
)
from fzero.testing._ranks import RankError, fake_mesh, run_ranks

__all__ = [
    "LiveBytes", "RankError", "assert_all_finite", "assert_collectives", "assert_no_alias", "assert_not_mutated",
    "assert_peak_bytes", "assert_same_spec", "assert_trees_close", "assert_trees_equal", "checked_collectives",
    "fake_mesh", "hazards", "recorded_collectives", "run_ranks", "strict",
]
__dir__ = __all__.copy  # without the modules that the names come from
