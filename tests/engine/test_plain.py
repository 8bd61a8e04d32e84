"""Runs whose graph begins with leaves, as products may wait, against those of buffers: the same bits and refusals."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from halved import F64, FUNCTIONS, params_of
from hypothesis import given
from hypothesis import strategies as st
from microbatches import by_torch, pulled

import fzero as fz
from fzero.base.pytree import is_real
from fzero.engine import run
from fzero.engine.passes import Passes
from fzero.testing import assert_trees_equal

X = torch.randn(8, 4, 5, dtype=F64, generator=torch.Generator().manual_seed(1))
POLICIES = {
    "float64": fz.Policy.exact(F64),
    "float32": fz.Policy.exact(torch.float32),
    "bfloat16": fz.Policy.exact(torch.bfloat16),
    "sums in float32": fz.Policy(
        param=torch.bfloat16, compute=torch.bfloat16, reduce=torch.float32, grad=torch.float32
    ),
    "stored in bfloat16": fz.Policy(
        param=torch.bfloat16, compute=torch.float32, reduce=torch.float32, grad=torch.bfloat16
    ),
}


def of_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_is_at_hand", lambda *_: False)


def drawn_pass(step: fz.Step, params: Any, x: torch.Tensor, count: int, order: list[int], halves: list[bool]) -> Any:
    """Grads and input cotangents of microbatches that are pulled back in some order, some of them in halves."""
    state = step.init(params, seed=5)
    passes = Passes(step, state, count)
    outputs: list[Any] = [passes.forward(i, (part,), (0,))[0] for i, part in enumerate(x.chunk(count))]
    found: list[Any] = [None] * count
    for i, halved in zip(order, halves, strict=True):
        cotangent = optree.tree_map(lambda x: x.cos() if is_real(x) else x, outputs[i])
        found[i] = (passes.inputs if halved else passes.backward)(i, cotangent)
        if halved:
            passes.params(i)
    passes.reduce()
    return outputs, found, fz.gather(passes.grads())


@given(
    name=st.sampled_from(list(FUNCTIONS)),
    policy=st.sampled_from(list(POLICIES)),
    cast=st.booleans(),
    order=st.permutations(range(4)),
    halves=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_drawn_functions(name: str, policy: str, cast: bool, order: list[int], halves: list[bool]) -> None:
    step = fz.train_step(FUNCTIONS[name], fz.sgd(0.1), POLICIES[policy])
    step = fz.autocast(step, torch.bfloat16) if cast and policy == "float32" else step
    x = X.to(POLICIES[policy].compute or F64).flatten(0, 1)
    params = params_of()

    def outcome() -> Any:
        try:
            return drawn_pass(step, params, x, 4, order, halves)
        except (ValueError, TypeError, RuntimeError) as error:
            return type(error)

    got = outcome()
    with pytest.MonkeyPatch.context() as patch:
        of_buffers(patch)
        want = outcome()
    if isinstance(want, type):
        assert got is want
    else:
        assert_trees_equal(got, want)


# ---- what a function may do to its params and inputs


def tripled(x: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda grad: 3 * grad)
    return x


def with_node_hook(p: Any, x: torch.Tensor) -> torch.Tensor:
    h = F.linear(x, p["w"])
    assert h.grad_fn is not None
    h.grad_fn.register_hook(lambda found, _: tuple(None if g is None else 3 * g for g in found))
    return h


def with_penalty(p: Any, x: torch.Tensor) -> torch.Tensor:
    h = F.linear(x, p["w"]).tanh()
    (slope,) = torch.autograd.grad(h.sum(), p["w"], create_graph=True)
    return h.sum() + slope.square().sum()


def used_up(p: Any, x: torch.Tensor) -> torch.Tensor:
    h = F.linear(x, p["w"])
    return h.detach() + 0 * p["v"].sum()


FUNCTIONS_OF_W: dict[str, Any] = {
    "linear": lambda p, x: F.linear(x, p["w"]),
    "of three dims": lambda p, x: F.linear(x.unflatten(0, (2, -1)), p["w"], p["v"][0]).flatten(0, 1),
    "left": lambda p, x: (p["w"] @ x.t()).t(),
    "twice": lambda p, x: F.linear(F.linear(x, p["w"]), p["w"]),
    "transposed by hand": lambda p, x: x @ p["w"].t(),
    "scaled": lambda p, x: torch.addmm(p["v"], x[:5], p["w"], alpha=0.5, beta=2),
    "of two casts": lambda p, x: F.linear(x.bfloat16(), p["w"].half().bfloat16()).double(),
    "of one cast": lambda p, x: F.linear(x.float(), p["w"].float()).double(),
    "a hook on a leaf": lambda p, x: F.linear(x, tripled(p["w"])),
    "a hook on a view": lambda p, x: x @ tripled(p["w"].t()),
    "a hook on a node": with_node_hook,
    "a gradient inside": with_penalty,
    "not reached": used_up,
    "returned": lambda p, x: p["w"] * x.sum(),
    "of constants": lambda p, x: F.linear(x.detach(), p["w"]),
    "an output that is the input": lambda p, x: x,
    "slices": lambda p, x: F.linear(x[:, :3], p["w"][:, :3]),
    "batched": lambda p, x: torch.bmm(x[None], p["w"][None])[0],
    "a vector": lambda p, x: p["w"] @ x[0],
    "cat": lambda p, x: F.linear(x, torch.cat([p["w"], p["v"]])),
}


@pytest.mark.parametrize("name", FUNCTIONS_OF_W)
def test_ways_to_use_a_weight(name: str) -> None:
    fn = FUNCTIONS_OF_W[name]
    generator = torch.Generator().manual_seed(2)
    params = {k: torch.randn(5, 5, dtype=F64, generator=generator) for k in "wv"}
    x = torch.randn(20, 5, dtype=F64, generator=generator)
    got = fz.gather(pulled(fn, params, x.clone().chunk(2)))
    if name == "an output that is the input":
        assert all(not g.any() for g in got.values())
        return
    assert_trees_equal(got, by_torch(fn, params, x.chunk(2)))


def test_what_is_done_to_a_leaf_is_nothing_to_the_next_microbatch() -> None:
    seen: list[Any] = []

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        seen.append(hasattr(p["w"], "mark"))
        p["w"].mark = True
        return F.linear(x, torch.nn.Parameter(p["w"])).sum() + F.linear(x, p["w"]).sum()

    step = fz.accumulate(fz.train_step(fn, fz.sgd(0.1)), 2)
    new, _ = step(step.init({"w": torch.ones(5, 5)}), torch.ones(4, 5))
    assert seen == [False] * 2
    assert_trees_equal(fz.gather(new.params)["w"], torch.full((5, 5), 0.8))


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_what_is_compiled_inside(backend: str) -> None:
    """torch.compile's backends take no tensor subclass: such a function runs under torch.func."""
    inner = torch.compile(lambda w, x: torch.tanh(F.linear(x, w)), backend=backend)
    for fn in (lambda p, x: inner(p["w"], x).sum(), lambda p, x: torch.tanh(F.linear(x, p["w"])).sum()):
        step = fz.accumulate(fz.train_step(fn, fz.sgd(0.1)), 2)
        state, norms = step.init({"w": torch.ones(5, 5)}), []
        for _ in range(3):
            state, metrics = step(state, torch.ones(4, 5))
            norms.append(metrics["grad_norm"])
        if fn.__code__.co_freevars:
            compiled = norms
    fz.testing.assert_trees_close(compiled, norms, rtol=1e-6)


@pytest.mark.parametrize("policy", ["float32", "stored in bfloat16"])
def test_params_that_are_given_out_are_copies(policy: str) -> None:
    """Whoever gets an output may write to it, between microbatches, too."""
    step = fz.train_step(lambda p, x: (x.to(p["w"].dtype) @ p["w"], p["b"]), fz.sgd(0.1), POLICIES[policy])
    passes = Passes(step, state := step.init({"w": torch.ones(5, 5), "b": torch.ones(5)}), 2)
    for i in range(2):
        out: Any = passes.forward(i, (torch.ones(4, 5),))[0]
        assert type(out[1]) is torch.Tensor and torch.equal(out[1].float(), torch.ones(5))
        out[1].mul_(2)
    assert torch.equal(fz.gather(state.params)["b"].float(), torch.ones(5))


def test_it_is_what_runs() -> None:
    """Otherwise these tests would compare something with itself."""
    step = fz.train_step(lambda p, x: F.linear(x, p["w"]).sum(), fz.sgd(0.1))
    passes = Passes(step, step.init({"w": torch.ones(5, 5)}), 2)
    passes.forward(0, (torch.ones(4, 5),))
    assert passes._runs[0].waits() and not passes._runs[0].outer


def test_a_donated_state_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """No leaf, no cast of one outlives the call: under the caller's own autocast, too."""
    step = fz.donate(fz.accumulate(fz.train_step(lambda p, x: F.linear(x, p["w"]).sum(), fz.sgd(0.1)), 2))
    for around in (torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False)):
        state = step.init({"w": torch.ones(64, 64)})
        with around:
            (buffer,) = [state.params.local(key) for key in state.params.groups]
            place = buffer.data_ptr()
            del buffer
            state, _ = step(state, torch.ones(4, 64))
            (buffer,) = [state.params.local(key) for key in state.params.groups]
            assert buffer.data_ptr() == place
