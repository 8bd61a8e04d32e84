"""Passes over graphs: what a pullback is given, and what nobody uses."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch

import fzero as fz
from fzero.base.thread_state import without_values
from fzero.graph import of_torch, operators
from fzero.graph.trace import Traced, trace
from fzero.kernels import build
from fzero.testing import LiveBytes

F64 = torch.float64
needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler")


def traced(fn: Any, *given: torch.Tensor, fuses: bool) -> Traced:
    with without_values() as mode:
        fakes = [mode.from_tensor(x) for x in given]
        run = lambda xs: (outs := [fn(*xs)], range(len(outs)), ())
        return trace(run, fakes, range(len(fakes)), of_torch.decompositions("inductor" if fuses else "graph"))


def between(made: Traced) -> int:
    """Elements that the forward puts out for the pullback alone."""
    outs = next(iter(made.forward.graph.find_nodes(op="output"))).args[0]
    return sum(x.meta["val"].numel() for x in outs[made.outputs :])  # type: ignore[union-attr]


def swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(x @ gate) * (x @ up) @ down


def test_a_pullback_computes_again_what_is_cheap() -> None:
    given = [torch.randn(3, 4), torch.randn(4, 8), torch.randn(4, 8), torch.randn(8, 4)]
    assert between(traced(swiglu, *given, fuses=False)) > 2 * 24
    made = traced(swiglu, *given, fuses=True)
    assert between(made) == 2 * 24, "the two products; what is computed of them by element is computed again"
    out, *saved = made.forward(*given)
    held = [([out, *saved][i] if i >= 0 else given[-1 - i]) for i in made.saved]
    expected = torch.func.vjp(swiglu, *given)[1](torch.ones(3, 4))
    for found, other in zip(made.pullback(*held, torch.ones(3, 4)), expected, strict=True):
        torch.testing.assert_close(found, other)


def test_what_is_drawn_is_kept() -> None:
    made = traced(lambda x: torch.nn.functional.dropout(x, 0.5) * x, torch.randn(100), fuses=True)
    assert not made.draws[1]


class Looking(LiveBytes):
    looks = True  # so that graphs run


def test_a_fused_update_takes_each_gradient_as_it_comes() -> None:
    width, blocks = 256, 16  # smaller ones are updated together
    own = fz.unit(lambda p, x: torch.tanh(x @ p["w"]))

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        for q in p["blocks"]:
            x = own(q, own(q, x))
        return x.square().mean()

    step = fz.jit(fz.donate(fz.fuse_update(fz.train_step(loss, fz.sgd(0.1)))), backend="graph")
    params = {"blocks": [{"w": torch.randn(width, width) / 8} for _ in range(blocks)]}
    state, x = step.init(params), torch.ones(2, width)
    for _ in range(2):
        state, _ = step(state, x)
    with fz.testing.hazards(None), Looking() as live:
        step(state, x)
    assert live.peak <= 6 * width * width * 4, "some units' gradients, of 16"


@needs_compiler
def test_what_nobody_uses_of_a_step_is_not_computed() -> None:
    """The derivative of the norm of the gradient, here, and the last step's moments."""
    loss = lambda p, x: (torch.tanh(x @ p["w"]) - 1.0).square().mean()
    params, x = {"w": torch.randn(4, 4, dtype=F64)}, torch.randn(3, 4, dtype=F64)
    of: list[Any] = []

    def meta(by: str) -> Any:
        def after(lr: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            step = fz.train_step(loss, fz.adamw(lr))
            state = step.init(params)
            for _ in range(2):
                state, metrics = step(state, x)
            return step.forward(state, x) if by == "loss" else metrics["grad_norm"]  # type: ignore[no-any-return]

        return torch.func.grad(after)

    rate = torch.tensor(0.01, dtype=F64)
    for by in ("loss", "grad_norm"):
        plain, fast = meta(by), fz.jit(meta(by), backend="graph")
        for _ in range(2):
            torch.testing.assert_close(fast(rate, x), plain(rate, x), rtol=1e-10, atol=1e-12)
        of.append(fast.graph(rate, x))
    pulled = [module.graph.find_nodes(op="call_function", target=operators.PULL) for module in of]
    assert [len(nodes) for nodes in pulled] == [2, 2]
    for module in of:
        for node in module.graph.find_nodes(op="call_function", target=operators.REGION):
            assert all(user.target is operator.getitem and user.users for user in node.users)


def test_what_nobody_differentiates_by_may_be_infinite() -> None:
    def fn(p: Any, x: torch.Tensor) -> Any:
        net = lambda: torch.tanh(x @ p["w"] + 1.0) @ p["w"]
        return net().square().mean(), {"a": (net() / x.sum(1, True)).log()}

    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)
    step = fz.train_step(fn, fz.sgd(0.1), has_aux=True)
    state, x = step.init({"w": draw(4, 4)}), draw(3, 4)
    by_input = lambda state, x: torch.func.grad(lambda x: step(state, x)[1]["loss"])(x)
    fast = fz.jit(by_input, backend="graph")
    for own in (x, x * torch.tensor([[0.0], [1.0], [1.0]]), 2 * x):
        torch.testing.assert_close(fast(state, own), by_input(state, own), rtol=1e-10, atol=1e-12)
