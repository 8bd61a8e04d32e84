"""How fzero and DeepSpeed are asked for the cases of `derivatives.py`: each way is a class with a method a case.

DeepSpeed says nothing of derivatives through a step, so it is asked by its own loop (`derivative_torch.Loop`), and with
its module under `torch.func.functional_call`, by torch.func and by autograd (`Plain`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from contenders import deepspeed_engine
from derivative_cases import (
    BETAS,
    DECAY,
    EPS,
    LR,
    STEPS,
    Data,
    Params,
    Plain,
    clipped,
    directions,
    dot,
    error_of,
    flow_loss,
    module_of,
    params_of,
    pushed_by_func,
    score_loss,
    slopes,
    stacked,
)
from torch import Tensor, nn

import fzero as fz

# ---- fzero


class Fzero:
    """Steps are functions: torch.func.grad, jvp and vmap go through them."""

    def __init__(self, data: Data, shard: Callable[[fz.Step], fz.Step]) -> None:
        self.data, self.shard = data, shard
        self.apply, self.params = fz.functional(module_of(data.dtype))

    def step_of(self, lr: Any = LR, decay: Any = 0.0, weights: Tensor | None = None, kind: str = "sgd") -> fz.Step:
        weights = self.data.ones if weights is None else weights

        def loss_fn(params: Any, x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
            return error_of(self.apply(params, x), y, weights[rows])

        optimizer = fz.sgd(lr, weight_decay=decay) if kind == "sgd" else fz.adamw(lr, *BETAS, EPS, weight_decay=decay)
        return self.shard(fz.train_step(loss_fn, optimizer))

    def held(self, step: fz.Step, state: fz.TrainState) -> Tensor:
        look = fz.with_fn(step, lambda params, x, y: error_of(self.apply(params, x), y))
        return look.forward(state, self.data.held_x, self.data.held_y)

    def run(self, params: Any, *given: Any, steps: int = STEPS, **named: Any) -> Tensor:
        step = self.step_of(*given, **named)
        state = step.init(params)
        for update in range(steps):
            state, _ = step(state, *self.data.batch(update))
        return self.held(step, state)

    def maml(self, steps: int, kind: str) -> Any:
        return torch.func.grad(lambda p: self.run(p, steps=steps, kind=kind))(self.params)

    def by_rate(self) -> Any:
        return torch.func.grad(lambda lr: self.run(self.params, lr))(self.data.number(LR))

    def by_decay(self) -> Any:
        return torch.func.grad(lambda decay: self.run(self.params, decay=decay))(self.data.number(DECAY))

    def by_weights(self) -> Any:
        return torch.func.grad(lambda weights: self.run(self.params, weights=weights))(self.data.ones)

    def total(self) -> fz.Step:
        return fz.with_fn(self.step_of(), lambda params, x: self.apply(params, x).sum())

    def slope(self) -> Any:
        step = self.total()
        state = step.init(self.params)
        return slopes(torch.func.grad(lambda x: step.forward(state, x))(self.data.held_x))

    def pushed_inputs(self) -> Any:
        step, (x, _, along) = fz.with_fn(self.step_of(), self.apply), self.data.held
        state = step.init(self.params)
        return torch.func.jvp(lambda x: step.forward(state, x), (x,), (along,))[1].square().mean()

    def of_loss(self, loss: Callable[..., Tensor], *inputs: Tensor) -> Any:
        """The gradient of a loss that holds derivatives itself."""
        step = fz.with_fn(self.step_of(), lambda params, *inputs: loss(functools.partial(self.apply, params), *inputs))
        value, pullback = step.vjp(step.init(self.params), *inputs)
        return dict(fz.gather(pullback(torch.ones_like(value))[0]))

    def flow(self) -> Any:
        return self.of_loss(flow_loss, *self.data.held)

    def score(self) -> Any:
        x, _, along = self.data.held
        return self.of_loss(score_loss, x, along)

    def examples(self) -> Any:
        step = fz.with_fn(self.step_of(), lambda params, x, y: error_of(self.apply(params, x), y))
        return clipped(fz.per_example_grads(step, step.init(self.params), self.data.held_x, self.data.held_y))

    def penalty(self) -> Any:
        step = self.total()

        def of(params: Any) -> Tensor:
            state = step.init(params)
            return slopes(torch.func.grad(lambda x: step.forward(state, x))(self.data.held_x))

        return torch.func.grad(of)(self.params)

    def pushed(self) -> Any:
        return pushed_by_func(lambda lr: self.run(self.params, lr), self.data.number(LR))

    def hessian(self) -> Any:
        step, vector = self.step_of(), directions(self.data.dtype)

        def held(params: Any) -> Tensor:
            return self.held(step, step.init(params))

        return torch.func.grad(lambda p: dot(torch.func.grad(held)(p), vector))(self.params)

    def twice(self) -> Any:
        return torch.func.grad(torch.func.grad(lambda lr: self.run(self.params, lr)))(self.data.number(LR))

    def over_models(self) -> Any:
        step = self.step_of()

        def one(params: Any) -> Any:
            state, _ = step(step.init(params), *self.data.batch(0))
            return fz.gather(state.params)

        return torch.vmap(one)(stacked(self.data.dtype))

    def over_rates(self) -> Any:
        return torch.vmap(lambda lr: self.run(self.params, lr))(self.data.rates)

    def long(self, steps: int) -> Any:
        def run(params: Any, lr: Tensor) -> Tensor:
            step = self.step_of(lr)
            state, _ = fz.scan(step, step.init(params), [self.data.batch(update) for update in range(steps)])
            return self.held(step, state)

        return torch.func.grad(run, (0, 1))(self.params, self.data.number(LR))


# ---- DeepSpeed


def deepspeed_begun() -> None:
    """Compiles what it would compile in the first case."""
    from deepspeed.comm.torch import build_shm_op  # type: ignore[import-not-found]

    build_shm_op()


def deepspeed_prepared(stage: int, module: nn.Module, make: Callable[[Any], torch.optim.Optimizer]) -> Any:
    from deepspeed.utils import safe_get_full_grad  # type: ignore[import-not-found]

    engine = deepspeed_engine(module, stage, optimizer=make(module.parameters()))
    backward = functools.partial(engine.backward, retain_graph=True)
    return engine, backward, engine.step, safe_get_full_grad


class Averaged(torch.autograd.Function):
    """The mean over ranks; in the pullback, the mean of the cotangents."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        out = x.clone()
        dist.all_reduce(out)
        return out / dist.get_world_size()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return Averaged.apply(cotangents[0])

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Any:
        return Averaged.apply(tangents[0])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], x: Tensor) -> Any:
        return Averaged.apply(x), in_dims[0]


def averaged(grads: Params) -> Params:
    return {name: Averaged.apply(g) for name, g in grads.items()}  # type: ignore[misc]


def deepspeed_functional(data: Data, stage: int, grad: Callable[..., Any]) -> Plain:
    """Its params, gathered as it says, are given by name to its engine; the rest is plain torch, averages by hand."""
    module = module_of(data.dtype)
    engine = deepspeed_engine(module, stage, optimizer=torch.optim.SGD(module.parameters(), lr=LR))
    whole: Any = contextlib.nullcontext()
    if stage == 3:
        import deepspeed  # type: ignore[import-not-found]

        whole = deepspeed.zero.GatheredParameters(list(engine.module.parameters()))
    with whole:
        params = params_of(engine.module)
    forward = lambda p, x: torch.func.functional_call(engine.module, p, (x,))
    vector, models = directions(data.dtype), stacked(data.dtype)
    return Plain(forward, params, data, averaged, grad, vector=vector, models=models)
