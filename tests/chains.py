"""Optimizers drawn as specs, each of which becomes fzero's transformation and a plain one, written with torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optree
import torch
from hypothesis import strategies as st

import fzero as fz
from fzero.base.patterns import matches

Spec = tuple[Any, ...]
Flat = dict[str, torch.Tensor]


class Plain(NamedTuple):
    """optax's pair over {path: tensor}."""

    init: Callable[[Flat], Any]
    update: Callable[[Flat, Any, Flat], tuple[Flat, Any]]


# ---- a user's own members: optax-shaped, with no extras

elementwise = functools.partial(fz.GradientTransformation, elementwise=True)


def my_scale(factor: float) -> fz.GradientTransformation:
    return elementwise(lambda params: (), lambda u, state, params: (optree.tree_map(lambda x: x * factor, u), state))


def my_trace(decay: float) -> fz.GradientTransformation:
    """Its state and what it passes on are the same tensors."""

    def update(u: Any, state: Any, params: Any) -> Any:
        state = optree.tree_map(lambda s, x: decay * s + x, state, u)
        return state, state

    return elementwise(lambda params: optree.tree_map(torch.zeros_like, params), update)


def my_delay() -> fz.GradientTransformation:
    """Passes on what came in last time: its old state, at first ones, but for the gaps between leaves."""
    return elementwise(
        lambda params: optree.tree_map(lambda x: x.ne(0).to(x.dtype), params), lambda u, state, params: (state, u)
    )


def my_momentum(decay: float) -> fz.GradientTransformation:
    """Keeps the params of last time, which the update must not overwrite."""

    def update(u: Any, old: Any, params: Any) -> Any:
        return optree.tree_map(lambda x, p, o: x + decay * (p - o), u, params, old), params

    return elementwise(lambda params: optree.tree_map(torch.clone, params), update)


def my_params() -> fz.GradientTransformation:
    """Passes on the params themselves, which the update must not overwrite before it is done with them."""
    return elementwise(lambda params: (), lambda u, state, params: (params, state))


def my_lars(factor: float) -> fz.GradientTransformation:
    """Looks at whole leaves: divides each by the sum of its absolute values."""

    def update(u: Any, state: Any, params: Any) -> Any:
        return optree.tree_map(lambda x: factor * x / (x.abs().sum() + 1e-3), u), state

    return fz.GradientTransformation(lambda params: (), update)


OWN = {  # declared elementwise
    "scale": my_scale,
    "trace": my_trace,
    "delay": my_delay,
    "momentum": my_momentum,
    "params": my_params,
}


def my_rows(decay: float) -> fz.GradientTransformation:
    """Divides moments by the norms of rows, of each leaf by itself."""

    def init(params: Any) -> Any:
        rows = optree.tree_map(lambda x: x.new_zeros((*x.shape[:-1], 1)), params)
        return 0, optree.tree_map(torch.zeros_like, params), rows

    def update(u: Any, state: Any, params: Any) -> Any:
        count, moment, rows = state
        moment = optree.tree_map(lambda m, x: decay * m + x, moment, u)
        rows = optree.tree_map(lambda r, x: decay * r + x.square().sum(-1, keepdim=True), rows, u)

        def one(m: torch.Tensor, r: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
            return 0.1 * m / (r.sqrt() + 0.1 * (count + 1)) + 0.01 * p / (p.norm() + 1)

        return optree.tree_map(one, moment, rows, params), (count + 1, moment, rows)

    return fz.GradientTransformation(init, update)


MINE = {**OWN, "rows": my_rows, "lars": my_lars}


def has(spec: Spec, *kinds: str) -> bool:
    """Whether one of these kinds of member is anywhere in it."""
    kind, *rest = spec
    if kind == "chain":
        return any(has(member, *kinds) for member in rest[0])
    if kind == "partition":
        return any(has(member, *kinds) for _, member in rest[0])
    return kind in kinds


def build(spec: Spec) -> fz.GradientTransformation:
    kind, *rest = spec
    if kind == "chain":
        return fz.chain(*map(build, rest[0]))
    if kind == "partition":
        return fz.partition({pattern: build(member) for pattern, member in rest[0]})
    made: dict[str, Any] = {
        "by_value": fz.clip_by_value,
        "by_norm": fz.clip_by_global_norm,
        "sgd": fz.sgd,
        "adamw": fz.adamw,
        "lion": fz.lion,
        "muon": fz.muon,
        **MINE,
    }
    return made[kind](*rest)


def plain(spec: Spec) -> Plain:
    """The same on full tensors in one process."""
    kind, *rest = spec
    if kind == "chain":
        return _plain_chain([plain(member) for member in rest[0]])
    if kind == "partition":
        return _plain_partition([(pattern, plain(member)) for pattern, member in rest[0]])
    return Plain(*build(spec)[:2]) if kind in MINE else _PLAIN[kind](*rest)  # what is one's own is plain already


def _plain_chain(members: Sequence[Plain]) -> Plain:
    def update(u: Flat, states: Any, params: Flat) -> Any:
        new = []
        for member, state in zip(members, states, strict=True):
            u, state = member.update(u, state, params)
            new.append(state)
        return u, new

    return Plain(lambda params: [member.init(params) for member in members], update)


def _plain_partition(table: Sequence[tuple[str, Plain]]) -> Plain:
    def part(tree: Flat, pattern: str) -> Flat:
        chosen = {path: next(p for p, _ in table if matches(p, path)) for path in tree}
        return {path: x for path, x in tree.items() if chosen[path] == pattern}

    def update(u: Flat, states: Any, params: Flat) -> Any:
        out, new = {}, []
        for (pattern, member), state in zip(table, states, strict=True):
            own, state = member.update(part(u, pattern), state, part(params, pattern))
            out.update(own)
            new.append(state)
        return out, new

    return Plain(lambda params: [member.init(part(params, pattern)) for pattern, member in table], update)


def _each(fn: Callable[..., torch.Tensor], *trees: Flat) -> Flat:
    return {path: fn(*[tree[path] for tree in trees]) for path in trees[0]}


def _stateless(fn: Callable[[Flat], Flat]) -> Plain:
    return Plain(lambda params: (), lambda u, state, params: (fn(u), state))


def _by_norm(limit: float) -> Plain:
    def clip(u: Flat) -> Flat:
        norm = sum(float(x.square().sum()) for x in u.values()) ** 0.5
        return _each(lambda x: x * min(1.0, limit / norm) if norm else x, u)

    return _stateless(clip)


def _sgd(lr: float, momentum: float | None, decay: float) -> Plain:
    def update(u: Flat, buffer: Any, params: Flat) -> Any:
        u = _each(lambda x, p: x + decay * p, u, params)
        if momentum:
            u = buffer = _each(lambda b, x: momentum * b + x, buffer, u)
        return _each(lambda x: -lr * x, u), buffer

    return Plain(lambda params: _each(torch.zeros_like, params), update)


def _adamw(lr: float, b1: float, b2: float, eps: float, decay: float) -> Plain:
    def update(u: Flat, state: Any, params: Flat) -> Any:
        count, mu, nu = state
        count += 1
        mu = _each(lambda m, x: b1 * m + (1 - b1) * x, mu, u)
        nu = _each(lambda v, x: b2 * v + (1 - b2) * x * x, nu, u)

        def one(m: torch.Tensor, v: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
            return -lr * (m / (1 - b1**count) / ((v / (1 - b2**count)).sqrt() + eps) + decay * p)

        return _each(one, mu, nu, params), (count, mu, nu)

    return Plain(lambda params: (0, _each(torch.zeros_like, params), _each(torch.zeros_like, params)), update)


def _lion(lr: float, b1: float, b2: float, decay: float) -> Plain:
    def update(u: Flat, mu: Flat, params: Flat) -> Any:
        out = _each(lambda m, x, p: -lr * ((b1 * m + (1 - b1) * x).sign() + decay * p), mu, u, params)
        return out, _each(lambda m, x: b2 * m + (1 - b2) * x, mu, u)

    return Plain(lambda params: _each(torch.zeros_like, params), update)


def _muon(lr: float, keep: float, decay: float) -> Plain:
    def orthogonal(x: torch.Tensor) -> torch.Tensor:
        x = x / x.norm().clamp(min=1e-7)
        for _ in range(5):
            gram = x @ x.mT
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        return x

    def update(u: Flat, moment: Flat, params: Flat) -> Any:
        moment = _each(lambda m, x: keep * m + (1 - keep) * x, moment, u)

        def one(m: torch.Tensor, x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
            scale = max(1.0, p.shape[0] / p.shape[1]) ** 0.5
            return -lr * (scale * orthogonal(keep * m + (1 - keep) * x) + decay * p)

        return _each(one, moment, u, params), moment

    return Plain(lambda params: _each(torch.zeros_like, params), update)


_PLAIN: dict[str, Callable[..., Plain]] = {
    "by_value": lambda limit: _stateless(lambda u: _each(lambda x: x.clamp(-limit, limit), u)),
    "by_norm": _by_norm,
    "sgd": _sgd,
    "adamw": _adamw,
    "lion": _lion,
    "muon": _muon,
}


# ---- drawing


@st.composite
def specs(draw: st.DrawFn, paths: Sequence[str], depth: int = 3, own: bool = True) -> Spec:
    """A member over the leaves at these paths.

    Args:
        own: whether users' own members that are declared elementwise are drawn too.
    """
    kinds = ["by_value", "by_norm", "by_norm", "sgd", "adamw", "lion", "rows", "lars"]
    kinds += list(OWN) if own else []
    kinds += ["muon"] * 3 if all(path.endswith("w") for path in paths) else []
    kinds += ["chain"] * 6 if depth else []
    kinds += ["partition"] * 2 if depth and len(paths) > 1 else []
    kind = draw(st.sampled_from(kinds))
    if kind == "chain":
        count = draw(st.integers(1, 4))
        return "chain", tuple(draw(specs(paths, depth - 1, own)) for _ in range(count))
    if kind == "partition":
        mine = draw(st.lists(st.sampled_from(list(paths)), unique=True, min_size=1, max_size=len(paths) - 1))
        rest = [path for path in paths if path not in mine]
        patterns = ("|".join(mine), draw(st.sampled_from(["*", "|".join(rest)])))
        parts = (draw(specs(mine, depth - 1, own)), draw(specs(rest, depth - 1, own)))
        return "partition", tuple(zip(patterns, parts, strict=True))
    numbers: dict[str, tuple[Any, ...]] = {
        "by_value": (draw(st.sampled_from([0.01, 0.1])),),
        "by_norm": (draw(st.sampled_from([0.02, 0.1, 10.0])),),
        "scale": (-0.5,),
        "trace": (0.5,),
        "rows": (0.8,),
        "momentum": (0.5,),
        "lars": (0.3,),
        "sgd": (0.1, draw(st.sampled_from([None, 0.9])), draw(st.sampled_from([0.0, 0.1]))),
        "adamw": (0.01, 0.8, 0.95, 1e-6, 0.1),
        "lion": (0.01, 0.9, 0.95, 0.1),
        "muon": (0.1, 0.9, 0.1),
    }
    return kind, *numbers.get(kind, ())
