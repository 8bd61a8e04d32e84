"""Which rank is which place of a pipeline."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from fzero.base.arguments import need_int, wrong
from fzero.comm import backend
from fzero.comm.axis import Axis
from fzero.components.line import Line
from fzero.components.wiring import Wiring
from fzero.schedules.task import Schedule
from fzero.table.spec import Spec

T = TypeVar("T")
ALL_KNOW = "what all places know"  # a call in which they say it


def tried(make: Callable[[], T]) -> tuple[T | Any, Exception | None]:
    """What `make` gives, or the error that it has raised."""
    try:
        return make(), None
    except Exception as error:
        return None, error


class AllPlaces:
    """All places of a pipeline, of which a line is one; without a line there is but one.

    Attributes:
        leads: whether this rank is the one that speaks for all places.
    """

    def __init__(self, line: Line | None, home: Mapping[int, int]) -> None:
        self.line, self._home, self.leads = line, home, line is None or line.rank == 0

    def __deepcopy__(self, memo: object) -> AllPlaces:
        return self  # the same ranks

    def __reduce__(self) -> tuple[object, ...]:
        if self.line is not None:
            raise TypeError(
                "A pipeline's state over ranks cannot be pickled, as what is elsewhere is not in it; expected fz.save."
            )
        return AllPlaces, (None, self._home)

    def agree(self, make: Callable[[], T]) -> T:
        """What `make` gives here; raises on all ranks if it fails on one."""
        made, error = tried(make)
        self.all_well(error)
        return made

    def all_well(self, error: BaseException | None) -> None:
        """Raises on all ranks if one has failed."""
        self.of_all({}, error)

    def of_all(self, own: Mapping[int, Any] | None, error: BaseException | None) -> dict[int, Any]:
        """The small trees of every component, of which each place gives its own; raises on all ranks if one failed."""
        if self.line is None:
            if error is not None:
                raise error
            return dict(own or {})
        self.line.begin_call(ALL_KNOW)
        said = self.line.exchange(dict(own or {}), error)
        return {c: said[self.line.rank_of(stage)][c] for c, stage in self._home.items()} if own else {}


_MESH = (
    "For several ranks at each place make a mesh, init_device_mesh('cpu', (places, ranks), mesh_dim_names=('pp', "
    "'dp')), and give groups=mesh['pp']; for places with other numbers of ranks take components of fz.remote as stages."
)


def need_groups(groups: object, schedule: Schedule) -> None:
    """Refuses what says no places for a schedule."""
    count = len(schedule.places)
    if groups is None:
        return
    if isinstance(groups, backend.Mesh):
        if groups.ndim != 1 or groups.size() != count:
            raise ValueError(
                f"pipeline: got groups=a mesh of shape {tuple(groups.shape)}, expected one axis of {count} ranks, as "
                f"the schedule {schedule.name!r} has {count} places. Take that axis: mesh[name]."
            )
        return
    if not isinstance(groups, (list, tuple)) or not all(isinstance(ranks, (list, tuple)) for ranks in groups):
        raise wrong("pipeline", "groups", groups, 'None, a mesh of one axis such as mesh["pp"], or lists of one rank')
    flat = {need_int(rank, "pipeline", "a rank in groups", least=0) for ranks in groups for rank in ranks}
    if len(groups) != count or any(len(ranks) != 1 for ranks in groups) or len(flat) < count:
        raise ValueError(
            f"pipeline: got groups={groups}, expected {count} lists of one rank, each another, for the places of the "
            f"schedule {schedule.name!r}. {_MESH}"
        )


def line_over(groups: object, schedule: Schedule, steps: Sequence[Spec], wires: Wiring) -> Line | None:
    """This rank's place; None where all stages run here. Every rank of the pipeline comes here at the same time."""
    if groups is None:
        return None
    if not backend.initialized():
        raise RuntimeError(
            "pipeline: there is no process group whose ranks could be the places in groups. Start one with "
            "torch.distributed.init_process_group('gloo') under torchrun, or leave groups out: all stages run here."
        )
    if isinstance(groups, backend.Mesh):
        group, by_place = groups.get_group(), groups.mesh.tolist()
        ranks_each = backend.ranks_around(groups) // groups.size()
    else:
        assert isinstance(groups, (list, tuple))
        group, by_place, ranks_each = backend.world(), [rank for (rank,) in groups], 1
        assert group is not None
        if sorted(by_place) != list(range(backend.size_of(group))):
            raise ValueError(
                f"pipeline: got groups={groups} on {backend.size_of(group)} ranks, expected each of them to have a "
                f"place. {_MESH}"
            )
    _need_messages(group)
    members = list(backend.members(group))
    ranks = [members.index(rank) for rank in by_place]
    place = ranks.index(backend.rank_in(group))

    def check() -> None:
        here = {c: steps[c].axis() for c, stage in wires.home.items() if schedule.place_of(stage) == place}
        _need_apart(here, place, by_place)
        _need_all_ranks(here, ranks_each)

    return Line(group, schedule, ranks, _identity(group, check, schedule, wires))


def _identity(group: backend.Group, check: Callable[[], None], schedule: Schedule, wires: Wiring) -> str:
    """One that all ranks have; where a check fails on one, or one has another schedule or wires, all raise."""
    _, error = tried(check)
    failed = "" if error is None else f"rank {backend.rank_in(group)} failed: {type(error).__name__}: {error}"
    does = hashlib.sha256(repr((schedule, wires)).encode()).hexdigest()
    heard = [json.loads(text) for text in backend.gather_strings(json.dumps((uuid.uuid4().hex, does, failed)), group)]
    if error is not None:
        raise error
    if failed := next((text for *_, text in heard if text), ""):
        raise ValueError(f"pipeline: {failed}")
    other = next((rank for rank, (_, text, _) in enumerate(heard) if text != does), None)
    if other is not None:
        raise ValueError(
            f"pipeline: rank {other} of the pipeline has another schedule, or other inputs, skips or shared "
            f"components, than rank {backend.rank_in(group)}, {schedule.name!r} of {schedule.stages} stages and "
            f"{schedule.microbatches} microbatches; expected the same on all."
        )
    return heard[0][0]


def _need_messages(group: backend.Group) -> None:
    """Refuses a process group whose ranks are threads, or have values on GPUs."""
    kind = backend.kind_of(group)
    if kind != "gloo":
        raise ValueError(
            f"pipeline: got groups over a process group of backend {kind!r}, expected 'gloo', whose ranks are "
            "processes that compute on CPUs. Start that: on real processes, "
            "torch.distributed.init_process_group('gloo') under torchrun or fz.testing.run_ranks(..., "
            "backend='processes'); stages on threads are components: fz.remote(..., on='threads')."
        )


def _need_all_ranks(axes: Mapping[int, Axis], count: int) -> None:
    """Refuses a component that is not sharded over all ranks of its place, as its copies would drift apart."""
    for component, axis in axes.items():
        ranks = axis.ranks * axis.place_on_tensor[1]
        if ranks != count:
            raise ValueError(
                f"pipeline: component {component} is sharded over {ranks} ranks of its place, of {count}; expected all "
                "of them, or copies of its params would drift apart. Say fz.shard_zero1, 2 or 3 with a mesh of these "
                "ranks, and axis= of all its axes beside that of the places."
            )


def _need_apart(axes: Mapping[int, Axis], place: int, by_place: Sequence[int]) -> None:
    """Refuses a component that goes over ranks of other places, which never call it."""
    for component, axis in axes.items():
        ranks = {*axis.members, *axis.others, *(axis.tensor.members if axis.tensor is not None else ())}
        if others := sorted(ranks & {*by_place} - {by_place[place]}):
            raise ValueError(
                f"pipeline: component {component} runs at place {place}, and goes over ranks {sorted(ranks)}, of which "
                f"{others} are at other places; expected ranks of its own place alone. Give its transforms a mesh of "
                "them: fz.shard_zero3(step, mesh=mesh, axis=...), of an axis beside that of the places."
            )
