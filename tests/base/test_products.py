"""Products that are added to a sum have the bits of a product that is computed first."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fzero.base import products
from fzero.base.products import Product

DTYPES = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 2e-1}


@given(
    st.integers(1, 40),
    st.sampled_from([1, 2, 3, 127, 128, 129, 384, 385, 700]),
    st.integers(1, 40),
    st.sampled_from(list(DTYPES)),
    st.sampled_from([torch.float32, torch.float64]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 0.5, 0]),
    st.integers(0, 3),
)
def test_the_bits_of_a_product_that_is_added(
    rows: int,
    inner: int,
    columns: int,
    dtype: torch.dtype,
    wide: torch.dtype,
    transposed: bool,
    first: bool,
    factor: float,
    offset: int,
) -> None:
    generator = torch.Generator().manual_seed(rows * 1000 + inner)
    left, right = (torch.randn(shape, generator=generator).to(dtype) for shape in ((inner, rows), (inner, columns)))
    product = Product(left.t(), right, transposed, factor)
    value = product.value()
    exact = factor * (left.double().t() @ right.double())
    torch.testing.assert_close(value.double(), exact.t() if transposed else exact, rtol=1e-2, atol=DTYPES[dtype] * 50)
    memory = torch.randn(offset + value.numel(), generator=generator).to(wide)
    total, before = memory[offset:].view(value.shape), memory[:offset].clone()
    want = value.to(wide) if first else total + value.to(wide)
    product.add_to(total, first, wide)
    assert torch.equal(total, want)
    assert torch.equal(memory[:offset], before)


@given(st.sampled_from([torch.float32, torch.bfloat16]), st.booleans())
def test_it_is_rounded_as_a_cotangent_is(dtype: torch.dtype, first: bool) -> None:
    left, right = torch.randn(6, 3), torch.randn(3, 5)
    total = torch.randn(6, 5)
    value = (left @ right).to(dtype)
    want = value.float() if first else total + value.float()
    Product(left, right, False).add_to(total, first, dtype)
    assert torch.equal(total, want)


def test_one_pass_where_it_pays() -> None:
    """From an inner dim that libraries do not cut; no longer one is looked at twice."""
    forms = [((64, products.FROM), (products.FROM, 1)), ((products.FROM, 64), (64, 1)), ((64, 64), (64, 1))]
    assert products._adds_alike(*forms, torch.float32, torch.get_num_threads()) in (True, False)
    before = products._adds_alike.cache_info().misses
    assert products._adds_alike(*forms, torch.float32, torch.get_num_threads()) in (True, False)
    assert products._adds_alike.cache_info().misses == before


@pytest.mark.parametrize("inner", [128, 384, 385, 700])
@pytest.mark.parametrize("precision", ["highest", "medium", "highest"])
def test_large_products(inner: int, precision: str) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                left, right = (torch.randn(inner, size, generator=generator).to(dtype) for size in (96, 64))
                total = torch.randn(96, 64, generator=generator).to(dtype)
                want = total + left.t() @ right
                Product(left.t(), right, False).add_to(total, False, dtype)
                assert torch.equal(total, want)
    finally:
        torch.set_float32_matmul_precision(before)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(RuntimeError):
        Product(torch.ones(2, 3), torch.ones(3, 4), False).add_to(torch.ones(4, 2), False, torch.float32)
