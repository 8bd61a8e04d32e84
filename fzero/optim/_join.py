"""Transformations of gradients joined: one after the other (`chain`), and one per pattern of leaves (`partition`)."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fzero.base.arguments import wrong
from fzero.base.patterns import matches
from fzero.comm.backend import finish_all
from fzero.optim._paused import call_paused, combined
from fzero.optim._pieces import of_slices
from fzero.optim.base import Elementwise, call_update, transformation_of, values, written
from fzero.state.sharded import Sharded, map_trees
from fzero.table.optimizer import GradientTransformation, Joined, Number, Paused

States = tuple[object, ...]


def chain(*members: GradientTransformation) -> GradientTransformation:
    """Applies several gradient transformations, one after the other, as `optax.chain`.

    Args:
        members: in the order in which they see the gradients. The last one is usually the optimizer.

    Returns:
        One transformation. Its state is the tuple of the members' states.

    Example:
        >>> optimizer = fz.chain(fz.clip_by_global_norm(1.0), fz.adamw(1e-3))
        >>> state = optimizer.init({"w": torch.zeros(2)})
        >>> len(state)
        2
    """
    if not members:
        raise ValueError("chain: got no members; give at least one GradientTransformation.")
    members = tuple([of_slices(member, "chain", f"member {place}") for place, member in enumerate(members)])
    own, before, last = _Chain(members), members[:-1], members[-1]
    # the norm of the gradients is the first member's: behind it others come in
    apart = any(m.needs for m in members[1:]) or any(m.exchanges for m in before)
    return transformation_of(
        own,
        needs="all" if apart else members[0].needs,
        scales=all(member.scales for member in members),
        copies=last.copies or not all(member.scales for member in before),
        blank=all(member.blank for member in members),
        exchanges=sum(member.exchanges for member in members),
    )


def need_states(optimizer: GradientTransformation, state: object) -> None:
    """Refuses a state that the same optimizer has begun in another chain, or alone: its labels are the same."""
    own = getattr(optimizer.update, "__self__", None)
    got = f"a chain of {len(state)}" if type(state) is tuple and state else "an optimizer by itself"
    expected, parts = got, list[tuple[GradientTransformation, object]]()
    if isinstance(own, _Partition) and isinstance(state, dict):
        parts += [(member, state.get(pattern)) for pattern, member in own.table.items()]
    elif isinstance(own, _Chain):
        expected = f"a chain of {len(own.members)}"
        parts += zip(own.members, state, strict=False) if isinstance(state, tuple) else []
    elif isinstance(own, Elementwise) and isinstance(own.state, type) and not isinstance(state, own.state):
        expected = f"{own.name!r} by itself"
    if got != expected:
        raise ValueError(
            f"step: the state has moments of {got}, expected those of {expected}. Make the state with this step's "
            "init, or use the optimizer that it was made with."
        )
    for each in parts:
        need_states(*each)


@dataclass(frozen=True)
class _Chain(Joined):
    members: tuple[GradientTransformation, ...]
    kind = "chain"

    @property
    def joined(self) -> Iterable[GradientTransformation]:
        return self.members

    def init(self, params: object) -> States:
        return tuple(member.init(params) for member in self.members)

    def update(self, updates: object, states: States, params: object = None, **extra: object) -> tuple[object, States]:
        new = list[object]()
        for member, state in zip(self.members, states, strict=True):
            updates, state = call_update(member, updates, state, params, extra)
            extra.pop("grad_norm", None)  # the norm of what came in; a joint norm holds throughout
            new.append(state)
        return updates, tuple(new)

    def paused(self, params: Sharded, grads: object, states: States, **extra: object) -> Paused:
        new, updates = list[object](), grads
        del grads  # or those of every group that waits would be kept
        for member, state in zip(self.members[:-1], states, strict=False):
            updates, part = written(member, updates, state, params, extra)
            extra.pop("grad_norm", None)
            new.append(part)
        run = call_paused(self.members[-1], params, updates, states[-1], extra)
        del updates
        return (*new, (yield from run))

    def combine(self, params: object, states: States, parts: Sequence[States]) -> States:
        last = combined(self.members[-1], params, states[-1], [part[-1] for part in parts])
        return (*parts[-1][:-1], last)

    def label(self, path: str) -> str:
        return "+".join(member.label(path) for member in self.members if member.label is not None)

    def metrics(self, states: States) -> dict[str, Number]:
        pairs = zip(self.members, states, strict=True)
        return {k: x for member, state in pairs if member.metrics for k, x in member.metrics(state).items()}


def partition(optimizers: Mapping[str, GradientTransformation]) -> GradientTransformation:
    """Gives different leaves different optimizers, by patterns over leaf paths.

    An update's metrics name each optimizer's rate by its pattern, such as `metrics["lr/*bias"]`. `metrics["lr"]` is
    that of the first pattern that has one. It needs the leaf paths of a step, so its `init` takes no plain pytree.

    Args:
        optimizers: pattern -> optimizer. Patterns are fnmatch over dotted paths, with alternatives separated by `|`.
            The first pattern that matches a leaf wins. End with "*" for all other leaves.

    Raises:
        ValueError: when the state begins, a leaf that no pattern matches, or a pattern that gets no leaf.

    Example:
        >>> optimizer = fz.partition({"*norm*|*bias": fz.adamw(1e-3, weight_decay=0.0), "*": fz.adamw(1e-3)})
        >>> optimizer.label("head.bias"), optimizer.label("head.weight")
        ('adamw, no decay (*norm*|*bias)', 'adamw (*)')
    """
    if not isinstance(optimizers, Mapping):
        raise wrong("partition", "optimizers", optimizers, "a dict of patterns to optimizers")
    if not optimizers:
        raise ValueError("partition: got optimizers={}, expected at least {'*': fz.adamw(1e-3)}.")
    table = dict[str, GradientTransformation]()
    for pattern, member in optimizers.items():
        if not isinstance(pattern, str):
            raise wrong("partition", "a key of optimizers", pattern, "a pattern over leaf paths, such as '*bias'")
        table[pattern] = of_slices(member, "partition", f"optimizers[{pattern!r}]")

    own, members = _Partition(table), table.values()
    return transformation_of(
        own,
        needs="all" if any(member.needs for member in members) else "",
        copies=any(member.copies for member in members),
        blank=all(member.blank for member in members),
        exchanges=max(member.exchanges for member in members),
    )


@dataclass(frozen=True)
class _Partition(Joined):
    table: dict[str, GradientTransformation]
    kind = "partition"

    @property
    def joined(self) -> Iterable[GradientTransformation]:
        return self.table.values()

    def _chosen(self, path: str) -> str:
        for pattern in self.table:
            if matches(pattern, path):
                return pattern
        raise ValueError(
            f"partition: leaf {path!r} matches none of {', '.join(self.table)}. Add a pattern such as '*'."
        )

    def _part(self, tree: object, pattern: str) -> Any:
        def one(node: Sharded) -> Sharded:
            groups = node.layout.groups
            return node.only(key for key in node.groups if self._chosen(groups[key].slots[0].path) == pattern)

        return map_trees(one, tree)

    def init(self, params: object) -> dict[str, object]:
        params, table = _need_sharded(params), self.table
        groups, rows = params.layout.groups, params.layout.rows
        used = {self._chosen(group.slots[0].path) for key, group in groups.items() if key in params.groups}
        used |= {pattern for row in rows if row.frozen for pattern in table if matches(pattern, row.path)}
        for pattern in table:
            if pattern not in used:
                raise ValueError(f"partition: the pattern {pattern!r} is used for no leaf. Correct it or take it out.")
        return {pattern: member.init(self._part(params, pattern)) for pattern, member in table.items()}

    def update(
        self, updates: object, states: Mapping[str, object], params: object = None, **extra: object
    ) -> tuple[Sharded, dict[str, object]]:
        buffers: dict[object, torch.Tensor] = {}
        new: dict[str, object] = {}
        whole = _need_sharded(updates)
        extra.pop("grad_norm", None)  # a member's norm is that of its part; a joint norm holds throughout
        for pattern, member in self.table.items():
            own = self._part(params, pattern)
            out, new[pattern] = call_update(member, self._part(updates, pattern), states[pattern], own, extra)
            buffers.update(values(out).locals())
        return whole.with_buffers(buffers, 1.0), new

    def paused(self, params: object, grads: object, states: Mapping[str, object], **extra: object) -> Paused:
        extra.pop("grad_norm", None)
        runs, new = dict[str, Paused](), dict[str, object]()
        for pattern, member in self.table.items():
            own = self._part(params, pattern), self._part(grads, pattern), states[pattern]
            runs[pattern] = call_paused(member, *own, extra)
        del grads, own
        for pattern, run in runs.items():
            new[pattern] = yield from run
        return new

    def combine(
        self, params: object, states: Mapping[str, object], parts: Sequence[Mapping[str, object]]
    ) -> dict[str, object]:
        found = dict[str, object]()

        def one(pattern: str, member: GradientTransformation) -> None:
            own = [part[pattern] for part in parts]
            found[pattern] = combined(member, self._part(params, pattern), states[pattern], own)

        # all are called, also where one fails, as each lets go of its own errors
        finish_all([functools.partial(one, pattern, member) for pattern, member in self.table.items()])
        return found

    def label(self, path: str) -> str:
        pattern = self._chosen(path)
        member = self.table[pattern]
        return f"{member.label(path)} ({pattern})" if member.label else pattern

    def metrics(self, states: Mapping[str, object]) -> dict[str, Number]:
        """Each name is the first pattern's; if several have it, each has one of its own, too, whatever the values."""
        found = {pattern: m.metrics(states[pattern]) if m.metrics else {} for pattern, m in self.table.items()}
        out: dict[str, Number] = {}
        for name in sorted({name for each in found.values() for name in each}):
            own = {f"{name}/{pattern}": each[name] for pattern, each in found.items() if name in each}
            out |= {name: next(iter(own.values())), **(own if len(own) > 1 else {})}
        return out


def _need_sharded(tree: object) -> Sharded:
    if not isinstance(tree, Sharded):
        raise TypeError(
            f"partition: got a tree of type {type(tree).__name__}, expected the trees of a step (fz.train_step), "
            "which know their leaves' paths."
        )
    return tree
