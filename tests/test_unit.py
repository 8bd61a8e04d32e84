"""fz.unit around a function: the same numbers inside a step and outside of one."""

from __future__ import annotations

import torch

import fzero as fz
from fzero.testing import run_ranks


@fz.unit
def layer(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """A layer."""
    return torch.tanh(x * p["w"])


PARAMS, X = {"w": torch.tensor([0.5, 2.0])}, torch.tensor([1.0, -1.0])


def test_it_is_the_function_and_keeps_its_name() -> None:
    assert torch.equal(layer(PARAMS, X), torch.tanh(X * PARAMS["w"]))
    assert layer.__name__ == "layer" and layer.__doc__ == "A layer."
    step = fz.remat(fz.train_step(lambda p, x: layer(p["a"], x).sum(), fz.sgd(0.1)))
    state = step.init({"a": PARAMS})
    grads, _ = step.vjp(state, X)[1](torch.ones(()))
    want = torch.func.grad(lambda p: layer(p, X).sum())(PARAMS)
    torch.testing.assert_close(fz.gather(grads)["a"]["w"], want["w"])


def test_inputs_of_inference_mode_in_steady_calls() -> None:
    """They count no writes."""

    def rank_main(rank: int) -> None:
        block = fz.unit(lambda q, x: torch.tanh(x @ q["w"]))
        step = fz.shard_zero3(fz.train_step(lambda p, x: block(p["blocks"][0], x).sum(), fz.sgd(0.1)))
        state = step.init({"blocks": [{"w": torch.eye(4)}]})
        with torch.inference_mode():
            x = torch.ones(2, 4)
        for _ in range(3):
            with torch.inference_mode():
                torch.testing.assert_close(step.forward(state, x), torch.tanh(torch.ones(2, 4)).sum())
            out, pullback = step.vjp(state, x)
            pullback(torch.ones_like(out))

    run_ranks(rank_main, 2)
