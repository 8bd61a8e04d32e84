"""Tensor and sequence parallelism: linear maps between the ranks of a mesh axis, and what is made of them."""

from fzero.parallel.axis import axis as axis
from fzero.parallel.cut import cut as cut
from fzero.parallel.maps import all_to_all as all_to_all
from fzero.parallel.maps import copy as copy
from fzero.parallel.maps import gather as gather
from fzero.parallel.maps import reduce_scatter as reduce_scatter
from fzero.parallel.maps import ring_shift as ring_shift
from fzero.parallel.maps import split as split
from fzero.parallel.maps import sum as sum
