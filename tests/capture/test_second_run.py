"""What surrounds a second run of a unit is what surrounded its first, or it is refused; nothing caught is lost."""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import itertools
import os
import random
import sys
import time
import types
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from units import F64, SHARDS, X, block_of, params_of, refused

import fzero as fz
from fzero.base import intercept
from fzero.testing import assert_trees_close, run_ranks


def test_an_iterator_that_a_second_run_would_advance() -> None:
    numbers = itertools.count()
    refused(
        block_of(lambda q, x: x @ q["w"] * next(numbers)), TypeError, "reaches a count, and runs again.*Keep a list"
    )


def test_a_long_list_that_a_second_run_would_lengthen() -> None:
    log = [0.0] * 5000
    fn = block_of(lambda q, x: log.append(1.0) or x @ q["w"])
    refused(fn, TypeError, "changes a list of more than 4096 entries, and runs again")


def test_a_dict_whose_keys_are_tensors() -> None:
    scale: dict[torch.Tensor, float] = {}
    unit = fz.unit(lambda q, x: x @ q["w"] * scale.get(x, 1.0))

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        scale[x] = 2.0
        return unit(p["blocks"][0], x).mean()

    refused(fn, TypeError, "a dict whose keys are tensors.*Take names or numbers")


def test_a_tensor_that_is_changed_between_two_runs() -> None:
    running = torch.zeros(4, dtype=F64)
    unit = fz.unit(lambda q, x: torch.tanh(x @ q["w"] + running))

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        for q in p["blocks"]:
            x = unit(q, x)
            running.add_(1.0)  # torch.func refuses this itself
        return x.mean()

    step = fz.remat(fz.train_step(fn, fz.sgd(0.1)))
    match = "closes over was changed in place after it was called.*assign another tensor"
    with fz.tape(step, step.init(params_of())) as model, pytest.raises(ValueError, match=match):
        model(X).backward()


@pytest.mark.parametrize("shard", [fz.shard_zero3, fz.remat])
def test_a_tensor_that_a_run_has_changed_before_it_is_begun_anew(shard: Any) -> None:
    running = torch.zeros(4, dtype=F64)

    def body(q: Any, x: torch.Tensor) -> torch.Tensor:
        running.add_(1.0)
        return torch.tanh(x.mul_(2.0) @ q["w"] + running)  # that the input is changed shows only now

    match = r"Unit 'blocks\.0' changes a tensor in place that it closes over, of shape \(4,\), and runs again"
    refused(block_of(body), ValueError, match, shard)


def test_inputs_in_a_long_list() -> None:
    unit = fz.unit(lambda q, x, of: torch.tanh(x @ q["w"]) * torch.stack(of).mean())

    def fn(p: Any, x: torch.Tensor, long: bool) -> torch.Tensor:
        return unit(p["blocks"][0], x, [*p["s"].expand(4200 if long else 2).unbind()]).square().mean()

    step = fz.remat(fz.train_step(fn, fz.sgd(0.1)))
    state = step.init(params_of())
    step.vjp(state, X, False)
    grads = fz.gather(step.vjp(state, X, True)[1](torch.ones((), dtype=F64))[0])
    assert_trees_close(grads, torch.func.grad(fn)(params_of(), X, True), rtol=1e-10)


def test_what_begins_unseen_in_a_later_step() -> None:
    """By a way that nothing looks through: what is differentiated shows itself."""
    variable: contextvars.ContextVar[Any] = contextvars.ContextVar("variable")
    views = fz.unit(lambda q, x, of: torch.tanh(x @ q["w"]) * sum(of, start=1.0))
    by_variable = fz.unit(lambda q, x: torch.tanh(x @ q["w"]) * variable.get())

    def in_a_view(p: Any, x: torch.Tensor, begins: bool) -> torch.Tensor:
        return views(p["blocks"][0], x, ({"s": p["s"]} if begins else {}).values()).mean()

    def in_a_variable(p: Any, x: torch.Tensor, begins: bool) -> torch.Tensor:
        variable.set(p["s"] * 2 if begins else 1.0)
        return by_variable(p["blocks"][0], x).mean()

    for fn in (in_a_view, in_a_variable):
        for shard in (fz.remat, fz.shard_zero3):

            def rank_main(rank: int, fn: Any = fn, shard: Any = shard) -> None:
                step = shard(fz.train_step(fn, fz.sgd(0.1)))
                state = step.init(params_of())
                for _ in range(2):
                    step(state, X, False)
                with pytest.raises(ValueError, match=r"closes over a tensor .*Pass this tensor"):
                    step(state, X, True)
                step(state, X, False)

            run_ranks(rank_main, 1)


def test_a_view_of_an_input_in_place() -> None:
    refused(block_of(lambda q, x: x.unsqueeze_(0)[0] @ q["w"]), ValueError, "another shape in place.*not in place")


def test_a_unit_that_tells_the_time() -> None:
    began = time.monotonic()
    fn = block_of(lambda q, x: x @ q["w"] * (1 + time.monotonic() - began))
    refused(fn, ValueError, "did something else when it ran again.*no clock")


@pytest.fixture
def library(monkeypatch: Any) -> Any:
    """A module that is none of the user's own, so that nobody looks into it."""
    made: Any = types.ModuleType("somebodys_library")
    made.__file__ = "site-packages/somebodys_library.py"
    code = "import itertools, random\ncount = itertools.count()\ndef turn():\n    return next(count)\n"
    exec(code + "def draw():\n    return random.random()", vars(made))
    monkeypatch.setitem(sys.modules, "somebodys_library", made)
    return made


@pytest.mark.parametrize("dims", [0, 1])
def test_a_hidden_order_of_entries(library: Any, dims: int) -> None:
    """Which no plain sum tells apart."""
    fn = block_of(lambda q, x: torch.tanh(x @ q["w"]).roll(library.turn() % 3, dims))
    step = fz.remat(fz.train_step(fn, fz.sgd(0.1)))
    with pytest.raises(ValueError, match="did something else when it ran again"):
        step(step.init(params_of()), X)


def test_a_library_that_begins_to_checkpoint() -> None:
    """What its unit had done by then is not known, but the next call of the step notes it."""
    library = types.ModuleType("library")
    code = "import torch.utils.checkpoint as c\nmul = lambda x, w: c.checkpoint(x.matmul, w, use_reentrant=False)"
    exec(code, vars(library))
    calls = [0]

    def body(q: Any, x: torch.Tensor, begins: bool) -> torch.Tensor:
        calls[0] += 1
        return (getattr(library, "mul")(x, q["w"]) if begins else x @ q["w"]) * calls[0]  # noqa: B009

    unit = fz.unit(body)

    def fn(p: Any, x: torch.Tensor, begins: bool) -> torch.Tensor:
        calls[0] = 0
        return unit(p["blocks"][0], x, begins).mean()

    step = fz.train_step(fn, fz.sgd(0.1))
    state = step.init(params_of())
    grads_of = lambda begins: fz.gather(step.vjp(state, X, begins)[1](torch.ones((), dtype=X.dtype))[0])
    before = grads_of(False)
    with pytest.raises(TypeError, match="Call the step again with the same state"):
        grads_of(True)
    assert_trees_close(grads_of(True), before, rtol=1e-12)


def test_a_second_run_that_is_another() -> None:
    """What decides lies where nothing is looked for."""
    sys.modules["elsewhere"] = types.ModuleType("elsewhere")
    sys.modules["elsewhere"].runs = 0  # type: ignore[attr-defined]

    def body(q: Any, x: torch.Tensor) -> Any:
        elsewhere: Any = sys.modules["elsewhere"]
        elsewhere.runs += 1
        h = x @ q["w"]
        return (h, h * 2) if elsewhere.runs < 3 else (h,)

    unit = fz.unit(body)
    step = fz.remat(fz.train_step(lambda p, x: sum(o.mean() for o in unit(p["blocks"][0], x)), fz.sgd(0.1)))
    state = step.init(params_of())
    step(state, X)  # the first step: called, and again
    with pytest.raises(ValueError, match=r"Unit 'blocks\.0' did something else when it ran again"):
        sys.modules["elsewhere"].runs = 1  # type: ignore[attr-defined]
        step(state, X)


def test_a_refusal_that_the_function_catches() -> None:
    """It would go on with something else, and nobody would know."""

    def careless(p: Any, x: torch.Tensor) -> torch.Tensor:
        try:
            penalty = (p["blocks"][0]["w"] ** 2).sum()
        except Exception:
            penalty = torch.zeros(())
        return x.square().mean() * p["s"] + penalty

    refused(careless, TypeError, "leaf 'blocks.0.w' belongs to unit 'blocks.0'")

    def writes(q: Any, x: torch.Tensor) -> torch.Tensor:
        try:
            q["w"].mul_(2)
        except Exception:
            pass
        return x @ q["w"]

    refused(block_of(writes), ValueError, "Leaf 'blocks.0.w' is written to in place")


def test_a_checkpoint_around_a_unit() -> None:
    unit = fz.unit(lambda q, x: torch.tanh(x @ q["w"]))

    def rank_main(rank: int, reentrant: bool) -> None:
        def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
            for q in p["blocks"]:
                x = torch.utils.checkpoint.checkpoint(unit, q, x, use_reentrant=reentrant)  # type: ignore[assignment]
            return x.sum()

        step = fz.shard_zero3(fz.train_step(fn, fz.sgd(0.1)))
        state = step.init(params_of())
        match = "A unit is called by torch.utils.checkpoint.*fz.remat"
        with fz.tape(step, state) as model, pytest.raises(TypeError, match=match):
            model(X.clone().requires_grad_()).backward()

    for reentrant in (False, True):
        run_ranks(functools.partial(rank_main, reentrant=reentrant), 2)


@pytest.mark.parametrize("stage", ["ZeRO-1", "ZeRO-3"])
def test_a_checkpoint_around_a_module_under_plain_autograd(stage: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(4, 4, dtype=F64) for _ in range(2)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)  # type: ignore[assignment]
            return x.sum()

    def rank_main(rank: int) -> None:
        apply, params = fz.functional(Net())
        step = (fz.shard_zero1 if stage == "ZeRO-1" else fz.shard_zero3)(fz.train_step(apply, fz.sgd(0.1)))
        state = step.init(params)
        with (
            fz.tape(step, state) as model,
            pytest.raises(TypeError, match=r"called by torch.utils.checkpoint.*fz\.remat"),
        ):
            model(X).backward()

    run_ranks(rank_main, 1)


def test_a_leak_under_plain_autograd_in_a_later_run() -> None:
    sys.modules["elsewhere"] = types.ModuleType("elsewhere")
    elsewhere: Any = sys.modules["elsewhere"]
    runs = [0]

    def body(q: Any, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x @ q["w"])
        if runs[0] > 2:
            setattr(sys.modules["elsewhere"], "h", h * 2)  # noqa: B010
        return h

    unit = fz.unit(body)

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        runs[0] += 1
        h = unit(p["blocks"][0], x)
        return h.sum() if runs[0] < 3 else h.sum() + sys.modules["elsewhere"].h.sum()  # type: ignore[attr-defined]

    elsewhere.h = None
    step = fz.remat(fz.train_step(fn, fz.sgd(0.1)))
    state = step.init(params_of())
    for run in range(3):
        match = "that unit 'blocks.0' computed is used outside of it"
        with fz.tape(step, state) as model, pytest.raises(ValueError, match=match) if run == 2 else nullcontext():
            model(X).backward()


class Noticing:
    """Keeps what it notices beside a tensor that is differentiated."""

    def __init__(self) -> None:
        self.calls, self.norms = 0, list[float]()
        self.h: Any = None


@pytest.mark.parametrize("shard", SHARDS)
def test_what_backward_hooks_write_stays(shard: str) -> None:
    def rank_main(rank: int) -> None:
        seen = Noticing()

        def body(q: Any, x: torch.Tensor) -> torch.Tensor:
            def hook(g: torch.Tensor) -> None:
                seen.calls += 1
                seen.norms.append(float(g.detach().norm()))

            seen.h = torch.tanh(x @ q["w"])
            if seen.h.requires_grad:
                seen.h.register_hook(hook)
            return seen.h

        step = SHARDS[shard](fz.train_step(block_of(body), fz.sgd(0.1)))
        state = step.init(params_of())
        for _ in range(3):
            state, _ = step(state, X)
        assert (seen.calls, len(seen.norms)) == (6, 6)

    run_ranks(rank_main, 1)


def test_a_rank_that_keeps_what_others_let_go() -> None:
    """What is gathered ahead must not depend on what still exists: nobody knows when a rank collects its garbage."""

    def rank_main(rank: int) -> None:
        unit = fz.unit(lambda q, x: torch.tanh(x @ q["w"]))
        kept = []

        def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
            h = unit(p["blocks"][0], x)
            with torch.enable_grad():
                z = h.detach().requires_grad_() if not torch._C._functorch.maybe_current_level() else h  # type: ignore[attr-defined]
                energy = unit(p["blocks"][1], z)
                (slope,) = torch.autograd.grad(energy.sum(), z, retain_graph=True)
            kept.append(energy if rank == 0 else None)
            return unit(p["blocks"][0], unit(p["blocks"][1], h + slope.detach())).square().mean()

        step = fz.shard_zero3(fz.train_step(fn, fz.sgd(0.1)))
        state = step.init(params_of())
        for _ in range(3):
            out, pullback = step.vjp(state, X)
            pullback(torch.ones_like(out))

    run_ranks(rank_main, 2)


def _draws(rank: int, shard: str) -> None:
    """Python's and numpy's own generators, where each rank has its own."""

    def scale() -> float:
        return random.random() + float(np.random.rand())

    @fz.unit
    def unit(q: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ q["w"]) * (random.random() + np.random.rand()) * scale()

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        for q in p["blocks"]:
            x = unit(q, x)
        return x.square().mean() * random.random()

    def begin() -> None:
        random.seed(1)
        np.random.seed(2)

    begin()
    params = params_of()
    wanted = [torch.func.grad(lambda p: fn(p, X))(params) for _ in range(3)]
    begin()
    step = SHARDS[shard](fz.train_step(fn, fz.sgd(0.1)))
    state = step.init(params)
    for grads in wanted:
        out, pullback = step.vjp(state, X)
        assert_trees_close(fz.gather(pullback(torch.ones_like(out))[0]), grads, rtol=1e-10)


@pytest.mark.parametrize("shard", SHARDS)
def test_the_generators_of_python_and_numpy(shard: str) -> None:
    run_ranks(functools.partial(_draws, shard=shard), 2, backend="processes")


def test_the_generators_of_python_and_numpy_on_threads() -> None:
    """All ranks draw from one: nothing tells who drew what."""
    fn = block_of(lambda q, x: x @ q["w"] * random.random())
    refused(fn, TypeError, "draws from the generator of the module random, which all threads share")


def test_sparse_gradients() -> None:
    index = torch.tensor([0, 2, 2])

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(index, p["blocks"][0]["w"], sparse=True).square().sum() * p["s"]

    wanted = torch.func.grad(lambda p: (p["blocks"][0]["w"][index]).square().sum() * p["s"])(params_of())

    def rank_main(rank: int, shard: Any, units: Any) -> None:
        step = shard(fz.train_step(fn, fz.sgd(0.1), units=units))
        with fz.tape(step, step.init(params_of())) as model:
            model(X).backward()
            assert_trees_close(fz.gather(model.grads()), wanted, rtol=1e-12)

    for shard in (lambda step: step, fz.shard_zero2):
        run_ranks(functools.partial(rank_main, shard=shard, units=()), 2)


def test_a_thread_that_has_ended_has_ended() -> None:
    """Or what it leaves behind is destroyed while the interpreter ends, which aborts the process."""
    step = fz.train_step(lambda p, x: (x @ p["blocks"][0]["w"]).sum(), fz.sgd(0.1))
    run_ranks(lambda rank: step.forward(step.init(params_of()), X), 2)
    assert intercept._stashed
    intercept._wait_for_threads()
    assert not any(os.path.exists(f"/proc/self/task/{number}") for number in intercept._stashed)


@dataclasses.dataclass(slots=True, frozen=True)
class Options:
    scale: float = 2.0
    shift: Any = None


class WithOptions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.options = nn.Linear(4, 4, dtype=F64), Options()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * self.options.scale


def test_a_dataclass_with_slots_in_a_module() -> None:
    module = WithOptions()
    apply, params = fz.functional(module)
    assert_trees_close(apply(params, X), module(X).detach())


def test_an_operator_that_reads_memory() -> None:
    """torch.func's tensors have none. In a unit it runs on plain ones."""

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        targets = (x[:1, :1] * 0 + 1).long()
        scores = (x[:, None] * p["s"]).log_softmax(-1)
        return nn.functional.ctc_loss(scores, targets, targets[0] * 3, targets[0])

    params = params_of()
    params["s"].requires_grad_()
    loss(params, X).backward()
    step = fz.train_step(fz.unit(loss), fz.sgd(0.1))
    out, pullback = step.vjp(step.init(params_of()), X)
    assert_trees_close(fz.gather(pullback(torch.ones_like(out))[0])["s"], params["s"].grad)


def test_a_second_run_is_compared_where_a_mode_looked_at_the_first() -> None:
    """As FlopCounterMode does, around the forward only."""
    unit = fz.unit(lambda p, x: torch.sin(x @ p["w"]) * (2.0 if os.environ.get("FZERO_TEST_LATER") else 1.0))
    step = fz.remat(fz.train_step(lambda p, x: unit(p["blocks"][0], x).sum(), fz.sgd(0.1)))
    state = step.init({"blocks": [{"w": torch.eye(3)}]})
    with FlopCounterMode(display=False):
        loss, pullback = step.vjp(state, torch.ones(2, 3))
    os.environ["FZERO_TEST_LATER"] = "1"
    try:
        with pytest.raises(ValueError, match="did something else when it ran again"):
            pullback(torch.ones_like(loss))
    finally:
        del os.environ["FZERO_TEST_LATER"]
