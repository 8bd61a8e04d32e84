"""The update: decode the grads, norm, skip or apply, in place where the state was donated."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fzero.base import private
from fzero.comm.axis import finish_all
from fzero.engine.use import start_gather
from fzero.optim.base import call_fused, call_update, values, write_values
from fzero.state.gather import global_norm
from fzero.state.moments import apart, next_extra, to_moment_dtype
from fzero.state.sharded import Draw, Part, Sharded, group_of, map_trees
from fzero.state.train_state import TrainState
from fzero.table.layout import Key
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
            trainable = state.layout.trainable
            one_by_one = step.optimizer.by_group and state.params.held  # the others' gathers then run meanwhile
            try:
                for keys in [(key,) for key in trainable] if one_by_one else [trainable]:
                    update.apply(keys, grads.only(keys), decision.extra)
            except BaseException as error:
                update.lost(error)
                raise
            return decision.next_state(update)
    return decision.next_state(None)


class Decision:
    """The decision by an update's norm: whether it is applied, the metrics, the next loss scale."""

    def __init__(self, step: Spec, state: TrainState, norm: torch.Tensor, joint: object = None) -> None:
        self.step, self.state = step, state
        self.extra: dict[str, object] = {"grad_norm": norm}
        self.finite = is_finite(norm)
        if joint is not None:
            joint = torch.as_tensor(joint, dtype=torch.float64)
            self.finite = self.finite and is_finite(joint)
            self.extra["joint_norm"] = joint
        known = step.optimizer.metrics(state.moments) if step.optimizer.metrics else {}
        scales = {extra.name: extra.factor(state.extra[extra.name]) for extra in step.extras if extra.scale}
        self.metrics: dict[str, object] = {"grad_norm": norm}
        self.metrics |= {name: torch.tensor(value, dtype=torch.float64) for name, value in known.items()}
        self.metrics["skipped"] = torch.tensor(not self.finite)
        self.metrics |= {name: torch.tensor(value, dtype=torch.float64) for name, value in scales.items()}

    def next_state(self, update: Update | None) -> tuple[TrainState, dict[str, object]]:
        """The state after this update, or after one that was skipped (None)."""
        step, state = self.step, self.state
        params, moments = update.finish() if update is not None else (state.params, state.moments)
        try:
            own = {extra.name: next_extra(extra, state.extra[extra.name], params, self.finite) for extra in step.extras}
        except BaseException as error:
            if update is not None:
                update.lost(error, " in the update of state.extra")
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
    """Tells whether a norm is finite; a fake tensor, which has no value, is."""
    return private.is_fake(norm) or bool(torch.isfinite(norm))


class Update:
    """One update on its way: the next state's buffers, which are written group by group.

    The old ones are overwritten only where they were donated and nobody else held them when this was made, nor does
    when they are written. A context: what is on its way is waited for at the end, also where something fails.
    """

    def __init__(self, step: Spec, state: TrainState) -> None:
        self.step, self._state, self.old, self.layout = step, state, state.params, state.layout
        self._copied: list[str] = []
        old = self.old
        self.params = old.replaced(buffers=self._writable(old.buffers), held=self._writable(old.held))
        self._draw = Draw(state.seed, state.step, step.table(state.layout).compiled)
        self.moments = state.moments
        formats = [old.format(key) for key in self.layout.trainable]
        # one that knows nothing of formats writes to buffers that hold values
        plain = all(form.plain and not form.rounds for form in formats)
        self._fused = step.optimizer.fused is not None and (step.optimizer.by_leaf or plain)
        if self._fused:
            self.moments = map_trees(lambda node: node.over(self._writable(node.buffers)), state.moments)
        self._after: object = self.moments
        if self._copied:
            warnings.warn(
                f"fz.donate: {len(self._copied)} buffers of the donated state are still held elsewhere (that of leaf "
                f"{self._copied[0]!r} first) and were copied instead of overwritten. Drop views, detach()ed tensors "
                "and pullbacks of the state before the update.",
                UserWarning,
                stacklevel=5,
            )
        self._waits: list[Callable[[], None]] = []
        self.applied: list[Key] = []  # the groups that have been written

    def lost(self, error: BaseException, where: str = "") -> None:
        """After an error: a donated state may be half written."""
        if self.step.donates and self.applied:
            said = (
                f"This state was donated to update {self._state.step + 1}, which had begun with "
                f"{len(self.applied)} of its {len(self.layout.trainable)} groups, among them that of leaf "
                f"{self.layout.groups[self.applied[0]].slots[0].path!r}, and then failed{where}"
            )
            error.add_note(f"{said}. Go on from another state, or leave fz.donate out.")
            self._state.kill(f"{said} ({type(error).__name__}: {error}). Go on from another state.")

    def _writable(self, buffers: dict[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
        """Buffers to write: the old ones where the state was donated and nobody else holds them, else copies."""
        return {name: self._own(buffers, name) for name in buffers}

    def _own(self, buffers: dict[Any, torch.Tensor], name: Key | Part) -> torch.Tensor:
        key = group_of(name)
        if key not in self.layout.trainable:
            return buffers[name]
        if self.step.donates:
            if private.entry_holders(buffers, name) == 0 and private.storage_holders(buffers[name]) == 1:
                return buffers[name]
            self._copied.append(self.layout.groups[key].slots[0].path)
        return buffers[name].clone()

    @torch.no_grad()
    def apply(self, keys: Sequence[Key], grads: Sharded, extra: Mapping[str, object]) -> None:
        """Updates some groups, and starts to gather what every rank holds of them."""
        self.applied += keys
        if self.step.donates:
            self._spare_readers(keys)
        own = self.params.only(keys).replaced(draw=self._draw)
        if not self._fused:
            self._after = self._plainly(own, grads, extra)
        else:
            moments = map_trees(lambda tree: tree.only(keys), self.moments)
            self._after = call_fused(self.step.optimizer, own, grads, moments, extra)
        for key in keys:
            if key in self.params.held:
                full, in_8_bits = self.params.held[key], self.layout.groups[key].row.policy.gather is not None
                axis, tag = self.old.axis_of(key), f"update of {key}"
                self._waits.append(start_gather(axis, full, own.stored(key), in_8_bits, tag))

    def _plainly(self, own: Sharded, grads: Sharded, extra: Mapping[str, object]) -> object:
        """An optimizer in optax's shape: update, then params + updates, in float32 or float64; writes `own`."""
        params = values(own)
        updates, new = call_update(self.step.optimizer, grads, self.moments, params, extra)
        updates, new = values(updates), apart(new, own)
        for key in own.keys:
            write_values(own, key, params.local(key) + updates.local(key), self._draw)
        return to_moment_dtype(new)

    def __enter__(self) -> Update:
        return self

    def __exit__(self, *_: object) -> None:
        waits, self._waits = self._waits, []
        finish_all(waits)

    def _spare_readers(self, keys: Sequence[Key]) -> None:
        """Leaves a donated buffer to whoever came to hold it since: a graph that is not pulled back yet, an output."""
        for buffers in (self.params.buffers, self.params.held):
            for name in buffers:
                if group_of(name) in keys and private.storage_holders(buffers[name]) > 1:
                    buffers[name] = buffers[name].clone()

    def finish(self) -> tuple[Sharded, object]:
        """The new params and moments, once all groups are updated."""
        waits, self._waits = self._waits, []
        finish_all(waits)
        if not self._fused:
            return self.params, self._after
        # counters come from the last call, buffers from all of them
        return self.params, map_trees(lambda after, whole: whole, self._after, self.moments)
