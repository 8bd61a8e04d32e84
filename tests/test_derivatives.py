"""tape, hvp and per_example_grads against torch.func on full tensors in one process."""

from __future__ import annotations

import fnmatch
import functools
from typing import Any

import optree
import pytest
import scenarios
import torch
import torch.utils._pytree as pytree
from exactness import SCENARIOS, SHARDS
from hypothesis import given
from hypothesis import strategies as st
from nightly import in_turns

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks, strategies

pytestmark = pytest.mark.usefixtures("hazards")  # races show

CHOSEN = strategies.transforms(stages=(1, 2, 3))


def without(chosen: Any, *names: str) -> Any:
    return [pair for pair in chosen if pair[0] not in names]


@given(chosen=CHOSEN, world=st.integers(1, 3), scenario=st.sampled_from(["unit", "module"]))
def test_tape(chosen: Any, world: int, scenario: str) -> None:
    """`.backward()` twice on one tape, retained once: the sum of the pullbacks."""
    make, batches_of = SCENARIOS[scenario]
    loss, params = make()
    batches = batches_of(world)
    grads = [torch.func.grad(lambda p, b=b: 4 * loss(p, *b))(params) for b in batches]
    want = pytree.tree_map(lambda *g: torch.stack(g).mean(0), *grads)

    def rank_main(rank: int) -> None:
        step = strategies.apply(fz.train_step(loss, fz.sgd(0.1)), without(chosen, "donate"))
        state = step.init(params)
        with fz.tape(step, state) as model:
            out = model(*batches[rank])
            out.backward(torch.full_like(out, 2.0), retain_graph=True)
            out.backward()
            model(*batches[rank]).backward()
            found = model.grads()
            assert all((leaf == 0).all() for leaf in model.grads().locals().values())
        assert_trees_close(fz.gather(found), want, rtol=1e-10)
        new, _ = step.update(state, found)
        assert_trees_close(fz.gather(new.params), pytree.tree_map(lambda p, g: p - 0.1 * g, params, want), rtol=1e-10)

    run_ranks(rank_main, world)


@given(chosen=CHOSEN, world=st.integers(1, 3), frozen=st.sampled_from(["", "blocks.0.*", "head.b"]))
def test_hvp(chosen: Any, world: int, frozen: str) -> None:
    loss, params = scenarios.stack(blocks=2, width=3)
    batches = scenarios.vector_batches(world, width=3)
    trains = optree.tree_map_with_path(lambda path, p: not fnmatch.fnmatch(".".join(map(str, path)), frozen), params)

    def mean_loss(p: Any) -> torch.Tensor:
        p = pytree.tree_map(lambda x, held, own: x if own else held, p, params, trains)
        return torch.stack([loss(p, *batch) for batch in batches]).mean()

    first = torch.func.grad(mean_loss)(params)
    pulled: Any = torch.func.vjp(torch.func.grad(mean_loss), params)
    want = pytree.tree_map(lambda x, own: x if own else None, pulled[1](first)[0], trains)

    def rank_main(rank: int) -> None:
        step = strategies.apply(fz.train_step(loss, fz.sgd(0.1)), chosen)
        step = fz.freeze(step, frozen) if frozen else step
        state = step.init(params)
        out, pullback = step.vjp(state, *batches[rank])
        grads, _ = pullback(torch.ones_like(out))
        # whole, and cut as the guide cuts a vector
        for vector in (grads, first, fz.scatter(first, like=state.params)):
            product = fz.gather(fz.hvp(step, state, vector, *batches[rank]))
            assert_trees_close(product, want, rtol=1e-9, atol=1e-12)

    run_ranks(rank_main, world)


POLICIES: dict[str, Any] = {
    "autocast": lambda loss: fz.autocast(fz.train_step(loss, fz.sgd(0.1))),
    "compute": lambda loss: fz.train_step(loss, fz.sgd(0.1), fz.Policy(compute=torch.bfloat16)),
    "bf16_states": lambda loss: fz.train_step(loss, fz.sgd(0.1), fz.Policy.bf16_states()),
    "exact": lambda loss: fz.train_step(loss, fz.sgd(0.1), fz.Policy.exact()),
    "gathered in 8 bits": lambda loss: fz.train_step(loss, fz.sgd(0.1), fz.Policy(gather="8-bit")),
}


@in_turns(2)
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_per_example_grads_of_what_the_step_computes_with(policy: str, stage: int) -> None:
    """The function sees the same values, dtypes and autocast; summed over examples they are the pullback's grads."""
    plain, params = scenarios.stack(dtype=torch.float32)
    batches = scenarios.vector_batches(2, dtype=torch.float32)

    def rank_main(rank: int) -> None:
        seen: list[Any] = []

        def loss(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            def see(q: Any, x: torch.Tensor) -> torch.Tensor:
                seen.append((torch.is_autocast_enabled("cpu"), q["w"].dtype, (x @ q["w"]).dtype, q["b"].dtype))
                return x

            fz.unit(see)(p["blocks"][1], x)
            return plain(p, x, y)

        step = SHARDS[stage](POLICIES[policy](loss))
        state = step.init(params)
        x, y = batches[rank]
        found = fz.per_example_grads(step, state, x.to(state.params.layout.rows[0].policy.compute), y)
        grads, _ = step.vjp(state, x.to(state.params.layout.rows[0].policy.compute), y)[1](torch.ones(()))
        assert len(set(seen)) == 1
        full = fz.gather(grads)
        mine = pytree.tree_map(lambda g: g.double().mean(0), found)
        dtypes = [g.dtype for g in pytree.tree_leaves(found)]
        assert dtypes == [g.dtype for g in pytree.tree_leaves(full)]
        group = state.params.axis
        mean = pytree.tree_map(lambda g: group.mean(g, "test"), mine)
        assert_trees_close(mean, full, rtol=1e-5 if policy == "gathered in 8 bits" else 3e-2)

    run_ranks(rank_main, 2 if stage else 1)


def second_derivative(rank: int, stage: int, transform: str, world: int) -> None:
    """Of a penalty on the gathered grads and on their norm, by the inputs."""
    loss, params = scenarios.stack()
    batches = scenarios.vector_batches(world)
    xs = [x.clone().requires_grad_() for x, _ in batches]
    leaves, spec = pytree.tree_flatten(params)
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    tree = pytree.tree_unflatten(leaves, spec)
    whole = torch.stack([loss(tree, x, y) for x, (_, y) in zip(xs, batches, strict=True)]).mean()
    plain = torch.autograd.grad(whole, leaves, create_graph=True)

    def penalty(grads: Any, norm: torch.Tensor) -> torch.Tensor:
        return sum((g**3 * (i + 1)).sum() for i, g in enumerate(pytree.tree_leaves(grads))) + 2 * norm  # type: ignore

    norm = sum((g * g).sum() for g in plain).sqrt()  # type: ignore[union-attr]
    want = torch.autograd.grad(penalty(plain, norm), xs)

    transforms: dict[str, Any] = {
        "plain": lambda step: step,
        "remat": fz.remat,
        "scaled": lambda step: fz.loss_scale(step, 8.0),
    }
    step = transforms[transform](SHARDS[stage](fz.train_step(loss, fz.sgd(0.1))))
    state = step.init(params)
    x = batches[rank][0].clone().requires_grad_()
    out, pullback = step.vjp(state, x, batches[rank][1])
    grads, _ = pullback(torch.ones_like(out), create_graph=True)
    full = fz.gather(grads)
    assert_trees_close(full, pytree.tree_unflatten([g.detach() for g in plain], spec), rtol=1e-10)
    value = penalty(full, fz.global_norm(grads))
    (found,) = torch.autograd.grad(value, [x], retain_graph=True)
    # cotangents of what a rank has by itself are those of its own loss, of which the mean is taken
    assert_trees_close(found / world, want[rank], rtol=1e-9)
    with torch.no_grad():
        assert not fz.gather(grads)["head"]["w"].requires_grad
    if rank == 0:
        value = value * 0
    (found,) = torch.autograd.grad(value * world / max(1, world - 1), [x])  # only the others' values count
    assert_trees_close(found / world, want[rank] if world > 1 else 0 * want[rank], rtol=1e-9)


@in_turns(3)
@pytest.mark.parametrize("transform", ["plain", "remat", "scaled"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_grads_of_a_pullback_that_creates_a_graph_are_gathered_on_gloo(stage: int, transform: str) -> None:
    second = functools.partial(second_derivative, stage=stage, transform=transform, world=2)
    run_ranks(second, 2, backend="processes")


@pytest.mark.parametrize(("stage", "world"), [(0, 1), (3, 1), (1, 3), (3, 3)])
def test_a_second_derivative_through_gathered_grads(stage: int, world: int) -> None:
    second = functools.partial(second_derivative, stage=stage, transform="plain", world=world)
    run_ranks(second, world)


@pytest.mark.parametrize("transform", [lambda step: step, fz.remat])
def test_sparse_gradients_differentiated_again_are_equal_or_refused_by_name(transform: Any) -> None:
    @fz.unit
    def rows(p: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding((x[:, 0] * 9).long().abs() % 4, p["w"], sparse=True) * x

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return rows(p[1], rows(p[0], x)).square().mean()

    params = [{"w": torch.linspace(-1, 1, 16).reshape(4, 4) + i} for i in range(2)]
    step, x = transform(fz.train_step(loss, fz.sgd(0.1))), torch.linspace(-1, 1, 12).reshape(3, 4)
    state = step.init(params)
    grads = step.vjp(state, x)[1](torch.ones(()))[0]
    if transform is fz.remat:
        with pytest.raises(TypeError, match=r"unit '1'.*sparse=False"):
            fz.hvp(step, state, grads, x)
    else:
        fz.gather(fz.hvp(step, state, grads, x))
