"""Batch norm over the batches of all ranks that the running step takes means over, as over one batch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from fzero.base import private
from fzero.base.context import averaged, one_by_one
from fzero.capture.handle import Function, Named, Operands
from fzero.comm import pieces
from fzero.comm.axis import Axis
from fzero.parallel.axis import need_axis
from fzero.parallel.loss import wide
from fzero.parallel.maps import _map


def ranks_of_means() -> tuple[Axis, ...]:
    """The axes that the running step takes means over, one after the other; none outside of a step."""
    axes = (*averaged.get(), *one_by_one.get())
    return tuple([need_axis(ax, "sync_batch_norm") for ax in axes])


class OverRanks(TorchFunctionMode):
    """Inside, `F.batch_norm` in training takes its mean and its variance over all ranks of some axes."""

    def __init__(self, axes: Sequence[Axis]) -> None:
        super().__init__()
        self.batch_norm: Function = functools.partial(batch_norm, axes)

    def __torch_function__(self, func: Function, types: object, args: Operands = (), kwargs: Named = None) -> object:
        if func is F.batch_norm:
            return self.batch_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def batch_norm(
    axes: Sequence[Axis],
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """`F.batch_norm` of the batches of all ranks, of this rank's one (Ioffe and Szegedy, arXiv 1502.03167).

    Ranks send each other twice as many numbers as there are channels, and one, there and back. The mean and the sum of
    squares about it are put together as those of parts of any sizes are (Chan, Golub and LeVeque, 1979), which loses
    nothing where a mean is large beside what is about it.

    Args:
        axes: whose ranks have other batches, of any sizes, also of none.
        input: [n, channels, ...].

    Raises:
        ValueError: on every rank, where all ranks together have one value for each channel.
    """
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    x = input.to(wide(input.dtype))
    count, mean, var = _of_all(x, axes)
    for running, value in ((running_mean, mean), (running_var, var * (count / (count - 1)))):
        if running is not None:
            running.mul_(1 - momentum).add_(value.detach().to(running.dtype), alpha=momentum)
    scale = (var + eps).rsqrt()
    scale = scale if weight is None else scale * weight.to(x.dtype)
    shift = -mean * scale if bias is None else bias.to(x.dtype) - mean * scale
    shape = (1, -1, *[1] * (x.ndim - 2))
    return torch.addcmul(shift.view(shape), x, scale.view(shape)).to(input.dtype)


def _of_all(x: torch.Tensor, axes: Sequence[Axis]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """How many values all ranks have for each channel, their means [channels], and their variances about these."""
    channels, dims = x.shape[1], [dim for dim in range(x.ndim) if dim != 1]
    own = x.numel() // channels if channels else 0
    if own:
        var, mean = torch.var_mean(x, dims, correction=0)
    else:
        var = mean = x.sum(dims)  # zeros, which depend on it as others' do, so that all ranks pull back alike
    found = torch.cat([mean, own * var, x.new_full((1,), own)])[None]
    for ax in axes:
        there, back = [functools.partial(each, ax) for each in (_gathered, _scattered)]
        found = _map("gather", found, ax, there, back, joins=0)
    counts = found[:, -1:].detach()
    count, means, squares = counts.sum(), found[:, :channels], found[:, channels:-1]
    _need_several(count)
    mean = (counts * means).sum(0) / count
    return count, mean, (squares + counts * (means - mean).square()).sum(0) / count


def _gathered(ax: Axis, x: torch.Tensor) -> torch.Tensor:
    return pieces.gathered(ax, x, 0, [len(x)] * ax.size, "sync_batch_norm")


def _scattered(ax: Axis, x: torch.Tensor) -> torch.Tensor:
    return pieces.scattered(ax, x, 0, [len(x) // ax.size] * ax.size, "sync_batch_norm")


def _need_several(count: torch.Tensor) -> None:
    """Refuses one value for each channel, of which there is no variance, where the count is here to be looked at."""
    with private.below_transforms():
        plain = private.unwrapped(count)
        if plain.device.type != "cpu" or private.is_fake(plain) or private.dispatch_modes():
            return
        if bool((plain == 1).any()):
            raise ValueError(
                "sync_batch_norm: got one value for each channel from all ranks together, expected more in training. "
                "Give larger batches, or take the module in eval mode."
            )
