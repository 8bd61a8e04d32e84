"""Pipelines whose stages are components on ranks of their own: the bits of those in one process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from nightly import in_turns

import fzero as fz
from fzero.schedules import Schedule

OPTIMIZER = fz.chain(fz.clip_by_global_norm(0.05), fz.adamw(1e-2))
X = torch.linspace(-1, 1, 48, dtype=torch.float64).view(16, 3)
Y = torch.cos(X)


def layer(params: Any, h: torch.Tensor) -> Any:
    out = torch.tanh(h @ params["w"])
    return out, out * 2


def middle(params: Any, h: torch.Tensor) -> torch.Tensor:
    return torch.tanh(h @ params["w"])


def head(params: Any, h: torch.Tensor, skip: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((h + skip) @ params["w"] - y).square().mean()


FNS: list[Any] = [layer, middle, head]
WIRES: dict[str, Any] = {"skips": {(0, 1): 2}, "inputs": {0: 0, 2: 1}}


def params(stage: int) -> Any:
    return {"w": torch.eye(3, dtype=torch.float64) * (0.5 + stage)}


def build(rank: int, stage: int, ranks: int) -> Any:
    step = fz.train_step(FNS[stage], OPTIMIZER)
    return (fz.shard_zero3(step) if ranks > 1 else step), params(stage)


def local(schedule: Schedule) -> fz.Pipeline:
    return fz.pipeline([fz.train_step(fn, OPTIMIZER) for fn in FNS], schedule, **WIRES)


@in_turns(3)
@pytest.mark.parametrize(("on", "ranks"), [("threads", (1, 1, 1)), ("threads", (2, 1, 2)), ("processes", (1, 2, 1))])
def test_stages_elsewhere(on: str, ranks: tuple[int, ...], tmp_path: Path) -> None:
    exact = max(ranks) == 1
    close = functools.partial(fz.testing.assert_trees_close, rtol=0 if exact else 1e-10, atol=0 if exact else 1e-12)
    made = [
        fz.remote(functools.partial(build, stage=s, ranks=n), ranks=n, on=on, name=f"stage {s}", timeout=60.0)
        for s, n in enumerate(ranks)
    ]
    try:
        for schedule in (fz.schedules.one_f_one_b(3, 4), fz.schedules.zero_bubble(3, 4)):
            pipe, whole = fz.pipeline(made, schedule, **WIRES), local(schedule)
            state, other = pipe.init(), whole.init([params(s) for s in range(3)])
            x, y = X[:14], Y[:14]  # which do not divide
            for rows in (16, 14):
                state, metrics = pipe(state, X[:rows], Y[:rows])
                other, expected = whole(other, X[:rows], Y[:rows])
                close(metrics, expected)
            close(list(fz.gather(state.params)), list(fz.gather(other.params)))
            out, pullback = pipe.vjp(state, x, y)
            want, pull = whole.vjp(other, x, y)
            close(out, want)
            close(pipe.forward(state, x, y), want)
            grads, cotangents = pullback(torch.ones_like(out))
            ours, theirs = pull(torch.ones_like(want))
            close(list(cotangents), list(theirs))
            close(list(fz.gather(grads)), list(fz.gather(ours)))
            close(fz.fetch(fz.global_norm(grads)), fz.global_norm(ours))
            state, other = pipe.add_grads(state, grads), whole.add_grads(other, ours)
            state, metrics = pipe.update(state, grads)
            other, expected = whole.update(other, ours)
            close(metrics, expected)
            timeline = pipe.timeline(state, x, y)
            tasks = {span.task for span in timeline.spans}
            assert tasks == {task for _, task in fz.schedules.check(schedule).order if not task.is_message}
            assert 0 < timeline.total < 60
            fz.save(tmp_path / "run", state, {"seen": 1})
            again = fz.load(tmp_path / "run", pipe)
            close(list(fz.gather(again.params)), list(fz.gather(other.params)))
            assert fz.load(tmp_path / "run", whole).step == other.step
    finally:
        for component in made:
            component.close()


def test_here_and_elsewhere() -> None:
    """A stage on ranks of its own between two in this process."""
    schedule = fz.schedules.one_f_one_b(3, 4)
    with fz.remote(functools.partial(build, stage=1, ranks=1), on="threads") as component:
        steps = [fz.train_step(fn, OPTIMIZER) for fn in FNS]
        pipe, whole = fz.pipeline([steps[0], component, steps[2]], schedule, **WIRES), local(schedule)
        state, other = pipe.init([params(0), None, params(2)]), whole.init([params(s) for s in range(3)])
        for _ in range(2):
            state, metrics = pipe(state, X, Y)
            other, expected = whole(other, X, Y)
            fz.testing.assert_trees_close(metrics, expected, rtol=0, atol=0)
        with pytest.raises(TypeError, match="expected None: what `build` returned"):
            pipe.init([params(0), params(1), params(2)])
        with pytest.raises(ValueError, match="expected groups=None"):
            fz.pipeline([steps[0], component, steps[2]], schedule, [[0], [1], [2]], **WIRES)
        with pytest.raises(ValueError, match=r"got weights= and steps\[1\], a component on ranks of its own"):
            fz.pipeline([steps[0], component, steps[2]], schedule, **WIRES, weights=len)


def test_it_is_pulled_back_again() -> None:
    whole = local(fz.schedules.gpipe(3, 2))
    _, pullback = whole.vjp(whole.init([params(stage) for stage in range(3)]), X, Y)
    norm = fz.global_norm(pullback(torch.ones((), dtype=torch.float64))[0])
    with fz.remote(functools.partial(build, stage=0, ranks=1), on="threads") as first:
        pipe = fz.pipeline([first, *[fz.train_step(fn, OPTIMIZER) for fn in FNS[1:]]], whole.schedule, **WIRES)
        _, pullback = pipe.vjp(pipe.init([None, params(1), params(2)]), X, Y)
        for retained in (True, True, False):
            grads, _ = pullback(torch.ones((), dtype=torch.float64), retain_graph=retained)
            assert float(fz.global_norm(grads)) == pytest.approx(float(norm), rel=1e-12)


def meaned(rank: int) -> Any:
    fn = lambda p, h: fz.parallel.weighted_mean((h @ p["w"]).square(), torch.ones_like(h), None)
    return fz.train_step(fn, OPTIMIZER), params(1)


def test_a_mean_of_means_elsewhere_is_refused() -> None:
    with fz.remote(meaned, on="threads") as component:
        pipe = fz.pipeline([fz.train_step(middle, OPTIMIZER), component], fz.schedules.gpipe(2, 2))
        with pytest.raises(ValueError, match="weighted_mean: got a call in a step of 2 microbatches"):
            pipe(pipe.init([params(0), None]), X)


def wrong(rank: int) -> Any:
    def fn(p: Any, h: torch.Tensor) -> torch.Tensor:
        raise LookupError("this stage refuses")

    return fz.train_step(fn, OPTIMIZER), params(1)


def test_an_error_elsewhere() -> None:
    with fz.remote(wrong, on="threads") as component:
        steps = [fz.train_step(fn, OPTIMIZER) for fn in FNS]
        pipe = fz.pipeline([steps[0], component, steps[2]], fz.schedules.gpipe(3, 2), **WIRES)
        state = pipe.init([params(0), None, params(2)])
        with pytest.raises(Exception, match="this stage refuses"):
            pipe(state, X, Y)


def scale(rank: int) -> Any:
    return fz.train_step(lambda p, x: x * p["w"], fz.sgd(0.1)), {"w": torch.ones(2) * 3}


def test_values_from_elsewhere_in_this_process() -> None:
    """Inputs, cotangents and norms that are handles: steps and pipelines here wait for them."""
    loss = fz.train_step(lambda p, x: (x * p["w"]).sum(), fz.sgd(0.1))
    here = fz.train_step(lambda p, x: x * p["w"], fz.sgd(0.1))
    x, w = torch.arange(8.0).view(4, 2), {"w": torch.ones(2) * 3}
    with fz.remote(scale, on="threads") as component, fz.remote(scale, on="threads") as head:
        state, theirs = component.init(), head.init()
        handle = component.forward(state, x)
        pipes: list[Any] = [
            (fz.pipeline([here, here], fz.schedules.gpipe(2, 2)), [w, w]),
            (fz.pipeline([component, here], fz.schedules.gpipe(2, 2)), [None, w]),
            (here, w),
        ]
        for pipe, params in pipes:
            own = pipe.init(params)
            times = 9 if isinstance(pipe, fz.Pipeline) else 3
            assert torch.equal(pipe.forward(own, handle), x * 3 * times)
            out, pullback = pipe.vjp(own, handle)
            y, pull = head.vjp(theirs, out)
            _, (ct,) = pull(torch.ones_like(y))
            grads, cotangents = pullback(ct)
            assert torch.equal(cotangents[0], torch.full((4, 2), 3.0 * times))
            norm = fz.global_norm(grads, component.init().params)
            new, metrics = pipe.update(own, grads, grad_norm=norm)
            assert new.step == 1 and not metrics["skipped"]
        own = loss.init(w)
        assert loss(own, handle)[1]["loss"] == (x * 9).sum()
