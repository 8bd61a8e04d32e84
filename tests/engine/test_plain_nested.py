"""Steps inside a step's function, and transforms around a pullback: no derivative is lost where graphs are plain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from microbatches import Params, drawn
from test_plain_graphs import grads_of

import fzero as fz
from fzero.testing import assert_trees_equal, run_ranks

C, X, V, W = drawn(4, 3, seed=7), drawn(4, 3, seed=2), drawn(3, 3, seed=5), drawn(3, 3, seed=6)


def layer(p: Params, x: torch.Tensor) -> torch.Tensor:
    return (x @ p["v"]).tanh()


vector = fz.train_step(layer, fz.sgd(0.1))
pipe = fz.pipeline([vector, vector], fz.schedules.gpipe(2, 2))


def state_of() -> fz.TrainState:
    return vector.init({"v": V})


def states_of() -> Any:
    return pipe.init([{"v": V}, {"v": W}])


def squares(p: Params, x: torch.Tensor, out: Any) -> torch.Tensor:
    return (out**2).sum() + (x * p["b"]).sum()  # type: ignore[no-any-return]


def a_pullback(p: Params, x: torch.Tensor) -> torch.Tensor:
    _, pullback = vector.vjp(state_of(), x)
    return squares(p, x, pullback(x @ p["w"])[1][0])


def a_pullback_in_halves(p: Params, x: torch.Tensor) -> torch.Tensor:
    _, pullback = vector.vjp(state_of(), x)
    return squares(p, x, pullback.inputs(x @ p["w"])[0])


def what_a_step_closes_over(p: Params, x: torch.Tensor) -> torch.Tensor:
    step = fz.train_step(lambda q, x: (x @ q["v"]).tanh() @ p["w"], fz.sgd(0.1))
    return squares(p, x, step.vjp(step.init({"v": V}), x)[0])


def what_its_pullback_closes_over(p: Params, x: torch.Tensor) -> torch.Tensor:
    hidden = x @ p["w"]
    step = fz.train_step(lambda q, x: (x @ q["v"]).tanh() * hidden, fz.sgd(0.1))
    _, pullback = step.vjp(step.init({"v": V}), x)
    return squares(p, x, pullback(torch.ones_like(x))[1][0])


def a_pipeline(p: Params, x: torch.Tensor) -> torch.Tensor:
    return squares(p, x, pipe.vjp(states_of(), x @ p["w"])[0])


def the_pullback_of_a_pipeline(p: Params, x: torch.Tensor) -> torch.Tensor:
    _, pullback = pipe.vjp(states_of(), x)
    return squares(p, x, pullback(x @ p["w"])[1][0])


NESTED = [
    a_pullback,
    a_pullback_in_halves,
    what_a_step_closes_over,
    what_its_pullback_closes_over,
    a_pipeline,
    the_pullback_of_a_pipeline,
]


def need_derivative(fn: Callable[..., Any]) -> None:
    params, step = {"w": drawn(3, 3), "b": drawn(3, seed=1)}, 1e-5
    found = grads_of(fn, params, X, 1)["w"].sum()
    assert found.abs() > 1e-3
    moved = [fn({**params, "w": params["w"] + h}, X) for h in (step, -step)]
    torch.testing.assert_close(found, (moved[0] - moved[1]) / (2 * step), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("fn", NESTED)
def test_derivatives_through_what_is_inside(fn: Callable[..., Any]) -> None:
    need_derivative(fn)


def calls(p: Params, x: torch.Tensor) -> torch.Tensor:
    class Holder:
        hidden = x @ p["w"]

    step = fz.train_step(lambda q, x: ((x @ q["v"]).tanh() * Holder.hidden).sum(), fz.sgd(0.1))
    return step(step.init({"v": V}), x)[1]["loss"]  # type: ignore[no-any-return]


def updates(p: Params, x: torch.Tensor) -> torch.Tensor:
    state = state_of()
    _, pullback = vector.vjp(state, x)
    new, _ = vector.update(state, pullback(x @ p["w"])[0])
    return fz.gather(new.params)["v"].sum()  # type: ignore[no-any-return]


def evaluates(p: Params, x: torch.Tensor) -> torch.Tensor:
    return fz.with_fn(vector, lambda q, x: x @ q["v"] @ p["w"]).forward(state_of(), x).sum()  # type: ignore[no-any-return]


def evaluates_a_pipeline(p: Params, x: torch.Tensor) -> torch.Tensor:
    own = fz.pipeline([fz.with_fn(vector, lambda q, x: x @ q["v"] @ p["w"])], fz.schedules.gpipe(1, 1))
    return own.forward(own.init([{"v": V}]), x).sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("fn", [calls, updates, evaluates, evaluates_a_pipeline])
def test_derivatives_through_a_whole_step_inside(fn: Callable[..., Any]) -> None:
    need_derivative(fn)


# ---- around the pullback of a pipeline


def by_torch(x: torch.Tensor) -> torch.Tensor:
    return ((x @ V).tanh() @ W).tanh()


def pulled_by_torch(cotangent: torch.Tensor) -> torch.Tensor:
    return torch.func.vjp(by_torch, X)[1](cotangent)[0]  # type: ignore[no-any-return]


AROUND: dict[str, Callable[[Any], Any]] = {
    "vmap": lambda pull: torch.func.vmap(pull)(torch.stack([C, 2 * C])),
    "grad": lambda pull: torch.func.grad(lambda c: (pull(c) ** 2).sum())(C),
    "jvp": lambda pull: torch.func.jvp(pull, (C,), (C.cos(),))[1],
    "jacrev": lambda pull: torch.func.jacrev(pull)(C),
}


@pytest.mark.parametrize("name", list(AROUND))
@pytest.mark.parametrize("schedule", [fz.schedules.gpipe(2, 2), fz.schedules.zero_bubble(2, 2)], ids=lambda s: s.name)
def test_transforms_around_a_pullback(name: str, schedule: fz.schedules.Schedule) -> None:
    own = fz.pipeline([vector, vector], schedule)
    _, pullback = own.vjp(states_of(), X)
    got = AROUND[name](lambda c: pullback(c, retain_graph=True)[1][0])
    torch.testing.assert_close(got, AROUND[name](pulled_by_torch))
    torch.testing.assert_close(pullback(C)[1][0], pulled_by_torch(C))
    with pytest.raises(RuntimeError, match="used up"):
        pullback(C)


def test_plain_autograd_around_a_pipeline() -> None:
    x = X.clone().requires_grad_()
    out, pullback = pipe.vjp(states_of(), x)
    (got,) = torch.autograd.grad((out**2).sum(), x, retain_graph=True)
    torch.testing.assert_close(got, torch.func.grad(lambda x: (by_torch(x) ** 2).sum())(x.detach()))
    assert pullback(C)[1][0].requires_grad


# ---- inputs, and what looks at a pass


def test_inference_tensors() -> None:
    """What a graph may not save is an input; one that is closed over torch refuses."""
    with torch.inference_mode():
        x, fixed = X.clone(), drawn(3, 3, seed=4)
    fn = lambda p, x: ((x @ p["v"]) @ fixed.clone()).tanh().mean()
    step = fz.train_step(fn, fz.sgd(0.1))
    state = step.init({"v": V})
    for _ in range(2):
        got, _ = step(state, x)
        want, _ = step(state, x.clone())
        assert_trees_equal(fz.gather(got.params), fz.gather(want.params))
    _, pullback = pipe.vjp(states_of(), x)
    torch.testing.assert_close(pullback(C)[1][0], pulled_by_torch(C))


def test_anomalies_are_seen() -> None:
    def fn(p: Params, x: torch.Tensor) -> torch.Tensor:
        return ((x * 0) @ p["v"]).sum() * torch.inf

    step = fz.train_step(fn, fz.sgd(0.1))
    state = step.init({"v": V})
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        with pytest.raises(RuntimeError, match="returned nan values"), pytest.warns(UserWarning, match="forward call"):
            step(state, X)


@pytest.mark.parametrize("wrap", [fz.shard_zero3, fz.remat, lambda step: fz.offload(step, params="host")])
def test_units_inside(wrap: Callable[[fz.Step], fz.Step]) -> None:
    """What a unit of an inner step is given leads to the outer params."""

    def fn(p: Params, x: torch.Tensor) -> torch.Tensor:
        unit = fz.unit(lambda q, x, w: (x @ q["v"] @ w).tanh())

        def inner(q: Any, x: torch.Tensor) -> torch.Tensor:
            return unit(q["blocks"][1], unit(q["blocks"][0], x, p["w"]), p["w"])

        step = wrap(fz.train_step(inner, fz.sgd(0.1)))
        out, pullback = step.vjp(step.init({"blocks": [{"v": V}, {"v": W}]}), x)
        return squares(p, x, out) + (pullback(x @ p["w"])[1][0] ** 2).sum()  # type: ignore[no-any-return]

    params = {"w": drawn(3, 3), "b": drawn(3, seed=1)}
    run = lambda _: grads_of(fn, params, X, 1)
    (got,) = run_ranks(run, 1)
    want = torch.func.grad(lambda p: _by_torch(p, X))(params)
    torch.testing.assert_close(got, want)


def _by_torch(p: Params, x: torch.Tensor) -> torch.Tensor:
    def inner(x: torch.Tensor) -> torch.Tensor:
        for v in (V, W):
            x = (x @ v @ p["w"]).tanh()
        return x

    out, pull = torch.func.vjp(inner, x)  # type: ignore[misc]
    return squares(p, x, out) + (pull(x @ p["w"])[0] ** 2).sum()
