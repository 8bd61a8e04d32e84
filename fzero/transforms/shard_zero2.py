"""ZeRO stage 2 (Rajbhandari et al. 2020, arXiv 1910.02054)."""

from __future__ import annotations

from typing import Any

from fzero.table.spec import S
from fzero.transforms._shard import shard


def shard_zero2(step: S, mesh: Any = None, axis: str = "dp", replicate: str | None = None) -> S:
    """Shards moments and grads over a mesh axis: ZeRO stage 2.

    As stage 1, but the gradients of every microbatch are reduced and cut at once, so that no full sum is kept.

    Args:
        step: any step that is not sharded yet.
        mesh: a torch DeviceMesh; None takes the default process group, looked up when first needed.
        axis: the mesh axis to shard over.
        replicate: a second mesh axis, over which the shards are replicated and gradients averaged too.

    Raises:
        ValueError: the mesh has no such axis, or the step is sharded otherwise already.

    Example:
        >>> step = fz.shard_zero2(fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1)))
        >>> step.stage
        2
    """
    return shard(step, 2, mesh, axis, replicate)
