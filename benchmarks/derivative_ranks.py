"""How those that run on ranks are asked for the cases of `derivatives.py`: each way is a class with a method a case.

FSDP2 and DeepSpeed say nothing of derivatives through a step, so each is asked in several ways: by its own loop
(`Loop`; `Kept` is what FSDP2's maintainers advise for second derivatives), and with its module under
`torch.func.functional_call`, by torch.func and by autograd (`Plain`). The same with params that are DTensors and a
module without hooks is torch alone.
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
    data_of,
    directions,
    dot,
    error_of,
    flow_loss,
    module_of,
    params_of,
    pushed_by_func,
    score_loss,
    score_loss_by_autograd,
    slope_of,
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


# ---- the loop that others have


class Loop:
    """`loss.backward(create_graph=True)`, `optimizer.step()`, and what is found where the last `backward` leaves it.

    Args:
        prepare: from the module and `make(params) -> optimizer`: the model, `backward(loss)`, `step()` (which also
            clears the gradients), and `gradient(param)`.
    """

    def __init__(self, data: Data, prepare: Callable[..., Any]) -> None:
        self.data, self.prepare = data, prepare

    def started(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        module = module_of(self.data.dtype)
        self.model, self.backward, self.step, self.gradient = self.prepare(module, make)
        self.names = [name for name, _ in module_of().named_parameters()]

    def run(self, weights: Tensor | None = None, steps: int = STEPS) -> None:
        for update in range(steps):
            x, y, rows = self.data.batch(update)
            self.backward(error_of(self.model(x), y, None if weights is None else weights[rows]))
            self.step()
        if weights is not None:
            weights.grad = None
        self.backward(error_of(self.model(self.data.held_x), self.data.held_y))

    def grads(self) -> dict[str, Any]:
        return dict(zip(self.names, [self.gradient(p) for p in self.model.parameters()], strict=True))

    def maml(self, steps: int, kind: str) -> Any:
        sgd = lambda params: torch.optim.SGD(params, lr=LR)
        adamw = lambda params: torch.optim.AdamW(params, lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0)
        self.started(sgd if kind == "sgd" else adamw)
        self.run(steps=steps)
        return self.grads()

    def by_rate(self) -> Any:
        lr = self.data.number(LR).requires_grad_()
        self.started(lambda params: torch.optim.SGD(params, lr=lr, differentiable=True))
        self.run()
        return lr.grad

    def by_decay(self) -> Any:
        decay: Any = self.data.number(DECAY).requires_grad_()
        self.started(lambda params: torch.optim.SGD(params, lr=LR, weight_decay=decay, differentiable=True))
        self.run()
        return decay.grad

    def by_weights(self) -> Any:
        weights = self.data.ones.requires_grad_()
        self.started(lambda params: torch.optim.SGD(params, lr=LR))
        self.run(weights)
        return weights.grad

    def of_loss(self, loss: Callable[[], Tensor]) -> Any:
        self.started(lambda params: torch.optim.SGD(params, lr=LR))
        self.backward(loss())
        return self.grads()

    def penalty(self) -> Any:
        return self.of_loss(lambda: slopes(slope_of(self.model, self.data.held_x)))

    def flow(self) -> Any:
        return self.of_loss(lambda: flow_loss(self.model, *self.data.held))

    def score(self) -> Any:
        x, _, along = self.data.held
        return self.of_loss(lambda: score_loss_by_autograd(self.model, x, along))

    def slope(self) -> Any:
        self.started(lambda params: torch.optim.SGD(params, lr=LR))
        return slopes(slope_of(self.model, self.data.held_x))

    def pushed_inputs(self) -> Any:
        self.started(lambda params: torch.optim.SGD(params, lr=LR))
        x, _, along = self.data.held
        return torch.func.jvp(self.model, (x,), (along,))[1].square().mean()

    def hessian(self) -> Any:
        first = self.of_loss(lambda: error_of(self.model(self.data.held_x), self.data.held_y))
        whole = {name: getattr(grad, "full_tensor", lambda grad=grad: grad)() for name, grad in first.items()}
        for param in self.model.parameters():
            param.grad = None
        self.backward(dot(whole, directions(self.data.dtype)))
        return self.grads()


def clears(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


# ---- FSDP2


def fsdp2_model(module: nn.Sequential) -> Any:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (module[0], module[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def fsdp2_prepared(
    module: nn.Sequential, make: Callable[[Any], torch.optim.Optimizer], create_graph: bool = True
) -> Any:
    model = fsdp2_model(module)
    optimizer = make(model.parameters())
    backward = functools.partial(torch.autograd.backward, create_graph=create_graph)
    return model, backward, clears(optimizer), lambda param: param.grad


class Kept(Loop):
    """FSDP2 with params that a backward leaves whole, which its maintainers advise for second derivatives.

    What a second backward adds to params after their hooks have run stays on each rank. So another backward, of zero
    times the model, reduces it.

    Args:
        flushed: with this other backward.
    """

    def __init__(self, data: Data, flushed: bool) -> None:
        super().__init__(data, functools.partial(fsdp2_prepared, create_graph=False))
        self.flushed = flushed

    def started(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().started(make)
        self.model.set_reshard_after_backward(False)

    def grads(self) -> dict[str, Any]:
        if self.flushed:
            self.model.set_reshard_after_backward(True)
            self.backward(0 * self.model(self.data.held_x).sum())
        return super().grads()

    def whole(self) -> list[Tensor]:
        """The model's parameters as a part of the graph, until a backward ends."""
        self.started(lambda params: torch.optim.SGD(params, lr=LR))
        self.model.set_reshard_after_forward(False)
        for module in (self.model, self.model[0], self.model[2]):
            module.unshard()
        return list(self.model.parameters())

    def hessian(self) -> Any:
        leaves = self.whole()
        loss = error_of(self.model(self.data.held_x), self.data.held_y)
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        self.backward(dot(dict(zip(self.names, first, strict=True)), directions(self.data.dtype)))
        return self.grads()

    def examples(self) -> Any:
        leaves, (x, y, _) = self.whole(), self.data.held
        found = [torch.autograd.grad(error_of(self.model(x[i : i + 1]), y[i : i + 1]), leaves) for i in range(len(x))]
        stacked = [torch.stack(grads) for grads in zip(*found, strict=True)]
        return clipped(dict(zip(self.names, stacked, strict=True)))


def fsdp2_functional(data: Data, grad: Callable[..., Any]) -> Plain:
    """Its sharded params (DTensors) are given by name; what it does in backward averages over ranks."""
    model = fsdp2_model(module_of(data.dtype))
    model(data.held_x)  # it sets itself up in the first call, which no transform can go through
    model.reshard()
    params = {name: param.detach() for name, param in model.named_parameters()}
    place = functools.partial(_cut_like, params)
    forward = lambda p, x: torch.func.functional_call(model, p, (x,))
    vector, models = place(directions(data.dtype), 0), place(stacked(data.dtype), 1)
    return Plain(forward, params, data, grad=grad, vector=vector, models=models)


def _cut_like(params: Params, whole: Params, dim: int) -> Params:
    """These values as DTensors that are cut over ranks along a dim."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    cut = {}
    for name, param in params.items():
        assert isinstance(param, DTensor)
        cut[name] = distribute_tensor(whole[name], param.device_mesh, [Shard(dim)])
    return cut


# ---- torch alone


def torch_prepared(module: nn.Module, make: Callable[[Any], torch.optim.Optimizer]) -> Any:
    backward = lambda loss: loss.backward(create_graph=True)
    return module, backward, clears(make(module.parameters())), lambda param: param.grad


def torch_functional(data: Data, grad: Callable[..., Any]) -> Plain:
    module = module_of(data.dtype)
    return Plain(lambda p, x: torch.func.functional_call(module, p, (x,)), params_of(module), data, grad=grad)


class Spread(Data):
    """Batches as DTensors whose rows are cut over ranks, of which torch computes with the whole."""

    def batch(self, update: int) -> tuple[Tensor, Tensor, Any]:
        return self.x[update], self.y[update], slice(None)

    def number(self, value: float) -> Tensor:
        return placed(super().number(value))

    @functools.cached_property
    def ones(self) -> Tensor:  # type: ignore[override]  # placed before any transform
        return placed(super().ones)

    @property
    def rates(self) -> Tensor:
        return placed(super().rates)


def placed(x: Tensor, dim: int | None = None) -> Any:
    """As a DTensor: cut over ranks along a dim, or the same on all of them."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(x, mesh, [Replicate() if dim is None else Shard(dim)])


def dtensor_functional(data: Data, grad: Callable[..., Any]) -> Plain:
    """A module without hooks, called with params that are DTensors, cut over ranks: no library at all."""
    module, whole = module_of(data.dtype), data_of(dtype=data.dtype)
    x, y, held_x, held_y = [placed(x, x.ndim - 2) for x in (whole.x, whole.y, whole.held_x, whole.held_y)]
    spread = Spread(x, y, whole.rows, held_x, held_y, data.dtype)
    assert isinstance(spread.ones, Tensor)
    place = lambda params, dim: {name: placed(param, dim) for name, param in params.items()}
    forward = lambda p, x: torch.func.functional_call(module, p, (x,))
    vector, models = place(directions(data.dtype), 0), place(stacked(data.dtype), 1)
    return Plain(forward, place(params_of(module), 0), spread, grad=grad, vector=vector, models=models)


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
