"""Updates in the host's memory beside what computes: the same bits, and errors where they are waited for.

A CPU leaves no cores for it; here it is lent some.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from nightly import by_turns, in_turns

import fzero as fz
from fzero.kernels.build import threads
from fzero.optim import _paused as paused
from fzero.testing import assert_trees_equal, run_ranks
from fzero.update import update as updates
from fzero.update.cpu_worker import begun, spare_cores

pytestmark = pytest.mark.usefixtures("hazards")
X = torch.linspace(-1, 1, 40, dtype=torch.float64).reshape(4, 10)
layer = fz.unit(lambda p, x: torch.tanh(x @ p["w"]) + p["b"])


@pytest.fixture(autouse=True)
def lent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "spare_cores", lambda device: 2)


@pytest.fixture
def memory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    yield fz.Disk(tmp_path) if request.param == "disk" else "host"


def model() -> tuple[Any, Any]:
    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        for block in p["blocks"]:
            x = layer(block, x)
        return (x**2).mean()

    blocks = [
        {"w": torch.linspace(-i, i, 100, dtype=torch.float64).reshape(10, 10), "b": torch.full((10,), 0.1 * i).double()}
        for i in range(1, 6)
    ]
    return loss, {"blocks": blocks}


def running() -> set[threading.Thread]:
    """The threads that run, without those that arrivals wait in inside of hazards, which start when first needed."""
    return {each for each in threading.enumerate() if not each.name.startswith("fzero-hazards")}


def plain(fuse: str | None, clip: bool) -> fz.Step:
    clipped = fz.chain(fz.clip_by_global_norm(0.01), fz.adamw(0.01)) if clip else fz.adamw(0.01)
    step = fz.train_step(model()[0], clipped)
    return fz.fuse_update(step, norm=fuse) if fuse else step


def trained(step: fz.Step, steps: int = 3) -> Any:
    state = step.init(model()[1])
    for _ in range(steps):
        state, _ = step(state, X)
    return fz.gather((state.params, state.moments))


@in_turns(2)
@pytest.mark.filterwarnings("ignore:fz.offload")
@pytest.mark.parametrize(
    ("how", "donates", "memory"),
    by_turns([(None, True), ("auto", False), ("held", True), ("twice", True)], [False, True], ["host", "disk"], of=3),
    indirect=["memory"],
)
def test_the_bits_are_those_of_updates_in_turn(memory: Any, how: tuple[str | None, bool], donates: bool) -> None:
    fuse, clip = how
    step = fz.offload(plain(fuse, clip), params=memory, moments=memory)
    before = threading.active_count()
    assert_trees_equal(trained(fz.donate(step) if donates else step), trained(plain(fuse, clip)))
    gc.collect()
    assert threading.active_count() <= before + 4  # a disk's own


@in_turns(3)
@pytest.mark.filterwarnings("ignore:fz.offload")
@pytest.mark.parametrize("shard", [fz.shard_zero1, fz.shard_zero2, fz.shard_zero3])
def test_what_every_rank_holds_is_gathered_once_it_is_updated(shard: Any) -> None:
    def rank_main(rank: int) -> Any:
        step = shard(fz.offload(plain("auto", False), params="host", moments="host"))
        return trained(step), trained(shard(plain("auto", False)))

    for got, wanted in run_ranks(rank_main, 2):
        assert_trees_equal(got, wanted)


@pytest.mark.filterwarnings("ignore:fz.offload")
def test_a_unit_is_pulled_back_while_the_one_before_is_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    pulled, seen = list[int](), list[tuple[bool, bool, int]]()
    call = paused.call_fused

    def waiting(*given: Any) -> object:
        until, number = time.monotonic() + 10, len(seen) + 1
        while len(pulled) < min(number + 1, 5) and time.monotonic() < until:
            time.sleep(1e-3)
        beside = threading.current_thread() is not threading.main_thread()
        seen.append((beside, len(pulled) >= min(number + 1, 5), threads.get()))
        return call(*given)

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return x.clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

        @staticmethod
        def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            pulled.append(1)
            return cotangent

    noted = fz.unit(lambda p, x: Noted.apply(torch.tanh(x @ p["w"]) + p["b"]))

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        for block in p["blocks"]:
            x = noted(block, x)
        return (x**2).mean()

    step = fz.fuse_update(fz.offload(fz.train_step(loss, fz.adamw(0.01)), params="host", moments="host"))
    state = step.init(model()[1])
    step(state, X)  # the units' first look at themselves
    pulled.clear()
    monkeypatch.setattr(paused, "call_fused", waiting)
    step(state, X)
    assert len(seen) == 5 and all(beside and in_time and lent == 2 for beside, in_time, lent in seen)


@in_turns(3)
@pytest.mark.filterwarnings("ignore:fz.offload")
@pytest.mark.parametrize("at", [0, 2, 4])
@pytest.mark.parametrize("fuse", [None, "auto", "held"])
@pytest.mark.parametrize("donates", [False, True])
def test_an_update_that_fails(fuse: str | None, at: int, donates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    step = fz.offload(plain(fuse, False), params="host", moments="host")
    step = fz.donate(step) if donates else step
    state, call, calls = step.init(model()[1]), paused.call_fused, list[int]()
    wanted = fz.gather(plain(fuse, False)(plain(fuse, False).init(model()[1]), X)[0].params)

    def failing(*given: Any) -> object:
        calls.append(1)
        if len(calls) == at + 1:
            raise MemoryError("no room")
        return call(*given)

    before = running()  # those of another test may be about to end
    with monkeypatch.context() as patch, pytest.raises(MemoryError) as failed:
        patch.setattr(paused, "call_fused", failing)
        step(state, X)
    assert len(calls) == at + 1 and before.issuperset(running())
    if donates:
        assert "This state was donated to update 1, which had begun with" in "".join(failed.value.__notes__)
        with pytest.raises(RuntimeError, match="This state was donated to update 1"):
            step(state, X)
    else:
        assert_trees_equal(fz.gather(step(state, X)[0].params), wanted)


def test_a_thread_raises_what_its_job_did() -> None:
    with ThreadPoolExecutor(1) as thread:
        failing = begun(thread, lambda: 1 // 0, torch.device("cpu"), 1)
        with pytest.raises(ZeroDivisionError):
            failing.result()
        assert begun(thread, torch.is_grad_enabled, torch.device("cpu"), 1).result() is False


def test_a_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spare_cores(torch.device("cpu")) == 0
    alone = spare_cores(torch.device("cuda"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert alone >= spare_cores(torch.device("cuda")) == 1
