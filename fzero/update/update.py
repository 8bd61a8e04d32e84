"""The update: decode the grads, norm, skip or apply, in place where the state was donated."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fzero.base import private, pytree
from fzero.comm.axis import finish_all
from fzero.engine.use import start_gather
from fzero.kernels.onepass import write
from fzero.optim.base import call_fused, call_update, values
from fzero.state.gather import global_norm
from fzero.state.moments import apart, next_extra, to_moment_dtype
from fzero.state.sharded import Draw, Sharded, group_of, is_sharded, map_trees
from fzero.state.train_state import TrainState
from fzero.table.layout import Key, Layout
from fzero.table.spec import Spec


def apply_update(
    step: Spec, state: TrainState, grads: Sharded, grad_norm: object
) -> tuple[TrainState, dict[str, object]]:
    """The next state and the metrics; the old state is dead afterwards where the step donates."""
    if state.grads is not None:
        grads = values(grads).map(torch.add, values(state.grads))
    decision = Decision(step, state, global_norm(grads), grad_norm)
    if decision.finite:
        with Update(step, state) as update:
            for keys in update.turns():
                update.apply(keys, grads.only(keys), decision.extra)
            return decision.next_state(update)
    return decision.next_state(None)


class Decision:
    """What an update's norm decides: whether it is applied, the metrics, the next loss scale."""

    def __init__(self, step: Spec, state: TrainState, norm: torch.Tensor, joint: object = None) -> None:
        self.step, self.state = step, state
        self.extra: dict[str, Any] = {"grad_norm": norm}
        self.finite = is_finite(norm)
        if joint is not None:
            joint = torch.as_tensor(joint, dtype=torch.float64)
            self.finite = self.finite and is_finite(joint)
            self.extra["joint_norm"] = joint
        known = step.optimizer.metrics(state.moments) if step.optimizer.metrics else {}
        self.metrics: dict[str, Any] = {"grad_norm": norm}
        self.metrics.update({name: torch.tensor(value, dtype=torch.float64) for name, value in known.items()})
        self.metrics["skipped"] = torch.tensor(not self.finite)
        for extra in step.extras:
            if extra.scale:
                self.metrics[extra.name] = torch.tensor(extra.factor(state.extra[extra.name]), dtype=torch.float64)

    def applied(self) -> None:
        """The update was applied before its norm was known."""
        self.finite = True
        self.metrics["skipped"] = torch.tensor(False)

    def next_state(self, update: Update | None) -> tuple[TrainState, dict[str, object]]:
        """The state after this update, or after one that was skipped (None)."""
        step, state = self.step, self.state
        params, moments = update.finish() if update is not None else (state.params, state.moments)
        try:
            own = {extra.name: next_extra(extra, state.extra[extra.name], params, self.finite) for extra in step.extras}
        except BaseException as error:
            if step.donates and update is not None:
                state.kill(
                    f"This state was donated to update {state.step + 1}, which wrote over its buffers and then failed "
                    f"in the update of state.extra ({type(error).__name__}: {error}). Go on from another state."
                )
            raise
        count = state.step + (update is not None)
        new = state.replace(params=params, moments=moments, grads=None, extra=own, step=count)
        if step.donates:
            state.kill(
                f"This state was donated to the step that applied update {state.step + 1}; its buffers now belong to "
                "the state that step returned. Use that one, or leave fz.donate out to keep old states."
            )
        return new, self.metrics


def is_finite(norm: torch.Tensor) -> bool:
    """Whether an update may be applied. A fake tensor, which has no value, stands for a finite one."""
    return private.is_fake(norm) or bool(torch.isfinite(norm))


class Update:
    """One update on its way: the next state's buffers, which are written group by group.

    The old ones are overwritten only where they were donated and nobody else held them when this was made, nor does
    when they are written. A context: what is on its way is waited for at the end, also where something fails.
    """

    def __init__(self, step: Spec, state: TrainState) -> None:
        self.step, self.old, self.layout = step, state.params, state.layout
        trainable = self.layout.trainable
        keep = _Writable(step.donates, self.layout)

        def kept(buffers: dict[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
            return {name: keep(buffers, name) if group_of(name) in trainable else buffers[name] for name in buffers}

        old = self.old
        self.params = Sharded(self.layout, old.axis, old.structure, kept(old.buffers), kept(old.held), kind=old.kind)
        self._draw = Draw(state.seed, state.step, step.table(state.layout).compiled)
        self._overwrites = (
            {
                name
                for own, new in ((old.buffers, self.params.buffers), (old.held, self.params.held))
                for name in own
                if new[name] is own[name]
            }
            if step.donates
            else set()
        )
        self.moments = state.moments
        self._in_place = step.optimizer.fused is not None
        if self._in_place:
            self.moments = map_trees(lambda tree: tree.over(kept(tree.buffers)), state.moments)
        keep.warn()
        self._after: Any = self.moments
        self._waits: list[Callable[[], None]] = []
        self.applied: list[Key] = []  # the groups that have been written

    def turns(self) -> list[tuple[Key, ...]]:
        """The groups in the parts that they are updated in: one by one where the others' gathers then run meanwhile."""
        trainable = self.layout.trainable
        return [(key,) for key in trainable] if self.step.optimizer.by_group and self.params.held else [trainable]

    @torch.no_grad()
    def apply(self, keys: Sequence[Key], grads: Sharded, extra: Mapping[str, Any]) -> None:
        """Updates some groups, and starts to gather what every rank holds of them."""
        self.applied += keys
        self._spare_readers(keys)
        own, extra = self.params.only(keys).replaced(draw=self._draw), dict(extra)
        if self.step.optimizer.fused is None:
            self._after = _plain_update(self.step, self.moments, own, grads, extra)
        else:
            moments = map_trees(lambda tree: tree.only(keys), self.moments)
            self._after = call_fused(self.step.optimizer, own, grads, moments, extra)
        held = self.params.held
        self._waits += [
            start_gather(self.old.axis_of(key), held[key], own.stored(key), self._in_8_bits(key), f"update of {key}")
            for key in keys
            if key in held
        ]

    def __enter__(self) -> Update:
        return self

    def __exit__(self, *_: object) -> None:
        waits, self._waits = self._waits, []
        finish_all(waits)

    def _spare_readers(self, keys: Sequence[Key]) -> None:
        """Leaves a donated buffer to whoever came to hold it since: a graph that is not pulled back yet, an output."""
        for buffers in (self.params.buffers, self.params.held):
            for name in buffers:
                if name in self._overwrites and group_of(name) in keys and private.storage_holders(buffers[name]) > 1:
                    buffers[name] = buffers[name].clone()

    def _in_8_bits(self, key: Key) -> bool:
        return self.layout.groups[key].row.policy.gather is not None

    def finish(self) -> tuple[Sharded, Any]:
        """The new params and moments, once all groups are updated."""
        waits, self._waits = self._waits, []
        finish_all(waits)
        if not self._in_place:
            return self.params, self._after
        # counters come from the last call, buffers from all of them
        moments = pytree.map(
            lambda after, whole: whole if is_sharded(whole) else after, self._after, self.moments, is_leaf=is_sharded
        )
        return self.params, moments


def _plain_update(step: Spec, moments: object, own: Sharded, grads: Sharded, extra: dict[str, Any]) -> object:
    """An optimizer in optax's shape: update, then params + updates, in float32 or float64; writes `own`."""
    params = values(own)
    updates, new = call_update(step.optimizer, grads, moments, params, extra)
    updates, new = values(updates), apart(new, own)
    for key in own.keys:
        stored, value = own.stored(key), params.local(key) + updates.local(key)
        assert own.draw
        write(stored, value, own.draw.counters(own.layout, key, own.rank_of(key)).blocks(value.device))
    return to_moment_dtype(new)


class _Writable:
    """Buffers that an update may write: the old ones where the state was donated, else copies."""

    def __init__(self, donated: bool, layout: Layout) -> None:
        self.donated, self.layout, self.copied = donated, layout, []

    def __call__(self, buffers: dict[object, torch.Tensor], key: Key) -> torch.Tensor:
        if self.donated:
            if private.entry_holders(buffers, key) == 0 and private.storage_holders(buffers[key]) == 1:
                return buffers[key]
            self.copied.append(self.layout.groups[group_of(key)].slots[0].path)
        return buffers[key].clone()

    def warn(self) -> None:
        if self.copied:
            warnings.warn(
                f"fz.donate: {len(self.copied)} buffers of the donated state are still held elsewhere (that of leaf "
                f"{self.copied[0]!r} first) and were copied instead of overwritten. Drop views, detach()ed tensors and "
                "pullbacks of the state before the update.",
                UserWarning,
                stacklevel=6,
            )
