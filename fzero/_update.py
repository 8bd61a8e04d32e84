"""The update: decode the grads, norm, skip or apply, in place where the state was donated."""

from __future__ import annotations

import inspect
import warnings
from typing import TYPE_CHECKING, Any

import torch

from fzero import _private, _tree
from fzero._init import to_moment_dtype
from fzero._layout import Layout
from fzero._sharded import Sharded, global_norm, is_sharded
from fzero._state import ScaleState, TrainState
from fzero.optim._base import call_update, math_dtype

if TYPE_CHECKING:
    from fzero._step import Step


class NoLossScale:
    """The loss scale of a step without one: 1, always."""

    def initial(self) -> ScaleState:
        return ScaleState()

    def adjust(self, state: ScaleState, finite: bool) -> ScaleState:
        return state


def sum_of(total: dict[str, torch.Tensor] | None, grads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """total + grads, written into total where it exists."""
    if total is None:
        return grads
    return {key: total[key] + grads[key] if total[key].requires_grad else total[key].add_(grads[key]) for key in total}


def apply_update(step: Step, state: TrainState, grads: Sharded, grad_norm: Any) -> tuple[TrainState, dict[str, Any]]:
    """The next state and the metrics; the old state is dead afterwards where the step donates."""
    scaler = step.scaler or NoLossScale()
    grads = _decoded(grads)
    if state.grads is not None:
        grads = grads.map(torch.add, _decoded(state.grads))
    norm = global_norm(grads)
    extra: dict[str, Any] = {"grad_norm": norm}
    finite = bool(torch.isfinite(norm))
    if grad_norm is not None:
        joint = torch.as_tensor(grad_norm, dtype=torch.float64)
        finite = finite and bool(torch.isfinite(joint))
        extra["joint_norm"] = joint
    metrics: dict[str, Any] = {"grad_norm": norm}
    known = step.optimizer.metrics(state.moments) if step.optimizer.metrics else {}
    metrics.update({name: torch.tensor(value, dtype=torch.float64) for name, value in known.items()})
    metrics["skipped"] = torch.tensor(not finite)
    scale = scaler.adjust(state.loss_scale, finite)
    if step.scaler:
        metrics["loss_scale"] = torch.tensor(state.loss_scale.scale, dtype=torch.float64)
    if finite:
        with torch.no_grad():
            params, moments = _applied(step, state, grads, extra)
        new = state.replace(params=params, moments=moments, grads=None, step=state.step + 1, loss_scale=scale)
        del params, moments
    else:
        new = state.replace(grads=None, loss_scale=scale)
    if step.donates:
        state.kill(
            f"This state was donated to the step that applied update {state.step + 1}; its buffers now belong to the "
            "state that step returned. Use that one, or leave fz.donate out to keep old states."
        )
    return new, metrics


def _decoded(grads: Sharded) -> Sharded:
    """Grads without their scale, in a dtype to compute in: a small fp16 gradient must not vanish when unscaled."""

    def one(g: torch.Tensor) -> torch.Tensor:
        g = g.to(math_dtype(g.dtype))
        return g / grads.scale if grads.scale != 1.0 else g

    return grads.with_buffers({key: one(g) for key, g in grads.locals().items()}, 1.0)


def _applied(step: Step, state: TrainState, grads: Sharded, extra: dict[str, Any]) -> tuple[Sharded, Any]:
    """New params and moments. The old ones are overwritten only where donated and held by nobody else."""
    old, layout = state.params, state.layout
    keep = _Writable(step.donates, layout)
    buffers = {key: keep(old.buffers, key) if key in layout.trainable else old.buffers[key] for key in old.buffers}
    held = {key: keep(old.held, key) if key in layout.trainable else old.held[key] for key in old.held}
    params = Sharded(layout, old.axis, old.structure, buffers, held)
    own = params.only(layout.trainable)
    if step.optimizer.fused is not None:
        moments = _tree.map(
            lambda node: (
                node.with_buffers({key: keep(node.buffers, key) for key in node.keys}) if is_sharded(node) else node
            ),
            state.moments,
            is_leaf=is_sharded,
        )
        fused = step.optimizer.fused
        if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(fused).parameters.values()):
            moments = fused(own, grads, moments, **extra)  # type: ignore[call-arg]
        else:
            moments = fused(own, grads, moments)
    else:
        moments = _plain_update(step, state, own, grads, extra)
    keep.warn()
    gathers = [
        old.axis.start_gather(held[key], own.local(key).to(held[key].dtype), f"update of {key}")
        for key in held
        if key in layout.trainable
    ]
    for wait in gathers:
        wait()
    return params, moments


def _plain_update(step: Step, state: TrainState, own: Sharded, grads: Sharded, extra: dict[str, Any]) -> Any:
    """An optimizer in optax's shape: update, then params + updates, in float32 or float64; writes `own`."""

    def decode(node: Any) -> Any:
        return node.map(lambda m: m.to(math_dtype(m.dtype))) if is_sharded(node) else node

    decoded = _tree.map(decode, state.moments, is_leaf=is_sharded)
    params = own.map(lambda p: p.to(math_dtype(p.dtype)))
    updates, moments = call_update(step.optimizer, grads, decoded, params, extra)
    for key in own.keys:
        own.local(key).copy_(params.local(key) + updates.local(key))
    return to_moment_dtype(moments)


class _Writable:
    """Buffers that an update may write: the old ones where the state was donated, else copies."""

    def __init__(self, donated: bool, layout: Layout) -> None:
        self.donated, self.layout, self.copied = donated, layout, []

    def __call__(self, buffers: dict[str, torch.Tensor], key: str) -> torch.Tensor:
        if self.donated:
            if _private.entry_holders(buffers, key) == 0 and _private.storage_holders(buffers[key]) == 1:
                return buffers[key]
            self.copied.append(self.layout.groups[key].slots[0].path)
        return buffers[key].clone()

    def warn(self) -> None:
        if self.copied:
            warnings.warn(
                f"fz.donate: {len(self.copied)} buffers of the donated state are still held elsewhere (that of leaf "
                f"{self.copied[0]!r} first) and were copied instead of overwritten. Drop views, detach()ed tensors and "
                "pullbacks of the state before the update.",
                UserWarning,
                stacklevel=5,
            )
