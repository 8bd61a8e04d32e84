"""Scalars that a function returns: the same on all ranks of a tensor axis, or refused wherever a gradient is made."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from nightly import in_turns
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fzero as fz
from fzero.testing import RankError, assert_trees_close, run_ranks

F64, WIDTH, INNER = torch.float64, 4, 6
# ways to a derivative of the loss
WAYS: dict[str, Callable[[fz.Step, Any, torch.Tensor], object]] = {
    "step": lambda step, state, x: step(state, x)[1]["loss"],
    "accumulated": lambda step, state, x: fz.accumulate(step, 2)(state, x)[1]["loss"],
    "fused": lambda step, state, x: fz.fuse_update(step)(state, x)[1]["loss"],
    "vjp": lambda step, state, x: step.vjp(state, x)[1](torch.ones((), dtype=F64))[1][0],
    "forward": lambda step, state, x: step.forward(state, x),
    "hvp": lambda step, state, x: fz.gather(fz.hvp(step, state, as_grads(step, state, x), x)),
    "per example": lambda step, state, x: fz.per_example_grads(step, state, x),
    "tape": lambda step, state, x: taped(step, state, x),
}


def as_grads(step: fz.Step, state: Any, x: torch.Tensor) -> Any:
    own = fz.with_fn(step, lambda p, x: p["up"].sum() * x.sum(0, keepdim=True))
    return own.vjp(state, x, argnums=())[1](torch.ones_like(x[:1]))[0]


def taped(step: fz.Step, state: Any, x: torch.Tensor) -> object:
    with fz.tape(step, state) as model:
        return model(x)


class Columns(nn.Module):
    """Gives its loss, and on the side what a column gave."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.up(x)
        return self.down(torch.tanh(hidden)), hidden


def loss(p: Any, x: torch.Tensor, ax: Any, mixed: float, by_rank: float) -> torch.Tensor:
    hidden = torch.tanh(fz.parallel.copy(x, ax) @ p["up"])
    out = fz.parallel.sum(hidden @ p["down"], ax).square().mean()
    return out * (1 + by_rank * torch.distributed.get_rank()) + (mixed * hidden.square().mean() if mixed else 0.0)


def run(rank: int, way: str, ranks: int, mixed: float = 0.0, by_rank: float = 0.0) -> object:
    """`mixed`: how much is of slices, which is followed; `by_rank`: of the rank's number, which values alone tell."""
    mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "tp"))
    ax = fz.parallel.axis(mesh, "tp")
    step = fz.train_step(lambda p, x: loss(p, x, ax, mixed, by_rank), fz.sgd(0.1))
    step = fz.shard_zero3(fz.shard_tensor(step, {"up": 1, "down": 0}, mesh), mesh)
    generator = torch.Generator().manual_seed(0)
    params = {
        "up": torch.randn(WIDTH, INNER, dtype=F64, generator=generator),
        "down": torch.randn(INNER, WIDTH, dtype=F64, generator=generator),
    }
    x = torch.randn(4, WIDTH, dtype=F64, generator=generator)
    return WAYS[way](step, step.init(params), x)


@in_turns(3)
@pytest.mark.parametrize("way", WAYS)
@given(
    ranks=st.integers(2, 3), part=st.sampled_from([0.0, 1e-2, 1e-1, 1.0]), what=st.sampled_from(["mixed", "by_rank"])
)
@example(ranks=3, part=1e-2, what="mixed")
@example(ranks=2, part=0.0, what="mixed")
@settings(max_examples=4)
def test_a_loss_of_slices_is_refused_on_every_way_to_a_derivative(ranks: int, way: str, part: float, what: str) -> None:
    def own(rank: int) -> Any:
        try:
            return run(rank, way, ranks, **{what: part})
        except ValueError as error:
            return str(error)

    found = run_ranks(own, ranks)
    if not part:
        for other in found[1:]:
            assert_trees_close(found[0], other)
        return
    assert len(set(found)) == 1, "all ranks hear of it"
    words = r"in loss: .*, of 'p\.up'\)\. A conversion is missing"
    if what == "by_rank" or way == "forward":
        words = r"ranks of axis 'tp'.*expected the same on all"
    assert re.search(words, found[0], re.DOTALL), found[0]


def test_what_a_column_gives_and_a_module_returns() -> None:
    """Keys and values, attention weights: a loss of them is refused, what does not go into it is nobody's business."""

    def own(rank: int, into_loss: bool) -> torch.Tensor:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        apply, params = fz.functional(Columns().to(F64))

        def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
            out, hidden = apply(p, x)
            return out.square().mean() + (hidden.square().mean() if into_loss else 0.0)

        step = fz.shard_tensor(fz.train_step(fn, fz.sgd(0.1)), {"up": "column", "down": "row"}, mesh)
        return step(step.init(params, sync=True), torch.ones(2, WIDTH, dtype=F64))[1]["loss"]

    assert len({x.item() for x in run_ranks(functools.partial(own, into_loss=False), 2)}) == 1
    with pytest.raises(RankError, match=r", of 'p\.up\.\w+'\)\. A conversion is missing"):
        run_ranks(functools.partial(own, into_loss=True), 2)


@in_turns(3)
@pytest.mark.parametrize("way", ["step", "fused", "accumulated"])
@pytest.mark.parametrize("kind", ["dict", "pair", "complex", "no number", "small"])
def test_other_outputs_with_a_cotangent(way: str, kind: str) -> None:
    """Scalars in containers; complex ones; one that is no number on one rank; float64, in which little is much."""

    def own(rank: int, bad: bool) -> Any:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        ax, off = fz.parallel.axis(mesh, "tp"), float(bad) * rank

        def fn(p: Any, x: torch.Tensor) -> Any:
            loss = fz.parallel.sum((p["w"] * x).sum(), ax)
            if kind == "complex":
                return torch.complex(loss, loss + off)
            if kind == "no number":
                return loss * (float("nan") if off else 1.0)
            return {"dict": {"l": loss + off}, "pair": (loss, loss + off), "small": loss * (1 + 1e-8 * off)}[kind]

        step = fz.shard_tensor(fz.train_step(fn, fz.sgd(0.1)), {"w": 0}, mesh)
        step = {"step": step, "fused": fz.fuse_update(step), "accumulated": fz.accumulate(step, 2)}[way]
        one = torch.ones((), dtype=F64)
        cotangent = {"dict": {"l": one}, "pair": (one, one), "complex": one + 0j}.get(kind, one)
        state = step.init({"w": torch.ones(4, dtype=F64)})
        return step(state, torch.full((2, 1), 2.0, dtype=F64), cotangent=cotangent)[0].step

    assert run_ranks(functools.partial(own, bad=False), 2) == [1, 1]
    with pytest.raises(RankError, match="differs between the ranks of axis 'tp'"):
        run_ranks(functools.partial(own, bad=True), 2)


def test_whole_leaves_that_differ_are_not_gathered() -> None:
    """A pullback that nobody updates with, of a function that computes something else on each rank."""

    def own(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        ax = fz.parallel.axis(mesh, "tp")
        fn = lambda p, x: fz.parallel.sum(p["w"].sum(), ax) + (x * p["whole"] * (1.0 + torch.distributed.get_rank()))
        step = fz.train_step(fn, fz.sgd(0.1))
        step = fz.shard_tensor(step, {"w": 0}, mesh)
        state = step.init({"w": torch.arange(4.0, dtype=F64), "whole": torch.ones(1, dtype=F64)})
        grads, _ = step.vjp(state, torch.ones(1, dtype=F64))[1](torch.ones(1, dtype=F64))
        return fz.gather(grads)

    with pytest.raises(RankError, match="leaf 'whole', which all ranks of axis 'tp' have in full, differ"):
        run_ranks(own, 2)


def test_a_rank_of_its_own_value_says_so_with_a_dim() -> None:
    def own(rank: int) -> torch.Tensor:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        step = fz.shard_tensor(fz.train_step(lambda p, x: (p["w"] * x).sum()[None], fz.sgd(0.1)), {"w": 0}, mesh)
        state = step.init({"w": torch.arange(4.0)})
        out, pullback = step.vjp(state, torch.tensor(2.0), argnums=())
        return torch.cat([out.detach(), fz.gather(pullback(torch.full((1,), rank + 1.0))[0])["w"]])

    first, second = run_ranks(own, 2)
    assert first.tolist() == [2.0, 2.0, 2.0, 4.0, 4.0] and second.tolist() == [10.0, 2.0, 2.0, 4.0, 4.0]
