"""What is around a call: other threads, inference mode, a default device, generators that are closed, forks."""

from __future__ import annotations

import concurrent.futures
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from failing import X, begun, model
from nightly import in_turns

import fzero as fz
from fzero.stores.transfer import Read
from fzero.testing import assert_trees_equal, hazards, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:fz.offload to 'host'")
LOSS, PARAMS = model()
ONE = torch.ones(())


# ways in which a run keeps something between its units
WAYS: dict[str, Callable[[fz.Step, fz.Disk], fz.Step]] = {
    "plain": lambda step, disk: step,
    "remat": lambda step, disk: fz.remat(step),
    "accumulated": lambda step, disk: fz.accumulate(step, 2),
    "params on the host": lambda step, disk: fz.offload(step, params="host"),
    "activations on a disk": lambda step, disk: fz.offload(step, activations=disk),
    "all on a disk": lambda step, disk: fz.remat(
        fz.offload(step, params=disk, grads=disk, moments=disk, activations=disk)
    ),
}


def made(way: str, path: Path) -> tuple[fz.Step, fz.TrainState]:
    step = WAYS[way](fz.train_step(LOSS, fz.adamw(1e-2)), fz.Disk(path))
    return step, begun(step)


# ---- threads


def in_threads(call: Callable[[], Any], count: int = 24) -> list[Any]:
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        return [future.result() for future in [pool.submit(call) for _ in range(count)]]


@pytest.mark.parametrize("way", WAYS)
def test_one_pullback_in_several_threads(way: str, tmp_path: Path) -> None:
    step, state = made(way, tmp_path)
    _, pullback = step.vjp(state, X)
    expected = fz.gather(pullback(ONE, retain_graph=True)[0])
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for grads in in_threads(lambda: fz.gather(pullback(ONE, retain_graph=True)[0])):
            assert_trees_equal(grads, expected)
    finally:
        sys.setswitchinterval(switch)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "accumulated"])
def test_one_tape_in_several_threads(way: str, tmp_path: Path) -> None:
    step, state = made(way, tmp_path)
    inputs = X.clone().requires_grad_()
    with fz.tape(step, state) as model:
        loss = model(inputs)
        pulled = lambda: torch.autograd.grad(loss, inputs, retain_graph=True)[0]
        expected = pulled()
        for found in in_threads(pulled):
            assert torch.equal(found, expected)


# ---- modes


VERBS: dict[str, Callable[[fz.Step, Any, Any], object]] = {
    "step": lambda step, state, g: fz.gather(step(state, X)[0].params),
    "vjp": lambda step, state, g: fz.gather(step.vjp(state, X)[1](ONE)[0]),
    "hvp": lambda step, state, g: fz.gather(fz.hvp(step, state, g, X)),
    "per_example_grads": lambda step, state, g: fz.per_example_grads(step, state, X),
    "tape": lambda step, state, g: fz.tape(step, state).__enter__(),
    "pullback": lambda step, state, g: PULLBACKS[0](ONE),
    "update": lambda step, state, g: fz.gather(step.update(state, g)[0].params),
    "add_grads": lambda step, state, g: fz.gather(step.update(step.add_grads(state, g), g)[0].params),
    "convert": lambda step, state, g: fz.gather(fz.convert(state, step).moments),
    "forward": lambda step, state, g: step.forward(state, X),
    "gather": lambda step, state, g: fz.gather(state.params),
    "norm": lambda step, state, g: fz.global_norm(g),
    "leaves": lambda step, state, g: optree.tree_leaves(state),
}
PULLBACKS: list[Any] = []
DIFFERENTIATE = ("step", "vjp", "hvp", "per_example_grads", "tape", "pullback")


@in_turns(2)
@pytest.mark.parametrize("way", WAYS)
def test_in_inference_mode_a_call_is_equal_or_refused(way: str, tmp_path: Path) -> None:
    step, state = made(way, tmp_path)
    grads = step.vjp(state, X)[1](ONE)[0]
    PULLBACKS[:] = [step.vjp(state, X)[1]]
    for name, verb in VERBS.items():
        if name in DIFFERENTIATE:
            with torch.inference_mode(), pytest.raises(RuntimeError, match=r"inside torch.inference_mode\(\)"):
                verb(step, state, grads)
            continue
        with torch.inference_mode():
            out: Any = verb(step, state, grads)
        assert_trees_equal(out, verb(step, state, grads))
        assert name in ("forward", "leaves", "norm") or not any(leaf.is_inference() for leaf in optree.tree_leaves(out))
    PULLBACKS.clear()
    with torch.inference_mode():
        other = step.init(PARAMS)
    assert_trees_equal(fz.gather(step(other, X)[0].params), fz.gather(step(step.init(PARAMS), X)[0].params))


def test_ranks_are_refused_alike_in_inference_mode() -> None:
    def rank_main(rank: int) -> None:
        step = fz.shard_zero3(fz.train_step(LOSS, fz.adamw(1e-2)))
        state = step.init(PARAMS)
        with torch.inference_mode(), pytest.raises(RuntimeError, match=r"say torch.no_grad"):
            step(state, X)

    run_ranks(rank_main, 2)


@in_turns(3)
@pytest.mark.parametrize("way", WAYS)
def test_a_default_device_is_the_functions_alone(way: str, tmp_path: Path) -> None:
    """On "meta" any tensor that the library makes without saying where would have no values."""
    step, state = made(way, tmp_path)
    grads = step.vjp(state, X)[1](ONE)[0]
    for name in ("update", "add_grads", "convert", "gather", "norm", "leaves", "step", "forward", "vjp", "hvp"):
        with torch.device("meta"):
            out: Any = VERBS[name](step, state, grads)
        assert_trees_equal(out, VERBS[name](step, state, grads))


# ---- a tape that is left elsewhere


def test_a_tape_that_a_generator_leaves_touches_nothing_else() -> None:
    step = fz.train_step(LOSS, fz.adamw(1e-2))
    state = begun(step)

    def suspended() -> Iterator[object]:
        with fz.tape(step, state) as model:
            yield model(X)

    mode = torch.overrides.BaseTorchFunctionMode()
    for how in ("close", "drop", "throw"):
        generator = suspended()
        next(generator)
        with torch.autocast("cpu"), mode:
            if how == "close":
                generator.close()  # type: ignore[attr-defined]
            elif how == "throw":
                with pytest.raises(KeyboardInterrupt):
                    generator.throw(KeyboardInterrupt)  # type: ignore[attr-defined]
            del generator
            assert torch.is_autocast_enabled("cpu") and (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
            assert torch.overrides._get_current_function_mode_stack() == [mode]  # type: ignore[attr-defined]


# ---- forks


@pytest.mark.parametrize("ends", ["exits", "goes on", "raises"])
def test_a_child_forked_inside_the_function_does_not_wait_for_threads(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that read what is on its way are the parent's."""
    slow, real = [False], Read.move
    children: list[int] = []

    def move(self: Read, *given: Any) -> None:
        time.sleep(0.2 if slow[0] else 0)
        real(self, *given)

    monkeypatch.setattr(Read, "move", move)
    count = [0]
    block = fz.unit(lambda p, x: torch.tanh(x @ p["w"]))

    def forks(p: Any, x: torch.Tensor) -> torch.Tensor:
        for number, own in enumerate(p["blocks"]):
            x = block(own, x)
            if number == 0 and slow[0]:
                children.append(os.fork())
                if not children[-1] and ends == "exits":
                    sys.exit(7)
                if not children[-1] and ends == "raises":
                    raise ValueError("in the child")
        count[0] += 1
        return (x @ p["head"]).square().mean()

    step = fz.offload(fz.train_step(forks, fz.adamw(1e-2)), params=fz.Disk(tmp_path, threads=1))
    state = step.init(PARAMS)
    expected = step.forward(state, X)  # the first run keeps to what is at hand
    slow[0] = True
    status = 0
    try:
        out = step.forward(state, X)
    except SystemExit as error:
        status = int(str(error.code))
    except ValueError:
        status = 8
    except RuntimeError as error:
        status = 9 if "was forked from" in str(error) else 10
    finally:
        if not children[-1]:
            os._exit(status)
    slow[0] = False
    assert torch.equal(out, expected)
    end = time.monotonic() + 30
    while not (done := os.waitpid(children[-1], os.WNOHANG))[0]:
        assert time.monotonic() < end, "the child waits for threads that it does not have"
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(done[1]) == {"exits": 7, "raises": 8, "goes on": 9}[ends]


def test_hazards_in_threads() -> None:
    """The same on ranks whose gathers arrive late."""

    def rank_main(rank: int) -> None:
        step = fz.shard_zero3(fz.train_step(LOSS, fz.adamw(1e-2)))
        state = step.init(PARAMS)
        _, pullback = step.vjp(state, X)
        expected = fz.gather(pullback(ONE, retain_graph=True)[0])
        again: list[Any] = []
        thread = threading.Thread(target=lambda: again.append(pullback(ONE)[0]))
        thread.start()
        thread.join()
        assert_trees_equal(fz.gather(again[0]), expected)

    with hazards(3):
        run_ranks(rank_main, 1)
