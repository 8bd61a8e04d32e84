"""Tensor and sequence parallelism: linear maps between the ranks of a mesh axis, and what is made of them."""

from fzero.parallel.axis import axis as axis
from fzero.parallel.check import Report as Report
from fzero.parallel.check import check as check
from fzero.parallel.cut import cut as cut
from fzero.parallel.huggingface import register_attention as register_attention
from fzero.parallel.loss import cross_entropy as cross_entropy
from fzero.parallel.loss import weighted_mean as weighted_mean
from fzero.parallel.maps import all_to_all as all_to_all
from fzero.parallel.maps import copy as copy
from fzero.parallel.maps import gather as gather
from fzero.parallel.maps import reduce_scatter as reduce_scatter
from fzero.parallel.maps import ring_shift as ring_shift
from fzero.parallel.maps import split as split
from fzero.parallel.maps import sum as sum
from fzero.parallel.randomness import own_stream as own_stream
from fzero.parallel.ring import attention as attention
from fzero.parallel.ring import ring as ring
from fzero.parallel.sequence import shard_sequence as shard_sequence
from fzero.parallel.tiled import tiled as tiled
from fzero.parallel.tiled import tiled_cross_entropy as tiled_cross_entropy
from fzero.parallel.types import AxisTypeError as AxisTypeError
from fzero.parallel.ulysses import ulysses as ulysses
