"""The operations of formats, on tensors: bits and floats to the bit."""

from __future__ import annotations

import torch

from fzero.formats.ops import TorchOps

X = torch.tensor([1.0, -2.5, 0.0, 3e38])


def test_bits_and_floats_are_each_others_inverse() -> None:
    bits = TorchOps.bits(X)
    assert bits.dtype == torch.int32 and bits[0] == 0x3F800000
    assert torch.equal(TorchOps.floats(bits), X)
    assert TorchOps.upper(bits | 0xFFFF)[:3].tolist() == [1.0, -2.5, 0.0]


def test_shifts_are_logical_and_extensions_are_signed() -> None:
    x = torch.tensor([-1, 8], dtype=torch.int32)
    assert TorchOps.shift(x, 28).tolist() == [15, 0]
    assert TorchOps.sign(X).tolist() == [1, -1, 0, 1]
