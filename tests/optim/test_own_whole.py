"""Optimizers of the user's own, which get whole leaves unless they are declared elementwise: as plain torch's step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nightly import by_day, in_turns

import fzero as fz
from fzero.testing import RankError, assert_trees_close, hazards, run_ranks, strategies

F64 = torch.float64
SHAPES = [(5, 4), (4,), (), (2, 3, 4), (1, 6), (9, 2)]
Leaf = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]

# the update of a leaf: by its grad, its moment, its param and how many updates there were
LEAVES: dict[str, Leaf] = {
    "norm": lambda g, m, p, n: -0.1 * g / (g.norm() + 1),
    "trust ratio": lambda g, m, p, n: -0.1 * m * (p.norm() + 0.1) / (m.norm() + 0.1),
    "mean": lambda g, m, p, n: -0.1 * (g - g.mean()),
    "largest": lambda g, m, p, n: -0.1 * m / (m.abs().max() + 1e-3),
    "rows": lambda g, m, p, n: -0.1 * m / (m.norm(dim=-1, keepdim=True) + 0.1) if p.ndim else -0.1 * m,
    "decay of matrices": lambda g, m, p, n: -0.1 * (m + 0.1 * p) if p.ndim > 1 else -0.1 * m,
    "polar": lambda g, m, p, n: -0.1 * polar(m) if p.ndim > 1 else -0.1 * m.sign(),
    "sorted": lambda g, m, p, n: -0.1 * m.reshape(-1).sort().values.view(m.shape),
    "a spike": lambda g, m, p, n: -0.1 * g if g.norm() < 10 * (m.norm() + 1) else torch.zeros_like(g),
    "by count": lambda g, m, p, n: -0.1 * 0.5**n * m * m.square().mean().sqrt(),
}
ELEMENTS: dict[str, Leaf] = {
    "sgd": lambda g, m, p, n: -0.1 * (m + 0.01 * p),
    "sign": lambda g, m, p, n: -0.01 * m.sign(),
    "rms": lambda g, m, p, n: -0.1 * 0.9**n * g / (m.square() + 1).sqrt(),
}


def polar(x: torch.Tensor) -> torch.Tensor:
    """The orthogonal part of a matrix: a function of matrices that is smooth here."""
    gram = x.mT @ x + torch.eye(x.shape[-1], dtype=x.dtype)
    values, vectors = torch.linalg.eigh(gram)
    return x @ (vectors / values.sqrt().unsqueeze(-2)) @ vectors.mT


def own(kind: str, declared: bool = False) -> fz.GradientTransformation:
    leaf = {**LEAVES, **ELEMENTS}[kind]

    def init(params: Any) -> Any:
        return 0, optree.tree_map(torch.zeros_like, params)

    def update(grads: Any, state: Any, params: Any) -> Any:
        count, moment = state
        moment = optree.tree_map(lambda m, g: 0.8 * m + g, moment, grads)
        return optree.tree_map(lambda g, m, p: leaf(g, m, p, count), grads, moment, params), (count + 1, moment)

    return fz.GradientTransformation(init, update, elementwise=declared)


def by_hand(kind: str, most: float, params: Any, batches: list[Any], loss: Any) -> Any:
    """In one process, as any user of torch writes it: leaf by leaf, clipped by the norm of all of them."""
    leaves, spec = optree.tree_flatten(params)
    moments = [torch.zeros_like(p) for p in leaves]
    for count, xs in enumerate(batches):
        mean = lambda p, xs=xs: torch.stack([loss(p, x) for x in xs]).mean()
        grads = optree.tree_leaves(torch.func.grad(mean)(optree.tree_unflatten(spec, leaves)))
        norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
        grads = [g * (most / norm).clamp(max=1.0) for g in grads]
        moments = [0.8 * m + g for m, g in zip(moments, grads, strict=True)]
        leaf = {**LEAVES, **ELEMENTS}[kind]
        leaves = [p + leaf(g, m, p, count) for g, m, p in zip(grads, moments, leaves, strict=True)]
    return optree.tree_unflatten(spec, leaves)


@fz.unit
def part(params: Any, x: torch.Tensor) -> torch.Tensor:
    each = [((i + 1) * p.square() * x.mean() + p.cos()).sum() for i, p in enumerate(params.values())]
    return torch.stack(each).sum()


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([part(each, x) for each in params]).sum()


def drawn(shapes: Any, units: int) -> Any:
    made = torch.Generator().manual_seed(0)
    return [{str(i): torch.randn(s, generator=made, dtype=F64) for i, s in enumerate(shapes)} for _ in range(units)]


@by_day(23)
@given(
    kind=st.sampled_from([*LEAVES, *ELEMENTS]),
    most=st.sampled_from([3.0, torch.inf]),
    chosen=strategies.transforms(stages=(1, 2, 3)),
    ranks=st.integers(1, 4),
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=5),
    units=st.integers(1, 3),
    seed=st.integers(0, 99),
)
@pytest.mark.filterwarnings("ignore:fz.offload")
def test_as_plain_torch_does(
    kind: str, most: float, chosen: Any, ranks: int, shapes: Any, units: int, seed: int
) -> None:
    """Also where it is declared elementwise and is so: declared and not, updates are those of plain torch."""
    before = [fz.clip_by_global_norm(most)] if most < torch.inf else []
    batches = [[torch.tensor([0.3 * i, 0.1 * rank], dtype=F64) for rank in range(ranks)] for i in range(3)]
    want = by_hand(kind, most, drawn(shapes, units), batches, loss)

    def on(declared: bool, rank: int) -> Any:
        member = own(kind, declared)
        step = strategies.apply(fz.train_step(loss, fz.chain(*before, member) if before else member), chosen)
        state = step.init(drawn(shapes, units))
        for xs in batches:
            state, _ = step(state, xs[rank])
        return fz.gather(state.params)

    with hazards(seed):
        for declared in (False, True) if kind in ELEMENTS else (False,):
            for found in run_ranks(functools.partial(on, declared), ranks):
                assert_trees_close(found, want, rtol=1e-10, atol=1e-12)


# ---- what it is given, and what is refused


def stateless(update: Callable[..., Any], **more: Any) -> fz.GradientTransformation:
    return fz.GradientTransformation(lambda params: (), lambda g, s, p: (update(g), s), **more)


W = {"a": torch.full((2, 2), 2.0, dtype=F64), "b": torch.ones(3, dtype=F64)}


def linear(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (p["a"].sum() * 2 + p["b"].sum()) * x


def by_norm_of_all(g: Any, grad_norm: torch.Tensor) -> Any:
    return {path: -x / grad_norm for path, x in g.items()}


def clipped_inside(g: Any, **norms: Any) -> Any:
    g, _ = fz.clip_by_global_norm(1e-3).update(g, (), None, **norms)
    return {path: -x for path, x in g.items()}


@in_turns(2)
@pytest.mark.parametrize("wrap", [lambda step: step, fz.fuse_update, fz.donate])
@pytest.mark.parametrize("update", [by_norm_of_all, clipped_inside])
def test_the_norm_of_all_gradients_is_a_keyword(update: Any, wrap: Any) -> None:
    named = fz.GradientTransformation(lambda p: (), lambda g, s, p, grad_norm: (update(g, grad_norm=grad_norm), s))
    any_ = fz.GradientTransformation(lambda p: (), lambda g, s, p, **norms: (update(g, **norms), s))
    factor = (1.0 if update is by_norm_of_all else 1e-3) / 19**0.5

    def on(own: fz.GradientTransformation, rank: int) -> Any:
        step = wrap(fz.shard_zero3(fz.train_step(linear, own)))
        return fz.gather(step(step.init(W), torch.ones((), dtype=F64))[0].params)

    want = {"a": W["a"] - 2 * factor, "b": W["b"] - factor}
    for own in (named, any_, fz.chain(named, fz.sgd(-1.0))):
        for found in run_ranks(functools.partial(on, own), 2):
            assert_trees_close(found, want, rtol=1e-10)
    with pytest.raises(RankError, match=r"grad_norm|global_norm: got leaf"):  # it is that of what a chain is given
        run_ranks(functools.partial(on, fz.chain(fz.clip_by_value(9.0), any_)), 2)
    for own in (fz.chain(fz.clip_by_value(9.0), named), fz.partition({"*": named})):
        with pytest.raises(RankError, match="The first of a chain alone is given grad_norm"):
            run_ranks(functools.partial(on, own), 2)


def test_a_norm_of_all_leaves_of_one_is_refused() -> None:
    def on(rank: int) -> None:
        step = fz.shard_zero3(
            fz.train_step(linear, stateless(lambda g: {k: x / fz.global_norm(g) for k, x in g.items()}))
        )
        with pytest.raises(
            (ValueError, RuntimeError), match=r"global_norm: got leaf '.' alone, by an optimizer on whole"
        ):
            step(step.init(W), torch.ones((), dtype=F64))

    run_ranks(on, 2)
    assert float(fz.global_norm(W)) == pytest.approx(19**0.5)  # and nowhere else


@pytest.mark.parametrize("declared", [False, True])
def test_one_that_takes_a_steps_trees_is_told_what_it_is_given(declared: bool) -> None:
    step = fz.train_step(linear, stateless(lambda g: g.map(torch.neg), elementwise=declared))
    with pytest.raises(AttributeError, match="'dict' object has no attribute 'map'") as info:
        step(step.init(W), torch.ones((), dtype=F64))
    by = "elementwise" if declared else "whole"
    (note,) = info.value.__notes__
    assert f"leaf 'a', by fz.{by}" in note and "optree.tree_map(fn, grads)" in note


def test_its_metrics_are_of_the_first_leaf() -> None:
    counted = lambda g, s, p: (
        {k: -0.1 * x for k, x in g.items()},
        {"n": s["n"] + 1, "m": {k: x for k, x in g.items()}},
    )
    zeros = lambda p: {"n": 0, "m": {k: torch.zeros_like(x) for k, x in p.items()}}
    step = fz.train_step(linear, fz.GradientTransformation(zeros, counted, metrics=lambda s: {"rate": 0.5 ** s["n"]}))
    state, seen = step.init(W), []
    for _ in range(3):
        state, metrics = step(state, torch.ones((), dtype=F64))
        seen.append(float(metrics["rate"]))
    assert seen == [1.0, 0.5, 0.25]


def test_ours_are_declared() -> None:
    ours = [fz.adamw(1.0), fz.sgd(1.0), fz.lion(1.0), fz.lamb(1.0), fz.muon(1.0), fz.adafactor(), fz.adam(1.0)]
    ours += [fz.clip_by_global_norm(1.0), fz.clip_by_value(1.0), fz.clip_by_block_norm(1.0), fz.adaptive_clip()]
    ours += [fz.gradient_noise(), fz.from_torch(torch.optim.NAdam, 0.1), fz.from_torch(torch.optim.Adafactor, 0.1)]
    own = stateless(lambda g: g)
    joined = [fz.chain(own, fz.sgd(0.1)), fz.partition({"*": own}), fz.whole(own)]
    assert all(each.elementwise for each in [*ours, *joined]) and not own.elementwise
    assert fz.train_step(linear, ours[0]).optimizer is ours[0]
