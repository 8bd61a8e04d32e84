"""torch's own attention kernel (FlashAttention, arXiv 2205.14135), with what others need to join several blocks.

`torch.nn.functional.scaled_dot_product_attention` calls it too, but keeps the logarithms to itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_forward: Callable[..., Any] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward: Callable[..., Any] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@functools.cache
def _is_quick(dtype: torch.dtype) -> bool:
    """Tells whether the kernel is quick in a dtype; where a CPU has no instructions for it, it is 10 times slower."""
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return dtype in (torch.float32, torch.float64)


def has_kernel(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Tells whether there is a kernel for q [..., d] and v [..., d]."""
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1] and _is_quick(q.dtype)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output [b, group, t, d], and the logarithms of the sums of exp(score) [b, group, t].

    Args:
        q: [b, group, t, d], of plain tensors; none of these is 0.
        k, v: [b, s, d], which the heads of a group share.
        causal: the i-th of q sees the first i + 1 of k.
    """
    out, logarithms = _forward(_rows(q), *_shared(q, k, v), 0.0, causal, scale=scale)
    return out, logarithms


def pullback(
    cotangent: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logarithms: torch.Tensor,
    causal: bool,
    scale: float,
) -> Three:
    """The cotangents of q, k and v; those of k and v are sums over a group.

    Args:
        q, k, v, causal, scale: as in `attention`: one block of those that q has seen.
        out, logarithms: after all blocks.
    """
    tensors = _rows(cotangent), _rows(q), *_shared(q, k, v), _rows(out), logarithms.contiguous()
    by_q, by_k, by_v = _backward(*tensors, 0.0, causal, scale=scale)
    dtype = logarithms.dtype
    return by_q, *[x.squeeze(1) if x.shape[1] == 1 else x.sum(1, dtype=dtype) for x in (by_k, by_v)]


def _rows(x: torch.Tensor) -> torch.Tensor:
    """A tensor whose last dim lies without gaps, as the kernel takes for granted."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _shared(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    return [_rows(x).unsqueeze(1).expand(-1, q.shape[1], -1, -1) for x in (k, v)]
