"""Functions as people write them: tensors and effects that go by ways which are easily overlooked.

Cases as in `written`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from written import F64, PARAMS, Case, Net, draw, filled, named, pure, quietly
from written_around import chain

import fzero as fz

Unit = Callable[..., Any]


def module(made: Any) -> Case:
    """A module, and the same in plain autograd's eyes: functional_call on it."""
    made = filled(made)
    apply, params = fz.functional(made)
    return apply, dict(params), lambda p, x: torch.func.functional_call(made, dict(p), (x,))


# ---- derivatives inside


def a_checkpoint_inside() -> Case:
    @fz.unit
    def unit(q: Any, x: torch.Tensor) -> Any:
        inner = functools.partial(torch.matmul, x)
        return torch.tanh(torch.utils.checkpoint.checkpoint(inner, q["w"], use_reentrant=False))

    plain = chain(lambda q, x: torch.tanh(x @ q["w"]))
    return (lambda p, x: chain(unit)(p, x).square().mean()), PARAMS, lambda p, x: plain(p, x).square().mean()


def what_escapes_a_derivative_inside() -> Case:
    """Values of a level that has ended are constants."""

    @fz.unit
    def unit(q: Any, x: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []

        def energy(y: torch.Tensor) -> torch.Tensor:
            seen.append((y @ y.T).sin().sum())
            return seen[-1]

        slope = torch.func.grad(energy)(x.detach())
        return torch.tanh((x + 0.1 * slope) @ q["w"]) * seen[0].detach()

    return pure(lambda p, x: chain(unit)(p, x @ p["head"]).square().mean())


def a_backward_inside() -> Case:
    @fz.unit
    def unit(q: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            own = torch.ones(4, dtype=F64, requires_grad=True)
            (own.sin() * x.detach()).sum().backward()
        assert own.grad is not None
        return torch.tanh(x @ q["w"]) * own.grad

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        return chain(unit)(p, x).square().mean()

    def plain(p: Any, x: torch.Tensor) -> torch.Tensor:
        def own(q: Any, x: torch.Tensor) -> torch.Tensor:
            slope = torch.ones(4, dtype=F64).cos() * x.detach().sum(0)
            return torch.tanh(x @ q["w"]) * slope

        return chain(own)(p, x).square().mean()

    return fn, pure(fn)[1], plain


# ---- modules whose units are called in other ways


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4, dtype=F64)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.lin(x)) * self.scale


class Calls(Net):
    block = Scaled


class FunctionalCall(Calls):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, *_ = self.blocks
        own = dict(first.named_parameters())
        h = torch.func.functional_call(first, {name: 2 * value for name, value in own.items()}, (x,))
        h = torch.func.functional_call(second, own, (h,))
        constant = {name: value.detach() for name, value in second.named_parameters()}
        h = h - torch.func.functional_call(second, constant, (h,))
        for block in self.blocks:
            h = block(h)
        return h.square().mean()


class ShallowCopy(Calls):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        other: Any = copy.copy(self.blocks[0])
        other.scale = 3.0
        return (other(x) + self.blocks[0](x)).square().mean()


class OldWeightNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        with quietly():
            for block in self.blocks:
                nn.utils.weight_norm(block.lin)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def functional_call_on_a_unit() -> Case:
    return module(FunctionalCall())


def a_shallow_copy_of_a_unit() -> Case:
    return module(ShallowCopy())


def weights_that_a_hook_computes() -> Case:
    return module(OldWeightNorm())


def graphs_in_compressed_form() -> Case:
    """Neighbours of a graph's nodes: reached, given, given back, and made inside; torch.func takes none of these."""
    adjacency = (draw(3, 3) > 0) * draw(3, 3, seed=1)
    with quietly():
        sparse, other = adjacency.to_sparse_csr(), adjacency.T.to_sparse_csc()

    def fn(p: Any, x: torch.Tensor, units: bool = True) -> torch.Tensor:
        unit = fz.unit if units else (lambda f: f)
        mix: Any = (sparse, other) if units else (adjacency, adjacency.T)

        @unit
        def reaches(q: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(mix[0] @ (x @ q["w"]))

        @unit
        def is_given(q: Any, x: torch.Tensor, by: torch.Tensor) -> Any:
            return torch.tanh(by @ (x @ q["w"])), by

        @unit
        def makes(q: Any, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
            own = x @ q["w"]
            return (own.to_sparse_csr().to_dense() if units else own) + by @ x

        first, second, third = p["blocks"]
        x, by = is_given(second, reaches(first, x), mix[1])
        return makes(third, x, by).square().mean()

    return fn, PARAMS, functools.partial(fn, units=False)


CASES = named(
    a_checkpoint_inside,
    what_escapes_a_derivative_inside,
    a_backward_inside,
    functional_call_on_a_unit,
    a_shallow_copy_of_a_unit,
    graphs_in_compressed_form,
    weights_that_a_hook_computes,
)
