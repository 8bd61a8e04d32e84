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
from nightly import by_day

import fzero as fz
from fzero.testing import assert_trees_close, hazards, run_ranks, strategies

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
        one = functools.partial(leaf, n=count)
        return optree.tree_map(lambda g, m, p: one(g, m, p), grads, moment, params), (count + 1, moment)

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


@by_day(15)
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
        how = [each for each in chosen if not (declared and each[0] == "fuse_update")]  # which has no fused form
        step = strategies.apply(fz.train_step(loss, fz.chain(*before, member) if before else member), how)
        state = step.init(drawn(shapes, units))
        for xs in batches:
            state, _ = step(state, xs[rank])
        return fz.gather(state.params)

    with hazards(seed):
        for declared in (False, True) if kind in ELEMENTS else (False,):
            for found in run_ranks(functools.partial(on, declared), ranks):
                assert_trees_close(found, want, rtol=1e-10, atol=1e-12)


def on_process(kind: str, rank: int) -> Any:
    step = fz.shard_zero3(fz.train_step(loss, own(kind)))
    state = step.init(drawn(SHAPES, 2))
    for i in range(2):
        state, _ = step(state, torch.tensor([0.1 * i, rank], dtype=F64))
    return fz.gather(state.params)


def test_on_real_processes() -> None:
    batches = [[torch.tensor([0.1 * i, rank], dtype=F64) for rank in range(2)] for i in range(2)]
    want = by_hand("polar", torch.inf, drawn(SHAPES, 2), batches, loss)
    for found in run_ranks(functools.partial(on_process, "polar"), 2, backend="processes"):
        assert_trees_close(found, want, rtol=1e-10, atol=1e-12)
