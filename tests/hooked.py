"""Hooks, closures and holders that read a module or its params, and what plain torch makes of those that may."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.utils.prune
from nightly import NIGHTLY
from torch import nn

import fzero as fz
from fzero.testing import assert_trees_close, assert_trees_equal, run_ranks

F64 = torch.float64
SHARDS: dict[int, Any] = {0: lambda step: step, 1: fz.shard_zero1, 3: fz.shard_zero3}


class Block(nn.Module):
    """A linear map with params and a buffer that hooks and closures may read."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)
        self.gain, self.shift = nn.Parameter(torch.full((3,), 1.5)), nn.Parameter(torch.full((3,), 0.25))
        self.register_buffer("table", torch.linspace(0.5, 1.0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.tanh(self.lin(x)) + self.get_buffer("table"))


class Net(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block, count: int = 2) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(block() for _ in range(count))
            self.head = nn.Linear(3, 3)
        self.gain = nn.Parameter(torch.full((3,), 0.75))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.gain).square().mean()


X = torch.randn(4, 3, generator=torch.Generator().manual_seed(3), dtype=F64)


def values_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach() for name, param in module.named_parameters()}


def by_functional_call(module: nn.Module) -> dict[str, torch.Tensor]:
    return torch.func.grad(lambda p: torch.func.functional_call(module, p, (X,)))(values_of(module))


def by_autograd(module: nn.Module) -> dict[str, torch.Tensor]:
    names, params = zip(*module.named_parameters(), strict=True)
    grads = torch.autograd.grad(module(X), params, materialize_grads=True)
    return dict(zip(names, grads, strict=True))


FORMS = [(stage, remat) for stage in SHARDS for remat in (False, True) if NIGHTLY or stage == 3 or remat == stage % 2]


def check(module: nn.Module, want: dict[str, torch.Tensor], forms: Any = FORMS) -> None:
    """The gradient under torch.func, and at every stage, in both forms, twice, here and in ranks that are threads."""
    before = {name: value.clone() for name, value in module.state_dict().items()}
    apply, params = fz.functional(module)

    def rank_main(rank: int) -> None:
        assert_trees_close(dict(torch.func.grad(apply)(params, X)), want, rtol=1e-10)
        for stage, remat in forms:
            step = SHARDS[stage](fz.train_step(apply, fz.sgd(0.1)))
            step = fz.remat(step) if remat else step
            state = step.init(params)
            for _ in range(2):
                out, pullback = step.vjp(state, X)
                assert_trees_close(dict(fz.gather(pullback(torch.ones_like(out))[0])), want, rtol=1e-10)

    for _ in range(2):
        assert_trees_close(dict(torch.func.grad(apply)(params, X)), want, rtol=1e-10)
    run_ranks(rank_main, 2)
    assert_trees_equal(dict(module.state_dict()), before)


# ---- what reads the module from a hook or a closure


class Gained:
    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __call__(self, module: Any, inputs: Any, out: Any) -> Any:
        return out * self.owner.gain

    def hook(self, module: Any, inputs: Any, out: Any) -> Any:
        return self(module, inputs, out)


def scaled_by(owner: Any, module: Any, inputs: Any, out: Any) -> Any:
    return out * owner.gain


def partial(at: Any, owner: Any) -> None:
    at.register_forward_hook(functools.partial(scaled_by, owner))


def pre_hook(at: Any, owner: Any) -> None:
    at.register_forward_pre_hook(functools.partial(lambda owner, m, i: (i[0] * owner.gain,), owner))


def hook_with_kwargs(at: Any, owner: Any) -> None:
    hook = functools.partial(lambda owner, m, i, k, o: o * owner.gain, owner)
    at.register_forward_hook(hook, with_kwargs=True, always_call=True)


def prepended(at: Any, owner: Any) -> None:
    at.register_forward_hook(functools.partial(lambda owner, m, i, o: o + owner.gain, owner))
    at.register_forward_hook(functools.partial(scaled_by, owner), prepend=True)


def partial_forward(at: Any, owner: Any) -> None:
    at.forward = functools.partial(lambda old, owner, x: old(x) * owner.gain, at.forward, owner)


def bound_method(at: Any, owner: Any) -> None:
    at.register_forward_hook(Gained(owner).hook)


def bound_to_a_submodule(at: Any, owner: Any) -> None:
    at.register_forward_hook(types.MethodType(lambda self, m, i, o: o * self.gain, owner))


def callable_object(at: Any, owner: Any) -> None:
    at.register_forward_hook(Gained(owner))


def cycle(at: Any, owner: Any) -> None:
    at.parent = [owner]
    at.register_forward_hook(lambda m, i, o: o * m.parent[0].gain)


READERS: dict[str, Callable[[Any, Any], None]] = {
    fn.__name__.replace("_", " "): fn
    for fn in (
        partial, pre_hook, hook_with_kwargs, prepended, partial_forward, bound_method, bound_to_a_submodule,
        callable_object, cycle,
    )
}  # fmt: skip


# ---- what leads to the module itself also in a copy of it


def closure(at: Any, owner: Any) -> None:
    at.register_forward_hook(lambda m, i, o: o * owner.gain)


def backward_hook(at: Any, owner: Any) -> None:
    at.register_full_backward_hook(lambda m, before, after: (before[0] * owner.gain,))


def default_argument(at: Any, owner: Any) -> None:
    at.register_forward_hook(lambda m, i, o, owner=owner: o * owner.gain)


def weak_reference(at: Any, owner: Any) -> None:
    reference = weakref.ref(owner)
    at.register_forward_hook(lambda m, i, o: o * reference().gain)  # type: ignore[union-attr]


def buffer_in_a_closure(at: Any, owner: Any) -> None:
    table = owner.table
    at.register_forward_hook(lambda m, i, o: o * table)


def cache(at: Any, owner: Any) -> None:
    at.register_forward_hook(functools.lru_cache(lambda m, i, o: o * owner.gain))


def generator(at: Any, owner: Any) -> None:
    at.made = (owner.gain for _ in range(9))


def weak_dict(at: Any, owner: Any) -> None:
    at.owners = weakref.WeakKeyDictionary({owner: 1})


CLOSED: dict[str, Callable[[Any, Any], None]] = {
    fn.__name__.replace("_", " "): fn
    for fn in (
        *(closure, backward_hook, default_argument, weak_reference, buffer_in_a_closure, cache, generator, weak_dict),
    )
}


# ---- a param that is held besides its module


def in_a_list(at: Any, owner: Any) -> None:
    at.held = [owner.gain]
    at.register_forward_hook(lambda m, i, o: o * m.held[0])


def in_a_dict(at: Any, owner: Any) -> None:
    at.held = {"gain": owner.gain}
    at.register_forward_hook(lambda m, i, o: o * m.held["gain"])


def in_a_partial(at: Any, owner: Any) -> None:
    at.scale = functools.partial(torch.mul, owner.gain)
    at.register_forward_hook(lambda m, i, o: m.scale(o))


HOLDERS = {fn.__name__.replace("_", " "): fn for fn in (in_a_list, in_a_dict, in_a_partial)}
