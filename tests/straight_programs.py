"""Functions of several units, drawn for `engine/test_straight.py`, and their steps by hand, in float64."""

from __future__ import annotations

import functools
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch.utils.checkpoint import checkpoint

import fzero as fz
from fzero.engine.straight import StraightOp
from fzero.testing import assert_trees_close, run_ranks

F64 = torch.float64
RATE, STEPS = 0.05, 4
COTANGENTS = 1.0, -0.5
Call = Callable[..., Any]  # (function, leaves, input, whether it may be a part of the run's graph)
_taken = Counter[int]()  # by thread
_applied = StraightOp.applied


def counting(self: StraightOp, carriers: Sequence[object]) -> object:
    """In `StraightOp.applied`'s place: counts the calls of units that are a part of their run's graph, by thread."""
    _taken[threading.get_ident()] += 1
    return _applied(self, carriers)


def taken() -> int:
    """How many of them there were on this thread since it was asked last."""
    return _taken.pop(threading.get_ident(), 0)


# ---- what units do: [rows, 3] -> [rows, 3], each row for itself


def affine(q: Any, h: torch.Tensor) -> torch.Tensor:
    out = h @ q["w"]
    for name in sorted(q.keys() - {"w"}):
        out = out + (q[name] if q[name].ndim == 1 else q[name][0])
    return out + 0.1


def bent(q: Any, h: torch.Tensor) -> torch.Tensor:
    return torch.tanh(affine(q, h))


def seen(q: Any, h: torch.Tensor) -> torch.Tensor:
    return affine(q, h).t().t()


def written(q: Any, h: torch.Tensor) -> torch.Tensor:
    out = affine(q, h).exp() * 0.1
    out[:, 0].mul_(q["w"][0, 0])
    out[:, 1:] += 1.0
    return out[:, :3]


def pair(q: Any, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = affine(q, h)
    return torch.tanh(out), torch.sin(out)


def numbered(q: Any, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return affine(q, h), h.argmax(-1)


def checkpointed(q: Any, h: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda h: torch.tanh(h @ q["w"]), h, use_reentrant=False)


def passes(q: Any, h: torch.Tensor) -> torch.Tensor:
    return h.t().t()


UNITS = affine, bent, seen, written, passes


# ---- what a function does with them


def calls(call: Call, unit: Any, p: Any, q: Any, h: torch.Tensor, n: int) -> torch.Tensor:
    return call(unit, q, h)


def twice(call: Call, unit: Any, p: Any, q: Any, h: torch.Tensor, n: int) -> torch.Tensor:
    return call(unit, q, torch.sin(call(unit, q, h)))


def beside(call: Call, unit: Any, p: Any, q: Any, h: torch.Tensor, n: int) -> torch.Tensor:
    return call(unit, q, h) + call(bent, p["blocks"][0], h) * call(unit, p["blocks"][-1], h)


def mixed(call: Call, unit: Any, p: Any, q: Any, h: torch.Tensor, n: int) -> torch.Tensor:
    """One call is given leaves of two units, and one leaf is given to two calls."""
    return call(unit, {"w": q["w"], "b": p["blocks"][0]["w"]}, call(unit, q, h))


def writes(call: Call, unit: Any, p: Any, q: Any, h: torch.Tensor, n: int) -> torch.Tensor:
    h = call(seen if unit in (bent, passes) else unit, q, h)
    h.mul_(2.0)
    h[:, 0].add_(1.0)
    return call(unit, q, h)


def skips(call: Call, unit: Any, p: Any, q: Any, h: torch.Tensor, n: int) -> torch.Tensor:
    return call(unit, q, h) if n % 2 else torch.sin(h)


def orders(call: Call, unit: Any, p: Any, q: Any, h: torch.Tensor, n: int) -> torch.Tensor:
    for own in p["blocks"] if n % 2 else reversed(p["blocks"]):
        h = call(unit, own, h)
    return h


def drops(call: Call, unit: Any, p: Any, q: Any, h: torch.Tensor, n: int) -> torch.Tensor:
    call(unit, p["blocks"][0], h)
    return call(unit, q, h) + call(unit, q, h).detach()


def casts(call: Call, unit: Any, p: Any, q: Any, h: torch.Tensor, n: int) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=bool(n % 2)):  # which leaves what is in double precision
        return call(unit, q, h)


def numbers(call: Call, unit: Any, p: Any, q: Any, h: torch.Tensor, n: int) -> torch.Tensor:
    out, places = call(numbered, q, h)
    return out + torch.nn.functional.one_hot(places, 3)


def hooks(call: Call, unit: Any, p: Any, q: Any, h: torch.Tensor, n: int) -> torch.Tensor:
    h = call(unit, q, h)
    if h.requires_grad:
        h.register_hook(lambda cotangent: cotangent * 2.0)
    return h


def _derived(y: torch.Tensor, by: torch.Tensor, **how: Any) -> torch.Tensor:
    return torch.autograd.grad(y.square().sum(), by, **how)[0] if by.requires_grad else by


def derives(call: Call, unit: Any, p: Any, q: Any, h: torch.Tensor, n: int) -> torch.Tensor:
    h = torch.sin(h)
    y = call(unit, q, h, not h.requires_grad)  # its first run shows the derivative
    return h + _derived(y, h, create_graph=True)


def derives_twice(call: Call, unit: Any, p: Any, q: Any, h: torch.Tensor, n: int) -> torch.Tensor:
    """A derivative of a derivative, but in the first run."""
    h = torch.sin(h)
    y = call(unit, q, h)
    if n == 0:
        return y
    first = _derived(y, h, create_graph=True)
    return h + _derived(first + h, h, create_graph=True)


def derives_once(call: Call, unit: Any, p: Any, q: Any, h: torch.Tensor, n: int) -> torch.Tensor:
    h = torch.sin(h)
    return call(unit, q, h) + _derived(call(unit, q, h), h)


def derives_by_its_output(call: Call, unit: Any, p: Any, q: Any, h: torch.Tensor, n: int) -> torch.Tensor:
    """A pass that comes to the end of a unit, and never to its beginning; then one that another goes through."""
    h = torch.sin(h)
    y = call(unit, q, call(unit, q, h))
    if n == 0:
        return y
    ahead = _derived(y, y, retain_graph=True)
    return (y + ahead) * _derived(y, h, create_graph=True)


def several(call: Call, unit: Any, p: Any, q: Any, h: torch.Tensor, n: int) -> torch.Tensor:
    a, b = call(pair, q, h, False)
    return call(unit, q, a + b)


def recomputes(call: Call, unit: Any, p: Any, q: Any, h: torch.Tensor, n: int) -> torch.Tensor:
    return call(unit, q, call(checkpointed, q, h, False))


def transforms(call: Call, unit: Any, p: Any, q: Any, h: torch.Tensor, n: int) -> torch.Tensor:
    return call(unit, q, torch.func.grad(lambda h: call(bent, q, h, False).square().sum())(h))


KINDS = {
    kind.__name__: kind
    for kind in (calls, twice, beside, mixed, writes, skips, orders, drops, casts, hooks, numbers, several)
} | {
    kind.__name__: kind
    for kind in (derives, derives_twice, derives_once, derives_by_its_output, transforms, recomputes)
}


class Program(NamedTuple):
    """What a step's function does, one after another: (kind, unit's function, block)."""

    actions: tuple[tuple[str, int, int], ...]
    leaves: tuple[int, int, int] = (1, 2, 3)  # how many each block has
    moves: bool = True  # whether the first input is differentiated
    transforms: tuple[str, ...] = ("shard_zero3",)
    mapped: int = STEPS  # from which step on cotangents are pulled back under torch.func.vmap, too

    @property
    def params(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        blocks: list[Any] = []
        for count in self.leaves:
            forms = {"w": (3, 3), "b": (3,), "c": (3,)}
            own = {name: forms[name] for name in list(forms)[:count]}
            blocks.append({k: 0.4 * torch.randn(form, generator=generator, dtype=F64) for k, form in own.items()})
        return {"blocks": blocks}

    def loss(self, call: Call, p: Any, x: torch.Tensor, n: int) -> torch.Tensor:
        h = x.clone().requires_grad_() if self.moves else x.detach()
        for kind, unit, block in self.actions:
            h = torch.tanh(KINDS[kind](call, UNITS[unit], p, p["blocks"][block], h, n))
        return call(affine, p["blocks"][2], h).square().sum(-1).mean()

    def trains(self, path: Any) -> bool:
        if "freeze" in self.transforms and path[1] == 1:
            return False
        return "frozen_leaves" not in self.transforms or path[2] != "b"


def batch(rank: int, n: int) -> torch.Tensor:
    return torch.randn(4, 3, dtype=F64, generator=torch.Generator().manual_seed(10 * n + rank))


def by_hand(program: Program, world: int) -> list[Any]:
    """Of each step: the losses of all ranks, gradients, params after it, and how many calls are in the graph."""
    q, out = program.params, list[Any]()
    for n in range(STEPS):
        found, losses, count = list[Any](), list[float](), 0

        def call(fn: Any, q: Any, h: torch.Tensor, counts: bool = True) -> Any:
            nonlocal count
            count += counts and any(x.requires_grad for x in (*optree.tree_leaves(q), h))
            return fn(q, h)

        for rank in range(world):
            p = optree.tree_map_with_path(lambda path, x: x.clone().requires_grad_(program.trains(path)), q)
            loss = program.loss(call, p, batch(rank, n), n)
            leaves, spec = optree.tree_flatten(p)
            moving = [x for x in leaves if x.requires_grad]
            grads = iter(torch.autograd.grad(loss, moving, allow_unused=True) if loss.requires_grad else moving)
            own = [next(grads) if x.requires_grad else None for x in leaves]
            zero = not loss.requires_grad
            own = [torch.zeros_like(x) if g is None or zero else g for g, x in zip(own, leaves, strict=True)]
            found.append(optree.tree_unflatten(spec, own))
            losses.append(loss.item())
        mean = optree.tree_map(lambda *g: sum(g) / world, *found)
        q = optree.tree_map(lambda x, g: (x - RATE * g).detach(), q, mean)
        out.append((losses, mean, q, count // world))
    return out


TRANSFORMS: dict[str, Callable[[fz.Step], fz.Step]] = {
    "shard_zero3": fz.shard_zero3,
    "shard_w": lambda step: fz.shard_zero3(step, pattern="*.w"),
    "fuse_update": fz.fuse_update,
    "donate": fz.donate,
    "offload": lambda step: fz.offload(step, params="host", moments="host"),
    "accumulate": lambda step: fz.accumulate(step, 2),
    "freeze": lambda step: fz.freeze(step, "blocks.1.*"),
    # of one unit several groups
    "frozen_leaves": lambda step: fz.freeze(step, "blocks.*.b"),
    "host_leaves": lambda step: fz.offload(step, params="host", pattern="blocks.*.c"),
    "disk": lambda step: fz.offload(step, params=fz.Disk(tempfile.mkdtemp()), pattern="blocks.0.*"),
    "remat": fz.remat,
    "activations": lambda step: fz.offload(step, activations="host"),
}
SHARDS = "shard_zero3", "shard_w"  # one of them
MEMORIES = "offload", "host_leaves", "disk"  # at most one
NEVER = {"remat", "activations"}  # under which no call may be a part of the graph


def in_unit(fn: Any, q: Any, h: torch.Tensor, _: bool = True) -> Any:
    return fz.unit(fn)(q, h)


def need_mapped(pullback: Any, loss: torch.Tensor, mean: Any, trains: Callable[[Any], bool]) -> None:
    """Needs the gradients of all cotangents at once."""

    def one(factor: torch.Tensor) -> list[torch.Tensor]:
        grads, _ = pullback(torch.full_like(loss, 1 / max(loss.numel(), 1)) * factor, retain_graph=True)
        return optree.tree_leaves(fz.gather(grads))

    got = torch.func.vmap(one)(torch.tensor(COTANGENTS, dtype=F64))
    trained = optree.tree_map_with_path(lambda path, g: g if trains(path) else None, mean)
    leaves: list[Any] = optree.tree_leaves(trained)
    for own, g in zip(got, leaves, strict=True):
        assert_trees_close(own, torch.stack([factor * g for factor in COTANGENTS]), rtol=1e-9, atol=1e-12)


def follow(rank: int, program: Program, want: list[Any], counts: bool = True) -> None:
    step = fz.train_step(functools.partial(program.loss, in_unit), fz.sgd(RATE))
    for name in program.transforms:
        step = TRANSFORMS[name](step)
    state = step.init(program.params)
    taken()
    for n, (losses, mean, params, calls) in enumerate(want):
        loss, pullback = step.vjp(state, batch(rank, n), n)
        if n >= program.mapped:
            need_mapped(pullback, loss, mean, program.trains)
        for factor in COTANGENTS:
            grads, _ = pullback(torch.full_like(loss, factor / max(loss.numel(), 1)), retain_graph=factor > 0)
            got = optree.tree_leaves(fz.gather(grads), none_is_leaf=True)
            for own, g in zip(got, optree.tree_leaves(mean), strict=True):
                assert_trees_close(torch.zeros_like(g) if own is None else own, factor * g, rtol=1e-9, atol=1e-12)
        del pullback
        state, metrics = step(state, batch(rank, n), n)
        torch.testing.assert_close(metrics["loss"].item(), sum(losses) / len(losses), rtol=1e-10, atol=1e-12)
        assert_trees_close(fz.gather(state.params), params, rtol=1e-10)
        found = taken()
        if counts and 2 <= n < program.mapped:  # each form of each call has been proven
            runs = 2 * (2 if "accumulate" in program.transforms else 1)
            assert found == (0 if NEVER & {*program.transforms} else runs * calls)


def check(program: Program, world: int, **how: Any) -> None:
    want = by_hand(program, world)
    run_ranks(functools.partial(follow, program=program, want=want, counts="backend" not in how), world, **how)
