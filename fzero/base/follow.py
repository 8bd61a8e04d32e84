"""Whether anything goes on through a value: a transform of torch.func, the pullback of a step whose function runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch

from fzero.base import private
from fzero.base.context import in_differentiated


def follows(tensor: object) -> bool:
    """Tells whether what is computed of a tensor here must be seen by whoever differentiates or maps it."""
    if not isinstance(tensor, torch.Tensor):
        return False
    if private.is_wrapped(tensor):
        return True
    if private.forward_mode() and private.transform_of(tensor) is not None:
        return True
    return tensor.requires_grad and torch.is_grad_enabled()


def any_follows(tensors: Iterable[object]) -> bool:
    return any(map(follows, tensors))


def is_pushed(tensor: torch.Tensor) -> bool:
    """Tells whether a derivative goes forward with a tensor, which torch.no_grad() does not end."""
    return private.transform_of(tensor) in ("torch.func.jvp", "torch.autograd.forward_ad")


def tangents_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tangents with which derivatives go forward with a tensor, from the innermost level."""
    out = []
    while private.is_wrapped(tensor):
        if is_pushed(tensor):
            with private.below_transforms(private.level_of(tensor)):
                tangent = torch.autograd.forward_ad.unpack_dual(tensor).tangent
            out += [] if tangent is None else [tangent]
        tensor = private.inner(tensor)
    return out


def is_transformed() -> bool:
    """Tells whether anything could go on through a value here, but for plain autograd outside of all functions."""
    return private.transforms() or in_differentiated()


def below_unless(follows: bool) -> contextlib.AbstractContextManager[object]:
    """Inside, no transform is active, unless one goes on through what is computed there."""
    return contextlib.nullcontext() if follows else private.below_transforms()


def nothing_of(x: torch.Tensor, value: float | torch.Tensor = 0.0) -> torch.Tensor:
    """A constant in the place of a value that may be not finite; it depends on that, with a derivative of zero."""
    return x.masked_fill(torch.ones((), dtype=torch.bool, device=x.device), value)


def root(x: torch.Tensor) -> torch.Tensor:
    """The square root; its derivative at zero, which is infinite, counts as zero.

    What it meets there is zero too (the first moment of a gradient that is zero, gradients of norm zero), so that this
    is the derivative of the whole, where torch's own root would make no number of it.
    """
    if not private.is_differentiated(x):  # a map alone needs nothing of it
        return x.sqrt()
    zero = x == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, x).sqrt())
