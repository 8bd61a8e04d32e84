"""Attention with a mask of the caller's own, by all scores at once: the mask has as many elements."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from fzero.base import private
from fzero.base.arguments import wrong
from fzero.parallel.attention import floats, need_shapes
from fzero.parallel.loss import wide
from fzero.parallel.visible import options_of


def masked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, given: Mapping[str, object]
) -> torch.Tensor:
    """The attention of q [b, heads, t, d] to k and v, as a differentiable function of the mask too.

    A token that sees nothing gets zeros, as in torch.

    Args:
        mask: True for what is seen, or added to the scores; broadcasts to [b, heads, t, t].
        given: options of `fz.parallel.attention`.
    """
    who = "parallel.attention"
    options = options_of(who, **given)
    if options.is_causal or options.window is not None or options.documents is not None:
        raise ValueError(
            f"{who}: got attn_mask beside is_causal, window or documents, expected attn_mask alone. Put them into it."
        )
    q, k, v = floats(who, q, k, v)
    need_shapes((q.shape, k.shape, v.shape), f"{who}: got", options)
    if not isinstance(mask, torch.Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise wrong(who, "attn_mask", mask, "a tensor of bools or floats, or None")
    shape = (*q.shape[:3], k.shape[2])
    sizes = zip(reversed(mask.shape), reversed(shape), strict=False)
    if not 1 < mask.ndim <= 4 or any(own not in (1, size) for own, size in sizes):
        raise ValueError(f"{who}: got attn_mask of shape {tuple(mask.shape)}, expected one that broadcasts to {shape}.")
    scale = q.shape[3] ** -0.5 if options.scale is None else options.scale
    with private.without_autocast():
        dtype, group = wide(q.dtype), q.shape[1] // k.shape[1]
        keys, values = [x.to(dtype).repeat_interleave(group, 1) for x in (k, v)]
        scores = (q.to(dtype) * scale) @ keys.mT
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.to(dtype)
        nothing = (scores == -math.inf).all(-1, keepdim=True)  # whose softmax would be no number
        weights = scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
        return (weights @ values).to(q.dtype)
