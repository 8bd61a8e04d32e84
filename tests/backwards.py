"""Functions whose backward is one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Map = Callable[[torch.Tensor], torch.Tensor]


def with_backward(forward: Map, backward: Map) -> Map:
    """A function of one tensor by plain autograd and torch.func alike, of any mathematics."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return forward(x)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

        @staticmethod
        def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return backward(cotangent)

    return Own.apply  # type: ignore[return-value]
