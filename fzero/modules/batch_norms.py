"""A module's batch norms that take their statistics over all ranks: which of them do, and their forwards."""

from __future__ import annotations

import types
from collections.abc import Callable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fzero.comm import backend
from fzero.engine.compiled import leave_out
from fzero.parallel.axis import is_spanned
from fzero.parallel.batch_norm import OverRanks, ranks_of_means


def synchronise(module: nn.Module, every: bool) -> None:
    """Has the batch norms of a copy take statistics over all ranks that the running step takes means over.

    Args:
        every: those of all kinds; otherwise `nn.SyncBatchNorm` alone, which says so itself.
    """
    for path, layer in _synchronised(module, every):
        layer.forward = types.MethodType(_forward_of(path, _own_forward(layer)), layer)


def need_own_forwards(module: nn.Module) -> None:
    """Refuses `nn.SyncBatchNorm` that nothing but torch's own collectives runs.

    Raises:
        ValueError: naming it.
    """
    for path, layer in _synchronised(module, False):
        if layer.training and not _is_torchs(layer):
            raise ValueError(
                f"fz.functional: {f'submodule {path!r}' if path else 'the module'} is a {type(layer).__name__}, an "
                "nn.SyncBatchNorm with a forward of its own around torch's, whose collectives are no functions that "
                "torch.func goes through. Take the module as it was before its batch norms were converted, and say "
                "fz.functional(module, sync_batch_norm=True)."
            )


def _synchronised(module: nn.Module, every: bool) -> list[tuple[str, nn.Module]]:
    kinds = _BatchNorm if every else nn.SyncBatchNorm
    return [(path, layer) for path, layer in module.named_modules() if isinstance(layer, kinds)]


def _is_torchs(layer: nn.Module) -> bool:
    """Tells whether a synchronised batch norm's forward is torch's own."""
    return type(layer).forward is nn.SyncBatchNorm.forward and "forward" not in vars(layer)


def _own_forward(layer: nn.Module) -> Callable[..., object]:
    """A layer's forward as a function of it: of torch's synchronised one that which it has on one rank."""
    wrapped = vars(layer).get("forward")
    if wrapped is not None:
        return lambda _, *args, **kwargs: wrapped(*args, **kwargs)
    return _BatchNorm.forward if _is_torchs(layer) else type(layer).forward


def _forward_of(path: str, run: Callable[..., object]) -> Callable[..., object]:
    def forward(layer: nn.Module, *args: object, **kwargs: object) -> object:
        return _over_ranks(path, run, layer, args, kwargs)

    return forward


def _over_ranks(
    path: str, run: Callable[..., object], layer: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    axes = ranks_of_means() if layer.training else ()
    if not axes:
        return run(layer, *args, **kwargs)
    own = backend.members(getattr(layer, "process_group", None))
    if own and not is_spanned([ax.members for ax in axes], own):
        means = " and ".join([str(list(ax.members)) for ax in axes])
        raise ValueError(
            f"apply: batch norm {path!r} has a process_group of ranks {list(own)}, and the running step takes means "
            f"over ranks {means}; expected the same ranks, as its statistics are those of the step's whole batch. "
            "Leave process_group out."
        )
    with OverRanks(axes):
        return run(layer, *args, **kwargs)


leave_out(__name__, "_over_ranks")
