"""Names of mesh axes."""

from __future__ import annotations

from collections.abc import Sequence

from fzero.comm.backend import Mesh


def axes_in(axis: str | Sequence[str] | None) -> tuple[str, ...]:
    """The names of one mesh axis or of several."""
    return () if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)


def need_axes(mesh: Mesh, wanted: Sequence[str], who: str, argument: str = "axis") -> None:
    """Refuses axes that a mesh does not have, or that come in another order than the mesh's."""
    known = mesh.mesh_dim_names or ()
    for name in wanted:
        if name not in known:
            raise ValueError(
                f"{who}: the mesh has no axis {name!r}; its axes are {', '.join(known) or 'unnamed'}. Pass "
                f"{argument}=, or name it in init_device_mesh(..., mesh_dim_names=...)."
            )
    if [*wanted] != sorted(wanted, key=known.index):
        raise ValueError(
            f"{who}: got {argument}={tuple(wanted)}, expected the axes in the mesh's order, {tuple(known)}: the first "
            "is the slowest."
        )
