"""torch's own attention kernel: values, logarithms and cotangents of blocks, of any strides and groups."""

from __future__ import annotations

import functools

import torch
from hypothesis import given
from hypothesis import strategies as st

from fzero.base import flash
from fzero.testing import assert_trees_close

F64 = torch.float64


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = [x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v)]
    scores = q @ k.mT * scale
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    scores = scores.masked_fill(hidden, -torch.inf) if causal else scores
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@given(
    sizes=st.tuples(*[st.integers(1, 4)] * 6),
    causal=st.booleans(),
    strided=st.booleans(),
    dtype=st.sampled_from([F64, torch.float32, torch.bfloat16]),
)
def test_equals_the_formula(sizes: tuple[int, ...], causal: bool, strided: bool, dtype: torch.dtype) -> None:
    b, kv_heads, group, t, s, d = sizes
    generator = torch.Generator().manual_seed(sum(sizes))

    def drawn(heads: int, count: int) -> torch.Tensor:
        shape = (d, count, heads, b) if strided else (b, heads, count, d)
        x = torch.randn(shape, dtype=F64, generator=generator).to(dtype)
        return x.permute(3, 2, 1, 0) if strided else x

    q, cotangent = drawn(kv_heads * group, t), drawn(kv_heads * group, t)
    k, v = drawn(kv_heads, s), drawn(kv_heads, s)
    out, logarithms = flash.attention(q, k, v, causal, 0.7)
    pulled = flash.pullback(cotangent, q, k, v, out, logarithms, causal, 0.7)
    wide = [x.to(F64) for x in (q, k, v)]
    (expected, sums), pull = torch.func.vjp(functools.partial(plain, causal=causal, scale=0.7), *wide)  # type: ignore[misc]
    by = pull((cotangent.to(F64), torch.zeros_like(sums)))
    tolerance = {F64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
    found = [x.to(F64) for x in (out, logarithms, *pulled)]
    assert_trees_close(found, [expected, sums, *by], rtol=tolerance, atol=tolerance)
