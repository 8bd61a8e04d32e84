"""Flat buffers in a format: values that went through one come back from it as they are, and take what is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fzero.formats.formats import Companded, Corrected, Exact, Plain
from fzero.formats.stored import Stored, decode, encode, nbytes, zeros
from fzero.kernels import onepass
from fzero.testing import assert_trees_equal

BF16, F32 = torch.bfloat16, torch.float32


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("form", [Exact(), Corrected(), Plain(BF16, True)])
def test_decoding_and_encoding_changes_nothing(form: Any) -> None:
    """So a state that is stored, loaded, converted or left alone stays; also where rounding is stochastic."""
    x = torch.randn(1 << 16, generator=generator()) * 10.0 ** torch.randn(1 << 16, generator=generator(1))
    values = decode(form, encode(form, x), F32)
    assert_trees_equal(decode(form, encode(form, values), F32), values)
    again = Stored(form, tuple(part.clone() for part in encode(form, x)))
    onepass.write(again, values, torch.arange(1 << 10, dtype=torch.int32))
    assert_trees_equal(again.to(F32), values)


@pytest.mark.parametrize("form", [Plain(F32), Exact(), Corrected(), Companded(True), Companded(True, 4)])
def test_zeros_are_zero_and_take_the_bytes_that_are_counted(form: Any) -> None:
    parts = zeros(form, 128, "cpu")
    assert sum(part.nbytes for part in parts) == nbytes(form, 128)
    assert not decode(form, parts, F32).any()


def test_a_cut_is_a_view_of_the_same_values() -> None:
    x = torch.randn(128, generator=generator())
    stored = Stored(Exact(), encode(Exact(), x))
    part = stored.cut(64, 128)
    assert torch.equal(part.to(F32), x[64:]) and part.numel() == 64
    part.parts[0].zero_()
    assert torch.equal(stored.to(F32)[:64], x[:64]) and not torch.equal(stored.to(F32)[64:], x[64:])
