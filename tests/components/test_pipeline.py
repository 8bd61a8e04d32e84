"""Pipelines in one process have the bits of one step that accumulates, whatever the schedule and what flows."""

from __future__ import annotations

import collections
import functools
import weakref
from typing import Any, cast

import optree
import pytest
import torch
from drawn_pipelines import Case, Fails, cases, piped
from hypothesis import given
from hypothesis import strategies as st
from nightly import by_day

import fzero as fz
from fzero.components.wiring import taken_apart
from fzero.schedules import Schedule
from fzero.testing import strategies

OPTIMIZER = fz.chain(fz.clip_by_global_norm(0.05), fz.adamw(1e-2))


def make(fn: Any) -> fz.Step:
    return fz.train_step(fn, OPTIMIZER)


@st.composite
def drawn(draw: st.DrawFn) -> tuple[Case, Schedule, torch.dtype, str]:
    schedule = draw(strategies.schedules())
    case = draw(cases(schedule.stages))
    how = draw(st.sampled_from(["even", "uneven", "fewer", "weighted"]))
    return case, schedule.computes, draw(st.sampled_from([torch.float32, torch.float64])), how


def assert_same(got: Any, want: Any) -> None:
    """To the bit, with one structure."""
    fz.testing.assert_trees_close(got, want, rtol=0, atol=0)


def kept(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return (x[:, 0] > 0).sum()


def pair(case: Case, schedule: Schedule, dtype: torch.dtype, how: str) -> tuple[Any, Any, Any, Any, list[torch.Tensor]]:
    """The pipeline and the step that accumulates, their states, and a batch."""
    weights, count = kept if how == "weighted" else None, schedule.microbatches
    pipe = piped(case, schedule, make, weights=weights)
    whole = fz.accumulate(make(case.whole), count, weights=weights)
    rows = {"even": 2 * count, "fewer": max(1, count - 1)}.get(how, 2 * count + count // 2)
    params, batch = case.params(dtype), case.batch(rows, dtype)
    if how == "weighted":
        batch[0][:2, 0], batch[0][2:, 0] = 1.0, -batch[0][2:, 0].abs()  # the first microbatch alone counts
    return pipe, whole, pipe.init(params), whole.init(params), batch


@by_day(30)
@given(drawn(), st.booleans())
def test_vjp_and_forward(one: Any, retain: bool) -> None:
    pipe, whole, state, other, batch = pair(*one)
    out, pullback = pipe.vjp(state, *batch)
    want, pull = whole.vjp(other, *batch)
    assert_same(out, want)
    assert_same(pipe.forward(state, *batch), want)
    cotangent = optree.tree_map(lambda x: torch.cos(x.detach()), want)
    for again in (True, False) if retain else (False,):
        grads, cotangents = pullback(cotangent, retain_graph=again)
        expected, ours = pull(cotangent, retain_graph=again)
        assert_same(list(cotangents), list(ours))
        assert_same(list(fz.gather(grads)), fz.gather(expected))
    with pytest.raises(RuntimeError, match=r"used up by an earlier call"):
        pullback(cotangent)


@by_day(30)
@given(drawn(), st.data())
def test_steps(one: Any, data: Any) -> None:
    case = one[0]
    pipe, whole, state, other, batch = pair(*one)
    cotangent = None
    if case.stages[-1].gives != "loss":
        cotangent = optree.tree_map(torch.sin, whole.forward(other, *batch))
    for _ in range(2):
        state, metrics = pipe(state, *batch, cotangent=cotangent)
        other, expected = whole(other, *batch, cotangent=cotangent)
        assert_same(metrics, expected)
    assert_same(list(fz.gather(state.params)), fz.gather(other.params))
    assert state.step == other.step == 2


@by_day(15)
@given(drawn(), st.data())
def test_argnums(one: Any, data: Any) -> None:
    pipe, whole, state, other, batch = pair(*one)
    numbers = data.draw(st.lists(st.integers(0, len(batch) - 1), unique=True))
    _, pullback = pipe.vjp(state, *batch, argnums=numbers)
    want, pull = whole.vjp(other, *batch, argnums=numbers)
    cotangent = optree.tree_map(torch.ones_like, want)
    assert_same(list(pullback(cotangent)[1]), list(pull(cotangent)[1]))


def chain(schedule: Schedule, transform: Any = lambda step: step, optimizer: Any = OPTIMIZER) -> Any:
    """A pipeline of layers, and the same as one function."""

    def layer(params: Any, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(h @ params["w"])

    def loss(params: Any, h: torch.Tensor) -> torch.Tensor:
        return (h @ params["w"]).square().mean()

    fns = [layer] * (schedule.stages - 1) + [loss]

    def whole(params: Any, h: torch.Tensor) -> torch.Tensor:
        for fn, own in zip(fns, params, strict=True):
            h = fn(own, h)
        return h

    make = lambda fn: transform(fz.train_step(fn, optimizer))
    generator = torch.Generator().manual_seed(0)
    params = [{"w": torch.randn(3, 3, generator=generator)} for _ in fns]
    return fz.pipeline([make(fn) for fn in fns], schedule), make(whole), params, torch.randn(8, 3, generator=generator)


def test_a_gradient_that_is_not_finite_skips_all_stages() -> None:
    pipe, _, params, x = chain(fz.schedules.one_f_one_b(3, 4), lambda step: fz.loss_scale(step))
    state = pipe.init(params)
    wrong = x.clone()
    wrong[0, 0] = float("nan")
    skipped, metrics = pipe(state, wrong)
    assert metrics["skipped"] and skipped.step == 0
    fz.testing.assert_trees_close(fz.gather(skipped.params), fz.gather(state.params), rtol=0, atol=0)
    # a gradient of the last stage alone
    _, pullback = pipe.vjp(state, x)
    grads, _ = pullback(torch.ones(()))
    leaves, structure = optree.tree_flatten(grads)
    broken = optree.tree_unflatten(structure, [*leaves[:-1], leaves[-1] * float("inf")])
    skipped, metrics = pipe.update(state, broken)
    assert metrics["skipped"] and [own.step for own in skipped] == [0, 0, 0]
    halved = {own.extra["loss_scale"].scale for own in skipped}
    assert halved == {own.extra["loss_scale"].scale / 2 for own in state}


def test_sums_of_several_pullbacks() -> None:
    pipe, whole, params, x = chain(fz.schedules.zero_bubble(3, 4))
    whole = fz.accumulate(whole, 4)
    state, other = pipe.init(params), whole.init(params)
    for part in (x, x * 2, x.flip(0)):
        own, theirs = pipe.vjp(state, part)[1](torch.ones(()))[0], whole.vjp(other, part)[1](torch.ones(()))[0]
        state, other = pipe.add_grads(state, own), whole.add_grads(other, theirs)
    state, metrics = pipe.update(state, own, grad_norm=0.5)
    other, expected = whole.update(other, theirs, grad_norm=0.5)
    assert_same(list(fz.gather(state.params)), fz.gather(other.params))
    assert_same(metrics, expected)
    assert state.grads is None


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "zero_bubble"])
def test_pullbacks_that_live_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as fz.schedules.check says, which is what memory is planned by."""
    schedule = getattr(fz.schedules, name)(3, 6)
    pipe, _, params, x = chain(schedule)
    from fzero.engine.run import Run

    made: dict[int, list[Any]] = {}
    most: dict[int, int] = {}
    begin = Run.__init__

    def init(self: Run, step: Any, *arguments: Any, **more: Any) -> None:
        begin(self, step, *arguments, **more)
        stage = next(i for i, own in enumerate(state) if own is arguments[0])
        own = made.setdefault(stage, [])
        own.append(weakref.ref(self))
        most[stage] = max(most.get(stage, 0), sum(run() is not None and run().state is not None for run in own))

    monkeypatch.setattr(Run, "__init__", init)
    state = pipe.init(params)
    pipe(state, torch.cat([x, x[:4]]))
    own = tuple(most[stage] for stage in range(3))
    alive = fz.schedules.check(schedule).alive
    assert own == alive


def test_a_timeline() -> None:
    schedule = fz.schedules.one_f_one_b(3, 4)
    pipe, _, params, x = chain(schedule)
    state = pipe.init(params)
    timeline = pipe.timeline(state, x)
    assert [span.task for span in timeline.spans] == [
        task for _, task in fz.schedules.check(schedule).order if not task.is_message
    ]
    assert timeline.places == 3 and timeline.total > 0 and state.step == 0


def test_refusals() -> None:
    schedule = fz.schedules.gpipe(2, 2)
    step = make(lambda p, x: (x * p["w"]).sum())
    named: Any = "gpipe"
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: fz.pipeline([], schedule), TypeError, "got steps=an empty list, expected a list of steps"),
        (lambda: fz.pipeline(cast(Any, {}), schedule), TypeError, "got steps=dict, expected a list of steps"),
        (lambda: fz.pipeline([step], schedule), ValueError, "got 1 steps for 2 stages"),
        (lambda: fz.pipeline([step] * 3, schedule), ValueError, r"the components \[2\] behind them"),
        (lambda: fz.pipeline([step, step], named), TypeError, "schedule"),
        (lambda: fz.pipeline([step, named], schedule), TypeError, r"steps\[1\]"),
        (lambda: fz.pipeline([step, fz.accumulate(step, 2)], schedule), ValueError, "Leave accumulate out"),
        (
            lambda: fz.pipeline([fz.train_step(step.fn, OPTIMIZER, has_aux=True), step], schedule),
            ValueError,
            "that of the last stage alone",
        ),
        (lambda: fz.pipeline([step, step], schedule, skips={(1, 0): 1}), ValueError, "later stages"),
        (lambda: fz.pipeline([step, step], schedule, skips={0: 1}), TypeError, "a key of skips"),
        (lambda: fz.pipeline([step, step], schedule, inputs={5: 0}), ValueError, "expected stages from 0 to 1"),
        (lambda: fz.pipeline([step, step], schedule, groups=[[0]]), ValueError, "expected 2 lists of one rank"),
        (lambda: fz.pipeline([step, step], schedule, groups=[[0], [1, 2]]), ValueError, "take components of fz.remote"),
        (lambda: fz.pipeline([step, step], schedule, groups=[[0], [0]]), ValueError, "one rank, each another"),
        (lambda: fz.pipeline([step, step], schedule, groups=3), TypeError, "groups"),
    ]
    for call, kind, words in cases:
        with pytest.raises(kind, match=words):
            call()
    pipe = fz.pipeline([step, step], schedule)
    w = {"w": torch.ones(())}
    with pytest.raises(TypeError, match="a list of 2 trees"):
        pipe.init([w])
    state = pipe.init([w, w])
    other = fz.pipeline([step], fz.schedules.gpipe(1, 2)).init([w])
    with pytest.raises(ValueError, match="got a state of 1 components"):
        pipe(other, torch.ones(2))
    with pytest.raises(TypeError, match="what the init of this pipeline returned"):
        pipe(state[0], torch.ones(2))
    with pytest.raises(ValueError, match=r"input 0 has shape \(\), expected a dim 0 to split into 2 microbatches"):
        pipe(state, torch.ones(()))
    with pytest.raises(ValueError, match="expected each of"):
        fz.pipeline([step, step], schedule, inputs={0: 0})(state, torch.ones(2), torch.ones(2))
    with pytest.raises(TypeError, match="grads"):
        pipe.update(state, state[0].params)
    with pytest.raises(RuntimeError, match="there is no process group"):
        fz.pipeline([step, step], schedule, groups=[[0], [1]]).init([w, w])
    loss = make(lambda p, x: (x * p["w"]).mean())
    two = fz.pipeline([make(lambda p, x: x * p["w"]), loss], schedule)
    state = two.init([w, w])
    out, pullback = two.vjp(state, torch.ones(2))
    with pytest.raises(ValueError, match="create_graph=True"):
        pullback(out, create_graph=True)
    stays = fz.pipeline([make(lambda p, x: x * p["w"]), loss], schedule, skips={(0, 1): 1})
    with pytest.raises(ValueError, match="which skips to another stage"):
        stays(stays.init([w, w]), torch.ones(2))


@pytest.mark.parametrize("name", ["gpipe", "zero_bubble"])
def test_a_pullback_after_one_that_failed(name: str) -> None:
    """What the failed one has left is nobody's."""
    fns: list[Any] = [
        lambda p, h: Fails.apply(h @ p["w"]),
        lambda p, h: torch.tanh(h @ p["w"]),
        lambda p, h: (h @ p["w"]).square().mean(),
    ]
    pipe = fz.pipeline([make(fn) for fn in fns], getattr(fz.schedules, name)(3, 4))
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    out, pullback = pipe.vjp(pipe.init([{"w": torch.eye(3)}] * 3), x)
    want = pullback(torch.ones_like(out), retain_graph=True)
    with pytest.raises(ArithmeticError, match="a cotangent over a thousand") as caught:
        pullback(torch.full_like(out, 1e9), retain_graph=True)
    assert caught.value.__notes__ == ["In stage 0 of the pipeline, microbatch 0."]
    for again in (True, False):
        grads, cotangents = pullback(torch.ones_like(out), retain_graph=again)
        assert_same(list(fz.gather(grads)), list(fz.gather(want[0])))
        assert_same(list(cotangents), list(want[1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_loss_of_16_bits(dtype: torch.dtype) -> None:
    """A third of it is not one of its numbers."""

    def loss(params: Any, h: torch.Tensor) -> torch.Tensor:
        return (h @ params["w"]).square().mean().to(dtype)

    layer = lambda params, h: torch.tanh(h @ params["w"])
    whole = fz.accumulate(make(lambda p, h: loss(p[1], layer(p[0], h))), 3)
    pipe = fz.pipeline([make(layer), make(loss)], fz.schedules.one_f_one_b(2, 3))
    params = [{"w": torch.eye(3)}, {"w": torch.ones(3, 3) / 2}]
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    state, other = pipe.init(params), whole.init(params)
    for _ in range(2):
        state, metrics = pipe(state, x)
        other, expected = whole(other, x)
        assert_same(metrics, expected)
    assert_same(list(fz.gather(state.params)), fz.gather(other.params))
    ours, theirs = pipe.vjp(state, x), whole.vjp(other, x)
    one = torch.ones_like(theirs[0])
    assert_same(list(fz.gather(ours[1](one)[0])), fz.gather(theirs[1](one)[0]))


def test_a_stage_is_given_the_rest_of_a_container_in_its_own_order() -> None:
    """Also where that is not the sorted one."""
    keyed = lambda kind: (lambda h: h.values(), "skipped", lambda q, s, k: kind(query=q, skipped=s, key=k))
    cases: list[Any] = [keyed(collections.OrderedDict), keyed(lambda **own: collections.defaultdict(list, own))]
    cases += [keyed(dict), (lambda h: h, 1, lambda q, s, k: [q, s, k])]
    for values, item, build in cases:
        first = lambda p, x, build=build: build(x * p["w"], x, 2 * x)
        middle = lambda p, h, values=values: functools.reduce(lambda a, b: a - 10 * b * p["w"], values(h))
        last = lambda p, h, s: (h * s * p["w"]).mean()
        pipe = fz.pipeline([*map(make, (first, middle, last))], fz.schedules.gpipe(3, 1), skips={(0, item): 2})
        x = torch.arange(1.0, 5.0)
        loss, pullback = pipe.vjp(pipe.init([{"w": torch.tensor(1.5)}] * 3), x)
        assert loss == ((1.5 - 30) * 1.5 * x * x).mean()
        got = [float(own["w"]) for own in fz.gather(pullback(torch.ones(()))[0])]
        assert got == [float(factor * (x * x).mean()) for factor in (1.5, -20 * 1.5, 1.5 - 30)]


def test_a_subclass_of_dict_that_is_no_pytree_is_refused_by_name() -> None:
    class Own(dict[str, Any]):
        pass

    with pytest.raises(ValueError, match=r"stage 0 returned .*Own.*skips to another stage"):
        taken_apart(Own(h=1, s=2), ["s"], "stage 0")


@pytest.mark.parametrize("sides", ["C @ w", "w @ C", "C @ w.T", "(C @ w) @ C"])
def test_a_weight_that_is_multiplied_before_it_meets_the_input(sides: str) -> None:
    """Its gradient is not that of the product that the input's is a part of, which waits for the second half."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    C, x, params = draw(4, 4), draw(8, 4), [{"w": draw(4, 4)}, {"w": draw(4, 4)}]

    def first(p: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ eval(sides, {"C": C, "w": p["w"]})

    def last(p: Any, x: torch.Tensor) -> torch.Tensor:
        return (x @ p["w"]).square().mean()

    leaves = [own["w"].clone().requires_grad_() for own in params]
    last({"w": leaves[1]}, first({"w": leaves[0]}, x)).backward()
    for schedule in (fz.schedules.gpipe(2, 2), fz.schedules.zero_bubble(2, 2)):
        pipe = fz.pipeline([fz.train_step(fn, fz.sgd(0.1)) for fn in (first, last)], schedule)
        loss, pullback = pipe.vjp(pipe.init(params), x)
        grads, _ = pullback(torch.ones_like(loss))
        for own, leaf in zip(fz.gather(grads), leaves, strict=True):
            torch.testing.assert_close(own["w"], leaf.grad, rtol=1e-10, atol=1e-12)
