"""Clipping of gradients: by their global norm (Pascanu et al. 2013), by the norm of each leaf, or by value."""

from __future__ import annotations

import functools

import torch

from fzero.base import private, pytree
from fzero.base.arguments import as_float64, renamed
from fzero.base.follow import follows, root
from fzero.optim._whole import whole
from fzero.optim.base import need_hypers
from fzero.state.gather import global_norm
from fzero.state.sharded import Sharded
from fzero.state.sliced import to_sharded
from fzero.table.optimizer import GradientTransformation, Number


def clip_by_global_norm(max_norm: Number) -> GradientTransformation:
    """Scales all gradients so that their global norm is at most `max_norm`.

    Every gradient is multiplied by `min(1, max_norm / norm)`. The norm is over all leaves and all shards. Put it before
    the optimizer: `fz.chain(fz.clip_by_global_norm(1.0), fz.adamw(1e-3))`.

    Source: Pascanu et al., 2013 (arXiv 1211.5063).

    Args:
        max_norm: gradients of a smaller norm pass unchanged. Positive.

    Example:
        >>> clip = fz.clip_by_global_norm(1.0)
        >>> clip.update({"w": torch.tensor([3.0, 4.0])}, clip.init(None))[0]["w"]
        tensor([0.6000, 0.8000])
    """
    need_hypers("clip_by_global_norm", max_norm=(max_norm, "a positive number"))

    return GradientTransformation(
        _nothing,
        functools.partial(_clip_by_global_norm, max_norm),
        needs="norm",
        scales=True,
        blank=True,
        elementwise=True,
    )


def _clip_by_global_norm(
    max_norm: Number,
    grads: object,
    state: object,
    params: object = None,
    *,
    grad_norm: object = None,
    joint_norm: object = None,
    **extra: object,
) -> tuple[object, object]:
    norm = joint_norm if joint_norm is not None else grad_norm if grad_norm is not None else global_norm(grads)
    norm = as_float64(norm)
    factor = _factor(norm, max_norm)
    if not isinstance(grads, Sharded):
        return pytree.map(lambda g: g * factor.to(g.device, g.dtype), grads), state
    if not (follows(norm) or follows(max_norm)):
        return grads.scaled(1.0 if private.is_fake(factor) else float(factor)), state
    parts = {key: grads.local(key) for key in grads.groups}
    factors = {key: to_sharded(grads, key, factor).to(g.device, g.dtype) for key, g in parts.items()}
    return grads.with_buffers({key: g * factors[key] for key, g in parts.items()}), state


def clip_by_block_norm(max_norm: Number) -> GradientTransformation:
    """Scales each leaf's gradient so that its norm is at most `max_norm`.

    Each leaf is multiplied by `min(1, max_norm / norm)`, by its own norm. Under ZeRO each leaf is clipped on one rank,
    as with `fz.whole`.

    Args:
        max_norm: gradients of a smaller norm pass unchanged. Positive.

    Example:
        >>> clip, params = fz.clip_by_block_norm(1.0), {"w": torch.ones(2), "b": torch.ones(1)}
        >>> clip.update({"w": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.5])}, clip.init(params), params)[0]
        {'w': tensor([0.6000, 0.8000]), 'b': tensor([0.5000])}
    """
    need_hypers("clip_by_block_norm", max_norm=(max_norm, "a positive number"))
    return whole(GradientTransformation(_nothing, functools.partial(_clip_by_block_norm, max_norm), label=_block))


def _block(path: str) -> str:
    return "block clip"


def _clip_by_block_norm(
    max_norm: Number, grads: dict[str, torch.Tensor], state: object, params: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], object]:
    ((path, g),) = grads.items()
    return {path: g * _factor(norm_of(g), max_norm).to(g.dtype)}, state


def _factor(norm: torch.Tensor, max_norm: Number) -> torch.Tensor:
    """What makes a norm the largest one, or 1; zeros pass, and have derivatives."""
    return torch.where(norm == 0, 1.0, max_norm / torch.where(norm == 0, 1.0, norm)).clamp(max=1.0)


def adaptive_clip(clipping: Number = 0.01, eps: Number = 1e-3) -> GradientTransformation:
    """Clips each row's gradient to a share of the norm of that row's params.

    A row's gradient is multiplied by `min(1, clipping * max(eps, norm(row)) / norm(gradient))`. A row is `w[i]` of a
    weight [outputs, ...]; a leaf with fewer than two dims is one row. Under ZeRO each leaf is clipped on one rank, as
    with `fz.whole`.

    Source: Brock et al., 2021 (arXiv 2102.06171).

    Args:
        clipping: the largest norm of a row's gradient, as a share of that row's norm. Positive.
        eps: rows of a smaller norm count as having this one. Positive.

    Example:
        >>> clip, params = fz.adaptive_clip(0.5), {"w": torch.eye(2)}
        >>> clip.update({"w": torch.tensor([[3.0, 4.0], [0.0, 0.1]])}, clip.init(params), params)[0]["w"]
        tensor([[0.3000, 0.4000],
                [0.0000, 0.1000]])
    """
    need_hypers("adaptive_clip", clipping=(clipping, "a positive number"), eps=(eps, "a positive number"))
    inner = GradientTransformation(_nothing, functools.partial(_clipped_by_row, clipping, eps), label=_adaptive)
    return whole(inner)


def _adaptive(path: str) -> str:
    return "adaptive clip"


def _clipped_by_row(
    clipping: Number, eps: Number, grads: dict[str, torch.Tensor], state: object, params: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], object]:
    ((path, g),), (p,) = grads.items(), params.values()
    norm, most = _by_row(g), clipping * _by_row(p).clamp(min=eps)
    return {path: torch.where(norm > most, g * (most / torch.where(norm > most, norm, 1.0)), g)}, state


def _by_row(x: torch.Tensor) -> torch.Tensor:
    """The norms of rows, each in the dims of the tensor."""
    dims = tuple(range(1, x.ndim)) if x.ndim > 1 else None
    return root(x.square().sum(dims, keepdim=True) if dims is not None else x.square().sum())


@renamed(clip_value="max_value", max_delta="max_value")
def clip_by_value(max_value: Number) -> GradientTransformation:
    """Clamps every element of the gradients to [-max_value, max_value].

    Args:
        max_value: the largest absolute value that passes. Positive.

    Example:
        >>> clip = fz.clip_by_value(1.0)
        >>> clip.update({"w": torch.tensor([-3.0, 0.5])}, clip.init(None))[0]["w"]
        tensor([-1.0000,  0.5000])
    """
    need_hypers("clip_by_value", max_value=(max_value, "a positive number"))

    return GradientTransformation(_nothing, functools.partial(_clip_by_value, max_value), blank=True, elementwise=True)


def _clip_by_value(
    max_value: Number, grads: object, state: object, params: object = None, **extra: object
) -> tuple[object, object]:
    if isinstance(grads, Sharded) and isinstance(max_value, torch.Tensor) and follows(max_value):
        bounds = {key: to_sharded(grads, key, max_value) for key in grads.groups}
        own = {key: _within(grads.local(key), bound) for key, bound in bounds.items()}
        return grads.with_buffers(own), state
    return pytree.map(lambda g: _within(g, max_value), grads), state


def _within(g: torch.Tensor, bound: Number) -> torch.Tensor:
    if not isinstance(bound, torch.Tensor):
        return g.clamp(-bound, bound)
    return g.clamp(-bound.to(g.dtype), bound.to(g.dtype))


def _nothing(params: object) -> tuple[()]:
    """The state of what keeps none."""
    return ()


def norm_of(x: torch.Tensor) -> torch.Tensor:
    """The norm of a leaf, a 0-d float64 tensor."""
    return root(x.to(torch.float64).square().sum())
