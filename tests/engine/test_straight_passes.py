"""Passes of autograd through units whose operations are a part of the run's own graph: from the second run on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from units import F64, params_of

import fzero as fz
from fzero.base import pytree
from fzero.testing import assert_trees_close, run_ranks

X = torch.randn(4, 4, dtype=F64, generator=torch.Generator().manual_seed(2))
grad = torch.autograd.grad


def body(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["w"])


def ends_at_an_output(hs: list[torch.Tensor]) -> torch.Tensor:
    """Of the unit before the last, which is then gathered ahead for the real pullback."""
    (g,) = grad(hs[-1].sin().sum(), hs[-2], retain_graph=True)
    return (g * hs[-2]).sum()


def ends_at_an_output_and_is_derived(hs: list[torch.Tensor]) -> torch.Tensor:
    (g,) = grad(hs[-1].sin().sum(), hs[-2], retain_graph=True)
    (f,) = grad(hs[-1].sin().sum(), hs[0], create_graph=True)
    return (g * hs[-2]).sum() + f.square().sum()


def within_a_pass(hs: list[torch.Tensor]) -> torch.Tensor:
    """A hook's own pass goes through the unit that the outer one is about to go through."""
    inner = hs[-2].sin().sum()
    inside: list[bool] = []

    def hook(g: torch.Tensor) -> torch.Tensor:
        if inside:
            return g
        inside.append(True)
        return g + grad(inner, hs[0], retain_graph=True)[0]

    hs[-2].register_hook(hook)
    return hs[-1].square().sum()


@pytest.mark.parametrize("more", [ends_at_an_output, ends_at_an_output_and_is_derived, within_a_pass])
def test_passes_of_the_functions_own(more: Callable[[list[torch.Tensor]], torch.Tensor]) -> None:
    def fn(unit: Any, p: Any, x: torch.Tensor) -> torch.Tensor:
        hs = [x * p["s"]]
        for own in 2 * p["blocks"]:
            hs.append(unit(own, hs[-1]))
        return hs[-1].sum() + more(hs)

    _compare(fn)


class Product(torch.autograd.Function):
    """A node with a low number, as another thread's: autograd's own makes those of a derivative on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, w)
        ctx._set_sequence_nr(0)
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return g @ w.mT, x.mT @ g


def test_a_write_to_a_view_of_what_another_thread_computed() -> None:
    def fn(unit: Any, p: Any, x: torch.Tensor) -> torch.Tensor:
        x = x * p["s"]
        for own in p["blocks"]:
            x = unit(own, x).mul_(2).view(x.shape)
        return x.sin().sum()

    _compare(fn, lambda p, x: Product.apply(x, p["w"]).view(-1))


def _compare(fn: Callable[[Any, Any, torch.Tensor], torch.Tensor], own: Callable[..., torch.Tensor] = body) -> None:
    """The gradients of three steps with those of the function whose units are plain calls."""
    flat, spec = pytree.flatten(params_of())
    flat = [w.clone().requires_grad_() for w in flat]
    want = pytree.unflatten(spec, grad(fn(own, pytree.unflatten(spec, flat), X), flat))

    def rank_main(rank: int) -> None:
        step = fz.shard_zero3(fz.train_step(lambda p, x: fn(fz.unit(own), p, x), fz.sgd(0.1)))
        state = step.init(params_of())
        for _ in range(3):
            _, pullback = step.vjp(state, X)
            got, *_ = pullback(torch.ones((), dtype=F64))
            assert_trees_close(fz.gather(got), want)

    run_ranks(rank_main, 2)
