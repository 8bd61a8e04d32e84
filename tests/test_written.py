"""Functions as people write them, which no feature of `drawn` writes, are what plain torch makes of them.

At every stage, in all forms, with hazards on. Each case is `make() -> (fn, params, plain)`: `plain(params, *inputs)` is
the same in torch alone. What a unit reads, holds, returns or changes otherwise is drawn in `test_drawn`; what is not
pure is listed in `purity/impure.py`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from nightly import NIGHTLY, in_turns
from torch import nn

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks

pytestmark = pytest.mark.usefixtures("hazards")

F64 = torch.float64
Unit = Callable[..., Any]
Case = tuple[Callable[..., Any], Any, Callable[..., Any]]
CASES: dict[str, Callable[[], Case]] = {}


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


X = draw(3, 4)
PARAMS = {"blocks": [{"w": draw(4, 4, seed=i)} for i in range(3)], "head": draw(4, 4, seed=7)}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    CASES[make.__name__.replace("_", " ")] = make
    return make


_one_at_a_time = threading.Lock()


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without warnings of torch's; ranks that are threads have one list of what is ignored."""
    with _one_at_a_time, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def filled(module: Any) -> Any:
    """With the same params on every rank, whatever torch's generator has drawn."""
    for i, param in enumerate(module.parameters()):
        param.data.copy_(0.5 * draw(*param.shape, seed=i))
    return module


def pure(fn: Callable[..., Any]) -> Case:
    """Outside of a step a unit is its function, so that the function is its own reference."""
    return fn, PARAMS, fn


def chain(unit: Unit, *rest: Any) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    def run(p: Any, x: torch.Tensor) -> torch.Tensor:
        for q in p["blocks"]:
            x = unit(q, x, *rest)
        return x

    return run


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4, dtype=F64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.lin(x))


class Net(nn.Module):
    """Blocks in a list, each a unit."""

    block: Any = Block

    def __init__(self) -> None:
        super().__init__()
        self.blocks: Any = filled(nn.ModuleList(type(self).block() for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def module(made: Any) -> Case:
    """A module, and the same in plain autograd's eyes: functional_call on it."""
    made = filled(made)
    apply, params = fz.functional(made)
    return apply, dict(params), lambda p, x: torch.func.functional_call(made, dict(p), (x,))


# ---- what goes into units and comes out of them


@case
def outputs_that_overlap() -> Case:
    @fz.unit
    def unit(q: Any, x: torch.Tensor) -> Any:
        with torch.no_grad():
            view = x[:, 1:]
        h = torch.tanh(x @ q["w"])
        return h, h[0], h.detach(), h[1:].detach(), view

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        total: Any = 0.0
        for q in p["blocks"]:
            own = x
            x, row, same, rest, view = unit(q, x)
            total = total + (x * same).sum() + (rest * x[1:]).sum() + row.sin().sum() + (own[:, 1:] * view).sum()
        return total

    return pure(fn)


def _transformed(q: Any, x: torch.Tensor) -> Any:
    h = torch.fft.fft(x @ q["w"])
    return h, h.conj(), h.real, h.imag, x.view(torch.int64)


@case
def complex_views_of_one_output() -> Case:
    unit = fz.unit(_transformed)

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        for q in p["blocks"]:
            h, conjugate, real, imaginary, bits = unit(q, x)
            x = torch.tanh((h * conjugate).real / 10 + real - 0.5 * imaginary) * (bits == bits)
        return x.square().sum()

    return pure(fn)


class Tagged(torch.Tensor):
    factor = 3.0


@case
def tensors_with_attributes() -> Case:
    @fz.unit
    def unit(q: Any, x: Any) -> Any:
        return (torch.tanh(x @ q["w"]) * x.factor).as_subclass(Tagged)

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        h: Any = chain(unit)(p, (x * 1).as_subclass(Tagged))
        return h.square().mean().as_subclass(torch.Tensor)

    return pure(fn)


@case
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


# ---- derivatives inside


@case
def leaves_that_it_makes_itself() -> Case:
    """A step of gradient descent inside, from what came in: nothing leads back from it."""

    @fz.unit
    def unit(q: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            fast = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad((fast @ fast.T).sin().sum(), fast, create_graph=True)
        return torch.tanh((x + 0.1 * slope.detach()) @ q["w"])

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        return chain(unit)(p, x @ p["head"]).square().mean()

    def plain(p: Any, x: torch.Tensor) -> torch.Tensor:
        def own(q: Any, x: torch.Tensor) -> torch.Tensor:
            slope = torch.func.grad(lambda y: (y @ y.T).sin().sum())(x.detach())
            return torch.tanh((x + 0.1 * slope.detach()) @ q["w"])

        return chain(own)(p, x @ p["head"]).square().mean()

    return fn, PARAMS, plain


@case
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

    return fn, PARAMS, plain


@case
def modes_of_a_call() -> Case:
    """Whether gradients are recorded inside is what it is around; and a score of what is not differentiated."""

    @fz.unit
    def unit(q: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ q["w"]) * (1.0 if torch.is_grad_enabled() else 3.0)

    @fz.unit
    def seen(q: Any, x: torch.Tensor) -> torch.Tensor:
        return unit(q, x) + q["w"].detach().numpy().sum()

    def fn(p: Any, x: torch.Tensor, recording: bool | None = None) -> torch.Tensor:
        with torch.no_grad():
            target = unit(p["blocks"][0], x)
        with torch.inference_mode():
            other = unit(p["blocks"][1], x)
        for q in p["blocks"]:
            x = seen(q, x)
        return (x - target - other.clone()).square().mean()

    def plain(p: Any, x: torch.Tensor) -> torch.Tensor:
        first, second, _ = p["blocks"]
        target = 3.0 * torch.tanh(x @ first["w"]).detach() + 3.0 * torch.tanh(x @ second["w"]).detach()
        factor = 1.0 if torch.is_grad_enabled() else 3.0
        for q in p["blocks"]:
            x = factor * torch.tanh(x @ q["w"]) + q["w"].detach().sum()
        return (x - target).square().mean()

    return fn, PARAMS, plain


# ---- modules whose units are called in other ways


class Switched(Net):
    class block(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.lin(x)) if self.training else torch.sin(self.lin(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.blocks.eval()
        clean = super().forward(x)
        self.blocks.train()
        return (super().forward(2 * x) - clean).square().mean()


@case
def training_that_the_parent_switches() -> Case:
    return module(Switched())


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


@case
def functional_call_on_a_unit() -> Case:
    return module(FunctionalCall())


@case
def a_shallow_copy_of_a_unit() -> Case:
    return module(ShallowCopy())


class Regularised(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        trained = sum(p.square().sum() for p in self.parameters() if p.requires_grad)
        return super().forward(x).square().mean() + 0.1 * trained


@case
def params_that_require_a_gradient() -> Case:
    made = filled(Regularised())
    apply, params = fz.functional(made)

    def plain(p: Any, x: torch.Tensor) -> torch.Tensor:
        weights = sum(w.square().sum() for w in p.values())
        return torch.func.functional_call(super_net, p, (x,)).square().mean() + 0.1 * weights

    super_net = Net()
    return apply, dict(params), plain


@case
def one_module_for_all_blocks() -> Case:
    block = filled(Block())
    apply, _ = fz.functional(block)

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        for q in p["blocks"]:
            x = apply(q, x)
        return x.square().mean()

    def plain(p: Any, x: torch.Tensor) -> torch.Tensor:
        for q in p["blocks"]:
            x = torch.func.functional_call(block, q, (x,))
        return x.square().mean()

    values = {name: x.detach() for name, x in block.named_parameters()}
    params = {"blocks": [{name: x * (1 + 0.1 * i) for name, x in values.items()} for i in range(3)]}
    return fn, params, plain


# ---- each of them


CHANGES = "training that the parent switches"  # between a call and its second run
SHARDS: dict[int, Any] = {0: lambda step: step, 1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}


def as_dicts(tree: Any) -> Any:
    return dict(tree) if isinstance(tree, dict) else tree


def follows(rank: int, name: str, world: int, stages: tuple[int, ...], times: int = 3 if NIGHTLY else 2) -> None:
    fn, params, plain = CASES[name]()
    batches = [X * (1 + i) for i in range(world)]
    pulled = [torch.func.grad(plain, argnums=(0, 1))(as_dicts(params), x) for x in batches]
    mean = pytree.tree_map(lambda *g: torch.stack(g).mean(0), *[g for g, _ in pulled])
    forms: list[Any] = [("vjp", False), ("vjp", True), ("tape", False), ("fused", False)]
    forms = [(form, remat) for form, remat in forms if not (remat and name == CHANGES)]
    by_turns = forms[len(name) % 2 :: 2] if world > 1 else forms
    for stage in stages:
        for form, remat in forms if NIGHTLY else by_turns if stage == 3 else forms[1:3] if stage == 0 else forms[::3]:
            step = SHARDS[stage](fz.train_step(fn, fz.sgd(0.1)))
            step = fz.remat(step) if remat else step
            state, x = step.init(params), batches[rank]
            if form == "vjp":  # what these runs show of the function is not all that the others need
                step.forward(state, x.clone())
                step.vjp(state, x.clone(), argnums=())[1](torch.ones((), dtype=F64))
            for _ in range(times):
                if form == "vjp":
                    out, pullback = step.vjp(state, x)
                    assert_trees_close(out, plain(as_dicts(params), x.clone().requires_grad_()).detach(), rtol=1e-10)
                    grads, (cotangent,) = pullback(torch.ones_like(out))
                    assert_trees_close(cotangent, pulled[rank][1], rtol=1e-9)
                elif form == "tape":
                    with fz.tape(step, state) as model:
                        model(x).backward()
                        grads = model.grads()
                else:
                    moved, _ = fz.fuse_update(step)(state, x)
                    difference = pytree.tree_map(
                        lambda a, b: (a - b) / 0.1, as_dicts(fz.gather(state.params)), as_dicts(fz.gather(moved.params))
                    )
                    assert_trees_close(difference, mean, rtol=1e-8)
                    continue
                assert_trees_close(as_dicts(fz.gather(grads)), mean, rtol=1e-9)


@in_turns(14)
@pytest.mark.parametrize("name", CASES)
def test_is_what_plain_torch_makes_of_it(name: str) -> None:
    run_ranks(functools.partial(follows, name=name, world=1, stages=(0, 3) if NIGHTLY else (0,)), 1)
    # 1 and 2 differ in how microbatches are summed
    stages = ((2, 3), (1, 3), (1, 3) if NIGHTLY else (3,))[len(name) % 3]
    run_ranks(functools.partial(follows, name=name, world=2, stages=stages), 2)


def test_what_changes_before_a_second_run_is_refused() -> None:
    """Before anything has changed, each time."""

    def rank_main(rank: int) -> None:
        fn, params, _ = CASES[CHANGES]()
        step = fz.remat(fz.shard_zero3(fz.train_step(fn, fz.sgd(0.1))))
        state = step.init(params)
        before = as_dicts(fz.gather(state.params))
        for _ in range(2):  # nor does it begin to be right
            with pytest.raises(ValueError, match=r"calls sin\(\) in one run and tanh\(\).*test_written.py:\d+"):
                step(state, X.clone())
        assert_trees_close(as_dicts(fz.gather(state.params)), before, rtol=0, atol=0)

    run_ranks(rank_main, 2)


def test_inputs_of_inference_mode_in_steady_calls() -> None:
    """They count no writes."""

    def rank_main(rank: int) -> None:
        block = fz.unit(lambda q, x: torch.tanh(x @ q["w"]))
        step = fz.shard_zero3(fz.train_step(lambda p, x: block(p["blocks"][0], x).sum(), fz.sgd(0.1)))
        state = step.init({"blocks": [{"w": torch.eye(4)}]})
        with torch.inference_mode():
            x = torch.ones(2, 4)
        for _ in range(3):
            with torch.inference_mode():
                torch.testing.assert_close(step.forward(state, x), torch.tanh(torch.ones(2, 4)).sum())
            out, pullback = step.vjp(state, x)
            pullback(torch.ones_like(out))

    run_ranks(rank_main, 2)
