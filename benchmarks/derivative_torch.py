"""How torch and its FSDP2 are asked for the cases of `derivatives.py`: each way is a class with a method a case.

They say nothing of derivatives through a step, so each is asked in several ways: by its own loop (`Loop`; `Kept` is
what FSDP2's maintainers advise for second derivatives), and with its module under `torch.func.functional_call`, by
torch.func and by autograd (`Plain`). The same with a module without hooks and params that are DTensors is torch alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
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
    score_loss_by_autograd,
    slope_of,
    slopes,
    stacked,
)
from torch import Tensor, nn

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
        each = [torch.stack(grads) for grads in zip(*found, strict=True)]
        return clipped(dict(zip(self.names, each, strict=True)))


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
