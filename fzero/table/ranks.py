"""The ranks that a step goes over, as numbers, and what each keeps of each leaf: no process group is needed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from fzero.base.arguments import need_int, wrong
from fzero.comm import backend
from fzero.comm.backend import Mesh
from fzero.table.layout import Layout
from fzero.table.rows import Row
from fzero.table.spec import Spec

AnyMesh = Mesh | Mapping[str, int]
MESH = "a dict of axes to their sizes, {'dp': 2, 'tp': 4}, a DeviceMesh, or None"


@dataclass(frozen=True)
class Ranks:
    """The sizes of a mesh's axes, and which of them state is cut over.

    Ranks are counted row by row, the first axis is the slowest: as in a DeviceMesh of ranks in their order.
    """

    sizes: Mapping[str, int] = field(hash=False)  # axis -> its number of ranks, in the mesh's order
    sharded: tuple[str, ...] = ()  # the axes that flat buffers are cut over, as one
    copies: tuple[str, ...] = ()  # those that shards are replicated over
    tensor: tuple[str, ...] = ()  # the one that leaves are cut over along a dim, if there is one

    @property
    def count(self) -> int:
        """How many there are."""
        return math.prod(self.sizes.values())

    def size(self, axes: Iterable[str]) -> int:
        """How many ranks some axes have, taken as one."""
        return math.prod(self.sizes[axis] for axis in axes)

    def place(self, axes: Iterable[str], rank: int) -> int:
        """A rank's number among those of some axes, taken as one, the first of them slowest."""
        own, names = self.coordinates(rank), [*axes]
        return int(np.ravel_multi_index([own[axis] for axis in names], [self.sizes[axis] for axis in names]))

    def coordinates(self, rank: int) -> dict[str, int]:
        """A rank's number on each axis."""
        return dict(zip(self.sizes, map(int, np.unravel_index(rank, [*self.sizes.values()])), strict=True))

    def __str__(self) -> str:
        return " × ".join(f"{axis} {size}" for axis, size in self.sizes.items())


def joined(axes: Sequence[str]) -> str:
    """The name of some axes that are taken as one."""
    return "×".join(axes)


def ranks_of(step: Spec, world_size: int | None, mesh: AnyMesh | None, who: str) -> Ranks:
    """The ranks of a step: those that are given, otherwise those of its own meshes and of the default process group.

    Args:
        world_size: ranks of the sharded axis (of the tensor axis, where no other is cut over), where there is no mesh.
        mesh: sizes of axes, or a DeviceMesh; None where the step says it.
    """
    sharding, over = step.sharding, step.tensor_axis
    sharded, copies = (sharding.axes, sharding.replicate) if sharding is not None else ((), ())
    tensor = (over.axis,) if over is not None else ()
    if mesh is not None:
        if world_size is not None:
            raise ValueError(f"{who}: got world_size={world_size} and a mesh, expected one of the two.")
        sizes = sizes_of(mesh, who)
        for axes in (sharded, copies, tensor):
            _need_axes(sizes, axes, who)
        return Ranks(sizes, sharded, copies, tensor)
    meshes = [each.mesh for each in (sharding, over) if each is not None]
    known: dict[str, int] = {}
    for own in [sizes_of(own, who) for own in meshes if own is not None]:
        if differ := [axis for axis in own if known.get(axis, own[axis]) != own[axis]]:
            raise ValueError(
                f"{who}: this step's meshes have axis {differ[0]!r} in sizes {known[differ[0]]} and {own[differ[0]]}. "
                "Say which ranks are meant: mesh={'dp': 2, 'tp': 4}."
            )
        known |= own
    if world_size is None:
        default = backend.size_of(backend.world()) if None in meshes and backend.initialized() else 1
    else:
        default = world_size
        if sharded and math.prod(known.get(axis, 0) for axis in sharded) != world_size:
            known = {axis: size for axis, size in known.items() if axis not in sharded}
            sharded = (joined(sharded),)
            known = {sharded[0]: world_size, **known}
    missing = [axis for axis in (*sharded, *copies, *tensor) if axis not in known]
    if default > 1 and sharded and set(tensor) & set(missing) and (len(missing) > 1 or world_size is not None):
        raise ValueError(
            f"{who}: this step goes over axes {', '.join(map(repr, (*sharded, *tensor)))} without a mesh that says how "
            "many ranks each has. Give their sizes: mesh={'dp': 2, 'tp': 4}."
        )
    known |= dict.fromkeys(missing, default)
    if not known and default > 1:
        known = {"ranks": default}  # which all hold the same
    return Ranks(known, sharded, copies, tensor)


def sizes_of(mesh: AnyMesh, who: str) -> dict[str, int]:
    """The sizes of a mesh's axes, by name."""
    if isinstance(mesh, Mapping):
        sizes = dict(mesh)
    elif hasattr(mesh, "mesh_dim_names") and hasattr(mesh, "shape"):
        names = mesh.mesh_dim_names or ()
        if not names:
            raise ValueError(
                f"{who}: got mesh={mesh}, whose axes have no names, expected {MESH}. Name them: "
                "init_device_mesh(..., mesh_dim_names=...)."
            )
        sizes = dict(zip(names, mesh.shape, strict=True))
    else:
        raise wrong(who, "mesh", mesh, MESH)
    if not sizes or not all(isinstance(axis, str) for axis in sizes):
        raise ValueError(f"{who}: got mesh={mesh}, expected {MESH}.")
    return {axis: need_int(size, who, f"mesh[{axis!r}]", MESH, least=1) for axis, size in sizes.items()}


def _need_axes(sizes: Mapping[str, int], axes: Sequence[str], who: str) -> None:
    for axis in axes:
        if axis not in sizes:
            raise ValueError(
                f"{who}: got mesh={dict(sizes)}, which has no axis {axis!r}, expected one with all axes that the step "
                "goes over. Give its size, 1 where it is not to be counted."
            )
    known = list(sizes)
    if [*axes] != sorted(axes, key=known.index):
        raise ValueError(
            f"{who}: got mesh={dict(sizes)}, expected the step's axes in the order {tuple(axes)}: the first is the "
            "slowest."
        )


class Held(NamedTuple):
    """A rank's part of one leaf.

    Attributes:
        dim: that the leaf is cut along over the tensor axis; None where the rank's slice is all of it.
        ranges: (start, size) of the slice's pieces along that dim, one after the other.
        shape: of the slice.
        start, stop: the elements of the slice, in row-major order, that are the rank's own where state is cut flat.
    """

    dim: int | None
    ranges: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Holdings:
    """The parts of all leaves on all ranks, found as they are asked for."""

    rows: tuple[Row, ...]
    ranks: Ranks
    _layouts: dict[int, Layout] = field(default_factory=dict, repr=False, compare=False)

    def layout(self, rank: int) -> Layout:
        """The layout of a rank's buffers."""
        place, size = self.ranks.place(self.ranks.tensor, rank), self.ranks.size(self.ranks.tensor)
        if place not in self._layouts:
            self._layouts[place] = Layout.build(self.rows, self.ranks.size(self.ranks.sharded), (place, size))
        return self._layouts[place]

    def of(self, path: str, rank: int) -> Held:
        """A rank's part of the leaf at a path."""
        layout = self.layout(rank)
        key, slot = layout.key_of[path]
        row, own = layout.rows[slot.leaf], layout.shard_numel(key)
        number = self.ranks.place(self.ranks.sharded, rank) if row.cuts else 0
        start, stop = (min(max(bound - slot.offset, 0), slot.numel) for bound in (number * own, (number + 1) * own))
        ranges = () if row.slices is None else row.slices.ranges(layout.tensor[1])[layout.tensor[0]]
        return Held(row.slices and row.slices.dim, tuple(ranges), slot.shape, start, stop)


def cuts_of(row: Row, ranks: Ranks) -> str:
    """The axes that cut a leaf, and how, in words: `tp: dim 1 (4×1024), dp: flat`."""
    out = []
    if row.slices is not None:
        sizes = row.slices.sizes(ranks.size(ranks.tensor))
        out.append(f"{joined(ranks.tensor)}: dim {row.slices.dim} ({_runs(sizes)})")
    if row.cuts:
        out.append(f"{joined(ranks.sharded)}: flat")
    return ", ".join(out) or "whole"


def _runs(sizes: Sequence[int]) -> str:
    """Sizes in words, equal ones together: `2×3 + 2×2`."""
    return " + ".join(f"{len([*run])}×{size}" for size, run in itertools.groupby(sizes))
