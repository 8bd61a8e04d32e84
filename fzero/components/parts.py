"""What a pipeline has of each component, the states of all as one pytree, saves; and which rank is which place."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch

from fzero.base import pytree
from fzero.base.arguments import named, need_int, wrong
from fzero.checkpoint.files import NAME as NAME_OF_ONE
from fzero.checkpoint.files import path_of
from fzero.checkpoint.fill import Everyone
from fzero.checkpoint.load import load
from fzero.checkpoint.manifest import TOGETHER, DamagedCheckpoint, Together, read_manifest, read_together, sealed
from fzero.checkpoint.remote import folder_at
from fzero.checkpoint.save import as_json, save
from fzero.comm import backend
from fzero.comm.axis import Axis
from fzero.components.line import Line
from fzero.components.wiring import Wiring
from fzero.schedules.task import Schedule
from fzero.state.beyond import Loadable
from fzero.state.gather import measured
from fzero.state.train_state import TrainState
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
    """All places of a pipeline, of which a line is one; without a line there is but one, which `leads`."""

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


SLOTS = ("a", "b")  # the subfolder that the next save goes to is the one that the last did not


def save_parts(path: str, states: Sequence[TrainState | None], extra: object, places: AllPlaces) -> None:
    """Writes the states that are here; what lay there before is whole until all are written, and then goes."""
    folder = path_of(path, "save")

    def begin() -> tuple[str, object]:
        known = json.loads(as_json(extra, "fz.save: extra"))
        if NAME_OF_ONE in folder_at(folder).names():
            raise FileExistsError(
                f"{folder}: got a folder with a checkpoint of one step, expected one of a pipeline, or none. Save into "
                "a folder of its own."
            )
        before = read_together(folder)
        return SLOTS[1 if before is not None and before.slot == SLOTS[0] else 0], known

    slot, known = places.agree(begin)

    def write() -> None:
        for c, state in enumerate(states):
            if state is not None:
                save(f"{folder}/{slot}/{c}", state)

    def end() -> None:
        # of several lines of places the one that leads in its components
        if places.leads and all(Everyone(own.params.axis).leads for own in states if isinstance(own, TrainState)):
            tokens = [read_manifest(f"{folder}/{slot}/{c}").token for c in range(len(states))]
            there = folder_at(folder)
            there.replace(TOGETHER, sealed("components", Together(slot, tokens, known)))
            if (old := next(own for own in SLOTS if own != slot)) in there.folders():
                there.discard(old)
            there.tidy()

    places.agree(write)
    places.agree(end)
    for state in states:  # of other lines of places, too
        if isinstance(state, TrainState):
            Everyone(state.params.axis).exchange("whole", "save")


def load_parts(path: object, steps: Mapping[int, Spec | Loadable], count: int, options: Mapping[str, Any]) -> list[Any]:
    """The states of the components that are here, None of the others.

    Args:
        count: of all components.
        options: of `fz.load`; `like` is a list with one tree for each component.
    """
    folder = path_of(path, "load")
    found = read_together(folder)
    if found is None:
        raise FileNotFoundError(
            f"{folder}: got no checkpoint of a pipeline, expected one that fz.save has written, with its {TOGETHER}."
        )
    if len(found.tokens) != count:
        raise ValueError(
            f"{folder}: got a checkpoint of {len(found.tokens)} components, expected one of {count}, as many as the "
            "pipeline has."
        )
    like = options.get("like")
    if like is not None and not (isinstance(like, (list, tuple)) and len(like) == count):
        raise TypeError(f"fz.load: got like={type(like).__name__}, expected a list of {count} trees, one a component.")
    states: list[Any] = [None] * count
    for c, step in cast(Mapping[int, Any], steps).items():
        own = f"{folder}/{found.slot}/{c}"
        states[c] = load(own, step, **{**options, "like": None if like is None else like[c]})
        if read_manifest(own).token != found.tokens[c]:
            raise DamagedCheckpoint(
                f"{own}: got another checkpoint than the one that belongs to {folder}/{TOGETHER}: another save has "
                "written there. Load it again, or load an older checkpoint."
            )
    return states


class PerStage:
    """A value for each component of a pipeline, stages first: params, grads or moments.

    It is a sequence and a pytree, whose children are the components' own trees. None stands for one in another place.

    Attributes:
        parts: the components' values, in order.
    """

    __slots__ = ("parts", "places")

    def __init__(self, parts: Sequence[Any], places: AllPlaces) -> None:
        self.parts, self.places = tuple(parts), places

    def __getitem__(self, component: int) -> Any:
        return self.parts[component]

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.parts)

    def squares_by_leaf(self) -> list[torch.Tensor]:
        """The sum of squares of every leaf, stage by stage, over all places: 0-d float64 tensors."""
        here = {c: tree for c, tree in enumerate(self.parts) if tree is not None}
        every = self.places.of_all(*tried(lambda: {c: next(measured([x])) for c, x in here.items()}))
        return [square for c in sorted(every) for square in every[c].unbind()]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join('elsewhere' if own is None else repr(own) for own in self.parts)})"


class PipelineState(PerStage):
    """The states of a pipeline's components: `state[0]` is the first stage's. Immutable, and a pytree.

    Attributes:
        params: those of every component, a `PerStage`.
        grads: the same, or None if none are kept.
        moments: the same.
        step: the number of applied updates.
    """

    __slots__ = ()

    def _each(self, name: str) -> PerStage:
        return PerStage([None if own is None else getattr(own, name) for own in self.parts], self.places)

    @property
    def params(self) -> PerStage:
        return self._each("params")

    @property
    def grads(self) -> PerStage | None:
        kept = self._each("grads")
        return kept if any(own is not None for own in kept) else None

    @property
    def moments(self) -> PerStage:
        return self._each("moments")

    @property
    def step(self) -> int:
        return max(own.step for own in self.parts if own is not None)

    def replace(self, component: int, state: TrainState) -> PipelineState:
        """A new pipeline state, with another state for one component.

        Args:
            component: its number, stages first.
            state: its new state.
        """
        if not isinstance(component, int) or not 0 <= component < len(self) or self.parts[component] is None:
            raise ValueError(
                f"PipelineState.replace: got component={named(component)}, expected one of "
                f"{[i for i, own in enumerate(self.parts) if own is not None]}, whose states lie here."
            )
        return PipelineState([state if i == component else own for i, own in enumerate(self.parts)], self.places)

    def save_to(self, path: str, extra: object) -> None:
        """Writes a checkpoint of all components. Use `fz.save(path, state)`."""
        save_parts(path, self.parts, extra, self.places)


def _flatten(node: PerStage) -> tuple[tuple[object, ...], tuple[tuple[bool, ...], pytree.Unseen]]:
    # torch's pytrees would take None for a leaf
    here = tuple(own is not None for own in node.parts)
    return tuple(own for own in node.parts if own is not None), (here, pytree.Unseen(node.places))


def _unflatten(kind: type[PerStage], metadata: Any, children: tuple[Any, ...]) -> Any:
    (here, unseen), left = metadata, iter(children)
    return kind([next(left) if is_here else None for is_here in here], unseen.value)


pytree.register(PerStage, _flatten, lambda here, children: _unflatten(PerStage, here, children))
pytree.register(PipelineState, _flatten, lambda here, children: _unflatten(PipelineState, here, children))
