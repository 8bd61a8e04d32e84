"""fz.jit of functions of states: the numbers of the function, traced once."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from nightly import in_turns

import fzero as fz
from fzero.testing import assert_trees_close

F64 = torch.float64
GENERATOR = torch.Generator().manual_seed(0)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=GENERATOR)


def params_of() -> Any:
    return {"blocks": [{"w": drawn(4, 4) / 2} for _ in range(2)], "o": drawn(4, 2)}


block = fz.unit(lambda p, x: torch.tanh(x @ p["w"]))


def loss(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for q in p["blocks"]:
        x = block(q, x)
    return (x @ p["o"] - y).square().mean()


PARAMS, X, Y = params_of(), drawn(3, 4), drawn(3, 2)
STEP = fz.train_step(loss, fz.chain(fz.clip_by_global_norm(0.5), fz.adamw(1e-2)))
STATES = [STEP.init(PARAMS)]
for _ in range(3):
    STATES.append(STEP(STATES[-1], X, Y)[0])
MEMBERS = [fz.stack([STEP.init(params_of()) for _ in range(3)])]
each = torch.vmap(STEP, in_dims=(0, None, None))
MEMBERS.append(each(MEMBERS[0], X, Y)[0])


def after(state: fz.TrainState, x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        state, _metrics = STEP(state, x, Y)
    return STEP.forward(state, x, Y)


def by_rate(lr: torch.Tensor) -> torch.Tensor:
    step = fz.train_step(loss, fz.adamw(lr))
    state = step.init(PARAMS)
    for _ in range(2):
        state, _metrics = step(state, X, Y)
    return step.forward(state, X, Y)


def scanned(state: fz.TrainState, xs: torch.Tensor) -> Any:
    return fz.scan(STEP, state, (xs, torch.stack([Y] * 4)))


def averaged(state: fz.TrainState, x: torch.Tensor) -> Any:
    step = fz.accumulate(fz.lookahead(fz.ema(STEP, 0.9), 2), 3)
    return step(step(step.init(PARAMS), x, Y)[0], x, Y)


XS = [drawn(4, 3, 4) for _ in range(2)]
RATES = [torch.tensor(r, dtype=F64) for r in (1e-2, 2e-2)]
CASES: dict[str, tuple[Callable[..., Any], Sequence[Any]]] = {
    "step": (lambda s, x: STEP(s, x, Y), [(s, X + i) for i, s in enumerate(STATES)]),
    "forward": (STEP.forward, [(s, X, Y) for s in STATES]),
    "gradient by an input": (lambda s, x: torch.func.grad(after, argnums=1)(s, x), [(s, X) for s in STATES]),
    "gradient by a state": (lambda s: torch.func.grad(lambda s: after(s, X))(s), [(s,) for s in STATES]),
    "gradient by a rate": (torch.func.grad(by_rate), [(rate,) for rate in RATES]),
    "a number": (by_rate, [(1e-2,), (2e-2,)]),
    "jvp": (lambda x, t: torch.func.jvp(lambda x: after(STATES[0], x), (x,), (t,)), [(X, X), (X, 2 * X)]),
    "hessian": (lambda x: torch.func.hessian(lambda v: after(STATES[0], X * v))(x), [(RATES[0],), (RATES[1],)]),
    "members": (each, [(own, X, Y) for own in MEMBERS]),
    "scan": (scanned, [(STATES[0], XS[0]), (STATES[1], XS[1])]),
    "accumulate, ema, lookahead": (averaged, [(STATES[0], X), (STATES[0], 2 * X)]),
    "no step": (lambda tree: {"sum": tree["a"].sum() + len(tree), "same": tree["a"]}, [({"a": X},), ({"a": Y},)][:1]),
}


@in_turns(4)
@pytest.mark.parametrize("name", CASES)
def test_numbers_of_the_function(name: str) -> None:
    fn, calls = CASES[name]
    fast = fz.jit(fn, backend="graph")
    for args in [*calls, *calls]:
        want, got = fn(*args), fast(*args)
        assert_trees_close(got, want, rtol=1e-12)
        for a, b in zip(states_in(want), states_in(got), strict=True):
            assert (a.step, a.seed, type(b.step)) == (b.step, b.seed, int)
            assert repr(a.moments) == repr(b.moments)
    assert fast.traces == 1


def states_in(tree: Any) -> list[fz.TrainState]:
    return [x for x in (tree if isinstance(tree, tuple) else (tree,)) if isinstance(x, fz.TrainState)]


@in_turns(12, "compiled by torch")  # steps are compiled each day, in test_jit_refused.py and test_jit_steps.py
def test_inductor() -> None:
    def after(lr: torch.Tensor) -> torch.Tensor:
        step = fz.train_step(lambda p, x: block(p, x).square().mean(), fz.adamw(lr))
        return step.forward(step(step.init(PARAMS["blocks"][0]), X)[0], X)

    fast = fz.jit(torch.func.grad(after), backend="inductor")
    for rate in RATES * 2:
        torch.testing.assert_close(fast(rate), torch.func.grad(after)(rate), rtol=1e-10, atol=0)
    assert fast.traces == 1


def test_transforms_go_around() -> None:
    fast = fz.jit(lambda x: after(STATES[0], x), backend="graph")
    fast(X)
    torch.testing.assert_close(torch.func.grad(fast)(X), torch.func.grad(lambda x: after(STATES[0], x))(X))
    stacked = torch.stack([X, 2 * X])
    torch.testing.assert_close(torch.vmap(fast)(stacked), torch.stack([fast(x) for x in stacked]))


def test_a_state_as_an_aux_of_a_derivative() -> None:
    def fn(state: fz.TrainState, x: torch.Tensor) -> Any:
        def norm(x: torch.Tensor) -> Any:
            new, metrics = STEP(state, x, Y)
            return metrics["grad_norm"], new

        return torch.func.grad(norm, has_aux=True)(x)

    fast = fz.jit(fn, backend="graph")
    for x in (X, 2 * X, X + 1):
        (got, new), (want, other) = fast(STATES[0], x), fn(STATES[0], x)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
        assert new.step == other.step and type(new.step) is int
        assert_trees_close(fz.gather(new.params), fz.gather(other.params), rtol=1e-10)


def test_a_map_of_pullbacks() -> None:
    fn = lambda state, x: torch.func.jacrev(lambda x: STEP.forward(state, x, Y) * x.sum(1))(x)
    fast = fz.jit(fn, backend="graph")
    for x in (X, 2 * X, X + 1):
        torch.testing.assert_close(fast(STATES[0], x), fn(STATES[0], x), rtol=1e-10, atol=1e-12)


def test_a_write_to_an_input_is_named() -> None:
    with pytest.raises(ValueError, match="writes to one of its inputs"):
        fz.jit(lambda x: x.mul_(2) + x, backend="graph")(X.clone())


def test_static_arguments_and_values() -> None:
    entered = []

    def fn(x: torch.Tensor, n: int, flag: bool) -> torch.Tensor:
        entered.append(n)
        return x[:n] * (2 if flag else 3)

    fast = fz.jit(fn, backend="graph", static_argnums=1)
    for n, flag in ((1, True), (2, True), (1, True), (1, False), (1, False)):
        assert torch.equal(fast(X, n, flag), X[:n] * (2 if flag else 3))
    assert fast.traces == 3 and entered == [1, 1, 2, 2, 1, 1]
    with pytest.raises(ValueError, match="a tensor in input 0, which is static"):
        fz.jit(fn, backend="graph", static_argnums=0)(X, 1, True)


def test_a_count_that_is_returned_is_refused() -> None:
    fast = fz.jit(lambda state: STEP(state, X, Y)[0].step, backend="graph")
    for _ in range(2):
        with pytest.raises(ValueError, match="return a state in the place of a count"):
            fast(STATES[0])


def test_fallback_says_so_once() -> None:
    fast = fz.jit(lambda x: x if x.sum() > 0 else -x, backend="graph", fallback=True)
    with pytest.warns(UserWarning, match="runs without a graph"):
        fast(X)
    assert torch.equal(fast(X), X.sum().sign() * X)


@pytest.mark.parametrize("fn", [lambda x: torch.rand_like(x) + x, lambda x: torch.nn.functional.dropout(x)])
def test_random_numbers_are_refused(fn: Any) -> None:
    with pytest.raises(ValueError, match="draws random numbers"):
        fz.jit(fn, backend="graph")(X)


@in_turns(2)
@pytest.mark.parametrize("mapped", [False, True])
def test_steps_share_a_body(mapped: bool) -> None:
    entered = []

    def counted(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        entered.append(1)
        return loss(p, x, y)

    step = fz.train_step(counted, fz.adamw(1e-2))

    def trained(state: fz.TrainState, x: torch.Tensor, n: int) -> torch.Tensor:
        for _ in range(n):
            state, _metrics = step(state, x, Y)
        return step.forward(state, x, Y)

    def members(state: fz.TrainState, x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.vmap(lambda factor: trained(state, x * factor, n))(torch.arange(3))

    counts = []
    for n in (3, 6):
        fn: Any = functools.partial(members if mapped else torch.func.grad(trained), n=n)
        fast, state = fz.jit(fn, backend="graph"), step.init(PARAMS)
        want = fn(state, X)
        entered.clear()
        fast.lower(state, X)
        counts.append(len(entered))
        fast(state, X)
        assert_trees_close(fast(state, X), want, rtol=1e-12)
        regions = {node.args[1] for node in fast.graph(state, X).graph.nodes if "region" in str(node.target)}
        assert len(regions) == 1 + mapped  # the first one's state is that of all members
    assert counts[0] == counts[1]


def test_leaves_with_counts_of_their_own() -> None:
    frozen = fz.freeze(STEP, "o", keep_moments=True)
    thawed = frozen(fz.convert(STATES[1], frozen), X, Y)[0]
    for step, state in ((frozen, thawed), (STEP, fz.convert(thawed, STEP))):
        fn = lambda state, step=step: step(step(state, X, Y)[0], X, Y)[0]
        fast = fz.jit(fn, backend="graph")
        for _ in range(3):
            want, got = fn(state), fast(state)
            assert_trees_close(fz.gather(got.params), fz.gather(want.params), rtol=1e-12)
            assert repr(got.moments) == repr(want.moments)
            state = got
        assert fast.traces == 1


def test_numbers_that_a_transform_changes() -> None:
    """A graph would have them as constants, and change them where an update is skipped."""
    step = STEP.with_state(fz.Extra(name="n", source="mine", init=lambda _: 0, update=lambda n, _, applied: n + 1))
    with pytest.raises(TypeError, match="has the number 0, and 1 after an update"):
        fz.jit(lambda state: step(state, X, Y)[0], backend="graph")(step.init(PARAMS))


def test_the_component_of_what_it_returns() -> None:
    fast = fz.jit(lambda state: STEP(state, X, Y)[0], backend="graph")
    for state in (STEP.init(PARAMS), STEP.init(PARAMS)):
        for _ in range(2):
            new = fast(state)
            grads, _ = STEP.vjp(state, X, Y)[1](torch.ones((), dtype=F64))
            STEP.update(new, grads)  # which takes those of its own component only
    assert fast.traces == 1


def test_states_of_two_components_in_other_places() -> None:
    first, second = STEP.init(PARAMS), STEP.init(PARAMS)
    fast = fz.jit(lambda *states: [STEP(state, X, Y)[0] for state in states], backend="graph")
    for states in [(first, second, first), (first, second, second)] * 2:
        for new, old in zip(fast(*states), states, strict=True):
            grads, _ = STEP.vjp(old, X, Y)[1](torch.ones((), dtype=F64))
            STEP.update(new, grads)  # which takes those of its own component only


def test_the_tenth_trace_is_said() -> None:
    fast = fz.jit(lambda x, n: x.sum() * n, backend="graph")
    for rows in range(9):
        fast(torch.ones(rows + 1), 1.0)
    with pytest.warns(UserWarning, match=r"10th time, now for other tensors of shapes \[\(20,\), \(\)\] of <lambda>"):
        fast(torch.ones(20), 2.0)
    fast(torch.ones(21), 2.0)


def kept_in(kind: str, helper: Callable[..., Any]) -> Callable[..., Any]:
    """A loss that comes to its helper by something else than a variable of its own."""
    if kind == "default":
        return lambda p, x, own=helper: own(x @ p["o"]).sum()
    if kind == "partial":
        return functools.partial(lambda p, x, own: own(x @ p["o"]).sum(), own=helper)
    held = (helper if kind == "tuple" else fz.jit(helper, backend="graph"),)
    return lambda p, x: held[0](x @ p["o"]).sum()


@in_turns(2)
@pytest.mark.parametrize("kind", ["default", "partial", "tuple", "jitted"])
def test_variables_of_what_a_function_leads_to(kind: str) -> None:
    """Those of a step's loss and its learning rate, and of helpers, are read in each call."""
    factor, rate = 1.0, 0.1
    step = fz.train_step(kept_in(kind, lambda x: x * factor), fz.partition({"*": fz.sgd(lambda n: rate)}))
    state = step.init({"o": PARAMS["o"]})
    fns: list[Callable[..., Any]] = [lambda s, x: step(s, x), torch.vmap(step, in_dims=(None, 0)), step]
    for fn, x in zip(fns, (X, XS[0], X), strict=True):
        fast = fz.jit(fn, backend="graph")
        for factor, rate in ((1.0, 0.1), (2.0, 0.1), (2.0, 0.3), (2.0, 0.3)):  # noqa: B007 - the step reads them
            (got, metrics), (want, others) = fast(state, x), fn(state, x)
            assert_trees_close((got.params, metrics), (want.params, others), rtol=1e-12)
        assert fast.traces == (2 if fn is step else 3)


def test_a_function_among_the_inputs_is_what_it_closes_over() -> None:
    factor = 1.0

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return factor * x

    fast = fz.jit(lambda f, x: f(x), backend="graph")
    for factor in (1.0, 2.0, 1.0):
        assert torch.equal(fast(scaled, X), factor * X)
    assert fast.traces == 2


def test_a_rate_that_is_a_number_of_python_is_a_tensor_in_metrics() -> None:
    def trained(lr: float) -> Any:
        step = fz.train_step(loss, fz.adamw(lr))
        return step(step.init(PARAMS), X, Y)

    fast = fz.jit(trained, backend="graph")
    for lr in (1e-2, 2e-2, 3e-2):
        assert_trees_close(fast(lr)[1], trained(lr)[1])
        assert isinstance(fast(lr)[1]["lr"], torch.Tensor)
    assert fast.traces == 1


def test_two_calls_of_a_step_with_something_else_around_them() -> None:
    """A variable that its loss closes over has another value, or autocast is on: they share no region."""
    factor, params = 1.0, {"w": drawn(4, 4).float()}
    step = fz.train_step(lambda p, x: (x @ p["w"] * factor).float().square().mean(), fz.sgd(0.1))

    def trained(state: fz.TrainState, x: torch.Tensor) -> fz.TrainState:
        nonlocal factor
        for factor, casts in ((1.0, False), (3.0, False), (1.0, True), (1.0, False)):  # noqa: B007 - the step reads it
            with torch.autocast("cpu", torch.bfloat16, enabled=casts):
                state, _ = step(state, x)
        return state

    fast, state, x = fz.jit(trained, backend="graph"), step.init(params), drawn(3, 4).float()
    for _ in range(2):
        assert_trees_close(fast(state, x).params, trained(state, x).params, rtol=1e-5)
    assert len({node.args[1] for node in fast.graph(state, x).graph.nodes if "region" in str(node.target)}) == 3


def test_slow_weights_do_not_move_at_an_update_that_is_skipped() -> None:
    step = fz.lookahead(STEP, 2)
    state, _ = step(step.init(PARAMS), X, Y)  # the next one is due
    fast = fz.jit(lambda state, x: step(state, x, Y), backend="graph")
    for x in (X, X, X * math.inf, X):
        (got, _), (want, _) = fast(state, x), step(state, x, Y)
        assert_trees_close((got.params, got.extra), (want.params, want.extra), rtol=1e-12)
        assert got.step == want.step == 1 + math.isfinite(x.sum())
