"""Users' own backwards and hooks in runs by plain autograd, in every order of pullbacks, held against plain torch.

Whoever acts in a pullback may write to what it is given, return memory that it uses again, and look at `grad`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drawn_pipelines import Copied
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

import fzero as fz
from fzero.engine.passes import Passes
from fzero.engine.weights import Graph

DTYPE = torch.float64
WORK: dict[torch.Size, Tensor] = {}
LATER: list[Callable[[], object]] = []  # what is done between the forwards and the pullbacks
Params = dict[str, Tensor]


def work(like: Tensor) -> Tensor:
    return WORK.setdefault(like.shape, torch.empty_like(like))


class Reversed(Copied):
    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:  # type: ignore[override]
        return cotangent.neg_()


class Doubled(Copied):
    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:  # type: ignore[override]
        return torch.mul(cotangent, 2, out=work(cotangent))


class DoubledView(Copied):
    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:  # type: ignore[override]
        return torch.mul(cotangent, 2, out=work(cotangent)).view(cotangent.shape)


class WrittenView(Function):
    """Doubles what it is given, a view, in place: its node is hidden in one of torch's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:  # type: ignore[override]
        return torch.mul(cotangent, 2, out=work(cotangent))


class Product(Function):
    """A product whose subclasses pull back to the weight in ways of their own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, w)
        ctx.w = w
        return x @ w

    @staticmethod
    def weight(ctx: Any, x: Tensor, w: Tensor, cotangent: Tensor) -> Tensor | None:
        return x.t() @ cotangent

    @classmethod
    def backward(cls, ctx: Any, cotangent: Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return cotangent @ w.t(), cls.weight(ctx, x, w, cotangent)


class NoWeight(Product):
    @staticmethod
    def weight(ctx: Any, x: Tensor, w: Tensor, cotangent: Tensor) -> Tensor | None:
        return None


class Assigns(Product):
    """Adds to the weight's `grad` itself, as fused kernels do."""

    @staticmethod
    def weight(ctx: Any, x: Tensor, w: Tensor, cotangent: Tensor) -> Tensor | None:
        own = x.t() @ cotangent
        w.grad = own if w.grad is None else w.grad + own
        return torch.zeros_like(w)


class Within(Product):
    """Runs a backward of its own, which is differentiable."""

    @staticmethod
    def weight(ctx: Any, x: Tensor, w: Tensor, cotangent: Tensor) -> Tensor | None:
        with torch.enable_grad():
            out = x.detach() @ ctx.w
        torch.autograd.backward(out, cotangent, create_graph=True)
        return torch.zeros_like(w)


class OfNothing(Function):
    """Runs what it closes over again in its backward; that there is one it owes to a leaf of its own."""

    @staticmethod
    def forward(ctx: Any, fn: Callable[[], Tensor], leaf: Tensor) -> Tensor:  # type: ignore[override]
        ctx.fn = fn
        with torch.no_grad():
            return fn()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            torch.autograd.backward(ctx.fn(), cotangent)
        return None, None


@torch.library.custom_op("fzero_tests::reversed", mutates_args=())
def reversed_op(x: Tensor) -> Tensor:
    return x.clone()


reversed_op.register_autograd(lambda ctx, cotangent: cotangent.neg_())


def hooked(hook: Callable[[Tensor], object], h: Tensor) -> Tensor:
    h.register_hook(hook)  # type: ignore[arg-type]
    return h


def double(g: Tensor) -> Tensor:
    return torch.mul(g, 2, out=work(g))


def of_params(p: Params, x: Tensor) -> Tensor:
    for leaf in p.values():
        leaf.register_hook(double)
    return x @ p["a"] @ p["b"]


def of_one_param(p: Params, x: Tensor) -> Tensor:
    p["b"].register_hook(lambda g: g.mul_(2))
    return x @ (p["a"] + p["b"])


def accumulated(p: Params, x: Tensor) -> Tensor:
    def triple(leaf: Tensor) -> None:
        assert leaf.grad is not None
        leaf.grad.mul_(3)

    p["b"].register_post_accumulate_grad_hook(triple)
    return x @ p["a"] @ p["b"]


def before_accumulation(p: Params, x: Tensor) -> Tensor:
    node = get_gradient_edge(p["b"]).node
    node.register_prehook(lambda grads: tuple(2 * g for g in grads))
    return x @ p["a"] @ (p["b"] + 0 * p["a"])


def of_a_node(p: Params, x: Tensor) -> Tensor:
    h = x @ p["a"]
    assert h.grad_fn is not None
    h.grad_fn.register_prehook(lambda grads: tuple(double(g) for g in grads))
    return h @ p["b"]


def later_on(p: Params, x: Tensor) -> Tensor:
    h = x @ p["a"]
    LATER.append(lambda: h.register_hook(lambda g: g.mul_(2)))
    return h + x @ p["b"]


def of_a_view(p: Params, x: Tensor) -> Tensor:
    h = x @ p["a"]
    WrittenView.apply(h[:1])
    return h @ p["b"]


def of_nothing(p: Params, x: Tensor) -> Tensor:
    leaf = torch.zeros((), requires_grad=True, dtype=DTYPE)
    return x @ p["a"] + OfNothing.apply(lambda: x.detach() @ p["b"], leaf)


FUNCTIONS: dict[str, Callable[[Params, Tensor], Tensor]] = {
    "reverses in place": lambda p, x: Reversed.apply(x @ p["a"]) + x @ p["b"],
    "an operator that reverses in place": lambda p, x: reversed_op(x @ p["a"]) + x @ p["b"],
    "a workspace": lambda p, x: Doubled.apply(x @ p["a"]) @ p["b"],
    "a workspace of the input": lambda p, x: Doubled.apply(x) @ p["a"] @ p["b"],
    "a view of a workspace": lambda p, x: DoubledView.apply(x) @ p["a"] @ p["b"],
    "a view of a workspace, of a param": lambda p, x: x @ DoubledView.apply(p["a"]) @ p["b"],
    "a workspace of a view": of_a_view,
    "no gradient of a weight": lambda p, x: NoWeight.apply(x @ p["a"], p["b"]),
    "assigns": lambda p, x: Assigns.apply(x @ p["a"], p["b"]),
    "a backward within": lambda p, x: Within.apply(x @ p["a"], p["b"]),
    "a backward of nothing": of_nothing,
    "a checkpoint": lambda p, x: checkpoint(lambda h: h @ p["b"], x @ p["a"], use_reentrant=True),
    "a hook in place": lambda p, x: hooked(lambda g: g.mul_(2), x @ p["a"]) + x @ p["b"],
    "a hook with a workspace": lambda p, x: hooked(double, hooked(double, x @ p["a"]) @ p["b"]),
    "a hook of the input": lambda p, x: hooked(double, x + 0 * p["a"].sum()) @ p["a"] @ p["b"],
    "hooks of params": of_params,
    "a hook of a param in place": of_one_param,
    "a hook of a node": of_a_node,
    "a hook that comes later": later_on,
    "a hook after accumulation": accumulated,
    "a hook before accumulation": before_accumulation,
}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DTYPE)


PARAMS, X = {"a": drawn(3, 3), "b": drawn(3, 3, seed=1)}, drawn(6, 3, seed=2)


def expected(fn: Callable[..., Tensor], count: int) -> tuple[Params, Tensor]:
    """By plain torch, one microbatch after the other, each with leaves of its own."""
    total, cotangents = {name: torch.zeros_like(leaf) for name, leaf in PARAMS.items()}, []
    for part in X.chunk(count):
        leaves = {name: leaf.clone().requires_grad_() for name, leaf in PARAMS.items()}
        x = part.clone().requires_grad_()
        loss = fn(leaves, x.view_as(x)) / count
        while LATER:
            LATER.pop()()
        loss.backward()
        for name, leaf in leaves.items():
            total[name] += 0 if leaf.grad is None else leaf.grad.detach()
        assert x.grad is not None
        cotangents.append(x.grad.clone())
    return total, torch.cat(cotangents)


def pulled(fn: Callable[..., Tensor], count: int, how: str) -> tuple[Params, Tensor]:
    """By a step's passes: all forwards, all that is given to others, all gradients."""
    step = fz.train_step(fn, fz.sgd(1.0))
    passes = Passes(step, step.init(PARAMS), count)
    for i, part in enumerate(X.chunk(count)):
        passes.forward(i, (part,), (0,))
    while LATER:
        LATER.pop()()
    one = torch.ones((), dtype=DTYPE) / count
    cotangents: list[Any] = []
    rests: list[Callable[[], object]] = []
    for i in range(count if how == "again" else 0):
        passes.backward(i, one, retain_graph=True)
    passes.begin()
    for i in range(count):
        if how == "early":
            (own,), rest = passes.early(i, one)
            rests.append(rest)
        elif how == "halves":
            (own,) = passes.inputs(i, one)
            rests.append(functools.partial(passes.params, i))
        else:
            (own,) = passes.backward(i, one)
        cotangents.append(own)
    for rest in rests:
        rest()
    passes.reduce()
    return fz.gather(passes.grads()), torch.cat(cotangents)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("how", ["backward", "again", "early", "halves", "step"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_whoever_acts_in_a_pullback_does_what_it_does_in_torch(name: str, how: str, count: int) -> None:
    fn = lambda p, x: torch.tanh(FUNCTIONS[name](p, x)).square().sum()
    want, want_cotangent = expected(fn, count)
    if how == "step":
        if name == "a hook that comes later":
            return  # than the pullback of a step, which nothing comes between
        step = fz.accumulate(fz.train_step(fn, fz.sgd(1.0)), count)
        new, _ = step(step.init(PARAMS), X)
        found = {name: PARAMS[name] - leaf for name, leaf in fz.gather(new.params).items()}
    else:
        found, cotangent = pulled(fn, count, how)
        torch.testing.assert_close(cotangent, want_cotangent, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-12)


# for as long as the process: torch 2.11 compiles nothing after one is gone
LIBRARY = torch.library.Library("fzero_tests_cpp", "DEF")
LIBRARY.define("same(Tensor x) -> Tensor")
LIBRARY.impl("same", lambda x: x.detach().clone(), "CPU")


def test_operators_in_cpp_are_users() -> None:
    x = torch.ones(3, requires_grad=True)
    assert Graph([x * 2], []).native
    assert not Graph([torch.ops.fzero_tests_cpp.same(x * 2) * 2], []).native


@pytest.mark.parametrize("how", ["backward", "early", "halves"])
def test_a_backward_of_what_unpacks_counts(how: str) -> None:
    """Nothing else shows it: all nodes are torch's own, and hooks on what they save are none on what passes."""

    def fn(p: Params, x: Tensor) -> Tensor:
        def unpacked(saved: Tensor) -> Tensor:
            with torch.enable_grad():
                torch.autograd.backward((p["b"].square() * 0.1).sum())
            return saved

        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpacked):
            h = torch.tanh(x @ p["a"])
        return h @ p["b"]

    loss = lambda p, x: fn(p, x).square().sum()
    want, _ = expected(loss, 2)
    found, _ = pulled(loss, 2, how)
    torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("error", [TypeError("a _Leaf of a tree"), RuntimeError("Multiple dispatch failed for me")])
def test_users_errors_are_their_own(error: Exception) -> None:
    calls = []

    def fn(p: Params, x: Tensor) -> Tensor:
        calls.append(0)
        raise error

    step = fz.train_step(fn, fz.sgd(1.0))
    with pytest.raises(type(error), match=str(error)):
        step(step.init(PARAMS), X)
    assert len(calls) == 1


@pytest.mark.parametrize("detached", [True, False])
@pytest.mark.parametrize("name", ["native", "a workspace"])
def test_what_is_kept_from_one_microbatch_to_the_next_is_detached(name: str, detached: bool) -> None:
    kept: list[Tensor] = []
    inner = FUNCTIONS.get(name, lambda p, x: x @ p["a"] @ p["b"])

    def fn(p: Params, x: Tensor) -> Tensor:
        h = inner(p, x) + (kept.pop() if kept else 0)
        kept.append(h.detach() if detached else h)
        return torch.tanh(h).square().sum()

    step = fz.accumulate(fz.train_step(fn, fz.sgd(1.0)), 2)
    state = step.init(PARAMS)
    if not detached:
        with pytest.raises(ValueError, match="another run of it"):
            step(state, X)
        return
    found = {name: PARAMS[name] - leaf for name, leaf in fz.gather(step(state, X)[0].params).items()}
    kept.clear()
    torch.testing.assert_close(found, expected(fn, 2)[0], rtol=1e-10, atol=1e-12)


class Checkpointed(nn.Module):
    """Runs a part of itself again in the pullback, as many models' blocks do."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.inner, self.again = nn.Linear(4, 4, dtype=torch.float64), again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def part(x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.inner(x))

        return x / 2 + (checkpoint(part, x, use_reentrant=False) if self.again else part(x))


@pytest.mark.parametrize("taped", [False, True])
def test_a_checkpoint_inside_a_unit_of_a_module(taped: bool) -> None:
    def trained(again: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        apply, params = fz.functional(nn.Sequential(Checkpointed(again), Checkpointed(again)))
        step = fz.train_step(lambda p, x: apply(p, x).square().mean(), fz.sgd(0.1))
        state, x = step.init(params), torch.linspace(0, 1, 12, dtype=torch.float64).reshape(3, 4)
        for _ in range(2):
            if taped:
                with fz.tape(step, state) as model:
                    model(x).backward()
                    state, _ = step.update(state, model.grads())
            else:
                state, _ = step(state, x)
        return list(fz.gather(state.params).values())

    for found, expected in zip(trained(True), trained(False), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)
