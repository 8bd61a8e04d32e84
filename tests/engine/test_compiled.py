"""Code that is compiled runs as it is under a functorch level, and a module with hooks has code of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fzero.engine.compiled import _with_own_code, compiled


def test_under_a_level_it_runs_as_it_is() -> None:
    ran: list[bool] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        ran.append(torch.compiler.is_compiling())
        return x.square()

    assert torch.func.grad(compiled(fn))(torch.tensor(3.0)) == 6.0 and ran == [False]


def test_own_code_is_the_same_function() -> None:
    by = 2.0

    def scaled(x: Any, plus: float = 1.0) -> Any:
        return by * x + plus

    other: Any = _with_own_code(scaled)
    assert other is not scaled and other.__code__ is not scaled.__code__ and other(3.0) == scaled(3.0) == 7.0
    module = nn.Linear(2, 2)
    method: Any = _with_own_code(module.forward)
    assert method.__self__ is module and method.__func__.__code__ is not module.forward.__func__.__code__  # type: ignore[attr-defined]
    assert _with_own_code(module) is module
