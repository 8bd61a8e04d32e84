"""States that begin by values of leaves: planned as they are, without the leaves' memory where none is needed."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from nightly import in_turns

import fzero as fz
from fzero.base import private
from fzero.testing import run_ranks

SHAPES = {"w": (40, 30), "u": (3, 30), "b": (30,)}


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return ((x @ p["w"] + p["b"]) @ p["u"].T).square().mean()


def params(device: str = "cpu") -> dict[str, torch.Tensor]:
    return {name: torch.ones(shape, device=device) for name, shape in SHAPES.items()}


class ByNorm(torch.optim.Optimizer):
    """Asks for a number of each leaf in its first step, as an optimizer of others may."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["m"] = 0.9 * state.get("m", torch.zeros_like(p)) + p.grad
            state["row"] = state.get("row", torch.zeros_like(p[:1])) + 1
            p.sub_(self.param_groups[0]["lr"] * state["m"] / (1 + float(p.grad.norm())))


def by_value(given: Any) -> Any:
    return {path: torch.zeros_like(p) if float(p.norm()) >= 0 else None for path, p in given.items()}


OPTIMIZERS: dict[str, Any] = {
    "adafactor": lambda: fz.from_torch(torch.optim.Adafactor, 0.01),
    "others": lambda: fz.from_torch(ByNorm, 0.01),
    "by hand": lambda: fz.GradientTransformation(by_value, lambda g, s, p: (g, s)),
    "joined": lambda: fz.partition({"w": fz.from_torch(torch.optim.Adafactor, 0.01), "*": fz.adamw(0.1)}),
}


def kept(state: Any) -> int:
    """The bytes of moments that this rank has."""
    return sum([x.nbytes for x in optree.tree_leaves(state.moments) if isinstance(x, torch.Tensor)])  # type: ignore[arg-type]


@in_turns(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_planned_as_it_is(name: str) -> None:
    step = fz.shard_zero3(fz.train_step(loss, OPTIMIZERS[name]()))
    plans = [fz.plan(step, params(device), world_size=2) for device in ("cpu", "meta")]
    real = run_ranks(lambda rank: kept(step.init(params())), 2)
    assert [plan.moments for plan in plans] == [max(real)] * 2
    assert plans[0].by_axis == plans[1].by_axis
    proposal = fz.fits(fz.train_step(loss, OPTIMIZERS[name]()), params("meta"), device=1 << 20)
    assert proposal.placement["moments"] == "device"
    looked = fz.plan(step, params(), world_size=2, inputs=(torch.ones(5, 40),))
    assert looked.moments == plans[0].moments and looked.flops


def test_values_are_asked_for_once_and_not_where_shapes_do() -> None:
    seen = list[tuple[str, str]]()

    def begun(given: Any) -> Any:
        ((path, p),) = given.items()
        seen.append((path, "fake" if private.is_fake(p) else p.device.type))
        return torch.zeros_like(p) if path == "b" else by_value(given)

    own = fz.whole(fz.GradientTransformation(begun, lambda g, s, p: (g, s)))
    fz.fits(fz.train_step(loss, own), params("meta"), device=1 << 20, host=1 << 20)
    assert sorted(each for each in seen if each[1] == "cpu") == [("u", "cpu"), ("w", "cpu")]
    assert seen.count(("w", "meta")) == 1 and seen.count(("b", "meta")) > 8


def test_what_fails_of_zeros_too_is_named() -> None:
    own = fz.whole(
        fz.GradientTransformation(lambda p: {k: 1 / float(x.norm()) for k, x in p.items()}, lambda g, s, p: s)
    )
    step = fz.train_step(loss, own)
    with pytest.raises(
        ValueError,
        match=r"init of an optimizer fails for leaf 'b' without values, .*meta.*zeros \(.*division by zero",
    ):
        fz.plan(step, params("meta"))
    step.init(params())
    with pytest.raises(ValueError, match=r"init of muon fails for leaf 'b' .* zeros \(Muon only supports 2D"):
        fz.plan(fz.train_step(loss, fz.from_torch(torch.optim.Muon, 0.1)), params("meta"))


def test_one_of_all_leaves_that_asks_for_values_is_told_what_a_plan_has() -> None:
    begun = lambda p: p.map(lambda x: x * float(x.norm()))
    own = fz.GradientTransformation(begun, lambda g, s, p: (g, s), elementwise=True)
    step = fz.train_step(loss, own)
    with pytest.raises(RuntimeError) as info:
        fz.plan(step, params())
    assert "params without values, as a plan has them" in info.value.__notes__[0]
    assert fz.plan(fz.train_step(loss, fz.GradientTransformation(by_value, own.update)), params()).moments > 0
    step.init(params())
