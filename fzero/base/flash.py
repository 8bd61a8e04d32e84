"""torch's own attention kernel (FlashAttention, arXiv 2205.14135), with what others need to join several blocks.

`torch.nn.functional.scaled_dot_product_attention` calls it too, but keeps the logarithms to itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_forward: Callable[..., tuple[torch.Tensor, torch.Tensor]] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward: Callable[..., Three] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@functools.cache
def _is_quick(dtype: torch.dtype) -> bool:
    """Tells whether the kernel is quick in a dtype; where a CPU has no instructions for it, it is 10 times slower."""
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return dtype in (torch.float32, torch.float64)


def has_kernel(q: torch.Tensor, v: torch.Tensor, scale: float) -> bool:
    """Tells whether there is a kernel for q [b, heads, t, d] and v [..., s, d]: it scales what is hidden, too."""
    return scale > 0 and q.device.type == "cpu" and q.shape[-1] == v.shape[-1] and _is_quick(q.dtype)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output [b, heads, t, d], and the logarithms of the sums of exp(score) [b, heads, t].

    Args:
        q: [b, heads, t, d], of plain tensors; no dim of these is 0.
        k, v: [b, kv_heads, s, d], of which neighbours of q share one.
        causal: the i-th of q sees the first i + 1 of k.
    """
    out, logarithms = _forward(*map(_rows, (q, k, v)), 0.0, causal, scale=scale)
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
    """The cotangents of q, k and v.

    Args:
        q, k, v, causal, scale: as in `attention`: one block of those that q has seen.
        out, logarithms: after all blocks.
    """
    tensors = *map(_rows, (cotangent, q, k, v, out)), logarithms.contiguous()
    return _backward(*tensors, 0.0, causal, scale=scale)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """A tensor whose last dim lies without gaps, as the kernel takes for granted."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
