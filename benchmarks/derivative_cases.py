"""The cases of `derivatives.py`, as plain torch says them: what others compute is held to this, in float64.

A small network, batches that are the same for all, losses that hold derivatives by inputs, and a run of some updates as
a function of params, learning rate, weight decay and data weights. `Plain` is also how a library is asked that says
nothing of derivatives itself: its module goes to `torch.func.functional_call`, and gradients of inner steps are
averaged over ranks by hand.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.checkpoint import checkpoint

Params = dict[str, Tensor]
Network = Callable[[Tensor], Tensor]
F64 = torch.float64
ROWS, FEATURES, WIDTH, OUTPUTS, LONGEST = 8, 3, 16, 2, 100
LR, DECAY = 0.1, 0.05
BETAS, EPS = (0.9, 0.99), 1e-2  # of AdamW: an eps of 1e-8 leaves nothing of the second order in the first update
RATES = (0.02, 0.05, 0.1, 0.2)
MODELS = 4
STEPS = 5
CLIP = 0.5


@dataclass(frozen=True)
class Data:
    """What a rank sees: its share of the rows of every batch.

    Attributes:
        x, y: of the updates, [updates, rows, features] and [updates, rows, outputs].
        rows: the numbers of these rows within a batch, [rows].
        held_x, held_y: what the run is judged by.
        dtype: of all of it.
    """

    x: Tensor
    y: Tensor
    rows: Tensor
    held_x: Tensor
    held_y: Tensor
    dtype: torch.dtype = F64

    def batch(self, update: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.x[update], self.y[update], self.rows

    def number(self, value: float) -> Tensor:
        return torch.tensor(value, dtype=self.dtype)

    @property
    def held(self) -> tuple[Tensor, Tensor, Tensor]:
        """What losses that hold derivatives are of: inputs, targets, and a tangent of the inputs."""
        return self.held_x, self.held_y, self.x[0]

    @property
    def ones(self) -> Tensor:
        """Weights of all rows of a batch, of other ranks too."""
        return torch.ones(ROWS, dtype=self.dtype)

    @property
    def rates(self) -> Tensor:
        return torch.tensor(RATES, dtype=self.dtype)


def data_of(rank: int = 0, ranks: int = 1, dtype: torch.dtype = F64) -> Data:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=F64).to(dtype)

    own = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
    x, y = normal(LONGEST, ROWS, FEATURES), normal(LONGEST, ROWS, OUTPUTS)
    held_x, held_y = normal(ROWS, FEATURES), normal(ROWS, OUTPUTS)
    return Data(x[:, own], y[:, own], torch.arange(ROWS)[own], held_x[own], held_y[own], dtype)


def module_of(dtype: torch.dtype = F64, seed: int = 0) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    module = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, OUTPUTS)).double()
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=F64) * param.shape[-1] ** -0.5)
    return module.to(dtype)


def params_of(module: nn.Module) -> Params:
    return {name: param.detach().clone() for name, param in module.named_parameters()}


def directions(dtype: torch.dtype = F64) -> Params:
    """What a Hessian is multiplied with."""
    return params_of(module_of(dtype, seed=7))


def stacked(dtype: torch.dtype = F64) -> Params:
    """Params of several models, [models, ...]."""
    each = [params_of(module_of(dtype, seed)) for seed in range(MODELS)]
    return {name: torch.stack([params[name] for params in each]) for name in each[0]}


def error_of(out: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
    """The mean over rows of the squared error, each with its weight."""
    each = (out - y).square().mean(1)
    return each.mean() if weights is None else (weights * each).mean()


def slopes(x_grad: Tensor) -> Tensor:
    """The penalty of WGAN-GP (arXiv 1704.00028): how far each row's gradient by the inputs is from length 1."""
    return (x_grad.square().sum(1).sqrt() - 1).square().mean()


def slope_of(network: Network, x: Tensor) -> Tensor:
    """The gradient by the inputs, by autograd, as a graph."""
    x = x.detach().requires_grad_()
    return torch.autograd.grad(network(x).sum(), x, create_graph=True)[0]


def flow_loss(network: Network, x: Tensor, y: Tensor, along: Tensor) -> Tensor:
    """As that of MeanFlow (arXiv 2505.13447), whose target holds a jvp by the inputs."""
    out, pushed = torch.func.jvp(network, (x,), (along,))  # type: ignore[misc]
    return (out - (y - pushed).detach()).square().mean()


def score_loss(network: Network, x: Tensor, along: Tensor) -> Tensor:
    """Sliced score matching (arXiv 1905.07088) of an energy; its gradient by the params is a third derivative."""
    score = torch.func.grad(lambda x: -network(x).sum())
    value, pushed = torch.func.jvp(score, (x,), (along,))  # type: ignore[misc]
    return ((along * pushed).sum(1) + value.square().sum(1) / 2).mean()


def score_loss_by_autograd(network: Network, x: Tensor, along: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (value,) = torch.autograd.grad(-network(x).sum(), x, create_graph=True)
    (pushed,) = torch.autograd.grad((value * along).sum(), x, create_graph=True)
    return ((along * pushed).sum(1) + value.square().sum(1) / 2).mean()


def clipped(each: Params) -> Params:
    """The mean of examples' gradients, [examples, ...], each clipped by itself, as for DP-SGD (arXiv 1607.00133)."""
    norms = torch.stack([g.flatten(1).square().sum(1) for g in each.values()]).sum(0).sqrt()
    weights = (CLIP / norms).clamp(max=1.0)
    return {name: (weights.view(-1, *[1] * (g.ndim - 1)) * g).mean(0) for name, g in each.items()}


def dot(left: Params, right: Params) -> Tensor:
    return torch.stack([(left[name] * right[name]).sum() for name in left]).sum()


def grad_by_autograd(fn: Callable[..., Tensor], argnums: int | tuple[int, ...] = 0) -> Callable[..., Any]:
    """As `torch.func.grad`, by the autograd that everybody uses; None where one leaf is not connected."""

    def grad(*args: Any) -> Any:
        chosen = (argnums,) if isinstance(argnums, int) else argnums
        flat, spec = tree_flatten(tuple(args[i] for i in chosen))
        leaves = [x if x.requires_grad else x.detach().requires_grad_() for x in flat]
        given = list(args)
        for i, arg in zip(chosen, tree_unflatten(leaves, spec), strict=True):
            given[i] = arg
        out = fn(*given)
        found = torch.autograd.grad(out, leaves, create_graph=True, allow_unused=True)
        if all(each is None for each in found):
            torch.autograd.grad(out, leaves, create_graph=True)  # says itself what is wrong
        tree = tree_unflatten(found, spec)
        return tree[0] if isinstance(argnums, int) else tree

    return grad


def pushed_by_func(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.func.jvp(fn, (x,), (torch.ones_like(x),))[1]


def pushed_by_autograd(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor | None:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(fn(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


# ---- the run, and the cases


@dataclass
class Plain:
    """Every case by functions of params.

    Attributes:
        forward: the outputs of a module with these params.
        params: that a run begins with.
        data: of this rank.
        average: gradients of inner steps over ranks, as a differentiable function.
        grad: `torch.func.grad`, or `grad_by_autograd`.
        remat: keeps each tenth of 100 states, and runs the rest again.
        vector: what the Hessian is multiplied with; as the params are.
        models: params with a leading dim of models; as the params are.
    """

    forward: Callable[[Params, Tensor], Tensor]
    params: Params
    data: Data
    average: Callable[[Params], Params] = lambda grads: grads
    grad: Callable[..., Callable[..., Any]] = torch.func.grad
    remat: bool = False
    vector: Params = dataclasses.field(default_factory=directions)
    models: Params = dataclasses.field(default_factory=stacked)

    def loss(self, params: Params, weights: Tensor, update: int) -> Tensor:
        x, y, rows = self.data.batch(update)
        return error_of(self.forward(params, x), y, weights[rows])

    def held(self, params: Params) -> Tensor:
        return error_of(self.forward(params, self.data.held_x), self.data.held_y)

    def optimizer(self, kind: str, lr: Any, decay: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """`init(params) -> state` and `update(grads, state, params) -> (params, state)`."""
        return (lambda params: (0, params, params)), functools.partial(update_by_hand, kind, lr, decay)

    def some(self, params: Params, state: Any, weights: Tensor, updates: range, update: Callable[..., Any]) -> Any:
        for number in updates:
            grads = self.average(self.grad(self.loss)(params, weights, number))
            params, state = update(grads, state, params)
        return params, state

    def run(
        self,
        params: Params,
        lr: Any = LR,
        decay: Any = 0.0,
        weights: Tensor | None = None,
        steps: int = STEPS,
        kind: str = "sgd",
    ) -> Tensor:
        """The loss on what is held out, after some updates."""
        init, update = self.optimizer(kind, lr, decay)
        state, weights = init(params), self.data.ones if weights is None else weights
        every = math.isqrt(steps) if self.remat else steps
        for begin in range(0, steps, every):
            part = functools.partial(self.some, weights=weights, updates=range(begin, begin + every), update=update)
            params, state = checkpoint(part, params, state, use_reentrant=False) if self.remat else part(params, state)
        return self.held(params)

    # ---- one method a case

    def slope(self) -> Any:
        return slopes(self.grad(lambda x: self.forward(self.params, x).sum())(self.data.held_x))

    def pushed_inputs(self) -> Any:
        x, _, along = self.data.held
        return torch.func.jvp(functools.partial(self.forward, self.params), (x,), (along,))[1].square().mean()

    def flow(self) -> Any:
        return self.grad(lambda p: flow_loss(functools.partial(self.forward, p), *self.data.held))(self.params)

    def score(self) -> Any:
        x, _, along = self.data.held
        loss = score_loss_by_autograd if self.grad is grad_by_autograd else score_loss
        return self.grad(lambda p: loss(functools.partial(self.forward, p), x, along))(self.params)

    def examples(self) -> Any:
        def loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
            return error_of(self.forward(params, x.unsqueeze(0)), y.unsqueeze(0))

        x, y, _ = self.data.held
        if self.grad is not grad_by_autograd:
            return clipped(torch.vmap(self.grad(loss), (None, 0, 0))(self.params, x, y))
        found = [self.grad(loss)(self.params, x[i], y[i]) for i in range(len(x))]
        return clipped({name: torch.stack([grads[name] for grads in found]) for name in self.params})

    def maml(self, steps: int, kind: str) -> Any:
        return self.grad(lambda p: self.run(p, steps=steps, kind=kind))(self.params)

    def by_rate(self) -> Any:
        return self.grad(lambda lr: self.run(self.params, lr))(self.data.number(LR))

    def by_decay(self) -> Any:
        return self.grad(lambda decay: self.run(self.params, decay=decay))(self.data.number(DECAY))

    def by_weights(self) -> Any:
        return self.grad(lambda weights: self.run(self.params, weights=weights))(self.data.ones)

    def penalty(self) -> Any:
        def of(params: Params) -> Tensor:
            return slopes(self.grad(lambda x: self.forward(params, x).sum())(self.data.held_x))

        return self.grad(of)(self.params)

    def pushed(self) -> Any:
        push = pushed_by_autograd if self.grad is grad_by_autograd else pushed_by_func
        return push(lambda lr: self.run(self.params, lr), self.data.number(LR))

    def hessian(self) -> Any:
        first = self.grad(self.held)
        return self.grad(lambda p: dot(first(p), self.vector))(self.params)

    def twice(self) -> Any:
        return self.grad(self.grad(lambda lr: self.run(self.params, lr)))(self.data.number(LR))

    def over_models(self) -> Any:
        init, update = self.optimizer("sgd", LR, 0.0)

        def one(params: Params) -> Params:
            return self.some(params, init(params), self.data.ones, range(1), update)[0]

        return torch.vmap(one)(self.models)

    def over_rates(self) -> Any:
        return torch.vmap(lambda lr: self.run(self.params, lr))(self.data.rates)

    def long(self, steps: int) -> Any:
        remat = dataclasses.replace(self, remat=self.grad is grad_by_autograd)
        return self.grad(lambda p, lr: remat.run(p, lr, steps=steps), (0, 1))(self.params, self.data.number(LR))


def update_by_hand(kind: str, lr: Any, decay: Any, grads: Params, state: Any, params: Params) -> Any:
    if kind == "sgd":
        return {name: p - lr * (grads[name] + decay * p) for name, p in params.items()}, state
    count, first, second = state
    if not count:
        first = second = tree_map(torch.zeros_like, params)
    count = count + 1
    first = {name: BETAS[0] * first[name] + (1 - BETAS[0]) * g for name, g in grads.items()}
    second = {name: BETAS[1] * second[name] + (1 - BETAS[1]) * g * g for name, g in grads.items()}
    new = {}
    for name, p in params.items():
        unbiased = second[name] / (1 - BETAS[1] ** count)
        way = first[name] / (1 - BETAS[0] ** count) / (unbiased.sqrt() + EPS)
        new[name] = p - lr * (way + decay * p)
    return new, (count, first, second)


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Attributes:
        asked: the method of a way of writing it, and its arguments.
        kind: what the derivative is by, or goes through.
        own: the result is a value, of each rank's own rows; otherwise it is a derivative of the mean loss over ranks.
    """

    title: str
    asked: tuple[Any, ...]
    kind: str = "through the optimizer"
    own: bool = False

    def __call__(self, way: Any) -> Any:
        return getattr(way, self.asked[0])(*self.asked[1:])

    def is_in(self, way: Any) -> bool:
        return hasattr(way, self.asked[0])


INPUTS, PARAMS = "by inputs", "by params"
CASES: dict[str, Case] = {
    "slope": Case("gradient by inputs", ("slope",), INPUTS, own=True),
    "jvp-inputs": Case("forward mode (jvp) by inputs", ("pushed_inputs",), INPUTS, own=True),
    "penalty": Case("gradient penalty", ("penalty",), INPUTS),
    "flow": Case("a loss that holds a jvp (MeanFlow)", ("flow",), INPUTS),
    "score": Case("score matching, a third derivative", ("score",), INPUTS),
    "hvp": Case("Hessian-vector product", ("hessian",), PARAMS),
    "examples": Case("the gradient of each example, clipped", ("examples",), PARAMS, own=True),
    "maml1": Case("MAML, through 1 step of SGD", ("maml", 1, "sgd")),
    "maml5": Case("MAML, through 5 steps of SGD", ("maml", 5, "sgd")),
    "maml1-adamw": Case("MAML, through 1 step of AdamW", ("maml", 1, "adamw")),
    "maml5-adamw": Case("MAML, through 5 steps of AdamW", ("maml", 5, "adamw")),
    "lr": Case("by the learning rate, through 5 steps", ("by_rate",)),
    "decay": Case("by the weight decay, through 5 steps", ("by_decay",)),
    "weights": Case("by a weight of each example, through 5 steps", ("by_weights",)),
    "jvp": Case("forward mode (jvp) by the learning rate, 5 steps", ("pushed",), own=True),
    "twice": Case("second derivative by the learning rate, 5 steps", ("twice",)),
    "models": Case("vmap over 4 models, a step", ("over_models",)),
    "rates": Case("vmap over 4 learning rates, 5 steps", ("over_rates",), own=True),
    "long": Case("through 100 steps, memory as their square root", ("long", LONGEST)),
}


def reference() -> Plain:
    module = module_of()
    return Plain(lambda p, x: torch.func.functional_call(module, p, (x,)), params_of(module), data_of())
