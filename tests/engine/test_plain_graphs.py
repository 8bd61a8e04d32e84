"""Graphs of plain autograd that are no chains of layers: the bits of torch.func, or plain torch's numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from microbatches import F64, HOW, Params, by_torch, drawn, pulled

import fzero as fz
from fzero.testing import assert_trees_close, assert_trees_equal


def grads_of(fn: Callable[..., Any], params: Params, x: torch.Tensor, count: int) -> Params:
    """The gradient of the mean over microbatches, by one step of sgd."""
    step = fz.accumulate(fz.train_step(fn, fz.sgd(1.0)), count)
    state = step.init(params)
    new, _ = step(state, x)
    before, after = fz.gather(state.params), fz.gather(new.params)
    return {name: before[name] - after[name] for name in params}


def torch_grads_of(fn: Callable[..., Any], params: Params, x: torch.Tensor, count: int) -> Params:
    return by_torch(fn, params, x.chunk(count), 1 / count)


def sparse_of(csr: bool, columns: int) -> torch.Tensor:
    dense = drawn(192, columns, dtype=torch.float32, seed=3)
    sparse = (dense * (dense > 0)).to_sparse()
    return sparse.to_sparse_csr() if csr else sparse


# each is called with a square weight, and a batch of so many columns
LONG = {
    "a sum": lambda p, x: (x @ p["w"]).sum(),
    "a sum over rows": lambda p, x: ((x @ p["w"]).sum(0) ** 2).mean(),
    "a sum over columns": lambda p, x: ((x @ p["w"].t()).sum(1) ** 2).mean(),
    "an input that is expanded": lambda p, x: ((x[:1].expand(x.shape) @ p["w"]) * x).tanh().mean(),
    "addmm": lambda p, x: torch.addmm(x[0], x, p["w"]).sum(),
}


@pytest.mark.parametrize("name", list(LONG))
def test_expanded_operands_of_long_products(name: str) -> None:
    """Nothing is drawn into memory that has several numbers in one place."""
    params, x = {"w": drawn(64, 64, dtype=torch.float32)}, drawn(512, 64, dtype=torch.float32, seed=1)
    want = torch_grads_of(LONG[name], params, x, 2)
    assert_trees_close(grads_of(LONG[name], params, x, 2), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("csr", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_weight_beside_a_sparse_tensor(csr: bool, transposed: bool) -> None:
    fixed = sparse_of(csr, 64)

    def fn(p: Params, x: torch.Tensor) -> torch.Tensor:
        return (fixed @ (p["w"].t() if transposed else p["w"])).tanh().mean() * x.mean()

    params, x = {"w": drawn(64, 64, dtype=torch.float32)}, drawn(4, 2, dtype=torch.float32, seed=1)
    torch.testing.assert_close(grads_of(fn, params, x, 2), torch_grads_of(fn, params, x, 2))


@pytest.mark.parametrize("compute", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", HOW)
def test_an_output_that_is_a_weight_of_a_product(compute: torch.dtype | None, how: str) -> None:
    """It has a cotangent of its own beside the product's; where it was cast, nobody has copied it on its way out."""
    policy = fz.Policy(param=F64, compute=compute or F64, reduce=F64, grad=F64)
    step = fz.train_step(lambda p, x: (x @ p["w"], p["w"]), fz.sgd(1.0), policy=policy)
    x = drawn(2, 3, seed=1).to(compute or F64)
    own = lambda output: (torch.ones_like(output[0]), 3 * torch.ones_like(output[1]))
    found = fz.gather(pulled(step, {"w": drawn(3, 3)}, [x], how, own))["w"]
    want = x.t().double() @ torch.ones(2, 3, dtype=F64) + 3
    tolerance = 2e-2 if compute is torch.bfloat16 else 1e-6
    torch.testing.assert_close(found, want, rtol=tolerance, atol=tolerance)


class PullsWithin(torch.autograd.Function):
    """The identity, whose backward pulls back through the same graph on its own."""

    @staticmethod
    def forward(out: torch.Tensor, holder: list[torch.Tensor]) -> torch.Tensor:
        return out.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.holder = inputs[1]

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:  # type: ignore[override]
        out, begin = ctx.holder
        (own,) = torch.autograd.grad(out, begin, cotangent, retain_graph=True)
        return cotangent + own.sum(), None


def pulls_within(p: Params, x: torch.Tensor) -> torch.Tensor:
    begin = (x * p["b"]).tanh()
    out = (begin @ p["w"]).tanh() @ p["u"]
    return PullsWithin.apply(out, [out, begin]).tanh().sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_backward_that_pulls_back_through_the_graph(count: int) -> None:
    """What comes by in its pass is none of the gradient."""
    params = {"w": drawn(5, 5), "u": drawn(5, 5, seed=1), "b": drawn(5, seed=2)}
    x = drawn(8, 5, seed=3)
    torch.testing.assert_close(grads_of(pulls_within, params, x, count), torch_grads_of(pulls_within, params, x, count))


def test_a_backward_that_pulls_back_in_the_first_half() -> None:
    params = {"w": drawn(5, 5), "u": drawn(5, 5, seed=1), "b": drawn(5, seed=2)}
    x = drawn(8, 5, seed=3)
    found = [fz.gather(pulled(pulls_within, params, [x], how)) for how in ("backward", "halves")]
    assert_trees_equal(found[0], found[1])
    torch.testing.assert_close(found[0], torch_grads_of(pulls_within, params, x, 1))


@pytest.mark.parametrize("count", [1, 2])
def test_products_that_other_threads_have_computed(count: int) -> None:
    """Each thread numbers its nodes on its own: numbers say nothing of which node leads to which."""

    def on_a_thread(work: Callable[[], torch.Tensor], before: int) -> torch.Tensor:
        out = []

        def run() -> None:
            for _ in range(before):
                torch.ones((), requires_grad=True).clone()
            out.append(work())

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return out[0]

    def fn(p: Params, x: torch.Tensor) -> torch.Tensor:
        hidden = on_a_thread(lambda: x @ p["w"], 500)
        return on_a_thread(lambda: hidden @ p["u"], 0).tanh().sum()

    params, x = {"w": drawn(5, 5), "u": drawn(5, 5, seed=1)}, drawn(8, 5, seed=3)
    torch.testing.assert_close(grads_of(fn, params, x, count), torch_grads_of(fn, params, x, count))


@st.composite
def weights_of_weights(draw: st.DrawFn) -> Callable[[Params], torch.Tensor]:
    """A square weight that is computed of some of four."""

    def tree(depth: int) -> Callable[[Params], torch.Tensor]:
        kind = draw(st.sampled_from(["w", "w", "t", "product", "product", "sum"] if depth else ["w"]))
        if kind == "w":
            name = draw(st.sampled_from("abcd"))
            return lambda p: p[name]
        if kind == "t":
            one = tree(depth - 1)
            return lambda p: one(p).t()
        left, right = tree(depth - 1), tree(depth - 1)
        return (lambda p: left(p) @ right(p)) if kind == "product" else (lambda p: left(p) + right(p))

    return tree(3)


@given(made=weights_of_weights(), count=st.integers(1, 2), biased=st.booleans())
def test_products_of_weights(made: Callable[[Params], torch.Tensor], count: int, biased: bool) -> None:
    def fn(p: Params, x: torch.Tensor) -> torch.Tensor:
        return ((x @ made(p) + (p["e"] if biased else 0)) ** 2).mean()

    params = {**{name: drawn(4, 4, seed=i) for i, name in enumerate("abcd")}, "e": drawn(4, seed=5)}
    x = drawn(4, 4, seed=6)
    cotangent = lambda _: torch.full((), 1 / count, dtype=F64)
    got = fz.gather(pulled(fn, params, x.chunk(count), "halves", cotangent))
    assert_trees_close(got, torch_grads_of(fn, params, x, count), rtol=1e-10, atol=1e-12)
