"""What is known of an update before it begins: metrics, whether a norm lets it, and where it writes."""

from __future__ import annotations

import torch

from fzero.base import private
from fzero.base.arguments import as_float64
from fzero.optim._join import members_and_states
from fzero.state.train_state import TrainState
from fzero.table.layout import Key, Layout
from fzero.table.spec import Spec


def known_metrics(step: Spec, state: TrainState) -> dict[str, object]:
    """The metrics of an update that do not depend on its gradients: "lr", the loss scale.

    Raises:
        ValueError: the moments are of the same optimizer in another chain.
    """
    members_and_states(step.optimizer, state.moments)
    known = step.optimizer.metrics(state.moments) if step.optimizer.metrics else {}
    scales = {extra.name: extra.factor(state.extra[extra.name]) for extra in step.extras if extra.scale}
    return {name: as_float64(value) for name, value in [*known.items(), *scales.items()]}


def is_finite(norm: torch.Tensor) -> bool:
    """Tells whether a norm is finite; a fake tensor, which has no value, is."""
    return private.is_fake(norm) or bool(torch.isfinite(norm))


def in_place(step: Spec, layout: Layout) -> bool:
    """Tells whether the optimizer writes to the buffers of its moments; otherwise it returns others."""
    formats = [layout.groups[key].row.policy.param_format for key in layout.trainable]
    # one that knows nothing of formats writes to buffers that hold values
    plain = all(form.plain and not form.rounds for form in formats)
    return step.optimizer.fused is not None and (step.optimizer.by_leaf or plain)


def on_host(step: Spec, layout: Layout) -> frozenset[Key]:
    """The groups whose update runs in the host's memory, as all that it writes lies elsewhere than on the device."""
    keys = frozenset(key for key in layout.trainable if layout.groups[key].row.updates_on_host)
    alike = step.optimizer.by_group or len(keys) == len(layout.trainable)
    return keys if alike and in_place(step, layout) else frozenset()
