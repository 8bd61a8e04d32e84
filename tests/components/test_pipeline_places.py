"""Pipelines whose places are ranks, on real processes whose messages come late: the bits of one process."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Sequence
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from drawn_pipelines import Case, Fails, Stage, cases, piped
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nightly import NIGHTLY, in_turns, todays
from torch.distributed.device_mesh import init_device_mesh

import fzero as fz
from fzero.schedules import Schedule
from fzero.testing import run_ranks, strategies

pytestmark = pytest.mark.usefixtures("hazards")  # races show

OPTIMIZER = fz.chain(fz.clip_by_global_norm(0.05), fz.adamw(1e-2))
SHARDS: dict[int, Any] = {1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}
Job = tuple[Case, Schedule]


def make(fn: Any) -> fz.Step:
    return fz.train_step(fn, OPTIMIZER)


def same(got: Any, want: Any) -> None:
    fz.testing.assert_trees_close(got, want, rtol=0, atol=0)


def known(got: Any, want: Any) -> None:
    """What is here is the same; what is elsewhere has the same shapes."""
    names = optree.tree_leaves(want)
    for a, b in zip(optree.tree_leaves(got), names, strict=True):
        if isinstance(a, torch.Tensor) and a.device.type == "meta":
            assert a.shape == b.shape and a.dtype == b.dtype
        else:
            same(a, b)


def kept(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return (x[:, 0] > 0).sum()


def against_one(rank: int, jobs: Sequence[Job], dp: int, stage: int) -> None:
    """Some pipelines, one after the other, over `dp` lines of places, each stage sharded in its own way."""
    # in one step of ZeRO-3 each use of a shared leaf is reduced; the sum of all uses here
    rtol = 1e-12 if stage == 3 else 0.0
    for number, (case, schedule) in enumerate(jobs):
        weights = kept if number % 2 else None
        ranks = len(schedule.places) * dp
        mesh = init_device_mesh("cpu", (len(schedule.places), dp), mesh_dim_names=("pp", "dp"))
        if rank >= ranks:
            continue
        shard = (lambda step: SHARDS[stage](step, mesh=mesh, axis="dp")) if dp > 1 else lambda step: step
        pipe = piped(case, schedule, lambda fn: shard(make(fn)), groups=mesh["pp"], weights=weights)
        whole = shard(fz.accumulate(make(case.whole), schedule.microbatches, weights=weights))
        params = case.params(torch.float64)
        state, other = pipe.init(params), whole.init(params)
        place = rank // dp
        here = [c for c, own in enumerate(state) if own is not None]
        assert here == [
            *[s for s in range(schedule.stages) if schedule.place_of(s) == place],
            *[len(case.stages) + i for i, u in enumerate(case.shared) if schedule.place_of(min(u)) == place],
        ]
        for turn in range(2):
            rows = schedule.microbatches * (2 + turn) - turn  # which makes messages grow, and not divide
            batch = case.batch(rows, torch.float64, seed=1 + rank % dp)
            batch[0][0, 0] = 1.0  # so that something counts
            takers = {n: {schedule.place_of(s) for s, own in case.inputs if n in own} for n in range(len(batch))}
            chosen = [number for number, places in takers.items() if len(places) == 1]
            out, pullback = pipe.vjp(state, *batch, argnums=chosen)
            want, pull = whole.vjp(other, *batch, argnums=chosen)
            known(out, want)
            cotangent = optree.tree_map(torch.cos, want)
            grads, cotangents = pullback(cotangent)
            expected, ours = pull(cotangent)
            full, gathered = fz.gather(expected), fz.gather(grads)
            fz.testing.assert_trees_close([gathered[c] for c in here], [full[c] for c in here], rtol=rtol, atol=0)
            for number, own in enumerate(cotangents):
                if takers[number] == {place} or number not in chosen:
                    same(own, ours[number])
                else:
                    assert own.shape == batch[number].shape and own.device.type == "meta"
            known(pipe.forward(state, *batch), want)
            loss = case.stages[-1].gives == "loss"
            state, metrics = pipe(state, *batch, cotangent=None if loss else cotangent)
            other, wanted = whole(other, *batch, cotangent=None if loss else cotangent)
            fz.testing.assert_trees_close(metrics, wanted, rtol=rtol, atol=0)
        full, gathered = fz.gather(other.params), fz.gather(state.params)
        fz.testing.assert_trees_close([gathered[c] for c in here], [full[c] for c in here], rtol=rtol, atol=0)
        assert len(pipe.timeline(state, *batch, cotangent=None if loss else cotangent).spans)


@st.composite
def jobs(draw: st.DrawFn) -> list[Job]:
    out = []
    for _ in range(4):
        schedule = draw(strategies.schedules(stages=4, microbatches=4)).computes
        case = draw(cases(schedule.stages))
        out.append((case, schedule.with_messages(case.edges) if draw(st.booleans()) else schedule))
    return out


@settings(max_examples=3, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(jobs())
def test_one_rank_a_place(drawn: list[Job]) -> None:
    run_ranks(functools.partial(against_one, jobs=drawn, dp=1, stage=0), 4, backend="processes")


@in_turns(8, "on processes, as on threads")
@pytest.mark.parametrize("stage", [1, 2, 3] if NIGHTLY else [3])
def test_sharded_stages(stage: int) -> None:
    """Two places of two ranks each: ZeRO goes over one axis, the pipeline over the other."""
    case = Case(
        (
            Stage("linear", "x", "tuple", True, ("weight",)),
            Stage("norm", "tuple", "dict", False, ()),
            Stage("twice", "dict", "bare", False, ("input",)),
            Stage("cast", "bare", "loss", False, ("skip", "input", "weight")),
        ),
        ((0, (3,)),),
        ((0, (0,)), (2, (1,)), (3, (1,))),
        ((0, 3),),
    )
    drawn = [(case, fz.schedules.dual_pipe_v(4, 4)), (case, fz.schedules.interleaved(4, 4, 2))]
    run_ranks(functools.partial(against_one, jobs=todays(drawn, of=2), dp=2, stage=stage), 4, backend="processes")


class Refuses:
    """A stage that fails on some microbatches, forward or back, on the ranks that its microbatch says."""

    def __init__(self, last: bool) -> None:
        self.last = last

    def __call__(self, params: Any, h: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        if bool((h.detach() > 1e3).any()):
            raise LookupError("the stage refuses a number over a thousand")
        out = Fails.apply(h) @ params["w"]
        return (out * out).mean() if self.last else out


def failing(rank: int) -> None:
    """An error in one place, in any task, is raised on all ranks, and the next call is as if nothing had been."""
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("pp",))
    steps = [make(Refuses(stage == 2)) for stage in range(3)]
    eye, x = torch.eye(3, dtype=torch.float64), torch.ones(8, 3, dtype=torch.float64)
    pipe = fz.pipeline(steps, fz.schedules.one_f_one_b(3, 4), groups=mesh["pp"])
    state = pipe.init([{"w": eye}] * 3)
    want = fz.gather(pipe(state, x)[0].params[rank])
    for stage in range(3):
        # a weight that makes the next stage's input too large, at the second microbatch alone
        wrong = x.clone()
        wrong[2] = 1e4
        w = [eye * (0.01 if i < stage else 1.0) for i in range(3)]
        with pytest.raises(LookupError, match="refuses a number over a thousand") as caught:
            pipe(pipe.init([{"w": own * 1.0} for own in w]), wrong)
        assert str(caught.value).startswith("pipeline: rank") or "the stage refuses" in str(caught.value)
        fz.testing.assert_trees_close(fz.gather(pipe(state, x)[0].params[rank]), want, rtol=0, atol=0)
    out, pullback = pipe.vjp(state, x)
    with pytest.raises(ArithmeticError, match="a cotangent over a thousand"):
        pullback(torch.full_like(out, 1e7))
    with pytest.raises(ValueError, match="expected that of the outputs"):
        pipe.vjp(state, x)[1]((torch.ones_like(out),))
    fz.testing.assert_trees_close(fz.gather(pipe(state, x)[0].params[rank]), want, rtol=0, atol=0)


def test_an_error_in_one_place_is_raised_in_all() -> None:
    run_ranks(failing, 3, backend="processes", timeout=20)


def unlike(rank: int) -> None:
    """Ranks that do not do the same are told, all of them, and nothing is computed of what was meant otherwise."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    steps = [make(Refuses(False)), make(Refuses(True))]
    eye, x = {"w": torch.eye(3)}, torch.ones(4, 3)
    with pytest.raises(ValueError, match="has another schedule"):
        schedule = fz.schedules.gpipe(2, 2 + rank)
        fz.pipeline(steps, schedule, groups=mesh["pp"]).init([eye, eye])
    whole = [fz.shard_zero1(step) for step in steps]
    with pytest.raises(ValueError, match=r"goes over ranks \[0, 1\], of which \[[01]\] are at other places"):
        fz.pipeline(whole, fz.schedules.gpipe(2, 2), groups=mesh["pp"]).init([eye, eye])
    with pytest.raises(ValueError, match=r"expected each of them to have a place"):
        fz.pipeline(steps[:1], fz.schedules.gpipe(1, 2), groups=[[0]]).init([eye])
    pipe = fz.pipeline(steps, fz.schedules.gpipe(2, 2), groups=mesh["pp"])
    state = pipe.init([eye, eye])
    with pytest.raises(ValueError, match="rank 0 of its group was given 3 examples, and the rank of the last stage"):
        pipe(state, x[: 3 + rank])
    with pytest.raises(ValueError, match="got 3 in input 0, 4 in input 1 along the dims that are split"):
        pipe(state, x[: 3 + rank], x)  # wrong on the first rank alone
    with pytest.raises(TypeError, match="plain autograd differentiates"):
        pipe.vjp(state, x.clone().requires_grad_())
    with pytest.raises(TypeError, match=r"torch.func.grad transforms|that torch.func"):
        torch.func.grad(lambda x: pipe.vjp(state, x)[0])(x)
    out, pullback = pipe.vjp(state, x)
    pullback(torch.ones_like(out))
    with fz.testing.hazards(None), pytest.raises(RuntimeError, match="expected the same calls in the same order"):
        pipe.forward(state, x) if rank else pipe.vjp(state, x)


def test_ranks_that_do_not_do_the_same() -> None:
    run_ranks(unlike, 2, backend="processes", timeout=20)


def dying(rank: int) -> str:
    """A place that is gone is an error everywhere, within the timeout."""
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("pp",))
    pipe = fz.pipeline([make(Refuses(s == 2)) for s in range(3)], fz.schedules.gpipe(3, 2), groups=mesh["pp"])
    state = pipe.init([{"w": torch.eye(3)}] * 3)
    pipe(state, torch.ones(4, 3))
    if rank == 1:
        return "left"
    try:
        with fz.testing.hazards(None):  # what is given up is waited for by nobody
            pipe(state, torch.ones(4, 3))
    except RuntimeError as error:
        return str(error)
    raise AssertionError("nobody noticed")


def test_a_place_that_does_not_come() -> None:
    first, second, third = run_ranks(dying, 3, backend="processes", timeout=5)
    assert second == "left"
    for said in (first, third):
        assert "and rank 1 did not come through" in said and "All ranks of a pipeline make the same calls" in said


def on_threads(rank: int) -> None:
    pipe = fz.pipeline([make(Refuses(s == 1)) for s in range(2)], fz.schedules.gpipe(2, 2), groups=[[0], [1]])
    with pytest.raises(ValueError, match=r"expected 'gloo', whose ranks are processes"):
        pipe.init([{"w": torch.eye(3)}] * 2)


def test_ranks_that_are_threads_are_refused() -> None:
    run_ranks(on_threads, 2, timeout=10)


def twice(params: Any, h: torch.Tensor) -> torch.Tensor:
    return h @ params["w"]


def squares(params: Any, h: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    return (h @ params["w"]).square().mean() + sum(other.mean() for other in others)


def unpickled(params: Any, h: torch.Tensor) -> Any:
    return h @ params["w"], lambda: None


def sparse(params: Any, h: torch.Tensor) -> Any:
    return (h @ params["w"]).to_sparse()


def swapped(rank: int, what: str) -> None:
    """Two pipelines, or two pullbacks of one, in another order on each rank."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    eye, x = {"w": torch.eye(3)}, torch.ones(4, 3)
    steps = [make(twice), make(squares)]
    one, two = (fz.pipeline(steps, fz.schedules.gpipe(2, 2), groups=mesh["pp"]) for _ in range(2))
    state, other = one.init([eye, eye]), two.init([eye, eye])
    with fz.testing.hazards(None), pytest.raises(RuntimeError, match=r"expected the same calls|did not come through"):
        if what == "pipelines":
            for pipe, own in [(one, state), (two, other)][:: -1 if rank else 1]:
                pipe(own, x)
        else:
            made = [one.vjp(state, x * n) for n in (1, 2)]
            for out, pullback in made[:: -1 if rank else 1]:
                pullback(torch.ones_like(out))


@pytest.mark.parametrize("what", ["pipelines", "pullbacks"])
def test_calls_in_another_order(what: str) -> None:
    run_ranks(functools.partial(swapped, what=what), 2, backend="processes", timeout=5)


def between_places(rank: int) -> None:
    """What cannot go from one place to another, what all places are told, and an update that fails in one."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    eye, x = {"w": torch.eye(3)}, torch.ones(4, 3)
    order = fz.schedules.gpipe(2, 2)
    pipe = lambda steps, **more: fz.pipeline(steps, order, groups=mesh["pp"], **more)
    for fn, words in ((unpickled, "cannot be sent to another place"), (sparse, r"expected dense tensors")):
        own = pipe([make(fn), make(squares)])
        with pytest.raises(TypeError, match=words):
            own(own.init([eye, eye]), x)
    own = pipe([fz.train_step(twice, fz.sgd(0.1)), fz.train_step(squares, fz.sgd(0.2))])
    state, metrics = own(own.init([eye, eye]), x)
    assert {"lr.0", "lr.1"} < metrics.keys() and float(metrics["lr.1"]) == pytest.approx(0.2)
    own = pipe([make(twice), make(squares)], inputs={0: 0, 1: (1, 0)})
    state = own.init([eye, eye])
    with pytest.raises(ValueError, match=r"input 0 is taken by stages at places \[0, 1\]"):
        own.vjp(state, x, x)
    out, pullback = own.vjp(state, x, x, argnums=1)
    _, (first, second) = pullback(torch.ones_like(out))
    assert first is None and second.shape == x.shape and second.device.type == ("cpu" if rank else "meta")
    bad = fz.GradientTransformation(fz.sgd(0.1).init, failing_update)
    own = pipe([fz.train_step(twice, bad), make(squares)])
    state = own.init([eye, eye])
    with pytest.raises(ArithmeticError, match="this optimizer fails"):
        own(state, x)
    own = pipe([make(twice), make(squares)])
    state = own.init([eye, eye])
    after, _ = own(state, x)
    torn = fz.PipelineState([after[0] if rank == 0 else None, None if rank == 0 else state[1]], state.places)
    with pytest.raises(ValueError, match="expected the same number of all"):
        own(torn, x)
    with pytest.raises(TypeError, match=r"expected fz.save"):
        pickle.dumps(state)
    assert len(copy.deepcopy(state)) == 2


def failing_update(*arguments: Any, **more: Any) -> Any:
    raise ArithmeticError("this optimizer fails")


def test_what_goes_between_places() -> None:
    run_ranks(between_places, 2, backend="processes", timeout=15)


def _tanh(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["w"])


def _token_mean(p: Any, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    told = (y >= 0).to(h.dtype)
    return ((h @ p["w"])[:, 0].sub(y).square() * told).sum() / told.sum()  # NaN of none


def _told(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (y >= 0).sum()


class _Raises:
    """Weights that are none on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> float:
        return -1.0 if dist.get_rank() == self.rank else 1.0


def weighted(rank: int, grouped: bool) -> None:
    """Token means over microbatches of which some have no token, and are NaN."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    params = [{"w": draw(3, 3)}, {"w": draw(3, 3)}, {"w": draw(3, 1)}]
    x, y = draw(11, 3), torch.tensor([1, -1, 2, 0, 1, -1, -1, -1, -1, -1, 3])
    kept = y >= 0

    def whole(params: Any, x: torch.Tensor) -> torch.Tensor:
        h = _tanh(params[1], _tanh(params[0], x[kept]))
        return ((h @ params[2]["w"])[:, 0] - y[kept]).square().mean()

    (grads, by_x), loss = torch.func.grad_and_value(whole, argnums=(0, 1))(params, x)
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("pp",)) if grouped else None
    groups = mesh["pp"] if mesh is not None else None
    steps = [fz.train_step(fn, fz.sgd(1.0)) for fn in (_tanh, _tanh, _token_mean)]
    for schedule in (fz.schedules.one_f_one_b(3, 5), fz.schedules.zero_bubble(3, 5)):
        pipe = fz.pipeline(steps, schedule, groups, weights=_told)
        state = pipe.init(params)
        new, metrics = pipe(state, x, y)
        out, pullback = pipe.vjp(state, x, y)
        found, (own_x, _) = pullback(torch.ones_like(out))
        fz.testing.assert_trees_close([metrics["loss"], out, pipe.forward(state, x, y)], [loss] * 3, rtol=1e-10)
        for c, own in enumerate(new):
            if own is not None:
                assert not metrics["skipped"]
                want = params[c]["w"] - grads[c]["w"]
                fz.testing.assert_trees_close(fz.gather(own.params)["w"], want, rtol=1e-10)
                fz.testing.assert_trees_close(fz.gather(found[c])["w"], grads[c]["w"], rtol=1e-10)
        if own_x.device.type != "meta":
            fz.testing.assert_trees_close(own_x, by_x, rtol=1e-10)
        new, metrics = pipe(state, x, torch.full_like(y, -1))
        assert metrics["skipped"] and metrics["loss"].isnan() and new.step == 0
    for broken in range(3) if grouped else ():
        pipe = fz.pipeline(steps, fz.schedules.one_f_one_b(3, 5), groups, weights=_Raises(broken))
        state = pipe.init(params)
        for call in (pipe, pipe.vjp, pipe.forward):
            with pytest.raises(ValueError, match=r"weights: got -1.0 for microbatch 0, expected a finite number"):
                call(state, x, y)
    with pytest.raises(ValueError, match=r"got steps\[0\] with fz.accumulate.*fz.pipeline\(..., weights=...\)"):
        fz.pipeline([fz.accumulate(steps[0], 1, weights=_told), *steps[1:]], fz.schedules.gpipe(3, 5), groups)


def test_weights_over_places() -> None:
    weighted(0, grouped=False)
    run_ranks(functools.partial(weighted, grouped=True), 3, backend="processes")
