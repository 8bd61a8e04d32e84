"""Chex-like asserts on trees, memory and communication; ranks on threads or processes; `strategies` for Hypothesis."""

from fzero.capture.watch import strict_capture as strict_capture
from fzero.comm.divergence import checked_collectives as checked_collectives
from fzero.comm.divergence import recorded_collectives as recorded_collectives
from fzero.comm.hazards import hazards as hazards
from fzero.testing._asserts import assert_all_finite as assert_all_finite
from fzero.testing._asserts import assert_collectives as assert_collectives
from fzero.testing._asserts import assert_no_alias as assert_no_alias
from fzero.testing._asserts import assert_not_mutated as assert_not_mutated
from fzero.testing._asserts import assert_same_spec as assert_same_spec
from fzero.testing._asserts import assert_trees_close as assert_trees_close
from fzero.testing._asserts import assert_trees_equal as assert_trees_equal
from fzero.testing._memory import LiveBytes as LiveBytes
from fzero.testing._memory import assert_peak_bytes as assert_peak_bytes
from fzero.testing._mesh import fake_mesh as fake_mesh
from fzero.testing._ranks import RankError as RankError
from fzero.testing._ranks import run_ranks as run_ranks
