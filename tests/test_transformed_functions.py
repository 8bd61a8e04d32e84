"""Every public function that tensors are given to, inside every transform of torch.func: right, or refused by name.

Never a silent zero: derivatives are held against differences of the function itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nightly import by_turns, in_turns
from state.test_checks import AROUND, NESTED, PARAMS, STATE, STEP, X, put, summed

import fzero as fz
from fzero.testing import assert_trees_close

F64 = torch.float64
W, RATE = PARAMS["w"], torch.tensor(0.1, dtype=F64)
OWN = STATE.params.local(STATE.params.groups[0])
GRADS = STEP.vjp(STATE, X)[1](torch.ones((), dtype=F64))[0]


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return ((x @ p["w"]) ** 2).mean()


def run_of(step: Any, w: torch.Tensor = W, x: torch.Tensor = X) -> torch.Tensor:
    """Everything that two updates give."""
    state, total = step.init({"w": w}), torch.zeros((), dtype=F64)
    for _ in range(2):
        state, metrics = step(state, x)
        total = total + metrics["loss"] + metrics["grad_norm"]
    return total + summed(fz.gather(state.params)) + step.forward(state, x)


def around(transform: Callable[[Any], Any]) -> tuple[Callable[..., Any], torch.Tensor]:
    """A run with a transform of steps, by its params."""
    return lambda w: run_of(transform(fz.train_step(loss, fz.sgd(0.1, momentum=0.9))), w), W


def with_optimizer(make: Callable[[Any], Any]) -> tuple[Callable[..., Any], torch.Tensor]:
    """A run by a number of its optimizer."""
    return lambda rate: run_of(fz.train_step(loss, make(rate))), RATE


def of_state(fn: Callable[[Any], object]) -> tuple[Callable[..., Any], torch.Tensor]:
    """Something that takes a whole state, by its params."""

    def called(own: torch.Tensor) -> torch.Tensor:
        fn(STATE.replace(params=put(STATE.params, own)))
        return own.sum()

    return called, OWN


def saved(name: str, fn: Callable[..., Any]) -> Callable[[Path], tuple[Callable[..., Any], torch.Tensor]]:
    return lambda folder: of_state(lambda state: fn(folder / name, state))


def taped(x: torch.Tensor) -> torch.Tensor:
    with fz.tape(STEP, STATE) as model:
        return model(x)  # type: ignore[no-any-return]


def stacked(w: torch.Tensor) -> torch.Tensor:
    one, two = fz.unstack(fz.stack([STEP.init({"w": w}), STEP.init({"w": 2 * w})]))
    return STEP.forward(one, X) + summed(fz.gather(two.params))  # type: ignore[no-any-return]


def in_a_unit(x: torch.Tensor) -> torch.Tensor:
    call = fz.unit(lambda p, x: torch.tanh(x @ p["w"]).mean())
    return run_of(fz.remat(fz.train_step(lambda p, x: call(p, x), fz.sgd(0.1))), x=x)


def with_names(x: torch.Tensor) -> torch.Tensor:
    call = fz.unit(lambda p, x: torch.tanh(fz.name(torch.sin(x @ p["w"]), "sine")).mean())
    return run_of(fz.remat(fz.train_step(lambda p, x: call(p, x), fz.sgd(0.1))), x=x)


def collecting(x: torch.Tensor) -> torch.Tensor:
    def block(p: Any, x: torch.Tensor) -> torch.Tensor:
        return fz.collect(torch.tanh(x @ p["w"]), "h").mean()

    own = lambda p, x: fz.unit(block)(p, x) + sum(h.square().sum() for h in fz.collected("h"))
    return run_of(fz.remat(fz.train_step(own, fz.sgd(0.1))), x=x)


def piped(w: torch.Tensor) -> torch.Tensor:
    steps = [fz.train_step(lambda p, x: torch.tanh(x @ p["w"]), fz.sgd(0.1)), fz.train_step(loss, fz.sgd(0.1))]
    pipe = fz.pipeline(steps, fz.schedules.gpipe(2, 2))
    state, metrics = pipe(pipe.init([{"w": w}, {"w": w[:2]}]), X)
    return metrics["loss"] + metrics["grad_norm"] + pipe.forward(state, X)  # type: ignore[no-any-return]


def with_other_function(z: torch.Tensor) -> torch.Tensor:
    return fz.with_fn(STEP, lambda p, x: (x @ p["w"] * z).mean()).forward(STATE, X)  # type: ignore[no-any-return]


def regularised(w: torch.Tensor) -> torch.Tensor:
    return run_of(fz.train_step(lambda p, x: loss(p, x) + fz.sum_over(p, lambda q: (q**3).sum()), fz.sgd(0.1)), w)


LINEAR = torch.nn.Linear(3, 2, dtype=F64)


def by_module(x: torch.Tensor) -> torch.Tensor:
    apply, params = fz.functional(LINEAR)
    ones = {name: torch.ones_like(value) for name, value in params.items()}
    step = fz.train_step(lambda p, x: apply(p, x).square().mean(), fz.sgd(0.1))
    return step(step.init(ones), x)[1]["loss"]  # type: ignore[no-any-return]


def scanned(x: torch.Tensor) -> torch.Tensor:
    state, metrics = fz.scan(STEP, STATE, [x, 2 * x, x], 2)
    return metrics["loss"].sum() + summed(fz.gather(state.params))


def loss_of_x(x: torch.Tensor) -> torch.Tensor:
    return fz.jit(STEP, backend="graph")(STATE, x)[1]["loss"]  # type: ignore[no-any-return]


def looped(x: torch.Tensor) -> torch.Tensor:
    run, total = fz.loop(STEP, STATE, [x, 2 * x, x], progress=False), torch.zeros((), dtype=F64)
    for _, metrics in run:
        total = total + metrics["loss"]
    return total + summed(fz.gather(run.state.params))


def carried(w: torch.Tensor) -> Any:
    fn = lambda p, mean, x: (loss({"w": p["w"] + mean}, x), 0.5 * mean + 0.5 * p["w"])
    step = fz.carry(fz.train_step(fn, fz.sgd(0.1, momentum=0.9)), torch.zeros_like(W))
    return run_of(step, w)


def averaged(w: torch.Tensor) -> torch.Tensor:
    step = fz.ema(fz.train_step(loss, fz.sgd(0.1, momentum=0.9)), 0.5)
    state = step(step(step.init({"w": w}), X)[0], X)[0]
    average = state.extra["ema"]
    return step.forward(state.replace(params=average), X) + summed(fz.gather(average))  # type: ignore[no-any-return]


# a function of one tensor through each, and that tensor; or one that is made for a folder
RIGHT: dict[str, Any] = {
    **{
        name: with_optimizer(make)
        for name, make in {
            "adam": lambda rate: fz.adam(rate, weight_decay=rate),
            "adamw": lambda rate: fz.adamw(rate, b1=rate, weight_decay=rate),
            "lamb": lambda rate: fz.lamb(rate, weight_decay=rate),
            "muon": lambda rate: fz.muon(rate, momentum=rate, weight_decay=rate, ns_steps=1),
            "adafactor": lambda rate: fz.adafactor(rate, weight_decay=rate),
            "whole": lambda rate: fz.whole(fz.adam(rate, weight_decay=rate)),
            "adaptive_clip": lambda rate: fz.chain(fz.adaptive_clip(rate), fz.adamw(0.1, eps=0.1)),
            "lion": lambda rate: fz.lion(rate, weight_decay=rate),
            "sgd": lambda rate: fz.sgd(rate, momentum=rate, weight_decay=rate),
            "chain": lambda rate: fz.chain(fz.clip_by_global_norm(rate), fz.sgd(rate)),
            "clip_by_global_norm": lambda rate: fz.chain(fz.clip_by_global_norm(2 * rate), fz.adamw(0.1, eps=0.1)),
            "clip_by_block_norm": lambda rate: fz.chain(fz.clip_by_block_norm(2 * rate), fz.adamw(0.1, eps=0.1)),
            "clip_by_value": lambda rate: fz.chain(fz.clip_by_value(rate), fz.sgd(0.1, momentum=0.9)),
            "partition": lambda rate: fz.partition({"w": fz.adamw(rate)}),
            "constant": lambda rate: fz.sgd(fz.constant(rate)),
            "linear": lambda rate: fz.sgd(fz.linear(rate, 2 * rate, 3)),
            "warmup_cosine": lambda rate: fz.sgd(fz.warmup_cosine(rate, 2, 9, rate / 2)),
        }.items()
    },
    **{
        name: around(transform)
        for name, transform in {
            "accumulate": lambda step: fz.accumulate(step, 2),
            "autocast": fz.autocast,  # of float64 nothing
            "freeze": lambda step: step,  # the only leaf: in test_whole_runs
            "fuse_update": fz.fuse_update,
            "lookahead": lambda step: fz.lookahead(step, 2),
            "loss_scale": fz.loss_scale,
            "offload": lambda step: fz.offload(step, params="host", moments="host"),
            "remat": fz.remat,
        }.items()
    },
    "train_step": around(lambda step: step),
    "ema": (averaged, W),
    "carry": (carried, W),
    "with_fn": (with_other_function, RATE),
    "functional": (by_module, X),
    "unit": (in_a_unit, X),
    "name": (with_names, X),
    "check_pure": (lambda x: (fz.check_pure(STEP, STATE, x), x.sum())[1], X),
    "collect": (collecting, X),
    "collected": (collecting, X),
    "sum_over": (regularised, W),
    "pipeline": (piped, W),
    "loop": (looped, X),
    "scan": (scanned, X),
    "jit": (lambda x: fz.jit(loss_of_x, backend="graph")(x), X),
    "stack": (stacked, W),
    "unstack": (stacked, W),
    "gather": (lambda own: summed(fz.gather(put(GRADS, own))), OWN),
    "scatter": (lambda w: summed(fz.scatter({"w": w}, like=STATE.params)), W),
    "global_norm": (lambda own: fz.global_norm(put(GRADS, own)), OWN),
}
REFUSED: dict[str, Any] = {
    "from_torch": (lambda w: run_of(fz.train_step(loss, fz.from_torch(torch.optim.Adam, 0.1)), w), W),
    "donate": around(fz.donate),
    "tape": (taped, X),
    "convert": of_state(lambda state: fz.convert(state, STEP)),
    "explain": (lambda x: torch.tensor(fz.explain(STEP, STATE, x).grad_norm), X),
    "hvp": (lambda x: summed(fz.hvp(STEP, STATE, GRADS, x)), X),
    "per_example_grads": (lambda x: summed(fz.per_example_grads(STEP, STATE, x)), X),
    "stream": (lambda own: summed(dict(fz.stream(put(GRADS, own)))), OWN),
    "save": saved("saved", fz.save),
    "save_async": saved("later", lambda *given: fz.save_async(*given).wait()),
    "save_safetensors": saved("tensors", fz.save_safetensors),
}
# what no tensor is given to; what compiles, which takes seconds, and is drawn with real ranks elsewhere
OTHERS = frozenset(
    "measure_bandwidth load load_extra load_safetensors plan fits plot_plan plot_schedule remote fetch compile "
    "keep_memory register_carrier shard_tensor shard_zero1 shard_zero2 shard_zero3".split()
)

DRAWS = frozenset({"gradient_noise"})  # right where a map says randomness=: in tests/optim/test_noise.py


def test_every_public_function_is_in_a_table() -> None:
    functions = {name for name, value in vars(fz).items() if inspect.isfunction(value)}
    assert functions == RIGHT.keys() | REFUSED.keys() | OTHERS | DRAWS
    assert not RIGHT.keys() & REFUSED.keys()


@in_turns(10)
@pytest.mark.parametrize(("name", "transform"), by_turns(sorted(RIGHT), sorted(AROUND), of=3))
def test_it_is_right(name: str, transform: str) -> None:
    fn, x = RIGHT[name]
    value, h, low = torch.as_tensor(fn(x)), 1e-5, 1e-6
    slope = (fn(x + h) - fn(x - h)) / (2 * h)
    for each in (AROUND, NESTED):
        if name == "scan" and transform == "torch.autograd.forward_ad":
            with pytest.raises(TypeError, match=r"scan: got .* expected those of torch\.func\.jvp"):
                each[transform](fn, x)
            continue
        got = each[transform](fn, x)
        if transform == "torch.func.grad":
            assert_trees_close(got.sum(), slope, rtol=low, atol=low * 1e-2)
        elif transform == "torch.func.vmap":
            assert_trees_close(got, torch.stack([value, value]), rtol=low * 1e-5)
        else:
            assert_trees_close(got[0], value, rtol=low * 1e-5)
            assert_trees_close(got[1], slope, rtol=low, atol=low * 1e-2)


@pytest.mark.parametrize("transform", sorted(AROUND))
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_it_is_refused(name: str, transform: str, tmp_path: Path) -> None:
    case = REFUSED[name]
    made: Any = case(tmp_path) if callable(case) else case
    fn, x = made
    for each in (AROUND, NESTED):
        with pytest.raises(TypeError, match=r"(step|fz)\..* got .*expected"):
            each[transform](fn, x)
    assert not [*tmp_path.iterdir()]
    fn(x)  # and by itself it runs


@pytest.mark.parametrize("name", sorted(name for name, (_, x) in RIGHT.items() if x is RATE))
def test_a_number_made_inside_of_a_transform_is_a_constant(name: str) -> None:
    """torch wraps it all the same."""
    fn, own = RIGHT[name]
    got = torch.func.grad(lambda t: t * fn(torch.tensor(float(own), dtype=F64)))(torch.ones((), dtype=F64))
    assert_trees_close(got, torch.as_tensor(fn(own)), rtol=1e-12)
