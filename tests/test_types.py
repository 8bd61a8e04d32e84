"""What an editor knows of what the public functions return: held by pyright (`make lint`), and true at run time."""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

import torch
from torch import Tensor

import fzero as fz


@fz.unit
def block(p: dict[str, Tensor], x: Tensor, scale: float = 1.0) -> Tensor:
    return torch.tanh(x @ p["w"]) * scale


def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return block(p, x, scale=2.0).mean()


def test_what_is_returned_has_its_type(tmp_path: Path) -> None:
    params, x = {"w": torch.ones(3, 3)}, torch.ones(2, 3)
    step = assert_type(fz.remat(fz.accumulate(fz.train_step(loss, fz.sgd(0.1), has_aux=False), 1)), fz.Step)
    state = assert_type(step.init(params), fz.TrainState)
    assert isinstance(state, fz.TrainState)

    outputs, pullback = step.vjp(state, x)
    assert isinstance(assert_type(pullback, fz.Pullback), fz.Pullback)
    grads, cotangents = pullback(torch.ones_like(outputs))
    assert isinstance(assert_type(grads, fz.Sharded), fz.Sharded)
    assert len(assert_type(cotangents, tuple[Any, ...])) == 1

    new, metrics = step(state, x)
    assert isinstance(assert_type(new, fz.TrainState), fz.TrainState)
    given: dict[str, Tensor] = metrics
    for name in given:
        assert isinstance(assert_type(metrics[name], Tensor), Tensor)
    assert isinstance(assert_type(step.update(state, grads)[1]["grad_norm"], Tensor), Tensor)
    assert isinstance(assert_type(fz.scan(step, state, [x])[1]["loss"], Tensor), Tensor)
    for _, each in fz.loop(step, state, [x], progress=False):
        assert isinstance(assert_type(each["loss"], Tensor), Tensor)

    assert [*assert_type(fz.gather(state.params, "w"), dict[str, Tensor])] == ["w"]
    again = assert_type(fz.scatter(fz.gather(state.params), like=state.params), fz.Sharded)
    assert isinstance(again, fz.Sharded)
    assert isinstance(assert_type(block(params, x), Tensor), Tensor) and block.__name__ == "block"
    assert assert_type(fz.testing.run_ranks(lambda rank: str(rank), 2), list[str]) == ["0", "1"]

    fz.save(tmp_path, state)
    assert isinstance(assert_type(fz.load(tmp_path, step), fz.TrainState), fz.TrainState)


def test_aux_has_the_type_that_its_function_gives() -> None:
    step = fz.train_step(lambda p, x: (p["w"] * x, {"rows": [1, 2]}), fz.sgd(0.1), None, None, True, ("leaf_norms",))
    state = step.init({"w": torch.ones(())})
    _, pullback, aux = step.vjp(state, torch.ones(()))
    assert isinstance(assert_type(pullback, fz.Pullback), fz.Pullback) and aux["rows"] == [1, 2]
    metrics = step(state, torch.ones(()))[1]
    assert metrics["aux"]["rows"] == [1, 2] and metrics["leaf_norms"]["params"].keys() == {"w"}


def pipelines_too(pipe: fz.Pipeline, state: fz.PipelineState, path: str) -> None:
    new, metrics = pipe(state, torch.ones(2))
    assert_type(new, fz.PipelineState)
    assert_type(metrics["loss"], Tensor)
    assert_type(fz.load(path, pipe), fz.PipelineState)
