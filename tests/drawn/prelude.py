"""What a program's file may name, all of this module: tables, containers and Functions as users write them."""

from __future__ import annotations

import functools as functools
import zlib
from collections.abc import Callable
from contextvars import ContextVar as ContextVar
from dataclasses import dataclass
from types import SimpleNamespace as SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils.checkpoint import checkpoint as checkpoint

F64 = torch.float64


def draw(seed: int, name: str, *shape: int) -> torch.Tensor:
    """The values of a leaf: of the program's seed and the leaf's path, whatever else is in the program."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) ^ (seed * 2654435761 & 0xFFFFFFFF))
    return 0.5 * torch.randn(shape, generator=generator, dtype=F64) + (0.7 if not shape else 0.0)


class Weights(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


class Table(Weights):
    """nn.Embedding with drawn values."""

    def forward(self, k: torch.Tensor) -> torch.Tensor:
        return F.embedding(k, self.weight)


class Head(Weights):
    """nn.Linear without bias, with drawn values."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return F.linear(h, self.weight)


class Config:
    """An object that nobody has registered anywhere."""

    def __init__(self, scale: float) -> None:
        self.scale = scale


class Pair(NamedTuple):
    one: Any
    two: Any


@dataclass
class Carry:
    h: Any
    penalty: Any = None


class Cube(torch.autograd.Function):
    """A Function in the form that torch.func accepts, which may be differentiated again."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 3 * ctx.saved_tensors[0] ** 2 * cotangent


class Scaled(torch.autograd.Function):
    """The same for two tensors: a matrix product whose second factor may be a weight."""

    @staticmethod
    def forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x @ w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return cotangent @ w.T, x.T @ cotangent


class Doubling(torch.overrides.TorchFunctionMode):
    """Inside, torch.tanh is twice what it was."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.tanh else out


def namespace(seed: int, unit: Callable[..., Any], functional: Callable[..., Any], sum_over: Callable[..., Any]) -> Any:
    """The globals of a program's file.

    Args:
        seed: of the program.
        unit: `fz.unit`, or the identity.
        functional: module -> the function `net(params, *inputs)`.
        sum_over: `fz.sum_over`, or a sum over leaves.
    """
    return {
        **globals(),
        "__name__": "program",
        "draw": lambda name, *shape: draw(seed, name, *shape),
        "leaf": lambda name, *shape: nn.Parameter(draw(seed, name, *shape)),
        "Table": lambda name, *shape: Table(nn.Parameter(draw(seed, name, *shape))),
        "Head": lambda name, *shape: Head(nn.Parameter(draw(seed, name, *shape))),
        "unit": unit,
        "functional": functional,
        "sum_over": sum_over,
    }
