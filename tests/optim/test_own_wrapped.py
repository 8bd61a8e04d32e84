"""Updates of the user's own around those of this library, and in the place of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from nightly import in_turns

import fzero as fz
from fzero.testing import assert_trees_close, assert_trees_equal

PARAMS = {"a": torch.ones(4, 4), "b": torch.ones(3)}
OPTIMIZERS: dict[str, Callable[[], fz.GradientTransformation]] = {
    "adamw": lambda: fz.adamw(0.1),
    "sgd": lambda: fz.sgd(0.1, momentum=0.9),
    "lion": lambda: fz.lion(0.1),
    "lamb": lambda: fz.lamb(0.1),
    "adafactor": lambda: fz.adafactor(0.1),
    "from_torch": lambda: fz.from_torch(torch.optim.NAdam, 0.1),
    "clip": lambda: fz.clip_by_global_norm(0.1),
    "clip by block": lambda: fz.clip_by_block_norm(0.1),
    "clip by value": lambda: fz.clip_by_value(0.1),
    "adaptive clip": lambda: fz.adaptive_clip(0.1),
    "noise": lambda: fz.gradient_noise(0.1),
    "chain": lambda: fz.chain(fz.clip_by_global_norm(0.1), fz.adamw(0.1)),
    "partition": lambda: fz.partition({"a": fz.muon(0.1), "*": fz.sgd(0.1)}),
}


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x * (p["a"].square().sum() + p["b"].sum())


def trained(optimizer: fz.GradientTransformation) -> Any:
    step = fz.train_step(loss, optimizer)
    state, _ = step(step.init(PARAMS), torch.ones(()))
    return fz.gather(state.params)


@in_turns(2)
@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_a_wrapper_passes_on_all_that_it_is_given(kind: str, declared: bool) -> None:
    inner = OPTIMIZERS[kind]()

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return inner.update(grads, state, params, **{"joint_norm": None, "another": 1, **extra})

    wrapped = fz.GradientTransformation(inner.init, update, label=inner.label, elementwise=declared)
    if kind == "partition":
        with pytest.raises(TypeError, match="partition: got a tree of type dict, expected the trees of a step"):
            trained(wrapped)
        return
    if declared and kind in ("adafactor", "adaptive clip", "clip by block", "from_torch", "lamb", "noise"):
        with pytest.raises(ValueError, match="inside an optimizer that is declared elementwise"):
            trained(wrapped)
        return
    assert_trees_close(trained(wrapped), trained(inner), rtol=1e-5)


@pytest.mark.parametrize("kind", ["adamw", "sgd", "lion", "adafactor", "chain"])
def test_another_update_with_what_a_step_runs_for_the_first_is_refused(kind: str) -> None:
    inner = OPTIMIZERS[kind]()
    other = inner._replace(update=fz.clip_by_value(1.0).update)
    makers: list[Callable[[], object]] = [
        lambda: fz.train_step(loss, other),
        lambda: fz.chain(fz.clip_by_value(1.0), other),
        lambda: fz.partition({"*": other}),
        lambda: fz.whole(other),
    ]
    for make in makers:
        with pytest.raises(ValueError, match=r"than its own, which .*(fused|paused) would run in its place"):
            make()


def test_another_update_with_the_init_of_one() -> None:
    inner = fz.sgd(0.1)
    signs = lambda g, s, p: (optree.tree_map(torch.Tensor.neg, optree.tree_map(torch.sign, g)), s)
    for own in (fz.GradientTransformation(inner.init, signs), inner._replace(update=signs)):
        assert_trees_equal(trained(own), {k: x - 1 for k, x in PARAMS.items()})
