"""What a rank does before its first call: the user's `build`, and its place on the axes that tensors lie over."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fzero.base import pytree
from fzero.base.arguments import named
from fzero.comm import backend
from fzero.comm.axis import Axis
from fzero.components.remote.link import Place, Settings
from fzero.components.remote.part import Part
from fzero.components.remote.specs import axes_of, dims_by_leaf, need_axes
from fzero.components.remote.values import device_of
from fzero.engine.carry import refuse_carry
from fzero.table.placements import Cut, Mark, noting
from fzero.table.spec import Spec


def join_group(settings: Settings, rank: int, store: backend.Store) -> None:
    """Joins the process group of a component's ranks."""
    kind = "gloo" if settings.backend == "gloo" else f"cpu:gloo,cuda:{settings.backend}"
    seconds = datetime.timedelta(seconds=settings.timeout)
    backend.dist.init_process_group(kind, store=store, rank=rank, world_size=settings.ranks, timeout=seconds)


def built_by(build: Callable[[int], object], rank: int, settings: Settings) -> Part:
    """The step and params of a rank."""
    given = build(rank)
    parts: tuple[Any, ...] = given if isinstance(given, tuple) else ()
    if len(parts) not in (2, 3) or not isinstance(parts[0], Spec):
        raise TypeError(
            f"fz.remote: got build({rank}) that returned {named(given)}, expected (step, params), or (step, params, "
            "mesh) with the mesh of its ranks, or (step, params, axis) with the axis that batches are split over "
            "(fz.parallel.axis(mesh, 'dp'))."
        )
    step, params = parts[0], parts[1]
    device = device_of(params)
    if settings.ranks > 1 and device.type == "cuda" and settings.backend == "gloo":
        raise ValueError(
            f"fz.remote: build({rank}) returned params on {device}, expected some on the CPU, as the process group of "
            f"the {settings.ranks} ranks is gloo's. Give each rank a GPU of its own and options={{'backend': 'nccl'}}, "
            "on='processes' or 'ray'."
        )
    refuse_carry(step, f"fz.remote: build({rank})")
    means = step.axis()
    over = parts[2] if len(parts) == 3 else means
    if isinstance(over, backend.Mesh):
        place = _on_mesh(over, step, means, rank)
    elif isinstance(over, Axis):
        place = _on_axis(over, means, rank)
    else:
        raise TypeError(
            f"fz.remote: build({rank}) returned {named(over)} as its third value, expected a DeviceMesh, or an axis of "
            "one, fz.parallel.axis(mesh, name)."
        )
    tensor = "" if step.tensor_axis is None else step.tensor_axis.axis
    cuts = {tensor, *[name for name, _, size in place.axes if size == 1 or name in place.averaged]}
    known = [name for name, _, _ in place.axes]
    need_axes(settings.in_specs, known, cuts, "in_specs")
    need_axes(settings.out_specs, known, cuts, "out_specs")
    if tensor and any(tensor in axes_of(spec.dims) for spec in pytree.leaves(settings.in_specs)):
        step = dataclasses.replace(step, fn=OwnSlices(step.fn, settings.in_specs, tensor))
    return Part(step, params, place, settings.ranks, settings.out_specs)


@dataclass(frozen=True)
class OwnSlices:
    """A function, some of whose inputs lie over the axis that leaves are cut over: they vary, as a column's outputs do.
    """

    fn: Callable[..., object]
    in_specs: object
    axis: str

    def __call__(self, params: object, *inputs: object) -> object:
        known, leaves = noting(), pytree.flatten(inputs)[0]
        for i, dim in self.cut_inputs(inputs).items() if known is not None else ():
            x = leaves[i]
            if known is not None and isinstance(x, torch.Tensor):
                known.note(x, Mark(f"an input over {self.axis!r}", Cut(dim - x.ndim, None, known.axis.rank)))
        return self.fn(params, *inputs)

    def cut_inputs(self, inputs: tuple[object, ...]) -> dict[int, int]:
        """The numbers of leaves that lie over the axis -> along which dim, which the check before a first run asks."""
        dims = dims_by_leaf(self.in_specs, inputs, "in_specs", "inputs")
        named = {i: [self.axis in names for names in own] for i, own in enumerate(dims)}
        return {i: found.index(True) for i, found in named.items() if True in found}


def _on_axis(axis: Axis, means: Axis, rank: int) -> Place:
    """The place of a rank whose batches are split over one axis."""
    if means.ranks % axis.ranks:
        raise ValueError(
            f"fz.remote: build({rank}) returned an axis of {axis.ranks} ranks to split batches over, and the step "
            f"takes means over {means.ranks} ranks; expected an axis that the step takes means over: shard_zero1, 2 "
            "or 3 with axis= its name, or replicate=."
        )
    name = axis.name or "dp"
    return Place(((name, axis.data_rank, axis.ranks),), (name,), (name,), means.data_rank, means.ranks)


def _on_mesh(mesh: backend.Mesh, step: Spec, means: Axis, rank: int) -> Place:
    """The place of a rank on all axes of a mesh."""
    where, sharding = mesh.get_coordinate(), step.sharding
    if where is None or not mesh.mesh_dim_names:
        raise ValueError(
            f"fz.remote: build({rank}) returned a mesh that rank {rank} is not in, or whose axes have no names; "
            "expected one of all ranks: init_device_mesh(device, sizes, mesh_dim_names=('dp', 'sp'))."
        )
    axes = tuple([*zip(mesh.mesh_dim_names, map(int, where), map(int, mesh.shape), strict=True)])
    averaged = () if sharding is None or means.ranks == 1 else (*sharding.replicate, *sharding.axes)
    place = Place(axes, averaged, averaged, means.data_rank, means.ranks)
    if not {*averaged} <= {*mesh.mesh_dim_names} or place.piece(averaged) != (means.data_rank, means.ranks):
        raise ValueError(
            f"fz.remote: build({rank}) returned a mesh with the axes {mesh.mesh_dim_names} of sizes "
            f"{tuple(mesh.shape)}, and the step takes means over {means.place}; expected the mesh that the step is "
            "sharded over."
        )
    return place
