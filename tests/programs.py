"""Random training programs over several components, and the plain component that they are held against.

A program is a list of operations; the same interpreter runs it over sharded components, on one rank of many, and over
plain ones, which hold the batches of all ranks in one process and know `torch.func.vjp` and nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import scenarios
import torch
from torch import nn

import fzero as fz
from fzero.testing import strategies

F64 = torch.float64
CLIP, LR, MOMENTUM = 0.5, 0.05, 0.9


# ---- models: [rows, 5] -> [rows, 5], as pure functions over both kinds of units


def pure(p: Any, x: torch.Tensor) -> torch.Tensor:
    block = fz.unit(lambda q, x: torch.tanh(x @ q["w"] + q["b"]))
    for q in p["blocks"]:
        x = block(q, x)
    return x @ p["head"]["w"] @ p["head"]["w"].T + x


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(scenarios.Block(5, F64) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(5, dtype=F64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def model(kind: str, seed: int) -> tuple[Callable[..., Any], Any]:
    if kind == "pure":
        return pure, scenarios.stack(seed, blocks=2)[1]
    generator = torch.Generator().manual_seed(seed)
    apply, params = fz.functional(Chain())
    return apply, {k: 0.5 * torch.randn(v.shape, generator=generator, dtype=F64) for k, v in params.items()}


# ---- the plain component


@dataclass(frozen=True)
class PlainState:
    params: Any
    moment: Any
    kept: Any = None

    def replace(self, **changes: Any) -> PlainState:
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class PlainStep:
    """`Step`'s verbs in one process: inputs, outputs and cotangents are lists with one entry per rank."""

    fn: Callable[..., Any]
    optimizer: str
    frozen: bool = False

    def init(self, params: Any) -> PlainState:
        return PlainState(params, optree.tree_map(torch.zeros_like, params))

    def forward(self, state: PlainState, x: list[Any]) -> list[Any]:
        return [self.fn(state.params, part) for part in x]

    def vjp(self, state: PlainState, x: list[Any]) -> tuple[list[Any], Callable[..., Any]]:
        pairs: Any = [torch.func.vjp(self.fn, state.params, part) for part in x]

        def pullback(cotangents: list[Any], retain_graph: bool = False) -> tuple[Any, tuple[Any]]:
            pulled = [pull(ct) for (_, pull), ct in zip(pairs, cotangents, strict=True)]
            total, *rest = [g for g, _ in pulled]
            for g in rest:
                total = optree.tree_map(torch.add, total, g)
            return optree.tree_map(lambda g: g / len(x), total), ([ct for _, ct in pulled],)

        return [out for out, _ in pairs], pullback

    def add_grads(self, state: PlainState, grads: Any) -> PlainState:
        return state.replace(kept=grads if state.kept is None else optree.tree_map(torch.add, state.kept, grads))

    def norm(self, *trees: Any) -> torch.Tensor:
        squares = [leaf.square().sum() for tree in trees for leaf in optree.tree_leaves(tree)]
        return torch.stack(squares).sum().sqrt() if squares and not self.frozen else torch.zeros((), dtype=F64)

    def update(self, state: PlainState, grads: Any, grad_norm: Any = None) -> tuple[PlainState, dict[str, Any]]:
        if state.kept is not None:
            grads = optree.tree_map(torch.add, grads, state.kept)
        if self.frozen:
            return state.replace(kept=None), {"grad_norm": torch.zeros((), dtype=F64)}
        norm = self.norm(grads)
        if self.optimizer == "sgd":
            params = optree.tree_map(lambda p, g: p.add(g, alpha=-LR), state.params, grads)
            return PlainState(params, state.moment), {"grad_norm": norm}
        factor = min(1.0, CLIP / float(norm if grad_norm is None else grad_norm))
        moment = optree.tree_map(lambda b, g: MOMENTUM * b + factor * g, state.moment, grads)
        return PlainState(optree.tree_map(lambda p, b: p - LR * b, state.params, moment), moment), {"grad_norm": norm}


OPTIMIZERS = {
    "sgd": lambda: fz.sgd(LR),
    "clipped": lambda: fz.chain(fz.clip_by_global_norm(CLIP), fz.sgd(LR, momentum=MOMENTUM)),
}


# ---- the program


@dataclass(frozen=True)
class Spec:
    """One component: what it computes, how it is trained, and the transforms of its sharded form."""

    kind: str = "pure"
    optimizer: str = "sgd"
    frozen: bool = False
    chosen: tuple[Any, ...] = ()

    @property
    def donates(self) -> bool:
        return any(name == "donate" for name, _ in self.chosen)

    @property
    def rounds_otherwise(self) -> bool:
        """Whether it adds, or multiplies, in another order than the plain run."""
        return self.optimizer == "clipped" or any(name in ("accumulate", "loss_scale") for name, _ in self.chosen)

    def sharded(self, seed: int) -> tuple[fz.Step, Any]:
        fn, params = model(self.kind, seed)
        step = strategies.apply(fz.train_step(fn, OPTIMIZERS[self.optimizer]()), self.chosen)
        return fz.freeze(step, "*") if self.frozen else step, params

    def plain(self, seed: int) -> tuple[PlainStep, Any]:
        fn, params = model(self.kind, seed)
        return PlainStep(fn, self.optimizer, self.frozen), params


@dataclass(eq=False)
class _Live:
    """A forward whose pullback may still be called, and the cotangent that a later component sent for its output."""

    component: int
    source: _Live | None
    out: Any
    pullback: Any
    cotangent: Any = None


def run(specs: Sequence[Spec], operations: Sequence[tuple[Any, ...]], make: Any, x: Any, norm: Any) -> list[Any]:
    """Interprets a program; `make(spec, seed)` gives (step, params). Returns everything that it saw, in order.

    Operations, whose numbers are taken modulo what there is:
        ("forward", component, source): vjp of a batch, or of the output of an earlier forward.
        ("pull", forward, retain): with the cotangent that came from downstream, or else one of its own.
        ("add", n), ("update", n), ("forget", n): the latest grads of one of the components that have some.
        ("joint", 0): update of all that have grads, clipped by their joint norm.
        ("drop", forward): without pulling.
        ("eval", component): forward without gradient.
        ("back", component): return to the state before the latest update.
    """
    steps, states, before, latest = [], [], [], []
    for seed, spec in enumerate(specs):
        step, params = make(spec, seed)
        steps.append(step)
        states.append(step.init(params))
        before.append(None)
        latest.append(None)
    live: list[_Live] = []
    seen: list[Any] = []

    def drop(entry: _Live) -> None:
        live.remove(entry)
        entry.pullback = None  # a later forward may still know this one as its source

    def update(c: int, **joint: Any) -> None:
        if specs[c].donates:  # forwards of a donated state are dead
            for entry in [entry for entry in live if entry.component == c]:
                drop(entry)
            before[c] = None
        else:
            before[c] = states[c]
        grads, latest[c] = latest[c], None
        states[c], metrics = steps[c].update(states[c], grads, **joint)
        seen.append(("grad_norm", metrics["grad_norm"]))

    for name, *numbers in operations:
        c = numbers[0] % len(specs) if numbers else 0
        entry = live[numbers[0] % len(live)] if live and numbers else None
        ready = [i for i in range(len(specs)) if latest[i] is not None]
        if name in ("add", "update", "forget"):
            if not ready:
                continue
            c = ready[numbers[0] % len(ready)]
        if name == "forward":
            entry = live[numbers[1] % len(live)] if live and numbers[1] >= 0 else None
            live.append(_Live(c, entry, *steps[c].vjp(states[c], x if entry is None else entry.out)))
            seen.append(("output", live[-1].out))
        elif name == "pull" and entry is not None:
            retain = bool(numbers[1] % 2)
            own = optree.tree_map(torch.cos, entry.out)
            ct = own if entry.cotangent is None else entry.cotangent
            grads, (cotangent,) = entry.pullback(ct, retain_graph=retain)
            latest[entry.component] = grads
            seen.append(("grads", entry.component, grads))
            seen.append(("cotangent", cotangent))
            if entry.source is not None:
                old = entry.source.cotangent
                entry.source.cotangent = cotangent if old is None else optree.tree_map(torch.add, old, cotangent)
            if not retain:
                drop(entry)
            del grads, cotangent
        elif name == "add":
            states[c], latest[c] = steps[c].add_grads(states[c], latest[c]), None
        elif name == "update":
            update(c)
        elif name == "joint":
            ready = [i for i in ready if not holds_grads(states[i])]
            if ready:
                together = norm([steps[i] for i in ready], [latest[i] for i in ready])
                seen.append(("joint norm", together))
                for i in ready:
                    update(i, grad_norm=together)
        elif name == "drop" and entry is not None:
            drop(entry)
        elif name == "forget":
            latest[c] = None
        elif name == "eval":
            seen.append(("output", steps[c].forward(states[c], x)))
        elif name == "back" and before[c] is not None:
            states[c], before[c] = before[c], None
        del entry  # nothing but `live` holds on to a pullback
    for c, state in enumerate(states):
        seen.append(("params", c, state.params))
    return seen


def holds_grads(state: Any) -> bool:
    return (state.kept if isinstance(state, PlainState) else state.grads) is not None


def run_plain(specs: Sequence[Spec], operations: Sequence[tuple[Any, ...]], world: int) -> list[Any]:
    batches = [x for x, _ in scenarios.vector_batches(world)]

    def norm(steps: Sequence[PlainStep], grads: Sequence[Any]) -> torch.Tensor:
        return torch.stack([step.norm(g) for step, g in zip(steps, grads, strict=True)]).square().sum().sqrt()

    return run(specs, operations, Spec.plain, batches, norm)


def run_sharded(specs: Sequence[Spec], operations: Sequence[tuple[Any, ...]], rank: int, world: int) -> list[Any]:
    x, _ = scenarios.vector_batches(world)[rank]
    return run(specs, operations, Spec.sharded, x, lambda steps, grads: fz.global_norm(*grads))


def compare(specs: Sequence[Spec], got: list[Any], want: list[Any], rank: int, exact: bool) -> None:
    """What one rank saw against what the plain run saw: to the bit, or to 1e-10 relative."""
    same = fz.testing.assert_trees_equal if exact else lambda a, b: fz.testing.assert_trees_close(a, b, rtol=1e-10)
    assert len(got) == len(want)
    for mine, plain in zip(got, want, strict=True):
        assert mine[0] == plain[0]
        if mine[0] in ("output", "cotangent"):
            same(mine[1], plain[1][rank])
        elif mine[0] in ("grads", "params"):
            full = fz.gather(mine[2])
            if specs[mine[1]].frozen and mine[0] == "grads":
                assert all(leaf is None for leaf in optree.tree_leaves(full, none_is_leaf=True))
            else:
                same(full, plain[2])
        else:
            fz.testing.assert_trees_close(mine[1], plain[1], rtol=1e-10)
