"""Both forms of the unit, under every kind of derivative, against plain torch.func on full tensors."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import scenarios
import torch
import torch.utils._pytree
from hypothesis import given
from hypothesis import strategies as st
from nightly import todays

import fzero as fz
from fzero.engine.function import call_function, traversal_of
from fzero.testing import assert_collectives, assert_trees_close, assert_trees_equal, run_ranks

SHARDS: dict[int, Any] = {0: lambda step: step, 1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}


def build(stage: int, remat: bool, fn: Any) -> fz.Step:
    step = SHARDS[stage](fz.train_step(fn, fz.sgd(0.1)))
    return fz.remat(step) if remat else step


@given(stage=st.sampled_from([0, 1, 2, 3]), remat=st.booleans(), world=st.integers(1, 3), seed=st.integers(0, 99))
def test_grads_and_input_cotangents(stage: int, remat: bool, world: int, seed: int) -> None:
    loss, params = scenarios.stack(seed)
    world = world if stage else 1
    batches = scenarios.vector_batches(world, seed=seed)
    primals = [torch.func.vjp(loss, params, *batch)[1](torch.tensor(2.0, dtype=torch.float64)) for batch in batches]
    mean = torch.utils._pytree.tree_map(lambda *g: torch.stack(g).mean(0), *[p[0] for p in primals])

    def rank_main(rank: int) -> None:
        step = build(stage, remat, loss)
        state = step.init(params)
        out, pullback = step.vjp(state, *batches[rank])
        assert_trees_close(out, loss(params, *batches[rank]), rtol=1e-12)
        for again in (True, False):  # the same graph twice
            grads, cotangents = pullback(torch.tensor(2.0, dtype=torch.float64), retain_graph=again)
            assert_trees_close(fz.gather(grads), mean, rtol=1e-10)
            assert_trees_close(cotangents, primals[rank][1:], rtol=1e-10)

    run_ranks(rank_main, world)


def product_of_hessian(rank: int, stage: int, remat: bool, mode: str) -> None:
    world = 2 if stage else 1
    loss, params = scenarios.stack(blocks=2, width=3)
    batches = scenarios.vector_batches(world, width=3)
    flat, spec = torch.utils._pytree.tree_flatten(params)
    direction = torch.utils._pytree.tree_unflatten([torch.cos(leaf) for leaf in flat], spec)

    def mean_loss(p: Any) -> torch.Tensor:
        return torch.stack([loss(p, *batch) for batch in batches]).mean()

    want = torch.func.jvp(torch.func.grad(mean_loss), (params,), (direction,))[1]
    step = build(stage, remat, loss)
    state, along = step.init(params), step.init(direction)

    def grad(buffers: dict[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
        def function(primals: dict[Any, torch.Tensor]) -> torch.Tensor:
            traversal, _, _ = traversal_of(step, state, (0,))
            return call_function(step, state, traversal, primals, batches[rank % world])

        out, pull = torch.func.vjp(function, buffers)  # type: ignore[misc]
        return pull(torch.ones_like(out))[0]

    primals, tangents = state.params.locals(), along.params.locals()
    if mode == "forward over reverse":
        product = torch.func.jvp(grad, (primals,), (tangents,))[1]
    else:
        product = torch.func.vjp(grad, primals)[1](tangents)[0]
    assert_trees_close(fz.gather(state.params.with_buffers(product)), want, rtol=1e-10)


def products_of_hessian(rank: int, cases: Sequence[tuple[int, bool, str]]) -> None:
    for case in cases:
        product_of_hessian(rank, *case)


def test_second_derivatives() -> None:
    """Hessian-vector products through sharded units; on processes, as torch's forward mode is not thread-safe."""
    modes = "forward over reverse", "reverse over reverse"
    cases = todays([*itertools.product((0, 2, 3), (False, True), modes)], of=4)
    run_ranks(functools.partial(products_of_hessian, cases=cases), 2, backend="processes")


def test_any_arguments_and_outputs() -> None:
    """Containers, keywords, integers, None, strings; an output that is a view of a param, or the input itself."""

    def odd(p: Any, x: torch.Tensor, *, options: Any, name: str) -> Any:
        assert name == "n" and options["none"] is None
        return {
            "y": x @ p["w"] + options["scale"],
            "count": torch.tensor(3),
            "weight": p["w"].t(),
            "same": x,
            "text": name,
            "nothing": None,
        }

    unit = fz.unit(odd)
    params = {"blocks": [{"w": torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))}]}
    x, scale = torch.ones(2, 3, dtype=torch.float64), torch.full((3,), 0.5, dtype=torch.float64)

    def fn(p: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        out = unit(p["blocks"][0], x, options={"scale": scale, "none": None}, name="n")
        assert out["text"] == "n" and out["nothing"] is None and out["count"] == 3
        return (out["y"] * out["same"]).sum() + (out["weight"] ** 2).sum()

    want = torch.func.grad(fn, argnums=(0, 1, 2))(params, x, scale)

    def rank_main(rank: int) -> None:
        for remat in (False, True):
            step = build(3, remat, fn)
            out, pullback = step.vjp(step.init(params), x, scale)
            grads, cotangents = pullback(torch.ones_like(out))
            assert_trees_close((fz.gather(grads), *cotangents), want, rtol=1e-12)

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_leaves_that_the_function_returns(stage: int) -> None:
    """Also those of units: as outputs with cotangents, twice, and changed by the caller."""
    _, params = scenarios.stack()
    x = torch.ones(5, dtype=torch.float64)

    def fn(p: Any, x: torch.Tensor) -> Any:
        first, last = (block["w"] for block in p["blocks"][:2])
        y = fz.unit(lambda q, x: torch.tanh(x @ q["w"]))(p["blocks"][0], x)
        return {"y": y.sum(), "first": first, "again": [first], "last": last, "all of a unit": p["blocks"][1]}

    pulled: Any = torch.func.vjp(fn, params, x)
    want, pull = pulled

    def rank_main(rank: int) -> None:
        for remat in (False, True):
            step = build(stage, remat, fn)
            state = step.init(params)
            for _ in range(2):
                out, pullback = step.vjp(state, x)
                assert_trees_close(out, want)
                cotangents = torch.utils._pytree.tree_map(lambda o: torch.full_like(o, 0.5), out)
                grads, (cotangent,) = pullback(cotangents)
                expected = pull(cotangents)
                assert_trees_close((fz.gather(grads), cotangent), expected, rtol=1e-12)
                out["first"].zero_()  # the caller's own
                assert_trees_close(step.forward(state, x), want)

    run_ranks(rank_main, 2 if stage else 1)


class Dropout(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.nn.functional.dropout(block(torch.nn.functional.dropout(x, 0.2)), 0.3)
        return x.sum()


class DropoutBlocks(Dropout):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Dropout()) for _ in range(3)
        )


@pytest.mark.parametrize("model", [Dropout, DropoutBlocks])
def test_dropout_is_the_same_with_and_without_remat(model: Any) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        apply, params = fz.functional(model())
    x = torch.ones(4, 6)

    def rank_main(rank: int) -> Any:
        runs = []
        before = torch.get_rng_state()
        for stage in (0, 1, 3):
            for remat in (False, True):
                step = build(stage, remat, apply)
                state = step.init(params, seed=3)
                out, pullback = step.vjp(state, x)
                grads = fz.gather(pullback(torch.ones_like(out))[0])
                runs.append((out, grads))
                other, _ = step.vjp(state, x, rng=1)
                assert not torch.equal(other, out)
                assert_trees_equal(step.forward(state, x), out)
        assert_trees_equal(before, torch.get_rng_state())
        for run in runs[1:]:
            assert_trees_equal(run, runs[0])

    run_ranks(rank_main, 1)


def test_collectives_of_a_step() -> None:
    """ZeRO-3: two gathers and one reduction a unit, one each for the root; ZeRO-1 and 2: one gather an update.

    Once the order of the units is known, the last one in the forward is kept for its pullback.
    """
    loss, params = scenarios.stack(blocks=3)
    batch = scenarios.vector_batches(1)[0]

    def rank_main(rank: int) -> None:
        counts = {1: (4, 4, 4), 2: (4, 8, 4), 3: (13, 8, None)}
        for stage, (gathers, reductions, plain) in counts.items():
            step = fz.accumulate(build(stage, False, loss), 2)
            state = step.init(params)
            expected = {"all_gather": gathers, "reduce_scatter": reductions}
            assert_collectives(lambda step=step, state=state: step(state, *batch), expected)
            if plain is not None:
                assert_collectives(lambda step=step, state=state: step.forward(state, *batch), {"all_gather": 0})

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("how", ["vjp", "remat", "tape", "hvp"])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", ["detached", "unused"])
def test_what_a_unit_does_not_depend_on_has_no_cotangent(kind: str, stage: int, how: str) -> None:
    """Zeros would meet the infinite derivative of the unit before, and become nan."""
    first = fz.unit(lambda q, x: torch.sqrt(x * q["w"]))
    second = fz.unit(lambda q, x: (x.detach() if kind == "detached" else 2.0) * q["w"].square())
    params = {"blocks": [{"w": torch.tensor(w, dtype=torch.float64)} for w in ([0.0, 4.0], [1.0, 2.0])]}
    x = torch.ones(2, dtype=torch.float64)

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        return second(p["blocks"][1], first(p["blocks"][0], x)).sum()

    def rank_main(rank: int) -> None:
        step = fz.train_step(fn, fz.sgd(1.0))
        step = fz.shard_zero3(step) if stage else step
        state = (step := fz.remat(step) if how == "remat" else step).init(params)
        if how == "tape":
            with fz.tape(step, state) as model:
                model(x).backward()
                grads = model.grads()
        else:
            out, pullback = step.vjp(state, x)
            grads, _ = pullback(torch.ones_like(out))
        assert_trees_close(fz.gather(grads), torch.func.grad(fn)(params, x), rtol=1e-12)
        if how == "hvp":
            product = fz.hvp(step, state, grads.map(torch.ones_like), x)
            v = torch.utils._pytree.tree_map(torch.ones_like, params)
            expected = torch.func.jvp(lambda p: torch.func.grad(fn)(p, x), (params,), (v,))[1]
            assert_trees_close(fz.gather(product), expected, rtol=1e-12)

    run_ranks(rank_main, 1)
