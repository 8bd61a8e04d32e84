"""What a caller writes to between a forward and its pullback is refused; a pullback that fails says so to all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backwards import with_backward

import fzero as fz
from fzero.testing import run_ranks

F64 = torch.float64


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


W, X = draw(6, 6), draw(4, 6, seed=1)


@pytest.mark.parametrize("act", [lambda step: step, fz.remat, fz.shard_zero3])
@pytest.mark.parametrize("half", [False, True])
def test_writes_to_inputs_and_outputs(act: Any, half: bool) -> None:
    unit = fz.unit(lambda p, x, y: (x @ p["w"]).tanh() * y)

    def rank_main(rank: int) -> None:
        step = act(fz.train_step(lambda p, x, y: unit(p["blocks"][0], x, y).exp(), fz.sgd(1.0)))
        state = step.init({"blocks": [{"w": W}]})
        for which in range(3):
            x, y = X.clone(), X.clone()
            out, pull = step.vjp(state, x, y)
            (x, y, out)[which].mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                (pull.inputs if half else pull)(torch.ones_like(out))

    run_ranks(rank_main, 1)


@pytest.mark.parametrize("which", ["output", "aux"])
def test_what_a_forward_gave_out_is_among_it(which: str) -> None:
    step = fz.train_step(lambda p, x: ((x @ p["w"]).exp(), (x @ p["w"]).tanh()), fz.sgd(0.1), has_aux=True)
    state = step.init({"w": W})
    output, pullback, aux = step.vjp(state, X)
    (output if which == "output" else aux).zero_()
    if which == "output":
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            pullback(torch.ones_like(output))
    else:  # to which nothing is pulled back
        pullback(torch.ones_like(output))


@pytest.mark.parametrize("retains", [False, True])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("act", [lambda step: step, fz.remat, fz.shard_zero3])
def test_a_pullback_that_failed(act: Any, half: bool, retains: bool) -> None:
    """It may be tried again where it keeps its graph, and says so where not."""

    def backward(cotangent: torch.Tensor) -> torch.Tensor:
        if fails:
            raise ValueError("told to")
        return cotangent

    fails, function = [1], with_backward(torch.clone, backward)
    unit = fz.unit(lambda p, x: function(x @ p["w"]).tanh())

    def rank_main(rank: int) -> None:
        step = act(fz.train_step(lambda p, x: unit(p["blocks"][0], x).square().sum(), fz.sgd(1.0)))
        state = step.init({"blocks": [{"w": W}]})
        out, pull = step.vjp(state, X)
        one = torch.ones_like(out)
        with pytest.raises(ValueError, match="told to"):
            (pull.inputs if half else pull)(one, retain_graph=retains)
        fails.clear()
        if retains:
            with pytest.raises(RuntimeError, match=r"Call inputs\(cotangent\) first"):
                pull.params()
        else:
            with pytest.raises(RuntimeError, match="was used up by an earlier call"):
                pull(one)
            out, pull = step.vjp(state, X)
        want = torch.func.grad(lambda w: (X @ w).tanh().square().sum())(W)
        pull.inputs(one, retain_graph=True)
        for grads in (pull.params(), pull(one)[0]):
            torch.testing.assert_close(fz.gather(grads)["blocks"][0]["w"], want)

    run_ranks(rank_main, 1)


@pytest.mark.parametrize("mistake", ["write", "cotangent"])
def test_others_are_told_of_a_pullback_that_one_rank_refuses(mistake: str) -> None:
    unit = fz.unit(lambda p, x: (x @ p["w"]).tanh())

    def rank_main(rank: int) -> str:
        step = fz.shard_zero3(fz.train_step(lambda p, x, y: (unit(p["blocks"][0], x) * y).sum(), fz.sgd(1.0)))
        y = X.clone()
        out, pull = step.vjp(step.init({"blocks": [{"w": W}]}), X, y)
        cotangent = torch.ones_like(out)
        if rank == 0 and mistake == "write":
            y.mul_(2)
        elif rank == 0:
            cotangent = torch.ones(3, dtype=F64)
        try:
            pull(cotangent)
        except (RuntimeError, ValueError, TypeError) as error:
            if rank:
                return str(error)
            with pytest.raises(RuntimeError):  # which the other one waits for
                fz.gather(step.init({"blocks": [{"w": W}]}).params)
        return ""

    assert "on rank 0 a pullback failed with" in run_ranks(rank_main, 2, timeout=20)[1]


@pytest.mark.parametrize("act", [lambda step: step, fz.remat, fz.shard_zero3])
@pytest.mark.parametrize("argnums", [(), (0,)])
def test_inputs_of_inference_mode(act: Any, argnums: tuple[int, ...]) -> None:
    """Features of a frozen encoder, say."""
    with torch.inference_mode():
        features = X * 1.0
    unit = fz.unit(lambda p, x: (x @ p["w"]).tanh())

    def rank_main(rank: int) -> Any:
        step = act(fz.train_step(lambda p, x: unit(p["blocks"][0], x).square().sum(), fz.sgd(1.0)))
        out, pull = step.vjp(step.init({"blocks": [{"w": W}]}), features, argnums=argnums)
        grads, cotangents = pull(torch.ones_like(out))
        return fz.gather(grads)["blocks"][0]["w"], cotangents[0]

    want = torch.func.grad(lambda w, x: (x @ w).tanh().square().sum(), (0, 1))(W, X)
    ((grad, cotangent),) = run_ranks(rank_main, 1)
    torch.testing.assert_close(grad, want[0])
    if argnums:
        torch.testing.assert_close(cotangent, want[1])


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("act", [lambda step: step, fz.remat, fz.shard_zero3])
def test_what_a_pullback_returns_of_what_is_not_used_may_be_written_to(act: Any, create_graph: bool) -> None:
    def rank_main(rank: int) -> None:
        unit = fz.unit(lambda p, x: (x @ p["w"]).tanh())
        step = act(fz.train_step(lambda p, x, y: unit(p["blocks"][0], x).square().sum(), fz.sgd(1.0)))
        state = step.init({"blocks": [{"w": W}], "unused": W})
        out, pull = step.vjp(state, X, X.clone())
        grads, cotangents = pull(torch.ones_like(out), create_graph=create_graph)
        with torch.no_grad():
            assert torch.equal(cotangents[1].add_(1), torch.ones_like(X))
            for buffer in grads.buffers.values():
                buffer.add_(1)
            assert torch.equal(fz.gather(grads)["unused"], torch.ones_like(W))

    run_ranks(rank_main, 1)
