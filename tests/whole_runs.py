"""A whole run as one function of params and of an optimizer's numbers, by plain torch in one process and by a step.

Of a few updates and everything that a step gives out on the way: losses, norms, the gathered params, a loss afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import scenarios
import torch
from torch.utils import _pytree as pytree

import fzero as fz
from fzero.testing import assert_trees_close, strategies

F64 = torch.float64
SCENARIOS: dict[str, Any] = {
    "module": (lambda: scenarios.tiny_lm(width=4, blocks=1), scenarios.token_batches),
    "unit": (
        lambda: scenarios.stack(blocks=2, width=3),
        lambda n, **seed: scenarios.vector_batches(n, width=3, **seed),
    ),
}
# lr, weight decay, largest norm, a number that the function closes over
NUMBERS = tuple(torch.tensor(x, dtype=F64) for x in (0.05, 0.1, 0.7, 1.3))


def mapped(fn: Callable[..., Any], *trees: Any) -> Any:
    return pytree.tree_map(fn, *trees)


def clipped(grads: Any, most: torch.Tensor) -> Any:
    norm = torch.stack([g.square().sum() for g in pytree.tree_leaves(grads)]).sum().sqrt()
    factor = torch.clamp(most / norm, max=1.0)
    return mapped(lambda g: g * factor, grads)


# each: (plain(params, grads, two moments, count, numbers) -> (params, moments), the optimizer)
Plain = Callable[..., Any]


def plain_sgd(p: Any, g: Any, m: Any, count: int, lr: Any, decay: Any, most: Any) -> Any:
    return mapped(lambda p, g: p - lr * (g + decay * p), p, g), m


def plain_momentum(p: Any, g: Any, m: Any, count: int, lr: Any, decay: Any, most: Any) -> Any:
    moved = mapped(lambda b, g, p: 0.8 * b + g + decay * p, m[0], g, p)
    return mapped(lambda p, b: p - lr * b, p, moved), (moved, m[1])


def plain_nesterov(p: Any, g: Any, m: Any, count: int, lr: Any, decay: Any, most: Any) -> Any:
    g = mapped(lambda g, p: g + decay * p, g, p)
    moved = mapped(lambda b, g: 0.8 * b + g, m[0], g)
    return mapped(lambda p, g, b: p - lr * (g + 0.8 * b), p, g, moved), (moved, m[1])


def root(v: torch.Tensor) -> torch.Tensor:
    """The direction has a derivative where a gradient is zero, as that of an unused leaf, if torch's root has none."""
    return torch.where(v > 0, torch.where(v > 0, v, 1.0).sqrt(), 0.0)


def adapted(g: Any, m: Any, count: int) -> Any:
    first = mapped(lambda a, g: 0.9 * a + 0.1 * g, m[0], g)
    second = mapped(lambda a, g: 0.99 * a + 0.01 * g * g, m[1], g)
    way = mapped(lambda a, v: (a / (1 - 0.9**count)) / (root(v / (1 - 0.99**count)) + 1e-3), first, second)
    return way, (first, second)


def plain_adamw(p: Any, g: Any, m: Any, count: int, lr: Any, decay: Any, most: Any) -> Any:
    way, new = adapted(g, m, count)
    return mapped(lambda p, u: p - lr * (u + decay * p), p, way), new


def plain_adam(p: Any, g: Any, m: Any, count: int, lr: Any, decay: Any, most: Any) -> Any:
    way, new = adapted(mapped(lambda g, p: g + decay * p, g, p), m, count)
    return mapped(lambda p, u: p - lr * u, p, way), new


def by_leaf(fn: Callable[..., Any], *trees: Any) -> Any:
    def norm(x: torch.Tensor) -> torch.Tensor:
        return root(x.square().sum())

    return mapped(lambda *each: fn(*each, *[norm(x) for x in each]), *trees)


def plain_lamb(p: Any, g: Any, m: Any, count: int, lr: Any, decay: Any, most: Any) -> Any:
    way, moments = adapted(g, m, count)
    way = mapped(lambda w, p: w + decay * p, way, p)

    def one(p: Any, w: Any, norm: Any, size: Any) -> Any:
        both = (norm > 0) & (size > 0)
        return p - lr * torch.where(both, norm / torch.where(both, size, 1.0), 1.0) * w

    return by_leaf(one, p, way), moments


def plain_block_clipped(p: Any, g: Any, m: Any, count: int, lr: Any, decay: Any, most: Any) -> Any:
    g = by_leaf(lambda g, norm: g * (0.3 * most / torch.where(norm > 0, norm, 1.0)).clamp(max=1.0), g)
    return plain_momentum(p, g, m, count, lr, decay, most)


def plain_lion(p: Any, g: Any, m: Any, count: int, lr: Any, decay: Any, most: Any) -> Any:
    new = mapped(lambda p, a, g: p - lr * ((0.9 * a + 0.1 * g).sign() + decay * p), p, m[0], g)
    return new, (mapped(lambda a, g: 0.99 * a + 0.01 * g, m[0], g), m[1])


def plain_clipped(p: Any, g: Any, m: Any, count: int, lr: Any, decay: Any, most: Any) -> Any:
    return plain_momentum(p, clipped(g, most), m, count, lr, decay, most)


def plain_clamped(p: Any, g: Any, m: Any, count: int, lr: Any, decay: Any, most: Any) -> Any:
    return plain_adamw(p, mapped(lambda g: g.clamp(-most, most), g), m, count, lr, decay, most)


def plain_scheduled(p: Any, g: Any, m: Any, count: int, lr: Any, decay: Any, most: Any) -> Any:
    return plain_sgd(p, g, m, count, lr + (most - lr) * (count - 1) / 4, decay, most)


def is_bias(path: Any) -> bool:
    return str(getattr(path[-1], "key", "")).endswith(("b", "bias"))


def plain_parted(p: Any, g: Any, m: Any, count: int, lr: Any, decay: Any, most: Any) -> Any:
    """Biases by sgd, the rest as AdamW."""
    new, moments = plain_adamw(p, g, m, count, lr, decay, most)
    biases = mapped(lambda p, g: p - 0.1 * most * g, p, g)
    return pytree.tree_map_with_path(lambda path, x, y: y if is_bias(path) else x, new, biases), moments


def orthogonal(x: torch.Tensor) -> torch.Tensor:
    """One step of Newton and Schulz, of which two would make much of little differences."""
    x = x / root(x.square().sum()).clamp(min=0.1)
    gram = x @ x.mT
    return 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x


def plain_muon(p: Any, g: Any, m: Any, count: int, lr: Any, decay: Any, most: Any) -> Any:
    """Matrices by muon, others by sgd."""
    moved = mapped(lambda b, g: 0.8 * b + 0.2 * g, m[0], g)

    def one(p: torch.Tensor, g: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if p.ndim < 2:
            return p - 0.1 * most * g
        scale = max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5
        return p - lr * (scale * orthogonal(0.2 * g + 0.8 * b) + decay * p)

    return mapped(one, p, g, moved), (moved, m[1])


def plain_adafactor(p: Any, g: Any, m: Any, count: int, lr: Any, decay: Any, most: Any) -> Any:
    """Rows and columns are kept as often as there are elements."""
    new = count**-0.8

    def mean(dim: int, old: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        squares = g.square().mean(dim, keepdim=True).expand_as(g) if g.ndim > 1 else g.square()
        return old + new * (squares - old)

    rows, columns = (mapped(functools.partial(mean, dim), old, g) for dim, old in zip((-1, -2), m, strict=True))

    def rms(x: torch.Tensor) -> torch.Tensor:
        return root(x.square().sum() / x.numel())

    def one(p: torch.Tensor, g: torch.Tensor, r: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        v = r * c / r.mean(-2, keepdim=True).clamp(min=1e-2) if p.ndim > 1 else r
        u = g / v.clamp(min=1e-4).sqrt()
        rate = rms(p).clamp(min=1e-3) * lr.clamp(max=1 / count**0.5)
        return p - rate * u / (rms(u) / most).clamp(min=1.0) - lr * decay * p

    return mapped(one, p, g, rows, columns), (rows, columns)


def plain_row_clipped(p: Any, g: Any, m: Any, count: int, lr: Any, decay: Any, most: Any) -> Any:
    def norm(x: torch.Tensor) -> torch.Tensor:
        dims = tuple(range(1, x.ndim))
        return root(x.square().sum(dims, keepdim=True) if dims else x.square().sum())

    def one(p: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        own, least = norm(g), 0.3 * most * norm(p).clamp(min=1e-3)
        return torch.where(own > least, g * least / torch.where(own > least, own, 1.0), g)

    return plain_sgd(p, mapped(one, p, g), m, count, lr, decay, most)


def adamw(lr: Any, decay: Any) -> Any:
    return fz.adamw(lr, 0.9, 0.99, 1e-3, weight_decay=decay)


def my_momentum(lr: torch.Tensor, decay: torch.Tensor) -> fz.GradientTransformation:
    """The same as fz.sgd with momentum, by a user: on whole leaves."""

    def update(grads: Any, old: Any, params: Any) -> Any:
        new = mapped(lambda b, g, p: 0.8 * b + g + decay * p, old, grads, params)
        return mapped(lambda b: -lr * b, new), new

    return fz.GradientTransformation(functools.partial(mapped, torch.zeros_like), update)


OPTIMIZERS: dict[str, tuple[Plain, Callable[..., Any]]] = {
    "sgd": (plain_sgd, lambda lr, decay, most: fz.sgd(lr, weight_decay=decay)),
    "momentum": (plain_momentum, lambda lr, decay, most: fz.sgd(lr, momentum=0.8, weight_decay=decay)),
    "my momentum": (plain_momentum, lambda lr, decay, most: my_momentum(lr, decay)),
    "nesterov": (plain_nesterov, lambda lr, decay, most: fz.sgd(lr, 0.8, decay, nesterov=True)),
    "adamw": (plain_adamw, lambda lr, decay, most: adamw(lr, decay)),
    "adam": (plain_adam, lambda lr, decay, most: fz.adam(lr, 0.9, 0.99, 1e-3, weight_decay=decay)),
    "lion": (plain_lion, lambda lr, decay, most: fz.lion(lr, weight_decay=decay)),
    "lamb": (plain_lamb, lambda lr, decay, most: fz.lamb(lr, 0.9, 0.99, 1e-3, decay)),
    "block clipped": (
        plain_block_clipped,
        lambda lr, decay, most: fz.chain(fz.clip_by_block_norm(0.3 * most), fz.sgd(lr, 0.8, decay)),
    ),
    "muon": (
        plain_muon,
        lambda lr, decay, most: fz.partition(
            {"*.b|*bias|*norm*|unused": fz.sgd(0.1 * most), "*": fz.muon(lr, 0.8, decay, ns_steps=1, eps=0.1)}
        ),
    ),
    "adafactor": (
        plain_adafactor,
        lambda lr, decay, most: fz.adafactor(lr, eps=(1e-2, 1e-3), d=most, weight_decay=decay),
    ),
    "row clipped": (
        plain_row_clipped,
        lambda lr, decay, most: fz.chain(fz.adaptive_clip(0.3 * most), fz.sgd(lr, weight_decay=decay)),
    ),
    "clipped": (
        plain_clipped,
        lambda lr, decay, most: fz.chain(
            fz.clip_by_global_norm(most), fz.sgd(lr, momentum=torch.tensor(0.8, dtype=F64), weight_decay=decay)
        ),
    ),
    "clamped": (plain_clamped, lambda lr, decay, most: fz.chain(fz.clip_by_value(most), adamw(lr, decay))),
    "parted": (
        plain_parted,
        lambda lr, decay, most: fz.partition({"*.b|*bias": fz.sgd(0.1 * most), "*": adamw(lr, decay)}),
    ),
    "scheduled": (plain_scheduled, lambda lr, decay, most: fz.sgd(fz.linear(lr, most, 4), weight_decay=decay)),
}


def in_one_process(loss: Any, optimizer: str, steps: int, given: list[Any], later: list[Any]) -> Any:
    """`objective(params, *NUMBERS)`.

    Args:
        given, later: the batches of all ranks, of the updates and of the loss afterwards.
    """
    update = OPTIMIZERS[optimizer][0]

    def mean(p: Any, data: Any, times: torch.Tensor) -> torch.Tensor:
        return times * torch.stack([loss(p, *batch) for batch in data]).mean()

    def objective(p: Any, lr: Any, decay: Any, most: Any, times: Any) -> torch.Tensor:
        zeros = mapped(torch.zeros_like, p)
        moments, total = (zeros, zeros), torch.zeros((), dtype=F64)
        for count in range(1, steps + 1):
            grads, value = torch.func.grad_and_value(mean)(p, given, times)
            norm = torch.stack([g.square().sum() for g in pytree.tree_leaves(grads)]).sum().sqrt()
            total = total + 0.3 * value + 0.1 * norm
            p, moments = update(p, grads, moments, count, lr, decay, most)
        return total + mean(p, later, times) + cubes(p)

    return objective


def cubes(p: Any) -> torch.Tensor:
    return 0.01 * torch.stack([(x**3).sum() for x in pytree.tree_leaves(p)]).sum()


def by_steps(loss: Any, optimizer: str, steps: int, given: Any, later: Any, transform: Any, how: str) -> Any:
    """The same by a step on one rank.

    Args:
        transform: gives a step with others around it.
        how: an update is done: "step", "vjp" (`vjp`, a pullback, `add_grads` and `update`), "scan".
    """

    def objective(p: Any, lr: Any, decay: Any, most: Any, times: Any) -> torch.Tensor:
        def fn(p: Any, *batch: Any) -> torch.Tensor:
            return times * loss(p, *batch)

        step = transform(fz.train_step(fn, OPTIMIZERS[optimizer][1](lr, decay, most)))
        state, total = step.init(p), torch.zeros((), dtype=F64)
        if how == "scan":
            state, metrics = fz.scan(step, state, [given] * steps, remat_every=2)
            total = 0.3 * metrics["loss"].sum() + 0.1 * metrics["grad_norm"].sum()
        for _ in range(0 if how == "scan" else steps):
            if how == "step":
                state, metrics = step(state, *given)
                total = total + 0.3 * metrics["loss"] + 0.1 * metrics["grad_norm"]
            else:
                value, pullback = step.vjp(state, *given, argnums=())
                grads, _ = pullback(torch.ones_like(value))
                total = total + 0.3 * value + 0.1 * fz.global_norm(grads)
                state, _ = step.update(step.add_grads(state, half(grads)), half(grads))
        return total + step.forward(state, *later) + cubes(fz.gather(state.params))

    return objective


def half(grads: Any) -> Any:
    return pytree.tree_map(lambda x: x / 2, grads)


def along(tree: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return mapped(lambda x: torch.randn(x.shape, generator=generator, dtype=x.dtype), tree)


def dot(tree: Any, other: Any) -> torch.Tensor:
    pairs = zip(pytree.tree_leaves(tree), pytree.tree_leaves(other), strict=True)
    return torch.stack([(x * y).sum() for x, y in pairs]).sum()


EVERY = (0, 1, 2, 3, 4)
LRS = torch.tensor([0.02, 0.1], dtype=F64)


def grad(f: Callable[..., Any], args: Any) -> Any:
    return torch.func.grad(f, EVERY)(*args)


def pushed(f: Callable[..., Any], args: Any) -> Any:
    return torch.func.jvp(f, args, along(args, 1))


def grad_of_grad(f: Callable[..., Any], args: Any) -> Any:
    return torch.func.grad(lambda *a: dot(torch.func.grad(f, EVERY)(*a), along(args, 2)), EVERY)(*args)


def pushed_grad(f: Callable[..., Any], args: Any) -> Any:
    return torch.func.jvp(torch.func.grad(f, EVERY), args, along(args, 3))[1]


def over_rates(f: Callable[..., Any], args: Any) -> Any:
    return torch.func.vmap(lambda lr: f(args[0], lr, *args[2:]))(LRS)


def over_params(f: Callable[..., Any], args: Any) -> Any:
    return torch.func.vmap(lambda p: f(p, *args[1:]))(mapped(lambda x: torch.stack([x, 0.5 * x]), args[0]))


def grads_over_rates(f: Callable[..., Any], args: Any) -> Any:
    return torch.func.vmap(lambda lr: torch.func.grad(f, EVERY)(args[0], lr, *args[2:]))(LRS)


def grad_over_rates(f: Callable[..., Any], args: Any) -> Any:
    return torch.func.grad(lambda *a: torch.func.vmap(lambda lr: f(a[0], lr, *a[2:]))(LRS).sum(), EVERY)(*args)


TRANSFORMS = {
    each.__name__: each
    for each in (
        *(grad, pushed, grad_of_grad, pushed_grad),
        *(over_rates, over_params, grads_over_rates, grad_over_rates),
    )
}
# what differs between ranks, whose mean is that of the whole: values, which are of each rank's own loss
OF_RANK = ("pushed", "over_rates", "over_params")


def on_rank(rank: int, scenario: str, optimizer: str, steps: int, ranks: int, chosen: Any, how: str, name: str) -> Any:
    make, batches = SCENARIOS[scenario]
    loss, params = make()
    given, later = batches(ranks)[rank], batches(ranks, seed=5)[rank]
    transform = functools.partial(strategies.apply, chosen=chosen)
    return TRANSFORMS[name](by_steps(loss, optimizer, steps, given, later, transform, how), (params, *NUMBERS))


def wanted(scenario: str, optimizer: str, steps: int, ranks: int, name: str) -> Any:
    make, batches = SCENARIOS[scenario]
    loss, params = make()
    plain = in_one_process(loss, optimizer, steps, batches(ranks), batches(ranks, seed=5))
    return TRANSFORMS[name](plain, (params, *NUMBERS))


def assert_found(found: list[Any], want: Any, name: str) -> None:
    """Holds what ranks have found against what one process has.

    Args:
        found: by data rank.
    """
    if name in OF_RANK:
        found = [mapped(lambda *each: torch.stack(each).mean(0), *found)]
    size = max(x.abs().max().item() for x in pytree.tree_leaves(want))
    for each in found:
        assert_trees_close(each, want, rtol=1e-10, atol=1e-11 * size)
