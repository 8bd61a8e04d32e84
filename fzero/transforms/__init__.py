"""A transform a file: a pure function that returns a step with one more rule. See CONTRIBUTING.md to write one."""

from fzero.transforms.accumulate import accumulate as accumulate
from fzero.transforms.autocast import autocast as autocast
from fzero.transforms.carry import carry as carry
from fzero.transforms.compile import compile as compile
from fzero.transforms.donate import donate as donate
from fzero.transforms.ema import ema as ema
from fzero.transforms.freeze import freeze as freeze
from fzero.transforms.fuse_update import fuse_update as fuse_update
from fzero.transforms.lookahead import lookahead as lookahead
from fzero.transforms.loss_scale import loss_scale as loss_scale
from fzero.transforms.offload import offload as offload
from fzero.transforms.remat import remat as remat
from fzero.transforms.shard import shard_zero1 as shard_zero1
from fzero.transforms.shard import shard_zero2 as shard_zero2
from fzero.transforms.shard import shard_zero3 as shard_zero3
from fzero.transforms.shard_tensor import shard_tensor as shard_tensor
