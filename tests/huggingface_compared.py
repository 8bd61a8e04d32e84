"""A module under ZeRO-3 on this rank, with and without recomputation, beside the module's own forward and backward.

Each rank has a batch of its own; the module itself is trained on all of them, by torch's own AdamW on the mean of their
gradients, in replicas with buffers of their own.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

import fzero as fz

STEPS, RATE, EPS = 3, 1e-2, 1e-3
Batch = dict[str, Any]
Tensors = dict[str, torch.Tensor]


def seeded(seed: int) -> None:
    """For what a forward draws itself, in its own process."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def tensors_of(out: object) -> Tensors:
    """The floating tensors of what a model puts out, by their paths: of its dictionary, tuples and caches."""
    return {name: x for name, x in _walk(out, "") if x.is_floating_point()}


def _walk(out: object, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(out, torch.Tensor):
        yield path, out
    elif isinstance(out, Mapping):
        for key, value in out.items():
            yield from _walk(value, f"{path}.{key}")
    elif isinstance(out, (tuple, list)):
        for i, value in enumerate(out):
            yield from _walk(value, f"{path}.{i}")
    elif type(out).__module__.startswith("transformers") and hasattr(out, "__dict__"):
        yield from _walk(vars(out), path)


def loss_of(out: Any) -> torch.Tensor:
    """The model's own, where it has one."""
    loss = getattr(out, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss.sum()  # which some leave as one number in a dim
    values = [x.square().mean() for name, x in tensors_of(out).items() if x.requires_grad and x.numel()]
    return torch.stack([x.double() for x in values]).sum()


def apart(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> tuple[float, str]:
    """The largest difference over the largest of a tensor's values, and of which tensor."""
    if got.keys() != want.keys():
        return float("inf"), f"{sorted(got.keys() ^ want.keys())[:3]} only on one side"
    worst = 0.0, ""
    for name, x in want.items():
        y = got[name]
        if x.shape != y.shape or x.dtype != y.dtype:
            return float("inf"), f"{name}: {y.dtype} {tuple(y.shape)}, expected {x.dtype} {tuple(x.shape)}"
        x, y = x.detach().double(), y.detach().double()
        same = (x == y) | (x.isnan() & y.isnan())
        if not same.all():
            scale = x[x.isfinite()].abs().amax().clamp(min=1e-3) if x.isfinite().any() else torch.ones(())
            far = torch.where(same, 0.0, (x - y).abs() / scale).nan_to_num(nan=torch.inf).max().item()
            worst = max(worst, (far, name))
    return worst


class Plain:
    """What the module itself puts out, its gradients, and what three updates make of it."""

    def __init__(self, module: nn.Module, batches: Sequence[Batch], rank: int) -> None:
        replicas = [copy.deepcopy(module) for _ in batches]
        optimizers = [
            torch.optim.AdamW([p for p in own.parameters() if p.requires_grad], lr=RATE, eps=EPS, weight_decay=0.0)
            for own in replicas
        ]
        self.losses: list[torch.Tensor] = []
        for number in range(STEPS):
            outs = [_forward_and_backward(own, batch) for own, batch in zip(replicas, batches, strict=True)]
            self.losses.append(torch.stack([loss_of(out).detach() for out in outs]).mean())
            grads = _mean_grads(replicas)
            if number == 0:
                self.outputs, self.grads = tensors_of(outs[rank]), grads
            for optimizer in optimizers:
                optimizer.step()
        own = replicas[rank]
        self.params = {name: p.detach() for name, p in own.named_parameters()}
        self.buffers = dict(own.named_buffers())


def _forward_and_backward(module: nn.Module, batch: Batch) -> Any:
    module.zero_grad()
    seeded(0)
    out = module(**copy.deepcopy(batch))
    loss_of(out).backward()
    return out


def _mean_grads(replicas: Sequence[nn.Module]) -> Tensors:
    """Of all replicas, which each has then."""
    means: Tensors = {}
    for name, param in replicas[0].named_parameters():
        if param.requires_grad:
            every = [own.get_parameter(name) for own in replicas]
            zeros = torch.zeros_like(param)
            means[name] = sum((p.grad if p.grad is not None else zeros for p in every), zeros) / len(replicas)
            for p in every:
                p.grad = means[name].clone()
    return means


def writes(module: nn.Module, batch: Batch) -> bool:
    """Whether a forward changes buffers."""
    own = copy.deepcopy(module)
    own(**copy.deepcopy(batch))
    after = dict(own.named_buffers())
    return any(not torch.equal(x, after[name]) for name, x in module.named_buffers())


def called(module: nn.Module, batch: Batch) -> nn.Module:
    """A copy that a forward has gone through, where that makes a buffer longer, or exchanges a submodule.

    As `fz.functional` asks for.
    """
    own = copy.deepcopy(module)
    own(**copy.deepcopy(batch))
    made = lambda each: [(name, type(x)) for name, x in each.named_modules()]
    sizes = lambda each: [(name, x.shape) for name, x in each.named_buffers()]
    return own if made(own) != made(module) or sizes(own) != sizes(module) else module


def draws(module: nn.Module, batch: Batch) -> bool:
    """Whether a forward draws random numbers that show."""
    found = []
    for seed in (0, 1):
        seeded(seed)
        found.append(tensors_of(copy.deepcopy(module)(**copy.deepcopy(batch))))
    return apart(*found)[0] > 0.0


def differences(
    module: nn.Module,
    batches: Sequence[Batch],
    rank: int,
    shard: Callable[[fz.Step], fz.Step] = fz.shard_zero3,
    remats: Sequence[bool] = (False, True),
) -> dict[str, tuple[float, str]]:
    """What differs between the module itself and its step, by what is compared, with and without `fz.remat`."""
    carries = writes(module, batches[0])
    module = called(module, batches[0])
    plain = Plain(module, batches, rank)
    apply, params, *buffers = fz.functional(module, buffers=True) if carries else fz.functional(module)

    def fn(params: Any, carry: Any, batch: Batch) -> Any:
        out, new = apply(params, carry, **batch)
        return (loss_of(out), tensors_of(out)), new

    def fn_alone(params: Any, batch: Batch) -> Any:
        out = apply(params, **batch)
        return loss_of(out), tensors_of(out)

    optimizer = fz.adamw(RATE, eps=EPS, weight_decay=0.0)
    plain_step = fz.train_step(fn if carries else fn_alone, optimizer, has_aux=True)
    whole = shard(fz.carry(plain_step, buffers[0]) if carries else plain_step)
    found: dict[str, tuple[float, str]] = {}
    for remat in remats:
        step = fz.remat(whole) if remat else whole
        for what, value in _of_step(step, params, batches[rank], plain, carries).items():
            found[f"{what}, remat" if remat else what] = value
    return found


def _of_step(step: fz.Step, params: Any, batch: Batch, plain: Plain, carries: bool) -> dict[str, tuple[float, str]]:
    state = step.init(params)
    seeded(0)
    loss, pullback, aux = step.vjp(state, batch, argnums=())
    outputs = aux[0] if carries else aux
    grads, _ = pullback(torch.ones_like(loss))
    full = fz.gather(grads)
    found = {
        "outputs": apart(outputs, plain.outputs),
        "grads": apart({name: full[name] for name in plain.grads}, plain.grads),
    }
    losses = []
    for _ in range(STEPS):
        seeded(0)
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    found["losses"] = apart({"loss": torch.stack(losses)}, {"loss": torch.stack(plain.losses)})
    found["params"] = apart(dict(fz.gather(state.params)), plain.params)
    if carries:
        found["buffers"] = apart(state.extra["carry"], plain.buffers)
    return found


worst = functools.partial(max, key=lambda pair: pair[0])
