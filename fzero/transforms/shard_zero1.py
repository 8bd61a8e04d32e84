"""ZeRO stage 1 (Rajbhandari et al. 2020, arXiv 1910.02054)."""

from __future__ import annotations

from typing import Any

from fzero.table.spec import S
from fzero.transforms._shard import shard


def shard_zero1(step: S, mesh: Any = None, axis: str = "dp", replicate: str | None = None) -> S:
    """Shards the moments (and, where dtypes differ, the master params) over a mesh axis: ZeRO stage 1.

    Every rank holds the full params in compute dtype; one gather an update, no other communication of params. An
    accumulating step reduces its gradients once, after the last microbatch.

    Args:
        step: any step that is not sharded yet.
        mesh: a torch DeviceMesh; None takes the default process group, looked up when first needed.
        axis: the mesh axis to shard over.
        replicate: a second mesh axis, over which the shards are replicated and gradients averaged too.

    Raises:
        ValueError: the mesh has no such axis, or the step is sharded otherwise already.

    Example:
        >>> step = fz.shard_zero1(fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1)))
        >>> step.stage
        1
    """
    return shard(step, 1, mesh, axis, replicate)
