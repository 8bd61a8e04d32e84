"""Batch norm over the batches of all ranks that the running step takes means over, as over one batch.

Which layers of a module take their statistics so, and a refusal of other buffers that each rank moves by its own batch.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import types
import zlib
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from fzero.base import hooks, private, pytree
from fzero.base.context import averaged, during, one_by_one, variable
from fzero.base.refusals import place_of
from fzero.comm.axis import Axis
from fzero.comm.pieces import most
from fzero.engine.compiled import leave_out
from fzero.parallel.axis import need_axis
from fzero.parallel.loss import wide
from fzero.parallel.maps import _joined, _map, _scattered
from fzero.table.handle import Function, Named, Operands, name_of

# of a batch norm, whose forward is over ranks or refused
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def ranks_of_means() -> tuple[Axis, ...]:
    """The axes that the running step takes means over, one after the other; none outside of a step."""
    axes = (*averaged.get(), *one_by_one.get())
    return tuple([need_axis(ax, "sync_batch_norm") for ax in axes])


class Call:
    """A call of a batch norm layer; `ran`: it has called an operation over ranks, or by its running statistics."""

    def __init__(self, path: str, axes: Sequence[Axis], running_mean: object = None) -> None:
        self.path, self.axes, self.ran = path, axes, False
        self._mean = running_mean if isinstance(running_mean, torch.Tensor) else None
        self._version = private.version(self._mean) if self._mean is not None else 0

    def takes(self, running_mean: object) -> bool:
        """Tells whether these are the layer's running statistics, and as the call has found them."""
        own = self._mean
        return own is not None and running_mean is own and private.version(own) == self._version


# the call that is running; outside of one every batch norm that is called takes its statistics over the step's ranks
running: contextvars.ContextVar[Call | None] = variable("batch_norm_layer", None)


class OverRanks(TorchFunctionMode):
    """Inside, `F.batch_norm` and `torch.batch_norm` in training take mean and variance over all ranks of a step."""

    calls = 0

    def __torch_function__(self, func: Function, types: object, args: Operands = (), kwargs: Named = None) -> object:
        if "batch_norm" in getattr(func, "__name__", ""):
            return self._run(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _run(self, func: Function, args: Operands, kwargs: Mapping[str, object]) -> object:
        own = running.get()
        schema = getattr(func, "_schema", None)  # of an operator of torch.ops
        order = _ORDERS.get(func, ()) if schema is None else [argument.name for argument in schema.arguments]
        given = dict(zip(order, args, strict=False)) | dict(kwargs)
        if "training" in order and not given.get("training"):
            if own is not None and own.takes(given.get("running_mean")):
                own.ran = True
            return func(*args, **kwargs)
        axes = ranks_of_means() if own is None else own.axes
        if not axes:
            return func(*args, **kwargs)
        what = "a batch norm without a layer" if own is None else f"batch norm {own.path!r}"
        if func not in (F.batch_norm, torch.batch_norm):
            raise ValueError(
                f"apply: {what} calls {name_of(func)!r} in training, which is not synchronised: its statistics would "
                f"be those of this rank's batch{place_of()}. Call torch.nn.functional.batch_norm, or leave out "
                "sync_batch_norm=True."
            )
        if hooks.in_checkpoint():
            raise ValueError(
                f"apply: {what}, over all ranks, runs inside torch.utils.checkpoint, which runs it again in the "
                "backward, where ranks exchange no statistics. Use fz.remat(step) instead."
            )
        if own is not None:
            own.ran = True
        self.calls += 1
        given.pop("cudnn_enabled", None)
        return batch_norm(axes, f"sync_batch_norm of {what}, number {self.calls}", **given)  # type: ignore[arg-type]


OverRanks.__torch_function__._torchdynamo_disable = True  # type: ignore[attr-defined]
_LAST = ("training", "momentum", "eps", "cudnn_enabled")
_AS_TORCH = ("input", "weight", "bias", "running_mean", "running_var", *_LAST)
# function -> the order of its arguments
_ORDERS: dict[object, tuple[str, ...]] = {
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", *_LAST[:3]),
    torch.batch_norm: _AS_TORCH,
    torch.native_batch_norm: _AS_TORCH[:-1],
}


def batch_norm(
    axes: Sequence[Axis],
    tag: str,
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """`F.batch_norm` of the batches of all ranks, of this rank's one (Ioffe and Szegedy, arXiv 1502.03167).

    Ranks send each other twice as many numbers as there are channels, and one, there and back. The mean and the sum of
    squares about it are put together as those of parts of any sizes are (Chan, Golub and LeVeque, 1979), which loses
    nothing where a mean is large beside what is about it. `tag` says, the same on all, what they exchange.
    """
    x = input.to(wide(input.dtype))
    count, mean, var = _of_all(x, axes, tag)
    for running, value in ((running_mean, mean), (running_var, var * (count / (count - 1)))):
        if running is not None:
            running.mul_(1 - momentum).add_(value.detach().to(running.dtype), alpha=momentum)
    scale = (var + eps).rsqrt()
    scale = scale if weight is None else scale * weight.to(x.dtype)
    shift = -mean * scale if bias is None else bias.to(x.dtype) - mean * scale
    shape = (1, -1, *[1] * (x.ndim - 2))
    return torch.addcmul(shift.view(shape), x, scale.view(shape)).to(input.dtype)


def _of_all(x: torch.Tensor, axes: Sequence[Axis], tag: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """How many values all ranks have for each channel, their means [channels], and their variances about these."""
    channels, dims = x.shape[1], [dim for dim in range(x.ndim) if dim != 1]
    own = x.numel() // channels if channels else 0
    if own:
        var, mean = torch.var_mean(x, dims, correction=0)
    else:
        var = mean = x.sum(dims)  # zeros, which depend on it as others' do, so that all ranks pull back alike
    found = torch.cat([mean, own * var, x.new_full((1,), own)])[None]
    for ax in axes:
        sizes = [len(found)] * ax.size
        there, back = [functools.partial(each, ax, 0, sizes, tag=tag) for each in (_joined, _scattered)]
        found = _map("gather", found, ax, there, back, (0,), sizes)
    counts = found[:, -1:].detach()
    count, means, squares = counts.sum(), found[:, :channels], found[:, channels:-1]
    _need_several(count)
    mean = (counts * means).sum(0) / count
    return count, mean, (squares + counts * (means - mean).square()).sum(0) / count


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


# ---- of a module


def synchronise(module: nn.Module, every: bool) -> Callable[[Function], Function]:
    """Has the batch norms of a copy take statistics over all ranks that the running step takes means over.

    Args:
        every: those of all kinds; otherwise `nn.SyncBatchNorm` alone, which says so itself.

    Returns:
        What has others that a function of the module calls do so, too, where those of all kinds do.
    """
    kinds = _BatchNorm if every else nn.SyncBatchNorm
    layers: list[tuple[str, nn.Module]] = [pair for pair in module.named_modules() if isinstance(pair[1], kinds)]
    for path, layer in layers:
        if layer.training and getattr(layer, "process_group", None) is not None:
            raise ValueError(
                f"apply: batch norm {path!r} has a process_group, and takes its statistics over the ranks that the "
                "running step takes means over; expected none. Leave process_group out."
            )
        layer.forward = _forward_of(path, layer)
    return _inside if every else lambda run: run


def _inside(run: Function) -> Function:
    def call(*args: object, **kwargs: object) -> object:
        with OverRanks():
            return run(*args, **kwargs)

    return call


def _forward_of(path: str, layer: nn.Module) -> Callable[..., object]:
    """A layer's forward over ranks; of torch's synchronised one that which it has on one rank."""
    is_torchs = type(layer).forward is nn.SyncBatchNorm.forward and "forward" not in vars(layer)
    run = _BatchNorm.forward if is_torchs else getattr(layer.forward, "__func__", None)

    def forward(own: nn.Module, *args: object, **kwargs: object) -> object:
        return _over_ranks(path, functools.partial(run, own) if run is not None else layer.forward, own, args, kwargs)

    return types.MethodType(forward, layer)  # as a copy of the layer is given itself


def _over_ranks(
    path: str, run: Callable[..., object], layer: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    axes = ranks_of_means() if layer.training else ()
    call = Call(path, axes, layer.running_mean)
    with during(running, call), OverRanks() if axes else contextlib.nullcontext():
        out = run(*args, **kwargs)
    if axes and not call.ran:
        raise ValueError(
            f"apply: the forward of batch norm {path!r}, a {type(layer).__name__} in training, calls neither "
            "torch.nn.functional.batch_norm nor torch.batch_norm, and what it computes itself is of this rank's batch "
            "alone. Call one of them, give it another base class than torch's, or leave out sync_batch_norm=True."
        )
    return out


leave_out(__name__, "_over_ranks")


def others_in(module: nn.Module) -> frozenset[str]:
    """The buffers of modules in training that nothing takes over ranks, under all of their names."""
    return frozenset(
        f"{path}.{name}" if path else name
        for path, own in module.named_modules(remove_duplicate=False)
        for name, x in own._buffers.items()
        if own.training
        and x is not None
        and x.layout == torch.strided
        and not (isinstance(own, _BatchNorm) and name in _STATISTICS)
    )


def need_moved_alike(
    names: Sequence[str], before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor], axes: Sequence[Axis]
) -> None:
    """Refuses, on all ranks, buffers that a call has moved to other values on one: they send two numbers of each."""
    with private.below_transforms():
        if not names or not axes or private.dispatch_modes() or any(private.is_fake(after[name]) for name in names):
            return
        own = [_moved(private.unwrapped(before[name]), private.unwrapped(after[name])) for name in names]
        numbers = [*own, *[-number for number in own]]
        for axis in axes:
            numbers = most(axis, numbers, "what a call has made of buffers")
    for number, name in enumerate(names):
        if numbers[number] != -numbers[number + len(names)]:
            raise ValueError(
                f"apply: the module has moved its buffer {name!r} to another value on one rank than on another, as "
                "statistics of each rank's own batch are; with sync_batch_norm=True expected the same on all. Compute "
                "them by torch.nn.functional.batch_norm, which is taken over all ranks. If each rank is to have its "
                "own, leave sync_batch_norm=True out and make the batch norms nn.SyncBatchNorm, which need it not."
            )


def _moved(old: torch.Tensor, new: torch.Tensor) -> int:
    """A checksum of a buffer; 0 where it is as it was."""
    if old.is_meta or torch.equal(old, new):
        return 0
    flat = pytree.as_reals(new.detach()).resolve_neg().cpu().contiguous().view(-1)
    if flat.is_floating_point() and flat.element_size() > 1:  # one zero, and one NaN
        flat = torch.where(flat.isnan(), torch.full_like(flat, torch.nan), flat + 0.0)
    return 1 + zlib.crc32(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
