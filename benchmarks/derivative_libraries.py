"""How torchopt and higher are asked for the cases of `derivatives.py`: each way is a class with a method a case."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from derivative_cases import (
    BETAS,
    DECAY,
    EPS,
    LR,
    STEPS,
    Data,
    Network,
    Params,
    Plain,
    clipped,
    directions,
    error_of,
    flow_loss,
    module_of,
    params_of,
    pushed_by_autograd,
    score_loss_by_autograd,
    slope_of,
    slopes,
    stacked,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass
class TorchoptFunctions(Plain):
    """`torchopt.sgd` and `torchopt.adamw` as pairs of functions, the rest by torch.func or autograd.

    Attributes:
        scheduled: gives a learning rate that is a tensor as a schedule, whose value torchopt does not look at.
    """

    scheduled: bool = False

    def optimizer(self, kind: str, lr: Any, decay: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
        import torchopt  # type: ignore[import-not-found]

        if self.scheduled:
            rate, lr = lr, lambda count: rate
        if kind == "sgd":
            pair = torchopt.sgd(lr, weight_decay=decay)
        else:
            pair = torchopt.adamw(lr, BETAS, EPS, decay)

        def update(grads: Params, state: Any, params: Params) -> Any:
            updates, state = pair.update(grads, state, params=params, inplace=False)
            return torchopt.apply_updates(params, updates, inplace=False), state

        return pair.init, update


def torchopt_functions(data: Data, grad: Callable[..., Any], scheduled: bool = False) -> TorchoptFunctions:
    module = module_of(data.dtype)
    forward = lambda p, x: torch.func.functional_call(module, p, (x,))
    return TorchoptFunctions(forward, params_of(module), data, grad=grad, scheduled=scheduled)


class Unrolled:
    """Inner loops that autograd goes through: a model, and an optimizer whose `step(loss)` gives it new params.

    Args:
        begun: `begun(module, kind, lr, decay) -> (model, step)`.
    """

    def __init__(self, data: Data, begun: Callable[..., Any]) -> None:
        self.data, self.begun = data, begun
        self.module = module_of(data.dtype)
        self.leaves = dict(self.module.named_parameters())

    def run(
        self, lr: Any = LR, decay: Any = 0.0, weights: Tensor | None = None, steps: int = STEPS, kind: str = "sgd"
    ) -> Tensor:
        model, step = self.begun(self.module, kind, lr, decay)
        for update in range(steps):
            x, y, rows = self.data.batch(update)
            step(error_of(model(x), y, None if weights is None else weights[rows]))
        return error_of(model(self.data.held_x), self.data.held_y)

    def maml(self, steps: int, kind: str) -> Any:
        found = torch.autograd.grad(self.run(steps=steps, kind=kind), list(self.leaves.values()))
        return dict(zip(self.leaves, found, strict=True))

    def by_rate(self) -> Any:
        lr = self.data.number(LR).requires_grad_()
        return torch.autograd.grad(self.run(lr), lr)[0]

    def by_decay(self) -> Any:
        decay = self.data.number(DECAY).requires_grad_()
        return torch.autograd.grad(self.run(decay=decay), decay)[0]

    def by_weights(self) -> Any:
        weights = self.data.ones.requires_grad_()
        return torch.autograd.grad(self.run(weights=weights), weights)[0]

    def network(self) -> Network:
        return self.begun(self.module, "sgd", LR, 0.0)[0]

    def by_params(self, loss: Tensor) -> dict[str, Any]:
        found = torch.autograd.grad(loss, list(self.leaves.values()), allow_unused=True)
        return dict(zip(self.leaves, found, strict=True))

    def slope(self) -> Any:
        return slopes(slope_of(self.network(), self.data.held_x))

    def pushed_inputs(self) -> Any:
        x, _, along = self.data.held
        return torch.func.jvp(self.network(), (x,), (along,))[1].square().mean()

    def penalty(self) -> Any:
        return self.by_params(slopes(slope_of(self.network(), self.data.held_x)))

    def flow(self) -> Any:
        return self.by_params(flow_loss(self.network(), *self.data.held))

    def score(self) -> Any:
        x, _, along = self.data.held
        return self.by_params(score_loss_by_autograd(self.network(), x, along))

    def examples(self) -> Any:
        network, (x, y, _) = self.network(), self.data.held
        found = [self.by_params(error_of(network(x[i : i + 1]), y[i : i + 1])) for i in range(len(x))]
        return clipped({name: torch.stack([grads[name] for grads in found]) for name in self.leaves})

    def pushed(self) -> Any:
        return pushed_by_autograd(self.run, self.data.number(LR))

    def hessian(self) -> Any:
        model, _ = self.begun(self.module, "sgd", LR, 0.0)
        leaves = list(self.leaves.values())
        first = torch.autograd.grad(error_of(model(self.data.held_x), self.data.held_y), leaves, create_graph=True)
        found = torch.autograd.grad(first, leaves, list(directions(self.data.dtype).values()))
        return dict(zip(self.leaves, found, strict=True))

    def twice(self) -> Any:
        lr = self.data.number(LR).requires_grad_()
        (first,) = torch.autograd.grad(self.run(lr), lr, create_graph=True)
        return torch.autograd.grad(first, lr)[0]

    def over_rates(self) -> Any:
        return torch.vmap(self.run)(self.data.rates)


# ---- torchopt's optimizers of modules


def torchopt_begun(module: nn.Module, kind: str, lr: Any, decay: Any) -> Any:
    import torchopt  # type: ignore[import-not-found]

    if kind == "sgd":
        optimizer = torchopt.MetaSGD(module, lr=lr, weight_decay=decay)
    else:
        optimizer = torchopt.MetaAdamW(module, lr=lr, betas=BETAS, eps=EPS, weight_decay=decay)
    return module, optimizer.step


# ---- higher


def higher_begun(module: nn.Module, kind: str, lr: Any, decay: Any) -> Any:
    import higher  # type: ignore[import-not-found]

    if kind == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    else:
        optimizer = torch.optim.AdamW(module.parameters(), lr=LR, betas=BETAS, eps=EPS)
    override = {"lr": [lr], "weight_decay": [decay]}
    # as `higher.innerloop_ctx` does, which is a context only to free the graph early
    model = higher.monkeypatch(module, copy_initial_weights=False)
    inner = higher.optim.get_diff_optim(optimizer, module.parameters(), fmodel=model, override=override)
    return model, inner.step


class Higher(Unrolled):
    """With params given in a call, too: `fmodel(x, params=...)` and `diffopt.step(loss, params=...)`."""

    def __init__(self, data: Data) -> None:
        super().__init__(data, higher_begun)

    def some(self, model: Any, step: Any, updates: range, *params: Tensor) -> tuple[Tensor, ...]:
        for update in updates:
            x, y, _ = self.data.batch(update)
            params = tuple(step(error_of(model(x, params=list(params)), y), params=list(params)))
        return params

    def over_models(self) -> Any:
        model, step = self.begun(self.module, "sgd", LR, 0.0)
        models = stacked(self.data.dtype)
        given = [x.requires_grad_() for x in models.values()]
        found = torch.vmap(functools.partial(self.some, model, step, range(1)))(*given)
        return dict(zip(models, found, strict=True))

    def long(self, steps: int) -> Any:
        lr, every = self.data.number(LR).requires_grad_(), math.isqrt(steps)
        model, step = self.begun(self.module, "sgd", lr, 0.0)
        params = tuple(self.leaves.values())
        for begin in range(0, steps, every):
            part = functools.partial(self.some, model, step, range(begin, begin + every))
            params = checkpoint(part, *params, use_reentrant=False)
        last = error_of(model(self.data.held_x, params=list(params)), self.data.held_y)
        *found, by_rate = torch.autograd.grad(last, [*self.leaves.values(), lr])
        return dict(zip(self.leaves, found, strict=True)), by_rate
