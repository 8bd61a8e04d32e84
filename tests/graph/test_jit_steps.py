"""Steps of fz.jit that go wrong where a graph sees less than a run: the numbers of the step without it, or an error."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import math
import types
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import fzero as fz
from fzero.testing import assert_trees_equal, run_ranks

F64 = torch.float64
jit = functools.partial(fz.jit, backend="graph")
unit = fz.unit(lambda p, x: torch.tanh(x @ p["w"]))


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


PARAMS = {"blocks": [{"w": drawn(4, 4, seed=i) / 2} for i in range(3)], "s": drawn(4)}


def compare(fn: Any, params: Any = PARAMS, calls: int = 4, inputs: Any = lambda i: (drawn(3, 4, seed=i),)) -> fz.Step:
    """Some updates with and without a graph: the same bits."""
    step = fz.train_step(fn, fz.adamw(1e-2))
    fast, states = jit(step), [step.init(params), step.init(params)]
    for i in range(calls):
        (states[0], want), (states[1], got) = step(states[0], *inputs(i)), fast(states[1], *inputs(i))
        assert_trees_equal({**want}, {**got})
        assert_trees_equal(fz.gather(states[0].params), fz.gather(states[1].params))
    return fast


def through(body: Any) -> Any:
    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        for q in p["blocks"]:
            x = body(q, x)
        return (x * p["s"]).square().mean()

    return fn


def test_dropout_of_a_transposed_tensor() -> None:
    compare(through(lambda q, x: F.dropout(unit(q, x).t(), 0.3).t()))
    compare(through(fz.unit(lambda q, x: F.dropout((x @ q["w"]).t(), 0.3).t())))


def _written(rank: int) -> None:
    def body(q: Any, x: torch.Tensor) -> torch.Tensor:
        x = x @ q["w"]
        x[0] = 1.0
        return x.relu_()

    step = fz.train_step(through(fz.unit(body)), fz.adamw(1e-2))
    fast, state = fz.jit(step, backend="inductor"), step.init(PARAMS)
    for i in range(2):
        (_, want), (_, got) = step(state, drawn(3, 4, seed=i)), fast(state, drawn(3, 4, seed=i))
        torch.testing.assert_close(got["grad_norm"], want["grad_norm"], rtol=1e-10, atol=0)


def test_writes_with_inductor_on_threads() -> None:
    run_ranks(_written, 1)


def test_modules_of_one_class_that_compute_differently() -> None:
    class Block(nn.Module):
        def __init__(self, factor: float, no_hooks: bool | None = False) -> None:
            super().__init__()
            self.linear, self.factor, self.no_hooks = nn.Linear(4, 4, dtype=F64), factor, no_hooks

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.factor * torch.tanh(self.linear(x)) + (self.no_hooks is None)

    def times(factor: int) -> Any:
        return functools.wraps(Block.forward)(lambda self, x: factor * Block.forward(self, x))

    blocks = [*map(Block, (1.0, 1.0, 0.5, 1.0, 1.0, 1.0)), Block(1.0, None)]
    for each in blocks:
        nn.init.normal_(each.linear.weight, generator=torch.Generator().manual_seed(0))
    blocks[1].forward = functools.partial(lambda old, x: 2 * old(x), blocks[1].forward)  # type: ignore[method-assign]
    for each, factor in zip(blocks[3:5], (3, -1), strict=True):
        each.forward = types.MethodType(times(factor), each)  # type: ignore[method-assign]
    apply, params = fz.functional(nn.Sequential(*blocks))
    compare(lambda p, x: apply(p, x).square().mean(), params)


class Noisy(torch.autograd.Function):
    """Noise on a cotangent."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def setup_context(*_: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return cotangent + torch.randn_like(cotangent)


@pytest.mark.parametrize("where", ["function", "unit", "unit-with-dropout", "remat", "remat-with-dropout"])
def test_a_backward_that_draws(where: str) -> None:
    """Its numbers come from torch's default generator, as in a step without a graph."""
    drop = functools.partial(F.dropout, p=0.5) if "dropout" in where else lambda x: x

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        noisy = fz.unit(lambda p, x: Noisy.apply(drop(torch.tanh(x @ p["w"]))))
        x = through(unit if where == "function" else noisy)(p, x)
        return Noisy.apply(x) if where == "function" else x

    step = fz.train_step(fn, fz.sgd(1e-2))
    step = fz.remat(step) if "remat" in where else step
    fast, states = jit(step), [step.init(PARAMS), step.init(PARAMS)]
    refused = pytest.raises(ValueError, match="one stream for both") if where == "remat-with-dropout" else nullcontext()
    with refused:
        for i in range(3):
            for j, each in enumerate((step, fast)):
                torch.manual_seed(i)
                states[j], _ = each(states[j], drawn(3, 4, seed=i))
            assert_trees_equal(*[fz.gather(state.params) for state in states])


@pytest.mark.parametrize("used", [*itertools.product((False, True), repeat=3)])
def test_a_unit_that_leaves_operands_unused(used: tuple[bool, ...]) -> None:
    @fz.unit
    def some(p: Any, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return sum([a * own for a, own, takes in zip((2, 3, 5), (p["w"][0], x, y), used, strict=True) if takes], z)

    step = fz.train_step(lambda p, x, y, z: some(p["blocks"][0], x, y, z) * p["s"], fz.adamw(1e-2))
    results = []
    for each in (step, jit(step)):
        state = each.init(PARAMS)
        for _ in range(2):  # the first one is without a graph
            out, pullback = each.vjp(state, *[drawn(3, 4, seed=i) for i in range(3)])
            grads, cotangents = pullback(drawn(3, 4, seed=3))
        results.append((out, fz.gather(grads), cotangents))
    assert_trees_equal(*results)


@pytest.mark.parametrize("loss", [F.mse_loss, F.huber_loss, F.smooth_l1_loss, F.l1_loss])
def test_a_microbatch_without_examples(loss: Any) -> None:
    step = fz.train_step(lambda p, x: loss(x * p["s"], x.cos()), fz.sgd(0.1))
    step = fz.accumulate(step, 3, weights=lambda x: len(x))  # of a batch of two
    states = [step.init(PARAMS), step.init(PARAMS)]
    for _ in range(2):
        (states[0], want), (states[1], got) = step(states[0], drawn(2, 4)), jit(step)(states[1], drawn(2, 4))
        assert_trees_equal({**want}, {**got})
    assert_trees_equal(*map(fz.gather, [state.params for state in states]))


def test_a_microbatch_of_weight_zero_whose_gradients_are_nan() -> None:
    fn = lambda p, x: through(unit)(p, x) / x.count_nonzero()
    step = fz.accumulate(fz.train_step(fn, fz.adamw(1e-2)), 2, weights=torch.count_nonzero)
    x = torch.cat([drawn(2, 4), torch.zeros(2, 4, dtype=F64)])
    fast, states = jit(step), [step.init(PARAMS), step.init(PARAMS)]
    for _ in range(2):  # the first one is without a graph
        (states[0], want), (states[1], got) = step(states[0], x), fast(states[1], x)
        assert not want["skipped"]
        assert_trees_equal({**want}, {**got})
    assert_trees_equal(*map(fz.gather, [state.params for state in states]))


def test_autocast_around_one_of_two_units() -> None:
    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        x = unit(p["blocks"][0], x)
        with torch.autocast("cpu", torch.bfloat16):
            x = unit(p["blocks"][1], x)
        return x.float().square().mean()

    params = {"blocks": [{"w": q["w"].float()} for q in PARAMS["blocks"][:2]]}  # type: ignore[index]
    compare(fn, params, inputs=lambda i: (drawn(3, 4, seed=i).float(),))


def test_a_closed_over_tensor_that_is_another_one_later() -> None:
    scales = drawn(2).unbind()
    scale = scales[0]

    def inputs(i: int) -> tuple[torch.Tensor]:
        nonlocal scale
        scale = scales[i // 2]
        return (drawn(3, 4),)

    assert compare(lambda p, x: (unit(p["blocks"][0], x) * scale * p["s"]).mean(), inputs=inputs).traces == 2


def test_the_function_differentiates_a_unit_by_its_input() -> None:
    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        inner = torch.func.grad(lambda z: unit(p["blocks"][0], z).sum())(x)
        (outer,) = torch.autograd.grad(unit(p["blocks"][1], x * p["s"]).sum(), p["s"], create_graph=True)
        return inner.square().mean() + outer.square().mean()

    compare(fn)


def test_numbers_of_python() -> None:
    fast = compare(lambda p, x, a: (unit(p["blocks"][0], x) * a).mean(), inputs=lambda i: (drawn(3, 4), 0.5 + i))
    assert fast.traces == 1
    state = fast.init(PARAMS)
    for _ in range(2):
        _, pullback = fast.vjp(state, drawn(3, 4), 0.5)
        _, cotangents = pullback(torch.ones((), dtype=F64))
        assert cotangents[1] is None
    asks = lambda p, x, a: (x * p["w"]).mean().to(F64 if type(a) is float else x.dtype)
    typed = jit(fz.train_step(asks, fz.sgd(0.1)))
    for _ in range(2):
        with pytest.raises(ValueError, match="a number of Python whose type it asks for"):
            typed(typed.init({"w": torch.ones(4)}), torch.ones(3, 4), 0.5)


def test_halves_and_writes_between() -> None:
    fast = jit(fz.train_step(through(unit), fz.sgd(0.1)))
    state, x = fast.init(PARAMS), drawn(3, 4)
    want = fast.vjp(state, x)[1](torch.ones((), dtype=F64))
    for _ in range(2):
        pullback = fast.vjp(state, x)[1]
        cotangents = pullback.inputs(torch.ones((), dtype=F64))
        assert_trees_equal(fz.gather(pullback.params()), fz.gather(want[0]))
        assert_trees_equal(cotangents, want[1])
    _, pullback = fast.vjp(state, x)
    with pytest.raises(ValueError, match="Put the transform around step"):
        pullback(torch.ones((), dtype=F64), create_graph=True)
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        pullback(torch.ones((), dtype=F64))


def test_a_used_pullback_holds_nothing() -> None:
    fast = jit(fz.train_step(through(unit), fz.sgd(0.1)))
    for _ in range(2):
        state, x = fast.init(PARAMS), drawn(3, 4)
        _, pullback = fast.vjp(state, x)
        held = [weakref.ref(x), *[weakref.ref(each) for each in pytree.tree_leaves(state.params)]]
        pullback(torch.ones((), dtype=F64))
        del state, x
        gc.collect()
        assert not any(each() is not None for each in held)


def own_generator(p: Any, x: torch.Tensor) -> torch.Tensor:
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=x.dtype)
    return unit(p["blocks"][0], x + noise).mean()


def checkpointed(p: Any, x: torch.Tensor) -> torch.Tensor:
    out: Any = checkpoint(lambda v: torch.tanh(v * p["s"]), unit(p["blocks"][0], x), use_reentrant=False)
    return out.mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("fn", "match"), [(own_generator, "generator of its own"), (checkpointed, "checkpoint")])
def test_refused(fn: Any, match: str) -> None:
    step = jit(fz.train_step(fn, fz.sgd(0.1)))
    with pytest.raises(ValueError, match=match):
        step(step.init(PARAMS), drawn(3, 4))


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_ranks_with_batches_of_their_own_lengths(backend: Any) -> None:
    for got, want in run_ranks(_uneven, 2, backend=backend):
        assert_trees_equal(got, want)


def _uneven(rank: int) -> Any:
    out = []
    for transform in (jit, lambda step: step):
        step = transform(fz.shard_zero3(fz.train_step(through(unit), fz.adamw(1e-2))))
        state = step.init(PARAMS)
        for i, rows in enumerate([(3, 3), (3, 2), (2, 3), (1, 3)]):
            state, _ = step(state, drawn(rows[rank], 4, seed=10 * i + rank))
        out.append(fz.gather(state.params))
    return out


@pytest.mark.parametrize("save", [(), ("hidden",), ("hidden", "out")])
def test_names_are_kept_and_the_rest_is_recomputed(save: tuple[str, ...]) -> None:
    def body(q: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = fz.name(F.dropout(x, 0.3) @ q["w"], "hidden")
        return x + F.dropout(fz.name(torch.tanh(hidden) @ q["v"], "out").exp(), 0.3)

    blocks = [{"w": drawn(4, 8, seed=i) / 4, "v": drawn(8, 4, seed=9 + i) / 4} for i in range(3)]
    params = {"blocks": blocks, "s": drawn(4)}
    step = fz.remat(fz.train_step(through(fz.unit(body)), fz.adamw(1e-2)), save=save)
    fast = jit(step)
    states = [step.init(params), step.init(params)]
    for i in range(3):
        (states[0], want), (states[1], got) = step(states[0], drawn(3, 4, seed=i)), fast(states[1], drawn(3, 4, seed=i))
        assert_trees_equal({**want}, {**got})
        assert_trees_equal(fz.gather(states[0].params), fz.gather(states[1].params))
    graph: Any = fast.graphs
    (program,) = graph._programs.values()
    pullback = program.regions[1].pullback.graph
    products = pullback.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert len(products) == 4 + 2 - len(save)  # four of the pullback, and those that run again


def offloaded(step: fz.Step) -> fz.Step:
    return fz.offload(step, moments="host")


def offloaded_activations(step: fz.Step) -> fz.Step:
    return fz.offload(step, activations="host")


def named(step: fz.Step) -> fz.Step:
    return fz.remat(step, offload=("y",))


def compiled(step: fz.Step) -> fz.Step:
    return fz.compile(step)


@pytest.mark.parametrize("transform", [offloaded, offloaded_activations, named, compiled])
def test_what_no_graph_takes_is_named(transform: Any) -> None:
    step = jit(transform(fz.train_step(through(unit), fz.adamw(1e-2))))
    with pytest.raises(ValueError, match=r"jit: got leaf '.*' with"):
        step(step.init(PARAMS), drawn(3, 4))


def test_other_users_of_a_step_refuse_it() -> None:
    step = jit(fz.train_step(through(unit), fz.sgd(0.1)))
    with pytest.raises(ValueError, match=r"step\.vjp"), fz.tape(step, step.init(PARAMS)):
        pass
    with pytest.raises(AttributeError, match=r"fz\.jit"):
        _ = fz.train_step(through(unit), fz.sgd(0.1)).traces


def test_a_graph_is_read_and_made_ahead() -> None:
    step = jit(fz.shard_zero3(fz.train_step(through(unit), fz.sgd(0.1))))

    def main(rank: int) -> None:
        state = step.init(PARAMS)
        graph = step.lower(state, drawn(3, 4)).graph(state, drawn(3, 4))
        names = [str(node.target).split(".")[1] for node in graph.graph.nodes if "fzero" in str(node.target)]
        assert isinstance(graph, torch.fx.GraphModule)
        assert names.count("region") == names.count("pull") == 3 and names.count("reduce") == 4
        assert names.count("gather") == 6  # the root's stays, and the first unit's pullback needs none
        assert step.traces == 1

    run_ranks(main, 2)


def test_alike_units_are_traced_once() -> None:
    entered = itertools.count()

    def body(q: Any, x: torch.Tensor) -> torch.Tensor:
        next(entered)
        return torch.tanh(x @ q["w"])

    step = jit(fz.train_step(through(fz.unit(body)), fz.sgd(0.1)))
    step.lower(step.init(PARAMS), drawn(3, 4))
    assert next(entered) == 2  # the first one's input has no gradient


def test_the_order_of_entries_is_part_of_the_signature() -> None:
    x, y = torch.arange(3.0), -torch.arange(3.0) - 1
    first, other = {"a": x, "b": y}, {"b": x, "a": y}
    unit = fz.unit(lambda p, d, **named: torch.cat([*p.values(), *d.values(), *named.values()]) * torch.arange(18.0))

    def loss(params: Any, d: Any) -> torch.Tensor:
        outer = torch.cat([*params["o"].values(), *d.values()]) * torch.arange(12.0)
        blocks = params["blocks"]
        return unit(blocks[0], d, **d).sum() + unit(blocks[1], {"b": x, "a": y}, b=x, a=y).sum() + outer.sum()

    step = fz.jit(fz.train_step(loss, fz.sgd(0.0)), backend="graph")
    through = fz.jit(lambda state, d: step.forward(state, d), backend="graph")
    for params in ({"blocks": [first, other], "o": first}, {"blocks": [other, first], "o": other}):
        state = step.init(params)
        for d in (first, first, other, other):
            want = loss(params, d)
            assert torch.equal(step(state, d)[1]["loss"], want) and torch.equal(through(state, d), want)


def test_grad_mode_is_part_of_the_signature() -> None:
    by_mode = lambda x: x * (2 if torch.is_grad_enabled() else 4)
    fast, x = jit(by_mode), drawn(3)
    for enabled in (False, False, True, True, False):
        with torch.set_grad_enabled(enabled):
            assert torch.equal(fast(x), by_mode(x))
    step = jit(fz.train_step(lambda p, x: by_mode(unit(p["blocks"][0], x) * p["s"]).sum(), fz.sgd(0.1)))
    state, x = step.init(PARAMS), drawn(3, 4)
    assert step.forward(state, x) == step.forward(state, x) == step(state, x)[1]["loss"] * 2


def test_a_unit_tells_zeros_apart_by_their_signs() -> None:
    signed = fz.unit(lambda p, x, zero: (x @ p["w"]) * (torch.ones(4) / zero).clamp(-1, 1))
    of_both = lambda blocks, x: signed(blocks[0], x, 0.0) - signed(blocks[1], x, -0.0)
    compare(lambda p, x: of_both(p["blocks"], x).square().sum() + p["s"].sum())


def test_static_values_that_are_equal_and_not_alike() -> None:
    @dataclasses.dataclass(frozen=True)
    class Config:
        scale: object

    def fn(p: Any, x: torch.Tensor, config: Config) -> torch.Tensor:
        (scale,) = config.scale if isinstance(config.scale, tuple) else (config.scale,)
        size = math.copysign(len(type(scale).__name__), float(scale))  # type: ignore[arg-type]
        return (x @ p["s"].expand(4, 4)).square().mean() * size

    values = [1, 1.0, True, 0.0, -0.0, (0.0,), (-0.0,), (1,), (True,), 1]
    fast = compare(fn, {"s": drawn(4)}, len(values), lambda i: (drawn(3, 4), Config(values[i])))
    assert fast.traces == 9


def test_a_unit_reads_the_callers_variable_through_helpers() -> None:
    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        def innermost(x: torch.Tensor) -> torch.Tensor:
            return innermost(x[None])[0] if x.ndim < 3 else x * number

        helper: Any = innermost
        for _ in range(5):
            helper = _within(helper)
        own = fz.unit(lambda p, x: helper(torch.tanh(x @ p["w"])))
        for number, q in enumerate(p["blocks"], 1):  # noqa: B007 - the innermost reads it
            x = own(q, x)
        return (x * p["s"]).square().mean()

    compare(fn)


def _within(fn: Any) -> Any:
    return lambda x: fn(x)
