"""Clipping of gradients: by their global norm (Pascanu et al. 2013), or by value."""

from __future__ import annotations

import functools

import torch

from fzero.base import private, pytree
from fzero.base.arguments import as_float64
from fzero.optim.base import need_hypers
from fzero.state.gather import global_norm
from fzero.state.sharded import Sharded
from fzero.table.optimizer import GradientTransformation


def clip_by_global_norm(max_norm: float) -> GradientTransformation:
    """Multiplies every gradient by min(1, max_norm / norm), norm over all leaves and all their shards.

    Args:
        max_norm: the largest norm that passes unchanged.

    Example:
        >>> clip = fz.clip_by_global_norm(1.0)
        >>> clip.update({"w": torch.tensor([3.0, 4.0])}, clip.init(None))[0]["w"]
        tensor([0.6000, 0.8000])
    """
    need_hypers("clip_by_global_norm", max_norm=(max_norm, "a positive number"))

    return GradientTransformation(
        _nothing, functools.partial(_scaled, max_norm), by_leaf=True, needs="norm", scales=True, blank=True
    )


def _scaled(
    max_norm: float,
    grads: object,
    state: object,
    params: object = None,
    *,
    grad_norm: object = None,
    joint_norm: object = None,
) -> tuple[object, object]:
    norm = joint_norm if joint_norm is not None else grad_norm if grad_norm is not None else global_norm(grads)
    factor = torch.clamp(max_norm / as_float64(norm), max=1.0)
    if isinstance(grads, Sharded):
        return grads.scaled(1.0 if private.is_fake(factor) else float(factor)), state
    return pytree.map(lambda g: g * factor.to(g.device, g.dtype), grads), state


def clip_by_value(max_value: float) -> GradientTransformation:
    """Clamps every element of the gradients to [-max_value, max_value].

    Example:
        >>> clip = fz.clip_by_value(1.0)
        >>> clip.update({"w": torch.tensor([-3.0, 0.5])}, clip.init(None))[0]["w"]
        tensor([-1.0000,  0.5000])
    """
    need_hypers("clip_by_value", max_value=(max_value, "a positive number"))

    return GradientTransformation(_nothing, functools.partial(_clamped, max_value), by_leaf=True, blank=True)


def _clamped(max_value: float, grads: object, state: object, params: object = None) -> tuple[object, object]:
    return pytree.map(lambda g: g.clamp(-max_value, max_value), grads), state


def _nothing(params: object) -> tuple[()]:
    """The state of what keeps none."""
    return ()
