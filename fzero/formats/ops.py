"""The operations that formats and formulas are written over, as torch's; `fzero/kernels/trace.py` has them as C++."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

_HIGH = -65536  # the upper half of a word
_LOW = tuple([(1 << (32 - count)) - 1 for count in range(33)])  # what is left of one that is shifted, by how far


class TorchOps:
    """The operations of formats and formulas on float32 (or float64) and int32 tensors of shape [groups, 32]."""

    @staticmethod
    def bits(x: torch.Tensor) -> torch.Tensor:
        return x.view(torch.int32)

    @staticmethod
    def floats(x: torch.Tensor) -> torch.Tensor:
        return x.view(torch.float32)

    @staticmethod
    def upper(x: torch.Tensor) -> torch.Tensor:
        """The bfloat16 that is in the upper half of a word, for a part of that dtype."""
        return (x & _HIGH).view(torch.float32)

    @staticmethod
    def shift(x: torch.Tensor, count: int) -> torch.Tensor:
        return (x >> count) & _LOW[count]

    @staticmethod
    def extended(x: torch.Tensor, count: int) -> torch.Tensor:
        """The low bits as a signed number."""
        return (x << (32 - count)) >> (32 - count)

    @staticmethod
    def sqrt(x: torch.Tensor) -> torch.Tensor:
        # torch's float32 square root is not always correctly rounded on CPU, and a kernel's is
        exact = x.device.type == "cpu" and x.dtype == torch.float32 and not torch.compiler.is_compiling()
        return x.double().sqrt().float() if exact else x.sqrt()

    @staticmethod
    def where(condition: torch.Tensor, x: torch.Tensor | float, y: torch.Tensor | float) -> torch.Tensor:
        out = torch.where(condition, x, y)
        return out.to(torch.int32) if out.dtype == torch.int64 else out  # of two whole numbers

    @staticmethod
    def times_plus(x: torch.Tensor, y: torch.Tensor, z: float) -> torch.Tensor:
        """x * y + z, where y is a power of two, so that it is rounded once however it is computed."""
        return x * y + z

    @staticmethod
    def less_times(x: torch.Tensor, y: float, z: torch.Tensor) -> torch.Tensor:
        """(x - y) * z, where the difference is exact and y a power of two, so that it is rounded once as well."""
        return (x - y) * z

    @staticmethod
    def level(code: torch.Tensor, of: Callable[[Ops, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The value of a 4-bit code; a kernel looks it up where it loads the code."""
        return of(TorchOps, code)

    @staticmethod
    def sign(x: torch.Tensor) -> torch.Tensor:
        return torch.sign(x)

    @staticmethod
    def least(x: torch.Tensor, bound: int) -> torch.Tensor:
        return torch.clamp(x, max=bound)

    @staticmethod
    def most(x: torch.Tensor, bound: int) -> torch.Tensor:
        return torch.clamp(x, min=bound)


Ops: TypeAlias = type[TorchOps]  # or what stands for it in a generated kernel
