"""Hooks and `.data` in units, which act on one derivative, and on the whole gradient of a tensor: equal, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nightly import in_turns

import fzero as fz
from fzero.testing import RankError, assert_trees_close, run_ranks

F64 = torch.float64
W = torch.tensor([[0.5, -1.0], [2.0, 0.3]], dtype=F64)
X = torch.tensor([[0.3, 0.2]], dtype=F64)
Unit = Callable[[Any, torch.Tensor], torch.Tensor]


def hooked(p: Any, x: torch.Tensor) -> torch.Tensor:
    h = x @ p["w"]
    if h.requires_grad:
        h.register_hook(lambda g: 2 * g)
    return torch.tanh(h)


def by_a_node(p: Any, x: torch.Tensor) -> torch.Tensor:
    h = x @ p["w"]
    if h.grad_fn is not None:
        h.grad_fn.register_prehook(lambda g: (2 * g[0],))
    return torch.tanh(h)


def clamped(p: Any, x: torch.Tensor) -> torch.Tensor:
    h = x @ p["w"]
    h.data.clamp_(-0.3, 0.3)
    return torch.sin(h)


def scaled(p: Any, x: torch.Tensor) -> torch.Tensor:
    h = x @ p["w"]
    return torch.sin(h / h.data.abs().mean())


def detached_in_place(p: Any, x: torch.Tensor) -> torch.Tensor:
    h = x @ p["w"]
    return torch.tanh(h) + torch.sin(h.detach_())


def harmless(p: Any, x: torch.Tensor) -> torch.Tensor:
    h = x @ p["w"]
    return torch.sin(h / h.detach().abs().mean()) + torch.ones(2, dtype=F64).data


KINDS = (hooked, by_a_node, clamped, scaled, detached_in_place, harmless)
HOW = {"zero3": fz.shard_zero3, "remat": fz.remat, "kept": lambda step: fz.remat(step, save=("out",))}


def net_of(unit: Unit) -> Any:
    return lambda params, x: unit(params["blocks"][1], unit(params["blocks"][0], x)).square().sum()


def named(unit: Unit) -> Unit:
    return fz.unit(lambda p, x: fz.name(unit(p, x), "out"))


def tree(w: torch.Tensor) -> Any:
    return {"blocks": [{"w": w}, {"w": w.T}]}


def penalty(net: Any) -> Any:
    return lambda params, x: net(params, x) + torch.func.grad(net, argnums=1)(params, x).square().sum()


def by_grad_inside(unit: Unit, act: Any) -> torch.Tensor:
    """A gradient penalty by torch.func in the function."""
    if act is None:
        return torch.func.grad(lambda w: penalty(net_of(unit))(tree(w), X))(W)
    step = act(fz.train_step(penalty(net_of(named(unit))), fz.sgd(1.0)))
    out, pull = step.vjp(step.init(tree(W)), X)
    return whole(pull(torch.ones_like(out))[0])


def whole(grads: fz.Sharded) -> torch.Tensor:
    first, second = (block["w"] for block in fz.gather(grads)["blocks"])
    return first + second.T


def by_hvp(unit: Unit, act: Any) -> torch.Tensor:
    loss = net_of(unit)
    if act is None:
        return torch.func.vjp(torch.func.grad(lambda w: loss(tree(w), X)), W)[1](torch.ones_like(W))[0]
    step = act(fz.train_step(net_of(named(unit)), fz.sgd(1.0)))
    state = step.init(tree(W))
    v = state.params.with_buffers({key: torch.ones_like(x) for key, x in state.params.locals().items()})
    return whole(fz.hvp(step, state, v, X))


def by_grad_outside(unit: Unit, act: Any) -> torch.Tensor:
    """Of a cotangent that a step pulls back."""
    if act is None:
        net = lambda x: net_of(unit)(tree(W), x)
    else:
        step = act(fz.train_step(net_of(named(unit)), fz.sgd(1.0)))
        state = step.init(tree(W))

    def size(x: torch.Tensor) -> torch.Tensor:
        if act is None:
            return torch.func.grad(net)(x).square().sum()
        out, pull = step.vjp(state, x, argnums=(0,))
        return pull(torch.ones_like(out))[1][0].square().sum()

    return torch.func.grad(size)(X)


def by_create_graph(unit: Unit, act: Any) -> torch.Tensor:
    """By plain autograd, of which every derivative has the hooks."""
    if act is None:
        w = W.clone().requires_grad_()
        x = X.clone().requires_grad_()
        out = net_of(unit)(tree(w), x)
        (g,) = torch.autograd.grad(out, x, create_graph=True)
        return torch.autograd.grad(out + g.square().sum(), w)[0]
    step = act(fz.train_step(net_of(named(unit)), fz.sgd(1.0)))
    with fz.tape(step, step.init(tree(W))) as model:
        x = X.clone().requires_grad_()
        out = model(x)
        (g,) = torch.autograd.grad(out, x, create_graph=True)
        (out + g.square().sum()).backward()
        return whole(model.grads())


@in_turns(6)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("way", [by_grad_inside, by_hvp, by_grad_outside, by_create_graph])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_or_refused(kind: Unit, way: Any, how: str) -> None:
    def rank_main(rank: int) -> torch.Tensor:
        return way(kind, HOW[how])

    try:
        found = run_ranks(rank_main, 2 if how == "zero3" else 1)
    except RankError as error:
        assert kind is not harmless, error
        assert "more than one derivative goes through it" in str(error), error
        return
    if kind is not harmless and (kind, way) != (by_a_node, by_hvp):
        assert kind not in (hooked, clamped), "it should be refused"
    for own in found:
        assert_trees_close(own, way(kind, None), rtol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_one_derivative_has_them(kind: Unit) -> None:
    w = W.clone().requires_grad_()
    (want,) = torch.autograd.grad(net_of(kind)(tree(w), X), w)
    for act in (fz.remat, HOW["kept"]):
        step = act(fz.train_step(net_of(named(kind)), fz.sgd(1.0)))
        out, pull = step.vjp(step.init(tree(W)), X)
        assert_trees_close(whole(pull(torch.ones_like(out))[0]), want, rtol=1e-12)


def test_a_hook_of_what_a_unit_makes_of_its_input() -> None:
    """It is for that call's part of the gradient; one of the input itself is refused, as of what has other parts."""

    def own(p: Any, x: torch.Tensor) -> torch.Tensor:
        h = x.view_as(x)
        h.register_hook(lambda g: g.clamp(-0.1, 0.1))
        return torch.tanh(h @ p["w"])

    def twice(unit: Unit) -> Any:
        def fn(params: Any, x: torch.Tensor) -> torch.Tensor:
            y = x @ params["a"]
            return (unit(params["blocks"][0], y) + unit(params["blocks"][0], 2 * y)).square().sum() + y.sum()

        return fn

    w, a = (x.clone().requires_grad_() for x in (W, W))
    want = torch.autograd.grad(twice(own)({"a": a, "blocks": [{"w": w}]}, X), (a, w))
    for act in (lambda step: step, fz.remat, HOW["kept"]):
        step = act(fz.train_step(twice(named(own)), fz.sgd(1.0)))
        out, pull = step.vjp(step.init({"a": W, "blocks": [{"w": W}]}), X)
        found = fz.gather(pull(torch.ones_like(out))[0])
        assert_trees_close([found["a"], found["blocks"][0]["w"]], list(want), rtol=1e-12)


@in_turns(5)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.jacfwd, torch.func.hessian])
def test_params_pass_through_a_transform(transform: Any, how: str) -> None:
    """As `torch.func.grad(net, argnums=1)(params, x)` wraps all that it is given."""

    def fn_of(unit: Unit) -> Any:
        net = net_of(unit)

        def fn(params: Any, x: torch.Tensor) -> torch.Tensor:
            mapped = torch.vmap(transform(net, argnums=1), in_dims=(None, 0))(params, torch.stack([x, 2 * x]))
            return net(params, x) + mapped.square().sum() + transform(net, argnums=1)(params, x).sin().sum()

        return fn

    def rank_main(rank: int) -> torch.Tensor:
        step = HOW[how](fz.train_step(fn_of(named(harmless)), fz.sgd(1.0)))
        out, pull = step.vjp(step.init(tree(W)), X)
        return whole(pull(torch.ones_like(out))[0])

    want = torch.func.grad(lambda w: fn_of(harmless)(tree(w), X))(W)
    for found in run_ranks(rank_main, 2 if how == "zero3" else 1):
        assert_trees_close(found, want, rtol=1e-9)


def test_a_module_whose_params_pass_through_a_transform() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).to(F64)
    apply, params = fz.functional(module)
    x = torch.randn(5, 3, dtype=F64, generator=torch.Generator().manual_seed(0))

    def fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda p, y: apply(p, y).sum(), argnums=1)(params, x).square().sum()

    want = torch.func.grad(fn)(params, x)

    def rank_main(rank: int) -> Any:
        step = fz.shard_zero3(fz.train_step(fn, fz.sgd(1.0)))
        out, pull = step.vjp(step.init(params), x)
        return fz.gather(pull(torch.ones_like(out))[0])

    for found in run_ranks(rank_main, 2):
        assert_trees_close(dict(found), dict(want), rtol=1e-9)


def test_handles_are_not_differentiated() -> None:
    step = fz.remat(fz.train_step(lambda p, x: torch.func.grad(net_of(named(harmless)))(p, x)["blocks"], fz.sgd(1.0)))
    with pytest.raises(AttributeError, match=r"derivatives over the params are fz\.hvp and fz\.per_example_grads"):
        step.vjp(step.init(tree(W)), X)
