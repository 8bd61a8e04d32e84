"""fz.donate: the state passed in is overwritten, and says who took it."""

from __future__ import annotations

import concurrent.futures
import copy
import re
import sys
import threading
import warnings
from typing import Any

import optree
import pytest
import scenarios
import torch
from memories import MEMORIES
from nightly import in_turns

import fzero as fz
from fzero.update.update import Decision

F64 = torch.float64


def test_the_old_state_is_dead_and_its_memory_the_new_ones() -> None:
    loss, params = scenarios.stack()
    step, batch = fz.donate(fz.train_step(loss, fz.adamw(1e-2))), scenarios.vector_batches(1)[0]
    old: Any = step.init(params)
    pointers = {leaf.data_ptr() for leaf in optree.tree_leaves(old)}
    new: Any = step(old, *batch)[0]
    assert {leaf.data_ptr() for leaf in optree.tree_leaves(new)} == pointers
    held: Any = step.init(params)
    tree, (_, pullback) = held.params, step.vjp(held, *batch)
    with pytest.warns(UserWarning, match=r"still held elsewhere \(that of leaf '"):  # the pullback holds it
        step(held, *batch)
    for use in (
        *(lambda: old.params, lambda: step(old, *batch), lambda: fz.gather(old.moments), lambda: old.extra),
        *(lambda: step.forward(held, *batch), lambda: tree["head.w"], lambda: fz.gather(tree)),
        lambda: pullback(torch.ones((), dtype=F64)),
    ):
        with pytest.raises(RuntimeError, match="donated to the step that applied update 1"):
            use()


@pytest.mark.parametrize("memory", [None, *MEMORIES], ids=["device", "host", "disk"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_nobody_else_uses_a_state_while_it_is_overwritten(fused: bool, memory: Any) -> None:
    """A run that has begun before keeps its values; one that begins meanwhile is refused."""
    met: list[str] = []
    seen: list[Any] = []
    pulled: list[Any] = []

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        if met and fused:
            for use in (lambda: state.params, lambda: step.forward(state, x), lambda: earlier[1](torch.ones(()))):
                with pytest.raises(RuntimeError) as error:
                    use()
                seen.append(error.value)
        return (p["w"] * x).square().sum()

    step = fz.donate(fz.train_step(loss, fz.adamw(0.1)))
    step = fz.fuse_update(step, norm="held") if fused else step
    if memory is not None:
        step = fz.offload(step, params=memory, moments=memory)
    x = torch.ones(64)
    state = step.init({"w": torch.ones(64)})
    sibling = state.replace(step=5)
    copied = copy.copy(state.params)
    earlier = step.vjp(state, x)
    met.append("the step")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # copies where it is held
        new, _ = step(state, x)
    met.clear()
    for error in seen:
        assert "is donated to the step that is applying update 1" in str(error)
    with pytest.raises(RuntimeError, match="was donated to the step that applied update 1"):
        step.forward(state, x)
    pulled.append(fz.gather(step.vjp(sibling, x)[1](torch.ones(()))[0]))
    assert torch.equal(pulled[0]["w"], 2 * x), "a sibling keeps its values"
    assert torch.equal(copied["w"], x), "and a copy of a tree"
    assert not torch.equal(fz.gather(new.params)["w"], x)


def test_a_donated_state_lives_where_the_step_fails_before_it_writes() -> None:
    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        if x.isnan().any():
            raise ZeroDivisionError
        return (p["w"] * x).square().sum()

    for fuse in (lambda step: step, fz.fuse_update):
        step = fuse(fz.donate(fz.train_step(loss, fz.adamw(0.1))))
        state = step.init({"w": torch.ones(4)})
        with pytest.raises(ZeroDivisionError):
            step(state, torch.full((4,), torch.nan))
        assert torch.equal(fz.gather(state.params)["w"], torch.ones(4))
        step(state, torch.ones(4))


def test_a_state_that_was_overwritten_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails behind the last group: here what the step returned beside its loss, and an interrupt."""

    def fn(p: Any, x: torch.Tensor) -> Any:
        return (p["w"] * x).square().sum(), x[:, : 1 + int(x[0, 0] > 0)]  # another shape in each microbatch

    def interrupted(*_: object) -> Any:
        raise KeyboardInterrupt

    x = torch.tensor([[1.0, 1.0], [-1.0, 1.0]])
    plain = fz.donate(fz.accumulate(fz.train_step(fn, fz.adamw(0.1), has_aux=True), 2))
    for step in (plain, fz.fuse_update(plain), fz.fuse_update(plain, norm="held")):
        state = step.init({"w": torch.ones(2)})
        with pytest.raises(ValueError, match="aux of the microbatches"):
            step(state, x)
        with pytest.raises(RuntimeError, match="This state was donated to"):
            fz.gather(state.params)
        with monkeypatch.context() as patch:
            patch.setattr(Decision, "next_state", interrupted)
            state = step.init({"w": torch.ones(2)})
            with pytest.raises(KeyboardInterrupt):
                step(state, x.abs())
            with pytest.raises(RuntimeError, match=r"had begun with 1 of its 1 groups, among them that of leaf 'w'"):
                fz.gather(state.params)


@in_turns(2)
@pytest.mark.filterwarnings("ignore:fz.donate")  # what the other one holds is copied
@pytest.mark.parametrize("memory", [None, *MEMORIES], ids=["device", "host", "disk"])
def test_one_of_two_threads_is_given_the_next_state(memory: Any) -> None:
    step = fz.donate(fz.train_step(lambda p, x: (p["w"] * x).square().sum(), fz.adamw(0.1)))
    step = fz.offload(step, params=memory, moments=memory) if memory is not None else step
    x, before = torch.ones(64), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(30):
            state, barrier = step.init({"w": torch.ones(64)}), threading.Barrier(2)
            grads, _ = step.vjp(state, x)[1](torch.ones(()))

            def run(_: int, state: Any = state, grads: Any = grads, barrier: Any = barrier) -> Any:
                barrier.wait()
                try:
                    return step.update(state, grads)[0]
                except RuntimeError as error:
                    assert re.search(r"This state (is|was) donated to the step", str(error))

            with concurrent.futures.ThreadPoolExecutor(2) as threads:
                found = [new for new in threads.map(run, range(2)) if new is not None]
            assert len(found) == 1 and torch.allclose(fz.gather(found[0].params)["w"], torch.full((64,), 0.899))
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_state_without_anything_to_train_is_donated(fused: bool) -> None:
    loss, params = scenarios.stack()
    step: Any = fz.donate(fz.freeze(fz.train_step(loss, fz.adamw(1e-2)), "*"))
    step, batch = fz.fuse_update(step) if fused else step, scenarios.vector_batches(1)[0]
    old = step.init(params)
    new, metrics = step(old, *batch)
    assert new.step == 1
    assert float(metrics["grad_norm"]) == 0
    with pytest.raises(RuntimeError, match="donated to the step that applied update 1"):
        old.params  # noqa: B018
