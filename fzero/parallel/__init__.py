"""Tensor and sequence parallelism: linear maps between the ranks of a mesh axis, and what is made of them."""

import fzero.parallel.check_first_run  # noqa: F401, which steps then call by themselves
from fzero.parallel.axis import axis
from fzero.parallel.check import Report, check
from fzero.parallel.huggingface import register_attention
from fzero.parallel.loss import cross_entropy, weighted_mean
from fzero.parallel.maps import all_to_all, copy, gather, reduce_scatter, ring_shift, split, sum
from fzero.parallel.randomness import own_stream
from fzero.parallel.ring import attention, ring
from fzero.parallel.sequence import shard_sequence
from fzero.parallel.tiled import tiled, tiled_cross_entropy
from fzero.parallel.types import AxisTypeError
from fzero.parallel.ulysses import ulysses
from fzero.table.slices import cut

__all__ = [
    "AxisTypeError", "Report", "all_to_all", "attention", "axis", "check", "copy", "cross_entropy", "cut", "gather",
    "own_stream", "reduce_scatter", "register_attention", "ring", "ring_shift", "shard_sequence", "split", "sum",
    "tiled", "tiled_cross_entropy", "ulysses", "weighted_mean",
]
__dir__ = __all__.copy  # without the modules that the names come from
