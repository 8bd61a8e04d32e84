"""Where batch norms take statistics over all ranks, other buffers that each rank moves by its own batch are refused."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fzero.base import private, pytree
from fzero.comm.axis import Axis
from fzero.comm.pieces import most

# of a batch norm, whose forward is over ranks or refused
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


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
