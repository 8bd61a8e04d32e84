"""Attention stands in the place of F.scaled_dot_product_attention: by the same names and values, or refused."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks

F64 = torch.float64


def tensors(heads: int, kv_heads: int, count: int, d: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(2, each, count, d, generator=generator, dtype=F64) for each in (heads, kv_heads, kv_heads)]


@st.composite
def calls(draw: st.DrawFn) -> tuple[list[torch.Tensor], tuple[Any, ...], dict[str, Any]]:
    """q, k and v, and further arguments as torch has them, by place or by name."""
    kv_heads, count, d = draw(st.integers(1, 2)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    heads = kv_heads * draw(st.integers(1, 2))
    given: dict[str, Any] = {"scale": draw(st.none() | st.just(0.7)), "enable_gqa": heads != kv_heads}
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    shape = draw(st.sampled_from([(count, count), (1, count, count), (2, 1, count, count), (2, heads, count, count)]))
    mask, is_causal = torch.randn(shape, generator=generator, dtype=F64), draw(st.booleans())
    kind = draw(st.sampled_from([None, torch.bool, F64]))
    if kind is not None:
        mask, is_causal = mask.gt(0) if kind == torch.bool else mask, False
    arguments = (mask if kind is not None else None, 0.0, is_causal)
    if draw(st.booleans()):
        return tensors(heads, kv_heads, count, d), arguments, given
    named = dict(zip(("attn_mask", "dropout_p", "is_causal"), arguments, strict=True))
    return tensors(heads, kv_heads, count, d), (), given | named


@given(call=calls())
def test_the_values_and_derivatives_of_torch(call: Any) -> None:
    """A token that sees nothing gets zeros."""
    own, arguments, given = call
    pairs = []
    for attend in (fz.parallel.attention, F.scaled_dot_product_attention):
        out, pull, *_ = torch.func.vjp(lambda *x, attend=attend: attend(*x, *arguments, **given), *own)
        pairs.append((out, pull(out.cos())))
    assert_trees_close(*pairs, rtol=1e-10, atol=1e-12)


def test_a_mask_has_derivatives_too() -> None:
    (q, k, v), bias = tensors(2, 2, 4, 3), torch.ones(4, 4, dtype=F64).tril().cumsum(0)
    for order in (1, 2):
        pairs = []
        for attend in (fz.parallel.attention, lambda *x, attn_mask: (q @ k.mT * 3**-0.5 + attn_mask).softmax(-1) @ v):
            fn = lambda bias, attend=attend: attend(q, k, v, attn_mask=bias).sin().sum()
            slope = torch.func.grad(fn)
            pairs.append(slope(bias) if order == 1 else torch.func.jvp(slope, (bias,), (bias.cos(),))[1])
        assert_trees_close(*pairs, rtol=1e-10)


@pytest.mark.parametrize("kind", ["ulysses", "ring", "torch's"])
def test_over_ranks(kind: str) -> None:
    """Around torch's own a mask is of the whole sequence."""
    q, k, v = tensors(4, 2, 6, 3)
    given: dict[str, Any] = {"is_causal": True, "enable_gqa": True, "scale": 0.7}
    if kind == "torch's":
        given |= {"is_causal": False, "attn_mask": torch.ones(6, 6, dtype=torch.bool).tril(1)}
    expected = F.scaled_dot_product_attention(q, k, v, **given).chunk(2, 2)

    def rank_main(rank: int) -> None:
        ax = fz.parallel.axis(None, "sp")
        inner = F.scaled_dot_product_attention if kind == "torch's" else None
        attend: Any = fz.parallel.ring(ax) if kind == "ring" else fz.parallel.ulysses(inner, ax)
        assert_trees_close(attend(*[x.chunk(2, 2)[rank] for x in (q, k, v)], **given), expected[rank], rtol=1e-10)

    run_ranks(rank_main, 2)


X = torch.ones(1, 2, 3, 4)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"dropout_p": 0.1}, ValueError, r"dropout_p=0\.1, expected 0\.0, as it has no dropout.*has torch's"),
        ({"is_causal": True, "causal": True}, TypeError, "causal= and is_causal=, which are one argument"),
        ({"is_causal": 1}, TypeError, "is_causal=1, expected True or False"),
        ({"enable_gqa": "yes"}, TypeError, "enable_gqa='yes', expected True or False or None"),
        ({"attn_mask": X[0, 0, :2]}, ValueError, r"shape \(2, 4\), expected one that broadcasts to \(1, 2, 3, 3\)"),
        ({"attn_mask": X.long()}, TypeError, "attn_mask=a tensor .*expected a tensor of bools or floats"),
        ({"attn_mask": X[0, :, :, :3], "is_causal": True}, ValueError, "attn_mask beside is_causal.*Put them into it"),
        ({"attn_mask": X[0, :, :, :3], "window": 2}, ValueError, "attn_mask beside is_causal, window or documents"),
    ],
)
def test_what_is_refused(given: dict[str, Any], error: Any, words: str) -> None:
    with pytest.raises(error, match=f"parallel.attention: got .*{words}"):
        fz.parallel.attention(X, X, X, **given)


def test_heads_that_share_without_a_word() -> None:
    few = X[:, :1]
    assert torch.equal(fz.parallel.attention(X, few, few), fz.parallel.attention(X, few, few, enable_gqa=True))
    with pytest.raises(ValueError, match="2 heads, 1 KV heads and enable_gqa=False, expected as many"):
        fz.parallel.attention(X, few, few, enable_gqa=False)


@pytest.mark.parametrize("kind", ["ulysses", "ring"])
def test_a_mask_over_ranks_is_refused_on_every_rank(kind: str) -> None:
    def rank_main(rank: int) -> None:
        ax = fz.parallel.axis(None, "sp")
        attend: Any = fz.parallel.ring(ax) if kind == "ring" else fz.parallel.ulysses(None, ax)
        own: dict[str, Any] = {"attn_mask": torch.ones(3, 3)} if rank else {}
        words = rf"parallel\.{kind}: got attn_mask, expected is_causal.*ulysses\(F\.scaled|options that it refuses"
        with pytest.raises(ValueError, match=words):
            attend(X, X, X, **own)

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("of_ring", [True, False])
def test_the_older_name(of_ring: bool) -> None:
    """Said when it was made, or in a call, which wins."""

    def rank_main(rank: int) -> None:
        ax = fz.parallel.axis(None, "sp")
        make: Any = fz.parallel.ring if of_ring else functools.partial(fz.parallel.ulysses, None)
        x = torch.full((1, 2, 1, 1), float(rank))
        expected = make(ax, is_causal=True)(x, x, x)
        for out in (make(ax, causal=True)(x, x, x), make(ax, causal=False)(x, x, x, is_causal=True)):
            assert torch.equal(out, expected)
        assert torch.equal(make(ax, is_causal=True)(x, x, x, causal=False), make(ax)(x, x, x))

    run_ranks(rank_main, 2)
