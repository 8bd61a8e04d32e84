"""fz.unit around a function: the same numbers inside a step and outside of one."""

from __future__ import annotations

import pytest
import torch

import fzero as fz


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


def test_only_functions_are_units() -> None:
    with pytest.raises(TypeError, match=r"unit: got fn="):
        fz.unit(3)  # type: ignore[arg-type]
