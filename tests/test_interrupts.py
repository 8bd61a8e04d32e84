"""What a user's function raises, Ctrl-C too, ends a step: it leaves nothing behind, the next gives the same numbers."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from interrupts import Points, thread_state
from nightly import by_day, in_turns
from torch import nn

import fzero as fz
from fzero.engine.traversal import Traversal

X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(6, 6, dtype=torch.float64), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(torch.relu(self.linear(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, dtype=torch.float64)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return (x**2).mean()


def plain(path: Path) -> tuple[fz.Step, Any]:
    layer = fz.unit(lambda p, x: torch.tanh(x @ p["w"]) + 0.1 * torch.rand(()))
    params = {"blocks": [{"w": torch.linspace(-i, i, 36, dtype=torch.float64).reshape(6, 6)} for i in (1, 2, 3)]}

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        for block in p["blocks"]:
            x = layer(block, x)
        return (x**2).mean()

    return fz.train_step(loss, fz.adamw(0.01)), params


def module(path: Path) -> tuple[fz.Step, Any]:
    torch.manual_seed(0)
    apply, params = fz.functional(Model())
    return fz.train_step(apply, fz.adamw(0.01)), params


def away(step: fz.Step, path: Path) -> fz.Step:
    disk = fz.Disk(path, threads=1)
    return fz.offload(step, params=disk, grads=disk, moments=disk, activations=disk)


def trained(step: fz.Step, state: fz.TrainState) -> object:
    return step(state, X)[0].params


def pulled(step: fz.Step, state: fz.TrainState) -> object:
    _, pullback = step.vjp(state, X)
    return step.update(state, pullback(torch.ones((), dtype=torch.float64))[0])[0].params


def taped(step: fz.Step, state: fz.TrainState) -> object:
    with fz.tape(step, state) as model:
        model(X).backward()
        return model.grads()


def curved(step: fz.Step, state: fz.TrainState) -> object:
    _, pullback = step.vjp(state, X)
    return fz.hvp(step, state, pullback(torch.ones((), dtype=torch.float64))[0], X)


def taped_and_caught(step: fz.Step, state: fz.TrainState) -> object:
    """What ends the model's call or its pullback is caught while the tape lasts."""
    caught: BaseException | None = None
    with fz.tape(step, state) as model:
        try:
            model(X).backward()
        except (KeyboardInterrupt, TimeoutError) as error:
            caught = error
        grads = model.grads()
    if caught is not None:
        raise caught
    return grads


Make = Callable[[Path], tuple[fz.Step, Any]]
CASES: dict[str, tuple[Make, Callable[[fz.Step, Path], fz.Step], Callable[[fz.Step, fz.TrainState], object]]] = {
    "step": (plain, lambda step, _: step, trained),
    "module": (module, lambda step, _: fz.remat(step), pulled),
    "tape": (module, lambda step, _: step, taped),
    "tape, caught": (plain, lambda step, _: step, taped_and_caught),
    "hvp": (plain, lambda step, _: step, curved),
    "forward": (plain, lambda step, _: fz.autocast(step, torch.bfloat16), lambda step, state: step.forward(state, X)),
    "fused": (plain, lambda step, _: fz.accumulate(fz.fuse_update(fz.remat(step)), 2), trained),
    "disk": (module, away, trained),
    "disk, fused": (plain, lambda step, path: away(fz.fuse_update(fz.remat(step)), path), trained),
    "disk, donated": (plain, lambda step, path: fz.donate(away(step, path)), trained),
    "host": (plain, lambda step, _: fz.offload(fz.fuse_update(step), params="host", moments="host"), trained),
}


def values(out: Any) -> list[torch.Tensor]:
    tree = fz.gather(out) if hasattr(out, "entries") else out
    return [leaf.detach().clone() for leaf in optree.tree_leaves(tree)]


@in_turns(4)
@pytest.mark.filterwarnings("ignore:fz.offload")
@pytest.mark.parametrize("case", CASES)
def test_what_a_users_function_raises_leaves_everything_as_it_was(case: str, tmp_path: Path) -> None:
    make, transformed, call = CASES[case]
    step, params = make(tmp_path)
    step = transformed(step, tmp_path)
    expected = values(call(step, step.init(params)))
    kept = step.init(params)
    whole, fresh = Points(within=__file__), [step.init(params)]
    whole.during(lambda: call(step, fresh[0]))
    fresh.clear()
    torch.manual_seed(0)
    gc.collect()
    before, threads = thread_state(), set(threading.enumerate())
    runs = sum(isinstance(x, Traversal) for x in gc.get_objects())

    @by_day(6)
    @given(st.integers(2, whole.count), st.sampled_from([KeyboardInterrupt, TimeoutError]))
    def ended(at: int, kind: type[BaseException]) -> None:
        state = step.init(params) if step.donates else kept
        points = Points(at, kind, within=__file__)
        try:
            points.during(lambda: call(step, state))
        except kind:
            pass
        else:
            assert not points.place, f"swallowed at {points.place}"
        now = thread_state()
        left = {name: now.get(name) for name in {*now, *before} if now.get(name) != before.get(name)}
        assert not left, f"{left} after one at {points.place}"
        try:
            again = values(call(step, state))
        except RuntimeError as error:
            assert step.donates and "donated" in str(error), points.place
        else:
            assert all(map(torch.equal, again, expected)), points.place

    ended()
    gc.collect()
    assert sum(isinstance(x, Traversal) for x in gc.get_objects()) == runs
    assert threads.issuperset(threading.enumerate())
