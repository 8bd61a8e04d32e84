"""Optimizers against torch.optim, `update` against `fused`, and those of a user's own in optax's shape."""

from __future__ import annotations

from typing import Any

import pytest
import scenarios
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks

F64 = torch.float64
CASES: dict[str, tuple[Any, Any]] = {
    "adamw": (
        lambda: fz.adamw(1e-2, b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    ),
    "adam": (
        lambda: fz.adam(1e-2, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    ),
    "sgd": (lambda: fz.sgd(0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": (
        lambda: fz.sgd(0.1, momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    ),
    "nesterov": (
        lambda: fz.sgd(0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    ),
    "adamw, amsgrad": (
        lambda: fz.adamw(1e-2, b2=0.9, eps=1e-6, weight_decay=0.1, amsgrad=True),
        lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.9, 0.9), eps=1e-6, weight_decay=0.1, amsgrad=True),
    ),
    "adam, amsgrad": (
        lambda: fz.adam(1e-2, b2=0.9, weight_decay=0.1, amsgrad=True),
        lambda p: torch.optim.Adam(p, lr=1e-2, betas=(0.9, 0.9), weight_decay=0.1, amsgrad=True),
    ),
    "lion": (lambda: fz.lion(1e-2, b1=0.9, b2=0.95, weight_decay=0.1), None),
}


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


@pytest.mark.parametrize("name", sorted(CASES))
def test_against_torch_and_fused_against_update(name: str) -> None:
    make, theirs = CASES[name]
    optimizer = make()
    params = {"a": draw(0, 5, 3), "b": draw(1, 70)}
    leaves = [leaf.clone().requires_grad_() for leaf in params.values()]
    reference = theirs(leaves) if theirs else None
    state, step = optimizer.init(params), fz.train_step(lambda p, x: sum((p[k] * x[k]).sum() for k in p), optimizer)
    trained = step.init(params)
    for count in range(5):
        grads = {"a": draw(10 + count, 5, 3), "b": draw(20 + count, 70)}
        updates, state = optimizer.update(grads, state, params)
        params = {key: params[key] + updates[key] for key in params}
        trained, _ = step(trained, grads)
        assert_trees_close(fz.gather(trained.params), params, rtol=1e-12)
        if reference:
            for leaf, grad in zip(leaves, grads.values(), strict=True):
                leaf.grad = grad
            reference.step()
            assert_trees_close(params, dict(zip(params, [leaf.detach() for leaf in leaves], strict=True)), rtol=1e-12)


@pytest.mark.parametrize("rate", [None, "0.1", torch.ones(2)])
def test_a_schedule_that_makes_no_number_is_refused(rate: Any) -> None:
    step = fz.train_step(lambda p: p["w"].sum(), fz.sgd(lambda count: rate))
    with pytest.raises(TypeError, match=r"the optimizer: got lr=.*, expected a number"):
        step(step.init({"w": torch.ones(2)}))


@given(stage=st.sampled_from([0, 1, 2, 3]), donated=st.booleans(), world=st.integers(1, 3))
def test_an_optimizer_in_optax_shape(stage: int, donated: bool, world: int) -> None:
    """A user's pair (init, update) without fused, on any pytree, with a state of its own."""

    def update(grads: Any, state: Any, params: Any) -> Any:
        import optree

        state = optree.tree_map(lambda s, g: 0.5 * s + g, state, grads)
        return optree.tree_map(lambda s: -0.1 * s, state), state

    def init(params: Any) -> Any:
        import optree

        return optree.tree_map(torch.zeros_like, params)

    mine = fz.GradientTransformation(init, update)
    loss, params = scenarios.stack()
    world = world if stage else 1
    batches = scenarios.vector_batches(world)

    def rank_main(rank: int) -> Any:
        out = []
        for optimizer in (mine, fz.sgd(0.1, momentum=0.5), fz.chain(fz.clip_by_value(100.0), mine)):
            shard = {0: lambda s: s, 1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}[stage]
            step = shard(fz.train_step(loss, optimizer))
            step = fz.donate(step) if donated else step
            state = step.init(params)
            for _ in range(3):
                state, _ = step(state, *batches[rank])
            out.append(fz.gather(state.params))
        assert_trees_close(*out, rtol=1e-12)

    run_ranks(rank_main, world)
