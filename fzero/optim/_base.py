"""The protocol of optimizers: optax's pair (init, update), on any pytree; and what fzero adds to it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from fzero import _tree
from fzero._policy import matches
from fzero._sharded import Sharded, is_sharded

Schedule = Callable[[int], float]
CHUNK = 1 << 20  # elements converted at a time, where a buffer is not in the dtype that is computed in


class GradientTransformation(NamedTuple):
    """A pure transformation of gradients, in optax's shape, with optional extras.

    Attributes:
        init: `init(params) -> state`.
        update: `update(updates, state, params) -> (updates, state)`; may take keywords (`grad_norm`) too.
        fused: `fused(params, grads, state) -> state`, equal to update and apply, writing params and moments in place
            (the step passes buffers that nobody else holds).
        label: `label(path) -> str`, which optimizer a leaf gets: a column of the table.
        metrics: `metrics(state) -> {name: number}` of the coming update, such as the learning rate.
    """

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]
    fused: Callable[[Any, Any, Any], Any] | None = None
    label: Callable[[str], str] | None = None
    metrics: Callable[[Any], dict[str, float]] | None = None


def rate(lr: float | Schedule, count: int) -> float:
    """The learning rate of the update after `count` applied ones."""
    return float(lr(count)) if callable(lr) else lr


def zeros_like(params: Any) -> Any:
    return _tree.map(torch.zeros_like, params)


def math_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype that an update computes in: float64 where any state is, otherwise float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def elementwise(kernel: Callable[..., None], params: Any, grads: Any, *moments: Any) -> None:
    """Runs `kernel(p, g, *m)`, which writes p and m in place, over every buffer, in float32 or float64.

    A buffer whose states are all in that dtype is passed whole; others are converted chunk by chunk, so that the
    temporaries stay small.
    """
    columns = [_tensors(tree) for tree in (params, grads, *moments)]
    for tensors in zip(*columns, strict=True):
        dtype = math_dtype(*(t.dtype for t in tensors))
        if all(t.dtype == dtype for t in tensors):
            kernel(*tensors)
            continue
        flat = [t.view(-1) for t in tensors]
        for start in range(0, flat[0].numel(), CHUNK):
            stored = [t[start : start + CHUNK] for t in flat]
            decoded = [t.to(dtype) for t in stored]
            kernel(*decoded)
            for place, (target, value) in enumerate(zip(stored, decoded, strict=True)):
                if place != 1 and target.dtype != dtype:
                    target.copy_(value)


def _tensors(tree: Any) -> list[torch.Tensor]:
    out: list[torch.Tensor] = []
    for node in _tree.flatten(tree, is_leaf=is_sharded)[0]:
        out += list(node.locals().values()) if is_sharded(node) else [node]
    return out


def call_update(member: GradientTransformation, updates: Any, state: Any, params: Any, extra: Mapping[str, Any]) -> Any:
    """`member.update` with those keywords that it takes; optax-shaped members of the user take none."""
    known = inspect.signature(member.update).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values()):
        return member.update(updates, state, params, **extra)
    return member.update(updates, state, params, **{name: value for name, value in extra.items() if name in known})


def chain(*members: GradientTransformation) -> GradientTransformation:
    """Applies transformations one after the other (optax.chain); the last one is usually the optimizer.

    Example:
        >>> optimizer = fz.chain(fz.clip_by_global_norm(1.0), fz.adamw(1e-3))
        >>> state = optimizer.init({"w": torch.zeros(2)})
        >>> len(state)
        2
    """
    if not members:
        raise ValueError("chain: got no members; give at least one GradientTransformation.")
    for place, member in enumerate(members):
        if not isinstance(member, GradientTransformation):
            raise TypeError(
                f"chain: member {place} is {type(member).__name__}, expected a GradientTransformation(init, update)."
            )
    last = members[-1]

    def init(params: Any) -> Any:
        return tuple(member.init(params) for member in members)

    def prefix(updates: Any, states: Any, params: Any, extra: dict[str, Any]) -> tuple[Any, list[Any]]:
        new = []
        for member, state in zip(members[:-1], states, strict=False):
            updates, state = call_update(member, updates, state, params, extra)
            extra.pop("grad_norm", None)  # the norm of what came in; a joint norm holds throughout
            new.append(state)
        return updates, new

    def update(updates: Any, states: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        updates, new = prefix(updates, states, params, extra)
        updates, state = call_update(last, updates, states[-1], params, extra)
        return updates, (*new, state)

    def fused(params: Any, grads: Any, states: Any, **extra: Any) -> Any:
        assert last.fused is not None
        grads, new = prefix(grads, states, params, extra)
        return (*new, last.fused(params, grads, states[-1]))

    def label(path: str) -> str:
        names = [member.label(path) for member in members if member.label is not None]
        return "+".join(names)

    def metrics(states: Any) -> dict[str, float]:
        out: dict[str, float] = {}
        for member, state in zip(members, states, strict=True):
            out.update(member.metrics(state) if member.metrics else {})
        return out

    return GradientTransformation(init, update, fused if last.fused else None, label, metrics)


def partition(optimizers: Mapping[str, GradientTransformation]) -> GradientTransformation:
    """One optimizer per pattern over leaf paths (fnmatch, alternatives separated by `|`); the first match wins.

    Works on the trees of a step, whose buffers never mix leaves of different optimizers.

    Raises:
        ValueError: at `init`, a leaf that no pattern matches, or a pattern that is used for no leaf.

    Example:
        >>> optimizer = fz.partition({"*norm*|*bias": fz.adamw(1e-3, weight_decay=0.0), "*": fz.adamw(1e-3)})
        >>> optimizer.label("head.bias"), optimizer.label("head.weight")
        ('adamw, no decay (*norm*|*bias)', 'adamw (*)')
    """
    table = dict(optimizers)

    def label(path: str) -> str:
        pattern = chosen(path)
        member = table[pattern]
        return f"{member.label(path)} ({pattern})" if member.label else pattern

    def chosen(path: str) -> str:
        for pattern in table:
            if matches(pattern, path):
                return pattern
        raise ValueError(f"partition: leaf {path!r} matches none of {', '.join(table)}. Add a pattern such as '*'.")

    def part(tree: Any, pattern: str) -> Any:
        def one(node: Sharded) -> Sharded:
            groups = node.layout.groups
            return node.only(key for key in node.keys if chosen(groups[key].slots[0].path) == pattern)

        return _tree.map(lambda node: one(node) if is_sharded(node) else node, tree, is_leaf=is_sharded)

    def init(params: Any) -> Any:
        _need_sharded(params)
        used = {chosen(group.slots[0].path) for key, group in params.layout.groups.items() if key in params.keys}
        frozen = {chosen(row.path) for row in params.layout.rows}
        for pattern in table:
            if pattern not in used | frozen:
                raise ValueError(f"partition: the pattern {pattern!r} is used for no leaf. Correct it or take it out.")
        return {pattern: member.init(part(params, pattern)) for pattern, member in table.items()}

    def update(updates: Any, states: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        _need_sharded(updates)
        buffers, new = {}, {}
        for pattern, member in table.items():
            own = None if params is None else part(params, pattern)
            out, new[pattern] = call_update(member, part(updates, pattern), states[pattern], own, extra)
            buffers.update(out.locals())
        return updates.with_buffers(buffers), new

    def fused(params: Any, grads: Any, states: Any) -> Any:
        new = {}
        for pattern, member in table.items():
            assert member.fused is not None
            new[pattern] = member.fused(part(params, pattern), part(grads, pattern), states[pattern])
        return new

    def metrics(states: Any) -> dict[str, float]:
        """A name with one value for all as it is, otherwise once per pattern."""
        found = {pattern: m.metrics(states[pattern]) if m.metrics else {} for pattern, m in table.items()}
        out: dict[str, float] = {}
        for name in sorted({name for each in found.values() for name in each}):
            values = {pattern: each[name] for pattern, each in found.items() if name in each}
            out[name] = next(iter(values.values()))
            if len(set(values.values())) > 1:
                out.update({f"{name}/{pattern}": value for pattern, value in values.items()})
        return out

    every = all(member.fused for member in table.values())
    return GradientTransformation(init, update, fused if every else None, label, metrics)


def _need_sharded(tree: Any) -> None:
    if not is_sharded(tree):
        raise TypeError(
            f"partition: got a tree of type {type(tree).__name__}, expected the trees of a step (fz.train_step), "
            "which know their leaves' paths."
        )
