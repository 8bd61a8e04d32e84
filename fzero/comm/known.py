"""Process groups and meshes by name: what is pickled finds them again, within their life and on the same rank."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

from fzero.comm import backend
from fzero.comm.backend import Group, Mesh
from fzero.comm.worlds import has_ended


class GroupName(NamedTuple):
    """What a group is found by again: its name, and this process's rank in it."""

    name: str
    rank: int


class MeshName(NamedTuple):
    """What a mesh is found by again, or made of its groups where nobody has kept it."""

    groups: tuple[GroupName, ...]
    rank: int  # this process's in the run
    device: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]


_groups: weakref.WeakValueDictionary[GroupName, Group] = weakref.WeakValueDictionary()
_meshes: weakref.WeakValueDictionary[MeshName, Mesh] = weakref.WeakValueDictionary()


def need_running(groups: Sequence[Group], who: str) -> None:
    """Refuses process groups that have ended, as those of ranks that are threads do with their run."""
    if any(map(has_ended, groups)):
        raise RuntimeError(
            f"{who}: its process group has ended, with fz.testing.run_ranks or torch.distributed."
            "destroy_process_group. Do this before, inside of the ranks: return fz.gather(state.params) from there, or "
            "use fz.save there and fz.load in the next run."
        )


def name_of_group(group: Group) -> GroupName:
    need_running((group,), "A state")
    name = GroupName(backend.name_of(group), backend.rank_in(group))
    _groups[name] = group
    return name


def group_of(name: GroupName) -> Group:
    return _groups[name]


def name_of_mesh(mesh: Mesh) -> MeshName:
    groups = tuple(map(name_of_group, backend.groups_of(mesh)))
    ranks = mesh.mesh
    name = MeshName(
        groups,
        backend.global_rank(),
        mesh.device_type,
        mesh.mesh_dim_names or (),
        tuple(ranks.shape),
        tuple(ranks.flatten().tolist()),
    )
    _meshes[name] = mesh
    return name


def mesh_of(name: MeshName) -> Mesh:
    if (alive := _meshes.get(name)) is not None:
        return alive
    groups = [group_of(each) for each in name.groups]
    mesh = _meshes[name] = backend.mesh_of(groups, name.device, name.ranks, name.shape, name.axes)
    return mesh


def need_here(what: str, groups: Sequence[GroupName], rank: int, instead: str) -> None:
    """Refuses what was pickled on another rank, or over process groups that this process does not know (any more)."""
    here = backend.global_rank() if groups and backend.initialized() else 0
    if here != rank or any(name not in _groups for name in groups):
        raise RuntimeError(
            f"A {what} of rank {rank} over process groups {[name.name for name in groups]} was unpickled on rank "
            f"{here} of a run that has none of that kind, or on another rank; expected the same rank, within their "
            f"life. {instead}"
        )
