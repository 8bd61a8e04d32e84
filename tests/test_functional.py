"""fz.functional: methods and partials go with the private copy, closures over the module are refused."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from hooked import CLOSED, HOLDERS, READERS, Gained, Net, X, by_functional_call, check
from hypothesis import given
from hypothesis import strategies as st
from nightly import by_day, in_turns
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks


@by_day(24)
@given(data=st.data(), stage=st.sampled_from([0, 1, 3]), remat=st.booleans(), count=st.integers(1, 3))
def test_any_hooks_on_any_modules(data: Any, stage: int, remat: bool, count: int) -> None:
    """In the main thread and in two ranks, against torch.func.functional_call.

    What a unit reads is its own, as long as it is gathered for its call alone; where nothing is, it is anybody's.
    """
    module = Net(count=count)
    gathered = stage == 3 or remat
    some = st.lists(st.sampled_from(sorted(READERS)), min_size=1, max_size=3, unique_by=lambda how: how[:6])
    for how in data.draw(some, label="how"):
        block: Any = module.blocks[data.draw(st.integers(0, count - 1), label="block")]
        at, owner = data.draw(st.sampled_from([(block.lin, block), (block.norm, block)]), label="at")
        if not gathered:
            owner = data.draw(st.sampled_from([block, module.blocks[-1]]), label="owner")
            at = data.draw(st.sampled_from([at, block]), label="at")
        if how == "partial forward":
            at = block
        READERS[how](at, owner)
    if data.draw(st.booleans(), label="one block at two paths"):
        module.blocks.append(module.blocks[0])
    check(module, by_functional_call(module), forms=[(stage, remat)])


@in_turns(12, "compiled by torch")
def test_compiled_units_of_one_class_with_and_without_hooks() -> None:
    """What the compiler made for a block with a hook does not serve the block without one, nor the reverse."""
    module = Net()
    READERS["partial"](module.blocks[0].lin, module.blocks[0])
    want = by_functional_call(module)
    apply, params = fz.functional(module)
    step = fz.compile(fz.remat(fz.train_step(apply, fz.sgd(0.1))))
    for _ in range(2):
        out, pullback = step.vjp(step.init(params), X)
        assert_trees_close(dict(fz.gather(pullback(torch.ones_like(out))[0])), want, rtol=1e-9)


@pytest.mark.parametrize("how", sorted(CLOSED))
def test_what_leads_to_the_module_also_in_a_copy_is_refused(how: str) -> None:
    module = Net()
    CLOSED[how](module.blocks[0].lin, module.blocks[0])
    with pytest.raises(ValueError, match=r"submodule 'blocks\.0\.lin', .* leads to its .* 'blocks\.0.*Use self"):
        fz.functional(module)


@pytest.mark.parametrize("how", sorted(HOLDERS))
def test_a_param_that_is_held_besides_its_module_is_refused_where_it_is_read(how: str) -> None:
    module = Net()
    HOLDERS[how](module.blocks[0].lin, module.blocks[0])
    apply, params = fz.functional(module)
    step = fz.train_step(apply, fz.sgd(0.1))
    for run in (lambda: torch.func.grad(apply)(params, X), lambda: step(step.init(params), X)):
        with pytest.raises(RuntimeError, match=r"Leaf 'blocks\.0\.gain' of a module .* besides its module holds it"):
            run()


def test_a_buffer_that_is_held_besides_its_module_is_refused_where_it_is_read() -> None:
    """Where buffers are values: otherwise it is a constant."""
    module: Any = Net()
    module.held = [module.blocks[0].table]
    module.head.register_forward_hook(functools.partial(lambda own, m, i, o: o * own.held[0], module))
    apply, params = fz.functional(module)
    assert torch.equal(apply(params, X), module(X))
    apply, params, buffers = fz.functional(module, buffers=True)
    with pytest.raises(RuntimeError, match=r"Leaf 'blocks\.0\.table' of a module .* besides its module holds it"):
        apply(params, buffers, X)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_read_what_they_are_given(kind: Any) -> None:
    module, x = kind(3, 4, num_layers=2).double(), X.view(2, 2, 3)
    apply, params = fz.functional(module)
    twice = {name: 2 * p for name, p in params.items()}
    for values in (params, twice, params):
        assert torch.equal(apply(values, x)[0], torch.func.functional_call(module, dict(values), (x,))[0])


class Shares(nn.Module):
    """Its blocks call layers that they share, which are units themselves, as CoaT's do."""

    class Block(nn.Module):
        def __init__(self, shared: nn.ModuleList) -> None:
            super().__init__()
            self.linear, self.shared = nn.Linear(3, 3), shared

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.linear(x)
            for layer in self.shared:
                out = torch.tanh(layer(out))
            return x + out

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])
        self.blocks = nn.ModuleList([self.Block(self.layers) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("wrap", [fz.shard_zero3, fz.remat, lambda step: fz.remat(fz.shard_zero3(step))])
def test_units_that_others_call(wrap: Any) -> None:
    module = Shares().double()
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    loss = module(x).square().mean()
    grads = dict(zip(dict(module.named_parameters()), torch.autograd.grad(loss, [*module.parameters()]), strict=True))

    def squared(p: Any) -> torch.Tensor:
        return torch.func.functional_call(module, p, (x,)).square().mean()

    params = {name: p.detach() for name, p in module.named_parameters()}
    products = torch.func.jvp(torch.func.grad(squared), (params,), (grads,))[1]

    def on(rank: int) -> Any:
        apply, params = fz.functional(module)
        step = wrap(fz.train_step(lambda p, x: apply(p, x).square().mean(), fz.sgd(0.1)))
        state = step.init(params)
        own = step.vjp(state, x)[1](torch.ones((), dtype=torch.float64))[0]
        return dict(fz.gather(own)), dict(fz.gather(fz.hvp(step, state, own, x)))

    for got in run_ranks(on, 2):
        assert_trees_close(got, (grads, products), rtol=1e-10, atol=1e-13)


# ---- what is somebody else's stays what it is


def test_what_hooks_change_is_the_users() -> None:
    module, seen, counts, calls = Net(), [], {"calls": 0}, 0
    recorder = Gained(seen)
    recorder.hook = lambda m, i, o: seen.append(o.shape)  # type: ignore[method-assign]

    def hook(m: Any, i: Any, o: Any) -> None:
        nonlocal calls
        seen.append(o.shape)
        counts["calls"] += 1
        calls += 1

    module.head.register_forward_hook(hook)
    module.head.register_forward_hook(lambda m, i, o: recorder.hook(m, i, o))
    apply, params = fz.functional(module)
    for _ in range(2):
        apply(params, X)
    assert len(seen) == 4 and counts == {"calls": 2} and calls == 2
    assert module.head._forward_hooks.popitem()[1].__closure__[0].cell_contents is recorder  # type: ignore[index]


@given(data=st.data(), stage=st.sampled_from([0, 1, 2, 3]), carried=st.booleans(), remat=st.booleans())
def test_evaluation_mode_over_the_same_params(data: Any, stage: int, carried: bool, remat: bool) -> None:
    """After a step, in `with_fn` of it and outside of steps, as the module in evaluation mode; no buffer changes."""
    seed = data.draw(st.integers(0, 2**31), label="seed")
    rows = torch.Generator().manual_seed(seed)
    norm = lambda: nn.BatchNorm1d(4, momentum=0.3) if carried else nn.Identity()
    blocks = [nn.Sequential(nn.Linear(4, 4), norm(), nn.Dropout(0.5)) for _ in range(2)]
    net, x = nn.Sequential(*blocks).double(), torch.randn(6, 4, generator=rows, dtype=torch.float64)
    apply, params, *buffers = fz.functional(net, buffers=True) if carried else fz.functional(net)

    def loss(p: Any, *rest: Any) -> Any:
        out = apply(p, *rest)
        return (out[0].square().mean(), out[1]) if carried else out.square().mean()

    def evaluated(p: Any, *rest: Any) -> Any:
        out = apply.eval(p, *rest)
        return (out, rest[0]) if carried else out

    def rank_main(rank: int) -> Any:
        step = fz.train_step(loss, fz.sgd(0.1))
        step = fz.carry(step, buffers[0]) if carried else step
        step = {0: lambda s: s, 1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}[stage](step)
        step = fz.remat(step) if remat else step
        state, _ = step(step.init(params), x[rank::2])
        out = fz.with_fn(step, evaluated).forward(state, x)
        return out, {**fz.gather(state.params), **state.extra.get("carry", {})}

    for out, after in run_ranks(rank_main, 2):
        module = copy.deepcopy(net).eval()
        module.load_state_dict(after)
        assert_trees_close(out, module(x).detach(), rtol=1e-12)
        own = {name: after[name] for name, _ in module.named_buffers()}
        kept = {name: value.clone() for name, value in own.items()}
        alone = pickle.loads(pickle.dumps(apply)).eval({name: after[name] for name in params}, *[own] * carried, x)
        assert torch.equal(alone, module(x)) and all(torch.equal(own[name], kept[name]) for name in own)


def test_evaluation_mode_that_is_first_asked_for_without_values() -> None:
    """Its buffers have theirs afterwards; `eval` need not return the module."""

    class Own(nn.Sequential):
        def eval(self) -> None:  # type: ignore[override]
            super().eval()

    net = Own(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    apply, params = fz.functional(net)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert apply.eval(params, torch.ones(2, 3)).shape == (2, 3)
    x = torch.randn(4, 3)
    out = apply.eval(params, x)
    net.eval()
    assert torch.equal(out, net(x))


def test_evaluation_mode_that_needs_values_of_params_is_told_of() -> None:
    class Merged(nn.Linear):
        def train(self, mode: bool = True) -> Any:
            self.merged = None if mode else 2 * self.weight
            return super().train(mode)

    apply, params = fz.functional(Merged(3, 3))
    with pytest.raises(RuntimeError, match=r"Leaf 'weight' .* own train\(\) or eval\(\) reads it: let forward do so"):
        apply.eval(params, torch.ones(2, 3))
