"""Optimizers against torch.optim or their formula, `update` against `fused`, and schedules of the momentum."""

from __future__ import annotations

from typing import Any

import chains
import pytest
import torch

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks

F64 = torch.float64
CASES: dict[str, tuple[Any, Any]] = {
    "adamw": (
        lambda: fz.adamw(1e-2, b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    ),
    "adam": (lambda: fz.adam(1e-2, weight_decay=0.1), lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1)),
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
    "lion": (lambda: fz.lion(1e-2, b1=0.9, b2=0.95, weight_decay=0.1), None),  # by its formula (Chen et al. 2023)
}


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


@pytest.mark.parametrize("name", sorted(CASES))
def test_against_torch_and_fused_against_update(name: str) -> None:
    make, theirs = CASES[name]
    optimizer = make()
    params = {"a": draw(0, 5, 3), "b": draw(1, 70)}
    leaves = [leaf.clone().requires_grad_() for leaf in params.values()]
    reference, formula = theirs(leaves) if theirs else None, chains.plain(("lion", 1e-2, 0.9, 0.95, 0.1))
    by_formula = formula.init(params)
    state, step = optimizer.init(params), fz.train_step(lambda p, x: sum((p[k] * x[k]).sum() for k in p), optimizer)
    trained = step.init(params)
    for count in range(5):
        grads = {"a": draw(10 + count, 5, 3), "b": draw(20 + count, 70)}
        updates, state = optimizer.update(grads, state, params)
        if reference is None:
            want, by_formula = formula.update(grads, by_formula, params)
            assert_trees_close(updates, want, rtol=1e-12)
        params = {key: params[key] + updates[key] for key in params}
        trained, _ = step(trained, grads)
        assert_trees_close(fz.gather(trained.params), params, rtol=1e-12)
        if reference:
            for leaf, grad in zip(leaves, grads.values(), strict=True):
                leaf.grad = grad
            reference.step()
            assert_trees_close(params, dict(zip(params, [leaf.detach() for leaf in leaves], strict=True)), rtol=1e-12)


def test_numbers_that_make_no_optimizer_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sgd\(nesterov=True\): got momentum=None, expected a momentum"):
        fz.sgd(0.1, nesterov=True)
    with pytest.raises(ValueError, match=r"adamw\(b2=\.\.\.\): got 1\.0"):
        fz.adamw(0.1, b2=1.0)
    assert fz.sgd(0.1, weight_decay=0.5).init({"w": torch.ones(1)}).momentum is None  # nothing is kept of it


@pytest.mark.parametrize("rate", [None, "0.1", torch.ones(2)])
def test_a_schedule_that_makes_no_number_is_refused(rate: Any) -> None:
    step = fz.train_step(lambda p: p["w"].sum(), fz.sgd(lambda count: rate))
    with pytest.raises(TypeError, match=r"the optimizer: got lr=.*, expected a number"):
        step(step.init({"w": torch.ones(2)}))


def test_a_schedule_of_the_momentum() -> None:
    """As in torch, where the betas of a group are changed before each step."""
    betas = [0.8, 0.5, 0.9, 0.7]
    generator = torch.Generator().manual_seed(0)
    w, x = torch.randn(5, 3, generator=generator), torch.randn(4, 5, generator=generator)
    makes: list[tuple[Any, Any]] = [(fz.adamw, torch.optim.AdamW), (fz.adam, torch.optim.Adam)]
    for make, theirs in makes:
        leaf = w.clone().requires_grad_()
        own = theirs([leaf], lr=0.1, weight_decay=0.1)
        for b1 in betas:
            own.param_groups[0]["betas"] = (b1, 0.999)
            own.zero_grad()
            (x @ leaf).square().mean().backward()
            own.step()

        def rank_main(rank: int, make: Any = make) -> torch.Tensor:
            made = make(0.1, b1=betas.__getitem__, weight_decay=0.1)
            step = fz.shard_zero3(fz.train_step(lambda p, x: (x @ p["w"]).square().mean(), made))
            state = step.init({"w": w})
            for _ in betas:
                state, _ = step(state, x)
            return fz.gather(state.params)["w"]

        torch.testing.assert_close(run_ranks(rank_main, 2)[0], leaf.detach(), rtol=1e-5, atol=1e-6)
    lion = fz.lion(0.1, b1=betas.__getitem__)
    grads, params = {"w": torch.tensor([1.0, -1.0])}, {"w": torch.zeros(2)}
    updates, state = lion.update(grads, lion.init(params), params)
    updates, _ = lion.update({"w": torch.tensor([-0.02, -1.0])}, state, params)  # 0.5 * 0.01 - 0.5 * 0.02
    assert updates["w"].tolist() == pytest.approx([0.1, 0.1])


@pytest.mark.parametrize("name", CASES)
def test_none_among_the_grads_is_no_leaf(name: str) -> None:
    optimizer, g = CASES[name][0](), torch.tensor([1.0, -2.0])
    alone, beside = {"w": g}, {"n": None, "w": g}
    want, _ = optimizer.update(alone, optimizer.init(alone), alone)
    got, _ = optimizer.update(beside, optimizer.init(beside), beside)
    assert got["n"] is None
    assert got["w"].equal(want["w"])


def test_states_of_fewer_moments_and_updates_without_params_are_refused() -> None:
    tree = {"w": torch.ones(2)}
    moving, still = fz.sgd(0.1, momentum=0.9), fz.sgd(0.1)
    with pytest.raises(ValueError, match="sgd: got a state with 0 moments of each leaf, expected 1"):
        moving.update(tree, still.init(tree), tree)
    made, other = [fz.train_step(lambda p, x: (p["w"] * x).sum(), each) for each in (moving, still)]
    with pytest.raises(ValueError, match="sgd: got a state with 0 moments of each leaf, expected 1"):
        made(other.init(tree), torch.ones(2))
    with pytest.raises(ValueError, match=r"adamw: got no params.*update\(grads, state, params\)"):
        fz.adamw(0.1).update(tree, fz.adamw(0.1).init(tree))


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_in_float64_has_the_bits_of_torch(nesterov: bool) -> None:
    """Where a kernel of torch's updates, also with a weight decay."""
    drawn = torch.randn(4, 1001, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    leaf = drawn[0].clone().requires_grad_()
    theirs = torch.optim.SGD([leaf], 0.1, momentum=0.9, weight_decay=0.013, nesterov=nesterov)
    step = fz.train_step(lambda p: p, fz.sgd(0.1, momentum=0.9, weight_decay=0.013, nesterov=nesterov))
    state = step.init({"w": drawn[0]})
    for grad in drawn[1:]:
        state, _ = step.update(state, {"w": grad})
        leaf.grad = grad
        theirs.step()
    assert torch.equal(state.params["w"], leaf.detach())
