"""Every argument of every public function, given things of every wrong kind: an error of ours that names it."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from memories import DISK
from torch import nn

import fzero as fz


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (x @ p["w"]).mean()


def build(rank: int) -> Any:
    return STEP, PARAMS


PARAMS = {"w": torch.ones(3, 2)}
X = torch.ones(4, 3)
STEP = fz.train_step(loss, fz.sgd(0.1, momentum=0.9))
STATE = STEP.init(PARAMS)
GRADS = STEP.vjp(STATE, X)[1](torch.ones(()))[0]
ORDER = fz.schedules.gpipe(1, 2)
SPEED = fz.Bandwidth(1e9, 1e9)
PROPOSAL = fz.fits(STEP, PARAMS, 1 << 20)
KINDS: dict[str, Any] = {
    "None": None,
    "a list": [1, 2],
    "a string": "x y",
    "a module": nn.Linear(3, 2),
    "a tensor": torch.ones(3, 3),
    "a 0-d tensor": torch.tensor(0.5),
    "an int": 3,
    "a negative": -1,
    "a float": 0.5,
    "a bool": True,
    "a dict": {"w": 1},
    "full params": PARAMS,
    "a state": STATE,
    "sharded params": STATE.params,
    "moments": STATE.moments,
    "grads": GRADS,
    "a step": STEP,
    "an optimizer": fz.sgd(0.1),
    "a torch optimizer": torch.optim.SGD([torch.ones(1)], lr=0.1),
    "a policy": fz.Policy(),
    "a dtype": torch.bfloat16,
    "a function": lambda *args: torch.ones(()),
    "a class": dict,
    "a disk": DISK,
    "a bandwidth": SPEED,
    "an object": object(),
}
RATE = {"an int", "a float", "a 0-d tensor", "a function"}
CALLED = {"a function", "a class", "a module", "a step"}
TREE = {"a tensor", "a 0-d tensor", "full params"}

JSON = {"None", "a list", "a string", "an int", "a negative", "a float", "a bool", "a dict"}


def at(path: Any) -> Any:
    """A string below a folder that goes with these tests."""
    return f"{DISK.path}-{path}" if isinstance(path, str) else path


def hf(path: Any) -> Any:
    return at(f"hf-{path}") if isinstance(path, str) else path


fz.save(at("x y"), STATE)
fz.save_safetensors(hf("x y"), STATE)
KEPT = fz.Checkpoints(at("kept"))
Call = Callable[[Any], Any]


def looped(state: Any = STATE, **given: Any) -> Any:
    """A loop that has not begun."""
    around: dict[str, Any] = {"checkpoints": KEPT, "evaluate": lambda _: {"x": 1.0}} | given
    return fz.loop(around.pop("step", STEP), state, around.pop("batches", [X]), **around)


def of_adam(make: Callable[..., Any]) -> dict[str, tuple[Call, set[str]]]:
    """The numbers of an optimizer of Adam's kind."""
    return {
        "lr": (make, RATE),
        "b1": (lambda v: make(0.1, b1=v), {"a 0-d tensor", "a float", "a function"}),
        "b2": (lambda v: make(0.1, b2=v), {"a 0-d tensor", "a float"}),
        **{
            name: (lambda v, name=name: make(0.1, **{name: v}), {"a 0-d tensor", "a float", "an int"})
            for name in ("eps", "weight_decay")
        },
    }


def in_step(fn: Callable[[], object]) -> object:
    return fz.with_fn(STEP, lambda p, x: (fn(), loss(p, x))[1]).forward(STATE, X)


def anew(cls: Any) -> Any:
    """A type that is not registered yet."""
    return type("Own", (cls,), {}) if isinstance(cls, type) else cls


def taken_apart(x: Any) -> Any:
    return [], None


def made_of(context: Any, values: Any) -> Any:
    return context


# function -> argument -> (a call with it, the kinds that it takes)
TABLE: dict[str, dict[str, tuple[Call, set[str]]]] = {
    "convert": {
        "state": (lambda v: fz.convert(v, STEP), {"a state"}),
        "step": (lambda v: fz.convert(STATE, v), {"a step"}),
        "lossy": (lambda v: fz.convert(STATE, STEP, v), {"a bool"}),
    },
    "stack": {"states": (lambda v: fz.stack([v]) if isinstance(v, fz.TrainState) else fz.stack(v), {"a state"})},
    "unstack": {"state": (lambda v: fz.unstack(fz.stack([v]) if v is STATE else v), {"a state"})},
    "hvp": {
        "step": (lambda v: fz.hvp(v, STATE, GRADS, X), {"a step"}),
        "state": (lambda v: fz.hvp(STEP, v, GRADS, X), {"a state"}),
        "v": (lambda v: fz.hvp(STEP, STATE, v, X), {"grads", "full params"}),
    },
    "explain": {
        "step": (lambda v: fz.explain(v, STATE, X), {"a step"}),
        "state": (lambda v: fz.explain(STEP, v, X), {"a state"}),
        "rng": (lambda v: fz.explain(STEP, STATE, X, rng=v), {"an int", "a negative"}),
        "cotangent": (lambda v: fz.explain(STEP, STATE, X, cotangent=v), {"None", "a 0-d tensor"}),
        "dtype": (lambda v: fz.explain(STEP, STATE, X, dtype=v), {"a dtype"}),
    },
    "per_example_grads": {
        "step": (lambda v: fz.per_example_grads(v, STATE, X), {"a step"}),
        "state": (lambda v: fz.per_example_grads(STEP, v, X), {"a state"}),
        "only": (lambda v: fz.per_example_grads(STEP, STATE, X, only=v), {"None"}),
    },
    "tape": {
        "step": (lambda v: fz.tape(v, STATE).__enter__(), {"a step"}),
        "state": (lambda v: fz.tape(STEP, v).__enter__(), {"a state"}),
    },
    "functional": {
        "module": (fz.functional, {"a module"}),
        "buffers": (lambda v: fz.functional(torch.nn.Linear(1, 1), v), {"a bool"}),
        "sync_batch_norm": (lambda v: fz.functional(torch.nn.Linear(1, 1), sync_batch_norm=v), {"a bool"}),
    },
    "plan": {
        "step": (lambda v: fz.plan(v, PARAMS), {"a step"}),
        "params": (lambda v: fz.plan(STEP, v), {"full params", "a tensor", "a 0-d tensor", "a function"}),
        "world_size": (lambda v: fz.plan(STEP, PARAMS, v), {"an int", "None"}),
        "mesh": (lambda v: fz.plan(STEP, PARAMS, mesh=v), {"None", "a dict"}),
        "rank": (lambda v: fz.plan(STEP, PARAMS, rank=v), set()),
        "inputs": (
            lambda v: fz.plan(STEP, PARAMS, inputs=(X,) if isinstance(v, (tuple, list)) else v),
            {"None", *[kind for kind, value in KINDS.items() if isinstance(value, (tuple, list))]},
        ),
    },
    "Plan.seconds": {
        "bandwidth": (fz.plan(STEP, PARAMS).seconds, {"a bandwidth"}),
        "compute": (lambda v: fz.plan(STEP, PARAMS).seconds(SPEED, v), {"an int", "a float", "None"}),
    },
    "Bandwidth": {
        "host_read": (lambda v: fz.Bandwidth(v, 1e9), {"an int", "a float"}),
        "host_write": (lambda v: fz.Bandwidth(1e9, v), {"an int", "a float"}),
        "disk_read": (lambda v: fz.Bandwidth(1e9, 1e9, v), {"an int", "a float", "None"}),
        "disk_write": (lambda v: fz.Bandwidth(1e9, 1e9, 1e9, v), {"an int", "a float", "None"}),
    },
    "keep_memory": {},
    "measure_bandwidth": {
        "disk": (lambda v: fz.measure_bandwidth(v, nbytes=8), {"a disk", "None"}),
        "device": (lambda v: fz.measure_bandwidth(device=v, nbytes=8), set()),
        "nbytes": (lambda v: fz.measure_bandwidth(nbytes=v), {"an int"}),
    },
    "fits": {
        "step": (lambda v: fz.fits(v, PARAMS, 1 << 20), {"a step"}),
        "params": (lambda v: fz.fits(STEP, v, 1 << 20), {"full params", "a tensor", "a 0-d tensor", "a function"}),
        "device": (lambda v: fz.fits(STEP, PARAMS, v, host=1 << 20), set()),
        "host": (lambda v: fz.fits(STEP, PARAMS, 1 << 20, v), {"an int"}),
        "disk": (lambda v: fz.fits(STEP, PARAMS, 1 << 20, 0, v), {"an int", "None"}),
        "world_size": (lambda v: fz.fits(STEP, PARAMS, 1 << 20, world_size=v), {"an int", "None"}),
        "bandwidth": (lambda v: fz.fits(STEP, PARAMS, 1 << 20, bandwidth=v), {"a bandwidth", "None"}),
    },
    "Proposal.apply": {
        "step": (PROPOSAL.apply, {"a step"}),
        "disk": (lambda v: PROPOSAL.apply(STEP, v), {"a disk", "None"}),
    },
    "plot_plan": {
        "plans": (fz.plot_plan, set()),
        "axes": (lambda v: fz.plot_plan({"plain": fz.plan(STEP, PARAMS)}, v), {"None"}),
        "leaves": (lambda v: fz.plot_plan(fz.plan(STEP, PARAMS), leaves=v), {"None"}),
    },
    "gather": {
        "tree": (fz.gather, {"sharded params", "moments", "grads"}),
        "pattern": (lambda v: fz.gather(STATE.params, v), {"None"}),
        "to": (lambda v: fz.gather(STATE.params, to=v), {"None"}),
    },
    "stream": {
        "tree": (lambda v: [*fz.stream(v)], {"sharded params", "grads"}),
        "dtype": (lambda v: [*fz.stream(STATE.params, v)], {"None", "a dtype"}),
        "pattern": (lambda v: [*fz.stream(STATE.params, pattern=v)], set()),
        "to": (lambda v: [*fz.stream(STATE.params, to=v)], {"None"}),
    },
    "scatter": {
        "tree": (lambda v: fz.scatter(v, like=STATE.params), {"sharded params", "grads", "full params"}),
        "like": (lambda v: fz.scatter(PARAMS, like=v), {"sharded params", "grads"}),
    },
    "global_norm": {"trees": (fz.global_norm, {*TREE, "sharded params", "moments", "grads"})},
    "train_step": {
        "fn": (lambda v: fz.train_step(v, fz.sgd(0.1)), {"a function", "a class"}),
        "optimizer": (lambda v: fz.train_step(loss, v), {"an optimizer"}),
        "policy": (lambda v: fz.train_step(loss, fz.sgd(0.1), v), {"a policy", "None"}),
        "units": (lambda v: fz.train_step(loss, fz.sgd(0.1), units=v), {"a string", "None"}),
        "has_aux": (lambda v: fz.train_step(loss, fz.sgd(0.1), has_aux=v), {"a bool"}),
        "metrics": (lambda v: fz.train_step(loss, fz.sgd(0.1), metrics=v), set()),
    },
    "loop": {
        "step": (lambda v: looped(step=v), {"a step", "a function"}),
        "state": (lambda v: looped(v, checkpoints=KEPT), {"a state"}),
        "batches": (lambda v: looped(batches=v), {"a list", "a tensor", "a function"}),
        **{
            name: (lambda v, name=name: looped(**{name: v}), {"None", "an int"})
            for name in ("total", "after", "patience", "save_every")
        },
        **{name: (lambda v, name=name: looped(**{name: v}), {"an int"}) for name in ("every", "evaluate_every")},
        **{name: (lambda v, name=name: looped(**{name: v}), {"None", "a string"}) for name in ("log", "tensorboard")},
        **{name: (lambda v, name=name: looped(**{name: v}), {"None"}) for name in ("best", "checkpoints")},
        **{name: (lambda v, name=name: looped(**{name: v}), {"None", "a function"}) for name in ("extra", "stop")},
        "evaluate": (lambda v: fz.loop(STEP, STATE, [X], evaluate=v), {"None", "a function"}),
        "progress": (lambda v: looped(progress=v), {"None", "a string", "a bool"}),
    },
    "scan": {
        "step": (lambda v: fz.scan(v, STATE, [X]), {"a step"}),
        "state": (lambda v: fz.scan(STEP, v, [X]), {"a state"}),
        "batches": (lambda v: fz.scan(STEP, STATE, [X] if isinstance(v, list) else v), {"a list", "a tensor"}),
        "remat_every": (lambda v: fz.scan(STEP, STATE, [X, X], v), {"None", "an int"}),
    },
    "jit": {
        "step": (lambda v: fz.jit(v), {"a step", "a function", "a class", "a module"}),
        "backend": (lambda v: fz.jit(STEP, v), {"None"}),
        "fallback": (lambda v: fz.jit(STEP, fallback=v), {"a bool"}),
        "static_argnums": (lambda v: fz.jit(STEP, static_argnums=v), {"an int", "a list"}),
    },
    "with_fn": {
        "step": (lambda v: fz.with_fn(v, loss), {"a step"}),
        "fn": (lambda v: fz.with_fn(STEP, v), {"a function", "a class"}),
        "has_aux": (lambda v: fz.with_fn(STEP, loss, v), {"a bool", "None"}),
    },
    "sum_over": {
        "params": (lambda v: fz.sum_over(v, torch.sum), TREE),
        "fn": (lambda v: fz.sum_over(PARAMS, v), {"a function"}),
    },
    "name": {
        "x": (lambda v: fz.name(v, "hidden"), {"a tensor", "a 0-d tensor"}),
        "name": (lambda v: fz.name(X, v), {"a string"}),
    },
    "unit": {"fn": (fz.unit, {"a function", "a class"}), "prove": (lambda v: fz.unit(abs, v), {"a bool"})},
    "check_pure": {
        "step": (lambda v: fz.check_pure(v, STATE, X), {"a step"}),
        "state": (lambda v: fz.check_pure(STEP, v, X), {"a state"}),
    },
    "collect": {
        "x": (lambda v: fz.collect(v, "aux"), {"a tensor", "a 0-d tensor"}),
        "name": (lambda v: fz.collect(X, v), {"a string"}),
    },
    "collected": {"name": (lambda v: in_step(lambda: fz.collected(v)), {"a string"})},
    "register_carrier": {
        "cls": (lambda v: fz.register_carrier(anew(v), taken_apart, made_of), {"a class"}),
        "flatten": (lambda v: fz.register_carrier(anew(dict), v, made_of), CALLED),
        "unflatten": (lambda v: fz.register_carrier(anew(dict), taken_apart, v), CALLED),
    },
    "adamw": {**of_adam(fz.adamw), "amsgrad": (lambda v: fz.adamw(0.1, amsgrad=v), {"a bool"})},
    "adam": {**of_adam(fz.adam), "amsgrad": (lambda v: fz.adam(0.1, amsgrad=v), {"a bool"})},
    "sgd": {
        "lr": (lambda v: fz.sgd(v), {*RATE, "a negative"}),
        "momentum": (lambda v: fz.sgd(0.1, v), {"a 0-d tensor", "a float", "an int", "None"}),
        "weight_decay": (lambda v: fz.sgd(0.1, weight_decay=v), {"a 0-d tensor", "a float", "an int", "a negative"}),
        "nesterov": (lambda v: fz.sgd(0.1, 0.9, nesterov=v), {"a bool"}),
    },
    "lion": {
        "lr": (lambda v: fz.lion(v), RATE),
        "b1": (lambda v: fz.lion(0.1, b1=v), {"a 0-d tensor", "a float", "a function"}),
        "b2": (lambda v: fz.lion(0.1, b2=v), {"a 0-d tensor", "a float"}),
        "weight_decay": (lambda v: fz.lion(0.1, weight_decay=v), {"a 0-d tensor", "a float", "an int"}),
    },
    "lamb": of_adam(fz.lamb),
    "chain": {"member": (fz.chain, {"an optimizer"})},
    "partition": {"optimizers": (fz.partition, set())},
    "whole": {"optimizer": (fz.whole, {"an optimizer"})},
    "from_torch": {
        "optimizer": (lambda v: fz.from_torch(v, 0.1), set()),
        "lr": (lambda v: fz.from_torch(torch.optim.SGD, v), RATE),
        "options": (
            lambda v: fz.from_torch(torch.optim.Adam, 0.1, eps=v).init({"w": torch.ones(2)}),
            {"an int", "a float", "a 0-d tensor", "a bool"},
        ),
    },
    "muon": {
        "lr": (fz.muon, RATE),
        "momentum": (lambda v: fz.muon(0.1, v), {"a 0-d tensor", "a float"}),
        "weight_decay": (lambda v: fz.muon(0.1, weight_decay=v), {"a 0-d tensor", "a float", "an int"}),
        "nesterov": (lambda v: fz.muon(0.1, nesterov=v), {"a bool"}),
        "ns_steps": (lambda v: fz.muon(0.1, ns_steps=v), {"an int"}),
        "eps": (lambda v: fz.muon(0.1, eps=v), {"a float", "an int"}),
        "adjust_lr_fn": (lambda v: fz.muon(0.1, adjust_lr_fn=v), set()),
    },
    "adafactor": {
        "lr": (fz.adafactor, RATE),
        "beta2_decay": (lambda v: fz.adafactor(0.1, v), {"an int", "a negative", "a float"}),
        "eps": (lambda v: fz.adafactor(0.1, eps=v), {"a list"}),
        "d": (lambda v: fz.adafactor(0.1, d=v), {"a 0-d tensor", "a float", "an int"}),
        "weight_decay": (lambda v: fz.adafactor(0.1, weight_decay=v), {"a 0-d tensor", "a float", "an int"}),
    },
    "adaptive_clip": {
        "clipping": (fz.adaptive_clip, {"a 0-d tensor", "a float", "an int"}),
        "eps": (lambda v: fz.adaptive_clip(eps=v), {"a 0-d tensor", "a float", "an int"}),
    },
    "clip_by_block_norm": {"max_norm": (fz.clip_by_block_norm, {"a 0-d tensor", "a float", "an int"})},
    "clip_by_global_norm": {"max_norm": (fz.clip_by_global_norm, {"a 0-d tensor", "a float", "an int"})},
    "clip_by_value": {"max_value": (fz.clip_by_value, {"a 0-d tensor", "a float", "an int"})},
    "gradient_noise": {
        "eta": (fz.gradient_noise, {"a 0-d tensor", "a float", "an int"}),
        "gamma": (lambda v: fz.gradient_noise(gamma=v), {"a 0-d tensor", "a float", "an int", "a negative"}),
        "seed": (lambda v: fz.gradient_noise(seed=v), {"an int", "a negative"}),
    },
    "constant": {"lr": (fz.constant, {"a 0-d tensor", "a float", "an int", "a negative"})},
    "linear": {
        "start": (lambda v: fz.linear(v, 1.0, 3), {"a 0-d tensor", "a float", "an int", "a negative"}),
        "end": (lambda v: fz.linear(1.0, v, 3), {"a 0-d tensor", "a float", "an int", "a negative"}),
        "steps": (lambda v: fz.linear(1.0, 0.0, v), {"an int"}),
    },
    "warmup_cosine": {
        "peak": (lambda v: fz.warmup_cosine(v, 1, 9), {"a 0-d tensor", "a float", "an int", "a negative"}),
        "warmup": (lambda v: fz.warmup_cosine(1.0, v, 9), {"an int"}),
        "total": (lambda v: fz.warmup_cosine(1.0, 1, v), {"an int"}),
        "end": (lambda v: fz.warmup_cosine(1.0, 1, 9, v), {"a 0-d tensor", "a float", "an int", "a negative"}),
    },
    "accumulate": {
        "step": (lambda v: fz.accumulate(v, 2), {"a step"}),
        "count": (lambda v: fz.accumulate(STEP, v), {"an int"}),
        "in_dims": (lambda v: fz.accumulate(STEP, 2, v), {"an int", "a negative", "None"}),
        "weights": (lambda v: fz.accumulate(STEP, 2, weights=v), {"None", *CALLED}),
    },
    "autocast": {
        "step": (lambda v: fz.autocast(v), {"a step"}),
        "dtype": (lambda v: fz.autocast(STEP, v), {"a dtype"}),
        "pattern": (lambda v: fz.autocast(STEP, pattern=v), {"a string"}),
    },
    "compile": {"step": (fz.compile, {"a step"}), "pattern": (lambda v: fz.compile(STEP, v), {"a string"})},
    "donate": {"step": (fz.donate, {"a step"})},
    "carry": {
        "step": (lambda v: fz.carry(v, torch.zeros(())), {"a step"}),
        "value": (lambda v: fz.carry(STEP, v), TREE),
    },
    "ema": {
        "step": (lambda v: fz.ema(v, 0.5), {"a step"}),
        "decay": (lambda v: fz.ema(STEP, v), {"a float"}),
        "name": (lambda v: fz.ema(STEP, 0.5, name=v), {"a string"}),
    },
    "freeze": {
        "step": (lambda v: fz.freeze(v, "w"), {"a step"}),
        "pattern": (lambda v: fz.freeze(STEP, v), {"a string"}),
        "keep_moments": (lambda v: fz.freeze(STEP, "w", keep_moments=v), {"a bool"}),
    },
    "fuse_update": {
        "step": (lambda v: fz.fuse_update(v), {"a step"}),
        "norm": (lambda v: fz.fuse_update(STEP, v), set()),
    },
    "loss_scale": {
        "step": (lambda v: fz.loss_scale(v), {"a step"}),
        "scale": (lambda v: fz.loss_scale(STEP, v), {"a float", "an int"}),
        "initial": (lambda v: fz.loss_scale(STEP, initial=v), {"an int"}),
        "interval": (lambda v: fz.loss_scale(STEP, interval=v), {"an int"}),
        "minimum": (lambda v: fz.loss_scale(STEP, minimum=v), {"an int", "a float"}),
        "hysteresis": (lambda v: fz.loss_scale(STEP, hysteresis=v), {"an int"}),
        "consecutive": (lambda v: fz.loss_scale(STEP, consecutive=v), {"a bool"}),
        "late": (lambda v: fz.loss_scale(STEP, late=v), {"a bool"}),
    },
    "lookahead": {
        "step": (lambda v: fz.lookahead(v), {"a step"}),
        "every": (lambda v: fz.lookahead(STEP, v), {"an int"}),
        "alpha": (lambda v: fz.lookahead(STEP, alpha=v), {"a float"}),
    },
    "offload": {
        "step": (lambda v: fz.offload(v, params="host"), {"a step"}),
        "params": (lambda v: fz.offload(STEP, params=v, grads="host"), {"a disk", "None"}),
        "grads": (lambda v: fz.offload(STEP, grads=v, params="host"), {"a disk", "None"}),
        "moments": (lambda v: fz.offload(STEP, moments=v, params="host"), {"a disk", "None"}),
        "activations": (lambda v: fz.offload(STEP, activations=v, params="host"), {"a disk", "None"}),
        "pattern": (lambda v: fz.offload(STEP, params="host", pattern=v), {"a string"}),
    },
    "remat": {
        "step": (fz.remat, {"a step"}),
        "pattern": (lambda v: fz.remat(STEP, v), {"a string"}),
        "save": (lambda v: fz.remat(STEP, save=v), set()),
        "offload": (lambda v: fz.remat(STEP, offload=v), set()),
    },
    "shard_tensor": {
        "step": (lambda v: fz.shard_tensor(v, {"w": 0}), {"a step"}),
        "plan": (lambda v: fz.shard_tensor(STEP, v), {"a dict"}),
        "mesh": (lambda v: fz.shard_tensor(STEP, {"w": 0}, v), {"None"}),
        "axis": (lambda v: fz.shard_tensor(STEP, {"w": 0}, None, v), {"a string"}),
        "sequence": (lambda v: fz.shard_tensor(STEP, {"w": 0}, None, "tp", v), {"a bool"}),
    },
    **{
        f"shard_zero{stage}": {
            "step": (lambda v, shard=shard: shard(v), {"a step"}),
            "mesh": (lambda v, shard=shard: shard(STEP, v), {"None"}),
            "axis": (lambda v, shard=shard: shard(STEP, None, v), {"a string"}),
            "replicate": (lambda v, shard=shard: shard(STEP, None, "dp", v), {"None"}),
            "pattern": (lambda v, shard=shard: shard(STEP, pattern=v), {"a string"}),
        }
        for stage, shard in ((1, fz.shard_zero1), (2, fz.shard_zero2), (3, fz.shard_zero3))
    },
    "Step.init": {
        "params": (STEP.init, {"full params", "a tensor", "a 0-d tensor", "a function"}),
        "seed": (lambda v: STEP.init(PARAMS, seed=v), {"an int", "a negative"}),
        "sync": (lambda v: STEP.init(PARAMS, sync=v), {"a bool"}),
    },
    "save": {
        "path": (lambda v: fz.save(at(v), STATE), {"a string"}),
        "state": (lambda v: fz.save(at("state"), v), {"a state"}),
        "extra": (lambda v: fz.save(at("extra"), STATE, v), JSON),
    },
    "save_async": {
        "path": (lambda v: fz.save_async(at(v), STATE).wait(), {"a string"}),
        "state": (lambda v: fz.save_async(at("state"), v).wait(), {"a state"}),
        "extra": (lambda v: fz.save_async(at("extra"), STATE, v).wait(), JSON),
    },
    "load": {
        "path": (lambda v: fz.load(at(v), STEP), {"a string"}),
        "step": (lambda v: fz.load(at("x y"), v), {"a step"}),
        "like": (lambda v: fz.load(at("x y"), STEP, like=v), {"None", "full params"}),
        "pattern": (lambda v: fz.load(at("x y"), STEP, like=PARAMS, pattern=v), set()),
        "params_only": (lambda v: fz.load(at("x y"), STEP, params_only=v), {"a bool"}),
        "lossy": (lambda v: fz.load(at("x y"), STEP, lossy=v), {"a bool"}),
        "lenient": (lambda v: fz.load(at("x y"), STEP, like=PARAMS, lenient=v), {"a bool"}),
    },
    "plot_schedule": {
        "schedule": (lambda v: fz.plot_schedule(v), set()),
        "times": (lambda v: fz.plot_schedule(ORDER, v), {"None"}),
        "path": (
            lambda v: fz.plot_schedule(ORDER, path=v if v is None or not isinstance(v, str) else None),
            {"None", "a string"},
        ),
        "axes": (lambda v: fz.plot_schedule(ORDER, axes=v), {"None"}),
    },
    "pipeline": {
        "steps": (lambda v: fz.pipeline(v, ORDER), set()),
        "schedule": (lambda v: fz.pipeline([STEP], v), set()),
        "groups": (lambda v: fz.pipeline([STEP], ORDER, v), {"None"}),
        "inputs": (lambda v: fz.pipeline([STEP], ORDER, inputs=v), {"None"}),
        "skips": (lambda v: fz.pipeline([STEP], ORDER, skips=v), {"None"}),
        "shared": (lambda v: fz.pipeline([STEP], ORDER, shared=v), {"None"}),
        "in_dims": (lambda v: fz.pipeline([STEP], ORDER, in_dims=v), {"None", "an int", "a negative"}),
        "weights": (lambda v: fz.pipeline([STEP], ORDER, weights=v), {"None", *CALLED}),
    },
    "remote": {
        "build": (lambda v: fz.remote(v, on="threads"), set()),
        "ranks": (lambda v: fz.remote(build, v, on="threads").close(), {"an int"}),
        "on": (lambda v: fz.remote(build, on=v), set()),
        "name": (lambda v: fz.remote(build, on="threads", name=v).close(), {"None", "a string"}),
        "timeout": (lambda v: fz.remote(build, on="threads", timeout=v).close(), {"an int", "a float"}),
        "checked": (lambda v: fz.remote(build, on="threads", checked=v).close(), {"a bool"}),
        "options": (lambda v: fz.remote(build, on="threads", options=v), set()),
        "in_specs": (lambda v: fz.remote(build, on="threads", in_specs=v).close(), {"None"}),
        "out_specs": (lambda v: fz.remote(build, on="threads", out_specs=v).close(), {"None"}),
    },
    "fetch": {"tree": (lambda v: fz.fetch(v), {*KINDS})},
    "load_safetensors": {
        "step": (lambda v: fz.load_safetensors(v, hf("x y")), {"a step"}),
        "files": (lambda v: fz.load_safetensors(STEP, hf(v)), {"a string"}),
        "like": (lambda v: fz.load_safetensors(STEP, hf("x y"), like=v), {"None", "full params"}),
        "names": (lambda v: fz.load_safetensors(STEP, hf("x y"), like=PARAMS, names=v), {"None"}),
        "pattern": (lambda v: fz.load_safetensors(STEP, hf("x y"), like=PARAMS, pattern=v), set()),
        "lossy": (lambda v: fz.load_safetensors(STEP, hf("x y"), lossy=v), {"a bool"}),
        "lenient": (lambda v: fz.load_safetensors(STEP, hf("x y"), like=PARAMS, lenient=v), {"a bool"}),
        "seed": (lambda v: fz.load_safetensors(STEP, hf("x y"), seed=v), {"an int", "a negative"}),
    },
    "save_safetensors": {
        "path": (lambda v: fz.save_safetensors(hf(v), STATE), {"a string"}),
        "state": (lambda v: fz.save_safetensors(hf("x y"), v), {"a state", "sharded params", "grads"}),
        "names": (lambda v: fz.save_safetensors(hf("x y"), STATE, names=v), {"None"}),
        "also": (lambda v: fz.save_safetensors(hf("also"), STATE, also=v), {"None"}),
        "dtype": (lambda v: fz.save_safetensors(hf("dtype"), STATE, dtype=v), {"None", "a dtype"}),
        "shard_bytes": (lambda v: fz.save_safetensors(hf("bytes"), STATE, shard_bytes=v), {"an int"}),
    },
    "load_extra": {"path": (lambda v: fz.load_extra(at(v)), {"a string"})},
    "Step.vjp": {
        "state": (lambda v: STEP.vjp(v, X), {"a state"}),
        "argnums": (lambda v: STEP.vjp(STATE, X, argnums=v), {"None", "a negative"}),
        "rng": (lambda v: STEP.vjp(STATE, X, rng=v), {"an int", "a negative"}),
    },
    "Step.forward": {
        "state": (lambda v: STEP.forward(v, X), {"a state"}),
        "rng": (lambda v: STEP.forward(STATE, X, rng=v), {"an int", "a negative"}),
    },
    "Step.__call__": {
        "state": (lambda v: STEP(v, X), {"a state"}),
        "cotangent": (lambda v: STEP(STATE, X, cotangent=v), {"None", "a 0-d tensor"}),
        "rng": (lambda v: STEP(STATE, X, rng=v), {"an int", "a negative"}),
    },
    "Step.update": {
        "state": (lambda v: STEP.update(v, GRADS), {"a state"}),
        "grads": (lambda v: STEP.update(STATE, v), {"grads", "full params"}),
        "grad_norm": (lambda v: STEP.update(STATE, GRADS, v), {"None", "an int", "a float", "a 0-d tensor"}),
    },
    "Step.add_grads": {
        "state": (lambda v: STEP.add_grads(v, GRADS), {"a state"}),
        "grads": (lambda v: STEP.add_grads(STATE, v), {"grads", "full params"}),
    },
    "Policy": {
        "param": (lambda v: fz.Policy(param=v), {"None", "a dtype"}),
        "grad": (lambda v: fz.Policy(grad=v), {"None", "a dtype"}),
        "moment": (lambda v: fz.Policy(moment=v), {"None", "a dtype"}),
        "compute": (lambda v: fz.Policy(compute=v), {"None", "a dtype"}),
        "reduce": (lambda v: fz.Policy(reduce=v), {"None", "a dtype"}),
        "rounding": (lambda v: fz.Policy(rounding=v), set()),
        "remainder": (lambda v: fz.Policy(remainder=v), set()),
        "gather": (lambda v: fz.Policy(gather=v), {"None"}),
    },
    "Policy.by_path": {"policies": (fz.Policy.by_path, set())},
    "Policy.exact": {"moment": (fz.Policy.exact, {"None", "a dtype"})},
    "Policy.compact24": {"moment": (fz.Policy.compact24, {"None", "a dtype"})},
    "Policy.compact16": {"moment": (fz.Policy.compact16, {"None", "a dtype"})},
    "TrainState.replace": {
        "params": (lambda v: STATE.replace(params=v), {"sharded params", "grads", "full params"}),
        "grads": (lambda v: STATE.replace(grads=v), {"None", "grads", "sharded params", "full params"}),
        "moments": (lambda v: STATE.replace(moments=v), {"moments"}),
        "step": (lambda v: STATE.replace(step=v), {"an int"}),
        "seed": (lambda v: STATE.replace(seed=v), {"an int", "a negative"}),
        "extra": (lambda v: STATE.replace(extra=v), set()),
    },
    "Pullback.__call__": {
        "cotangent": (lambda v: STEP.vjp(STATE, X)[1](v), {"None", "a 0-d tensor"}),
        "retain_graph": (lambda v: STEP.vjp(STATE, X)[1](torch.ones(()), retain_graph=v), {"a bool"}),
        "create_graph": (lambda v: STEP.vjp(STATE, X)[1](torch.ones(()), create_graph=v), {"a bool"}),
    },
    "run_ranks": {
        "fn": (lambda v: fz.testing.run_ranks(v, 1), {"a function"}),
        "world_size": (lambda v: fz.testing.run_ranks(abs, v), {"an int"}),
        "backend": (lambda v: fz.testing.run_ranks(abs, 1, backend=v), set()),
        "timeout": (lambda v: fz.testing.run_ranks(abs, 1, timeout=v), {"an int", "a float"}),
    },
}
CASES = [(name, argument) for name, arguments in TABLE.items() for argument in arguments]


@pytest.mark.parametrize(("name", "argument"), CASES)
def test_an_argument_of_a_wrong_kind(name: str, argument: str) -> None:
    call, taken = TABLE[name][argument]
    for kind, value in KINDS.items():
        if kind in taken:
            continue
        with pytest.raises((TypeError, ValueError)) as info:
            call(value)
        said = str(info.value)
        assert re.search(r"got .*expected", said, re.DOTALL), f"{kind}: {said}"
        assert argument in said, f"{kind}: {said}"


@pytest.mark.parametrize(("name", "argument"), CASES)
def test_an_argument_of_a_right_kind(name: str, argument: str) -> None:
    call, taken = TABLE[name][argument]
    for kind in taken:
        call(KINDS[kind])


def test_the_table_has_every_public_function_with_every_argument() -> None:
    functions: dict[str, Any] = {name: value for name, value in vars(fz).items() if inspect.isfunction(value)}
    for owner, names in ((fz.Step, ("init", "vjp", "forward", "__call__", "update", "add_grads")),):
        functions.update({f"{owner.__name__}.{name}": getattr(owner, name) for name in names})
    assert set(functions) <= set(TABLE)
    for name, function in functions.items():
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        parameters = inspect.signature(function).parameters.values()
        known = {p.name for p in parameters if p.kind not in variadic} - {"self"}
        assert known <= set(TABLE[name]), name


# ---- what is wrong with a value, and not with its kind


@pytest.mark.parametrize(
    ("returned", "got"),
    [(1.5, r"1\.5"), (None, "None"), ("loss", "'loss'"), ([], "list"), ({"loss": 2}, "dict"), (True, "True")],
)
def test_a_loss_that_is_no_tensor(returned: Any, got: str) -> None:
    step = fz.train_step(lambda p, x: returned, fz.sgd(0.1))
    state = step.init(PARAMS)
    for call, who in (
        (lambda: step(state, X), "step"),
        (lambda: fz.fuse_update(step)(state, X), "step"),
        (lambda: fz.hvp(step, state, STEP.vjp(STATE, X)[1](torch.ones(()))[0], X), "grads|v"),
        (lambda: fz.per_example_grads(step, state, X), "per_example_grads"),
    ):
        with pytest.raises((TypeError, ValueError), match=who):
            call()
    with pytest.raises(ValueError, match=rf"returned {got}, expected a scalar loss"):
        fz.hvp(step, state, state.params.map(torch.ones_like), X)
    for call in (step, step.vjp):
        with pytest.raises(ValueError, match=rf"step: the function returned {got}, expected a floating tensor"):
            call(state, X)


def test_a_loss_of_integers() -> None:
    step = fz.train_step(lambda p, x: {"n": (x @ p["w"]).argmax()}, fz.sgd(0.1))
    for call in (step, step.vjp):
        with pytest.raises(ValueError, match=r"returned dict with a tensor of shape \(\) and dtype torch\.int64, exp"):
            call(step.init(PARAMS), X)


@pytest.mark.parametrize("argnums", [2, -3, (0, 2), [5]])
def test_argnums_out_of_range(argnums: Any) -> None:
    step = fz.train_step(lambda p, x, y: (x @ p["w"] * y).mean(), fz.sgd(0.1))
    with pytest.raises(ValueError, match=r"step\.vjp: got argnums=.*expected numbers of inputs.*from -2 to 1"):
        step.vjp(step.init(PARAMS), X, torch.ones(4, 2), argnums=argnums)


@pytest.mark.parametrize("accumulated", [False, True])
def test_negative_argnums_count_from_the_end_as_in_torch(accumulated: bool) -> None:
    def fn(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x @ p["w"] * y).mean()

    step = fz.train_step(fn, fz.sgd(0.1))
    step = fz.accumulate(step, 2) if accumulated else step
    y = torch.full((4, 2), 3.0)
    state = step.init(PARAMS)
    for argnums in (-1, -2, (-1,), (0, -1)):
        by_torch = torch.func.grad(lambda x, y: fn(PARAMS, x, y), argnums)(X, y)
        by_torch = by_torch if isinstance(by_torch, tuple) else (by_torch,)
        numbers = [n % 2 for n in (argnums if isinstance(argnums, tuple) else (argnums,))]
        _, found = step.vjp(state, X, y, argnums=argnums)[1](torch.ones(()))
        assert [i for i in (0, 1) if found[i] is not None] == sorted(numbers)
        for number, want in zip(numbers, by_torch, strict=True):
            fz.testing.assert_trees_close(found[number], want, rtol=1e-6)


def test_argnums_of_what_has_no_gradient() -> None:
    step = fz.train_step(lambda p, x, n: (x @ p["w"]).mean() * n, fz.sgd(0.1))
    state = step.init(PARAMS)
    with pytest.raises(TypeError, match=r"argnums=1 and input 1=2, expected one with a tensor"):
        step.vjp(state, X, 2, argnums=1)
    with pytest.raises(ValueError, match=r"argnums=\(0, -2\), expected every input at most once"):
        step.vjp(state, X, 2, argnums=(0, -2))


def test_a_state_with_a_loss_scale_in_a_step_without_and_the_reverse() -> None:
    scaled, other, dynamic = fz.loss_scale(STEP, 8.0), fz.loss_scale(STEP, 1.0), fz.loss_scale(STEP)
    steps = {"no rules": STEP, r"loss_scale\(8\.0\)": scaled, r"loss_scale\(1\.0\)": other, "a dynamic": dynamic}
    for theirs, made in steps.items():
        state = made.init(PARAMS)
        for ours, step in steps.items():
            for call in (step, step.vjp, step.forward):
                if step is made:
                    call(state, X)
                    continue
                with pytest.raises(ValueError, match=rf"another step, made with .*{theirs}.*expected.*{ours}"):
                    call(state, X)
            converted = fz.convert(state, step)
            assert converted.extra == step.init(PARAMS).extra
            step(converted, X)


def test_a_dynamic_loss_scale_survives_a_conversion() -> None:
    step = fz.loss_scale(STEP, initial=4.0, interval=1)
    state, _ = step(step.init(PARAMS), X)
    assert fz.convert(state, fz.donate(step)).extra["loss_scale"].scale == 8.0


def test_params_and_moments_of_the_state_itself_are_no_grads() -> None:
    for tree in (STATE.params, STATE.moments.momentum):
        for call in (STEP.update, STEP.add_grads):
            with pytest.raises(TypeError, match=r"grads: got the (params|signed) of the state itself, expected"):
                call(STATE, tree)
    STEP.update(STATE, STATE.params.map(lambda x: 0.1 * x))  # weight decay, for example


@pytest.mark.parametrize("returned", [torch.ones(()), (torch.ones(()),), (1, 2, 3)])
def test_a_function_with_aux_that_returns_no_pair(returned: Any) -> None:
    step = fz.train_step(lambda p, x: returned, fz.sgd(0.1), has_aux=True)
    state = step.init(PARAMS)
    for call in (step, step.vjp, step.forward):
        with pytest.raises(TypeError, match=r"got no pair, expected \(outputs, aux\)"):
            call(state, X)


def test_inputs_of_per_example_grads() -> None:
    step = fz.train_step(lambda p, x, y, by: (x @ p["w"] * y).mean() * by, fz.sgd(0.1))
    state = step.init(PARAMS)
    found = fz.per_example_grads(step, state, X, torch.ones(4, 2), 2.0)
    fz.testing.assert_trees_close(found["w"].mean(0), torch.full((3, 2), 1.0), rtol=1e-6)
    with pytest.raises(ValueError, match=r"4 in input 0, 5 in input 1; expected the same number"):
        fz.per_example_grads(step, state, X, torch.ones(5, 2), 2.0)
    with pytest.raises(ValueError, match=r"got input 2 of shape \(\), expected examples"):
        fz.per_example_grads(step, state, X, torch.ones(4, 2), torch.tensor(2.0))
    with pytest.raises(TypeError, match=r"got input 2\.0, 'x', expected at least one tensor"):
        fz.per_example_grads(step, state, 2.0, "x")


@pytest.mark.parametrize(
    ("call", "own", "others"),
    [
        (fz.warmup_cosine, {"peak": 1.0, "warmup": 2, "total": 9, "end": 0.5},
         {"peak_value": 1.0, "warmup_steps": 2, "decay_steps": 9, "end_value": 0.5}),
        (fz.linear, {"start": 1.0, "end": 0.5, "steps": 3},
         {"init_value": 1.0, "end_value": 0.5, "transition_steps": 3}),
        (fz.clip_by_value, {"max_value": 2.0}, {"max_delta": 2.0}),
        (fz.clip_by_value, {"max_value": 2.0}, {"clip_value": 2.0}),
        (functools.partial(fz.lookahead, STEP), {"every": 3, "alpha": 0.25},
         {"sync_period": 3, "slow_step_size": 0.25}),
        (functools.partial(fz.loss_scale, STEP), {"initial": 8.0, "interval": 3},
         {"init_scale": 8.0, "growth_interval": 3}),
        (functools.partial(fz.gather, STATE.params), {"to": 0}, {"dst": 0}),
        (functools.partial(fz.stream, STATE.params), {"to": 0}, {"dst": 0}),
    ],
)  # fmt: skip
def test_other_libraries_names_of_arguments(call: Any, own: dict[str, Any], others: dict[str, Any]) -> None:
    """They are those of fzero; both together are refused."""
    made = [call(**each) for each in (own, others)]
    said = [
        [each(count) for count in range(12)] if isinstance(each, functools.partial)
        else [str(pair) for pair in each] if isinstance(each, Generator) else str(each)
        for each in made
    ]  # fmt: skip
    assert said[0] == said[1]
    (name, value), other = next(iter(own.items())), next(iter(others))
    with pytest.raises(TypeError, match=f"got {other}= and {name}=, which are one argument"):
        call(**{name: value, other: value})
