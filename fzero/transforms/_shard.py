"""What the three sharding transforms share."""

from __future__ import annotations

from typing import Any

from fzero.base.arguments import need_str, wrong
from fzero.table.needs import need_step
from fzero.table.rows import Sharding
from fzero.table.spec import S


def shard(step: S, stage: int, mesh: Any, axis: str, replicate: str | None) -> S:
    """A step whose state is cut over `axis`, from this ZeRO stage on."""
    name = f"shard_zero{stage}"
    need_step(step, name)
    need_str(axis, name, "axis", "the name of a mesh axis")
    need_str(replicate, name, "replicate", "the name of a mesh axis or None", or_none=True)
    if mesh is not None and not (hasattr(mesh, "mesh_dim_names") and hasattr(mesh, "get_group")):
        raise wrong(name, "mesh", mesh, "a DeviceMesh (torch.distributed.init_device_mesh makes one) or None")
    if replicate is not None and replicate == axis:
        raise ValueError(f"{name}: got replicate={replicate!r}, which is the axis too; expected another mesh axis.")
    if mesh is None and replicate is not None:
        raise ValueError(f"{name}: got replicate={replicate!r} without a mesh; expected a mesh that has both axes.")
    if mesh is not None:
        known = tuple(mesh.mesh_dim_names or ())
        for wanted in (axis, *([replicate] if replicate else [])):
            if wanted not in known:
                raise ValueError(
                    f"{name}: the mesh has no axis {wanted!r}; its axes are {', '.join(known) or 'unnamed'}. Pass "
                    "axis=, or name it in init_device_mesh(..., mesh_dim_names=...)."
                )
    said = f"{name}(axis={axis!r}" + (f", replicate={replicate!r})" if replicate else ")")
    return step.with_rule("axis", Sharding(stage, mesh, axis, replicate), said)
