"""What a unit's pullback needs, in another memory meanwhile: writes to it count as if it had stayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from memories import DISK, HOST
from nightly import by_turns, in_turns

import fzero as fz
from fzero.comm.hazards import hazards
from fzero.testing import assert_trees_equal, run_ranks

W = {"blocks": [{"w": torch.randn(16, 16, generator=torch.Generator().manual_seed(i)) / 4} for i in range(2)]}
X = torch.ones(32, 16)  # larger than what is not worth its way


class Doubles(torch.autograd.Function):
    """The identity, whose backward writes to what it saved."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.saved_tensors[0].mul_(2)
        return cotangent


def a_derivative_writes_to_what_others_saved(p: Any, x: torch.Tensor) -> torch.Tensor:
    h = x @ p["w"]
    return h * h + Doubles.apply(h)


def a_derivative_writes_to_its_own(p: Any, x: torch.Tensor) -> torch.Tensor:
    return Doubles.apply(x @ p["w"])


def written_after_it_was_saved(p: Any, x: torch.Tensor) -> torch.Tensor:
    h = torch.exp(x @ p["w"])
    return h.mul(2).sin() + h.add_(1)


def a_view_written_after_it_was_saved(p: Any, x: torch.Tensor) -> torch.Tensor:
    h = x @ p["w"]
    y = h.square()
    h[0].zero_()
    return y + h


def written_before_it_is_saved(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (x @ p["w"]).add_(1).square()


def quiet(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["w"])


INSIDE = (
    a_derivative_writes_to_what_others_saved,
    a_derivative_writes_to_its_own,
    written_after_it_was_saved,
    a_view_written_after_it_was_saved,
    written_before_it_is_saved,
    quiet,
)


def a_chain(block: Any, p: Any, x: torch.Tensor) -> torch.Tensor:
    for q in p["blocks"]:
        x = block(q, x)
    return x.square().mean()


def writes_to_an_input(block: Any, p: Any, x: torch.Tensor) -> torch.Tensor:
    x = x * 2
    y = block(p["blocks"][0], x)
    x.mul_(3)
    return block(p["blocks"][1], y).square().mean()


def writes_to_an_output(block: Any, p: Any, x: torch.Tensor) -> torch.Tensor:
    y = block(p["blocks"][0], x)
    z = block(p["blocks"][1], y)
    y.mul_(3)
    return (z + y).square().mean()


OUTSIDE = (a_chain, writes_to_an_input, writes_to_an_output)
# the step, and one without offload whose units are nodes of the graph too: a node's inputs may be written to later
STEPS: dict[str, tuple[Callable[[fz.Step], fz.Step], Callable[[fz.Step], fz.Step]]] = {
    "plain": (lambda step: step, fz.shard_zero3),
    "zero3": (fz.shard_zero3, fz.shard_zero3),
    "remat": (fz.remat, fz.remat),
}


def outcome(step: fz.Step) -> Any:
    """The gradients, twice, or the kind of error."""
    state = step.init(W)
    try:
        loss, pullback = step.vjp(state, X)
        return [fz.gather(pullback(torch.ones_like(loss), retain_graph=retain)[0]) for retain in (True, False)]
    except (RuntimeError, ValueError) as error:
        told = "modified by an inplace operation", "was changed in place after it was called"
        return any(text in str(error) for text in told) or str(error)


@in_turns(3)
@pytest.mark.parametrize(("outside", "memory", "name"), by_turns(OUTSIDE, ["host", "disk"], STEPS))
def test_writes_are_seen_as_without_it(outside: Any, memory: str, name: str) -> None:
    kinds = set()

    def compare(rank: int) -> None:
        for inside in INSIDE:
            block = fz.unit(inside)
            plain = fz.train_step(lambda p, x, block=block: outside(block, p, x), fz.sgd(0.1))
            away, stays = [transform(plain) for transform in STEPS[name]]
            got, want = outcome(fz.offload(away, activations={"host": HOST, "disk": DISK}[memory])), outcome(stays)
            kinds.add(type(want))
            if isinstance(want, list) and isinstance(got, list):
                assert_trees_equal(got, want)
            else:
                assert got == want, inside.__name__

    run_ranks(compare, 1)
    assert outside is not a_chain or kinds == {bool, list}


def test_what_no_derivative_goes_through_is_not_left_on_its_way() -> None:
    def fails_halfway(p: Any, x: torch.Tensor) -> torch.Tensor:
        try:
            x = torch.sin(x @ p["w"]) @ torch.ones(3, 3)
        except RuntimeError:
            pass
        return torch.tanh(x @ p["w"])

    def two_outputs(p: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(x @ p["w"]), torch.exp(x @ p["w"])

    for inside in (fails_halfway, lambda p, x: two_outputs(p, x)[0], lambda p, x: two_outputs(p, x)[1]):
        for away in (lambda step: step, fz.remat):
            block = fz.unit(inside)
            one_of_two = fz.unit(two_outputs)

            def fn(p: Any, x: torch.Tensor, block: Any = block, other: Any = one_of_two) -> torch.Tensor:
                return other(p["blocks"][1], block(p["blocks"][0], x))[0].square().mean()

            step = fz.offload(away(fz.train_step(fn, fz.sgd(0.1))), activations=HOST)
            with hazards():
                assert isinstance(outcome(step), list)


def forces(p: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        y = x if x.requires_grad else x.detach().requires_grad_()
        return torch.autograd.grad(torch.tanh(y @ p["w"]).sum(), y, create_graph=True)[0]


def hooks_of_its_own(p: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x * 2, lambda x: x / 2):
        return torch.tanh(x @ p["w"])


@in_turns(2)
@pytest.mark.parametrize("memory", [HOST, DISK], ids=["host", "disk"])
def test_derivatives_and_hooks_inside_a_unit(memory: Any) -> None:
    def compare(rank: int) -> None:
        for inside in (forces, hooks_of_its_own):
            block = fz.unit(inside)
            plain = fz.shard_zero3(fz.train_step(lambda p, x, block=block: a_chain(block, p, x), fz.sgd(0.1)))
            for step in (plain, fz.remat(plain)):
                assert_trees_equal(outcome(fz.offload(step, activations=memory)), outcome(step))

    run_ranks(compare, 2)


def test_a_derivative_of_torch_func_in_a_unit_is_refused_by_name() -> None:
    @fz.unit
    def block(p: Any, x: torch.Tensor) -> torch.Tensor:
        return fz.name(torch.func.grad(lambda x: torch.tanh(x @ p["w"]).sum())(x), "out")

    step = fz.train_step(lambda p, x: a_chain(block, p, x), fz.sgd(0.1))
    for own in (fz.remat(step, save=("out",)), fz.offload(step, activations=HOST)):
        with pytest.raises(TypeError, match=r"Unit '.*' calls a derivative of torch.func within .*torch.autograd.grad"):
            own(own.init(W), X)
    step(step.init(W), X)


def test_hooks_around_units_that_would_see_nothing_are_refused() -> None:
    block = fz.unit(lambda p, x: fz.name(torch.tanh(x @ p["w"]), "out"))

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.half, torch.Tensor.float):
            return a_chain(block, p, x)

    plain = fz.train_step(fn, fz.sgd(0.1))
    for step in (fz.remat(plain, save=("out",)), fz.offload(plain, activations=HOST)):
        with (
            pytest.raises(ValueError, match=r"unit '.*': got .*saved_tensors_hooks around the unit"),
            fz.tape(step, step.init(W)) as taped,
        ):
            taped(X)
    with fz.tape(plain, plain.init(W)) as taped:
        taped(X).sum().backward()
