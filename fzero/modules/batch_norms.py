"""A module's batch norms that take their statistics over all ranks: which of them do, and their forwards.

Other buffers that each rank moves by its own batch are refused then.
"""

from __future__ import annotations

import contextlib
import functools
import types
import zlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fzero.base import private, pytree
from fzero.base.context import during
from fzero.comm.axis import Axis
from fzero.comm.pieces import most
from fzero.engine.compiled import leave_out
from fzero.parallel.batch_norm import Call, OverRanks, ranks_of_means, running
from fzero.table.handle import Function

# of a batch norm, whose forward is over ranks or refused
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def synchronise(module: nn.Module, every: bool) -> Callable[[Function], Function]:
    """Has the batch norms of a copy take statistics over all ranks that the running step takes means over.

    Args:
        every: those of all kinds; otherwise `nn.SyncBatchNorm` alone, which says so itself.

    Returns:
        What has others that a function of the module calls do so, too, where those of all kinds do.
    """
    for path, layer in _synchronised(module, every):
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


def _synchronised(module: nn.Module, every: bool) -> list[tuple[str, nn.Module]]:
    kinds = _BatchNorm if every else nn.SyncBatchNorm
    return [(path, layer) for path, layer in module.named_modules() if isinstance(layer, kinds)]


def _is_torchs(layer: nn.Module) -> bool:
    """Tells whether a synchronised batch norm's forward is torch's own."""
    return type(layer).forward is nn.SyncBatchNorm.forward and "forward" not in vars(layer)


def _forward_of(path: str, layer: nn.Module) -> Callable[..., object]:
    """A layer's forward over ranks; of torch's synchronised one that which it has on one rank."""
    run = _BatchNorm.forward if _is_torchs(layer) else getattr(layer.forward, "__func__", None)

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
    """Compares what a call has made of buffers between the ranks that the running step takes means over.

    Ranks send each other two numbers of each, also where none of them has moved.

    Raises:
        ValueError: on every rank, naming the buffer.
    """
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
