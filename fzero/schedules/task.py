"""Tasks, and a schedule: for each place a tuple of them, in order."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fzero.base.arguments import need_int, need_str, wrong

Edge = tuple[int, int]
_WRITTEN = re.compile(r"([FBIW])(\d+)\.(\d+)|(S)(\d+)\.(\d+)>(\d+)|(R)(\d+)\.(\d+)<(\d+)")
_EDGES = "pairs of ints (source stage, target stage) or None"


class Kind(enum.Enum):
    """What a task does with one microbatch of one stage. Its value is the letter that it is written with.

    `BACKWARD` is the whole pullback. `INPUTS` and `PARAMS` are its halves: cotangents of the stage's inputs, and
    gradients of its params.

    Example:
        >>> fz.schedules.Kind("W")
        <Kind.PARAMS: 'W'>
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUTS = "I"
    PARAMS = "W"
    SEND = "S"
    RECEIVE = "R"


COTANGENT = (Kind.BACKWARD, Kind.INPUTS)  # make the cotangents of a stage's inputs
MESSAGES = (Kind.SEND, Kind.RECEIVE)


class Task(NamedTuple):
    """One thing that a place does: a computation for one microbatch of a stage, or a message.

    A SEND of stage s to a later stage carries the output of s. To an earlier stage it carries a cotangent. A RECEIVE on
    stage s from stage p is the other end of the SEND of p to s.

    Attributes:
        kind: what is done.
        stage: number of the stage, from 0.
        microbatch: number of the microbatch, from 0.
        peer: for a message, the stage at its other end; otherwise None.

    Example:
        >>> Task = fz.schedules.Task
        >>> Task(fz.schedules.Kind.FORWARD, stage=0, microbatch=3)
        F0.3
        >>> Task.parse("R1.3<0") == Task(fz.schedules.Kind.RECEIVE, 1, 3, peer=0)
        True
    """

    kind: Kind
    stage: int
    microbatch: int
    peer: int | None = None

    def __repr__(self) -> str:
        other = "" if self.peer is None else f"{'>' if self.kind is Kind.SEND else '<'}{self.peer}"
        return f"{self.kind.value}{self.stage}.{self.microbatch}{other}"

    @staticmethod
    def parse(text: str) -> Task:
        """Reads a task as its repr writes it: "F0.3" (stage 0, microbatch 3), "S0.3>1", "R1.3<0".

        Raises:
            ValueError: not such a text.
        """
        need_str(text, "Task.parse", "text", "a str such as 'F0.3'")
        if not (found := _WRITTEN.fullmatch(text)):
            raise ValueError(
                f"Task.parse: got {text!r}, expected a letter of F, B, I, W with stage.microbatch, such as 'F0.3', or "
                "'S0.3>1' for a send of stage 0 to stage 1, or 'R1.3<0' for its receive."
            )
        letter, *numbers = [group for group in found.groups() if group is not None]
        return Task(Kind(letter), *map(int, numbers))

    @property
    def is_message(self) -> bool:
        """True for a SEND or a RECEIVE."""
        return self.kind in MESSAGES

    @property
    def other_end(self) -> Task:
        """The RECEIVE of a SEND, or the SEND of a RECEIVE."""
        assert self.peer is not None
        kind = Kind.RECEIVE if self.kind is Kind.SEND else Kind.SEND
        return Task(kind, self.peer, self.microbatch, self.stage)


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule: for each place, its tasks in order. `print` it for a table.

    A place does one task at a time: a process, a group of ranks, or the host of a remote component. It has one or more
    stages; all tasks of a stage are at one place. Messages follow from the tasks: `with_messages` adds them.
    `fz.schedules.check` says whether it can run.

    Args:
        name: for error messages and pictures.
        stages: number of stages. The outputs of each are inputs of the next.
        microbatches: number of parts of the batch.
        places: for each place, its tasks in order.

    Raises:
        TypeError: not an int, or not a Task.
        ValueError: a task has a stage or microbatch out of range, or a peer without being a message.

    Example:
        >>> tasks = [["F0.0", "B0.0"], ["F1.0", "B1.0"]]
        >>> places = [[fz.schedules.Task.parse(text) for text in place] for place in tasks]
        >>> schedule = fz.schedules.Schedule("mine", stages=2, microbatches=1, places=places)
        >>> print(schedule.with_messages())
        mine: stages 2, microbatches 1, places 2, messages 2
        place 0 | stage 0 | F0.0    S0.0>1  R0.0<1  B0.0
        place 1 | stage 1 | R1.0<0  F1.0    B1.0    S1.0>0
    """

    name: str
    stages: int
    microbatches: int
    places: tuple[tuple[Task, ...], ...]

    def __init__(self, name: str, stages: int, microbatches: int, places: Iterable[Iterable[Task]]) -> None:
        need_str(name, "Schedule", "name", "a str")
        need_counts("Schedule", stages, microbatches)
        if not isinstance(places, Iterable) or not all(isinstance(tasks, Iterable) for tasks in places):
            raise wrong("Schedule", "places", places, "a tuple of tasks for each place")
        own = tuple(tuple(tasks) for tasks in places)
        for field, value in (("name", name), ("stages", stages), ("microbatches", microbatches), ("places", own)):
            object.__setattr__(self, field, value)
        for place, tasks in enumerate(own):
            for at, task in enumerate(tasks):
                self._need_task(place, at, task)

    def _need_task(self, place: int, at: int, task: object) -> None:
        which = f"task {at} of place {place}"
        if not isinstance(task, Task) or not isinstance(task.kind, Kind):
            raise wrong("Schedule", which, task, "a Task, such as Task.parse('F0.3') makes")
        for field, count in (("stage", self.stages), ("microbatch", self.microbatches), ("peer", self.stages)):
            if field == "peer" and not task.is_message:
                if task.peer is not None:
                    raise ValueError(
                        f"Schedule: got {task!r} as {which} with peer={task.peer}; only messages have one."
                    )
                continue
            number = need_int(getattr(task, field), "Schedule", f"{field} of {which}")
            if not 0 <= number < count:
                raise ValueError(
                    f"Schedule: got {task!r} as {which}, expected a {field} from 0 to {count - 1}: there are {count}."
                )
        if task.peer == task.stage:
            raise ValueError(f"Schedule: got {task!r} as {which}, a message from stage {task.stage} to itself.")

    @property
    def has_messages(self) -> bool:
        """True if the schedule has its messages."""
        return any(task.is_message for tasks in self.places for task in tasks)

    @property
    def computes(self) -> Schedule:
        """The schedule without messages."""
        return replace(self, places=[[task for task in tasks if not task.is_message] for tasks in self.places])

    @property
    def homes(self) -> tuple[int, ...]:
        """The place of every stage.

        Raises:
            ValueError: a stage without tasks, or with tasks at two places.
        """
        found: dict[int, tuple[int, Task]] = {}
        for place, tasks in enumerate(self.places):
            for task in tasks:
                first, other = found.setdefault(task.stage, (place, task))
                if first != place:
                    raise ValueError(
                        f"schedule {self.name!r}: stage {task.stage} has {other!r} at place {first} and {task!r} at "
                        f"place {place}, expected all its tasks at one place, where its params lie; move one of them."
                    )
        if missing := [stage for stage in range(self.stages) if stage not in found]:
            raise ValueError(f"schedule {self.name!r}: stage {missing[0]} has no tasks, expected some of each.")
        return tuple(found[stage][0] for stage in range(self.stages))

    def place_of(self, stage: int) -> int:
        """The place of a stage.

        Raises:
            ValueError: there is no such stage, or it has no tasks, or tasks at two places.
        """
        if not 0 <= need_int(stage, "Schedule.place_of", "stage") < self.stages:
            raise ValueError(f"Schedule.place_of: got stage={stage}, expected one from 0 to {self.stages - 1}.")
        return self.homes[stage]

    def stages_of(self, place: int) -> tuple[int, ...]:
        """The stages with tasks at a place, ascending."""
        return tuple(sorted({task.stage for task in self.places[place]}))

    def edges(self, more: Iterable[Edge] | None = None) -> tuple[Edge, ...]:
        """Pairs (source, target) of stages where the target uses an output of the source: neighbours, and `more`.

        Raises:
            TypeError: not pairs of ints.
            ValueError: the target is not behind its source, or there is no such stage.
        """
        found = {(stage, stage + 1) for stage in range(self.stages - 1)}
        if more is not None and not isinstance(more, Iterable):
            raise wrong("schedule", "edges", more, _EDGES)
        for edge in more or ():
            if not isinstance(edge, Sequence) or len(edge) != 2:
                raise wrong("schedule", "edges", edge, _EDGES)
            source, target = (need_int(stage, "schedule", "a stage of edges", _EDGES) for stage in edge)
            if not 0 <= source < target < self.stages:
                raise ValueError(
                    f"schedule {self.name!r}: got the edge ({source}, {target}), expected a stage and a later one, "
                    f"from 0 to {self.stages - 1}."
                )
            found.add((source, target))
        return tuple(sorted(found))

    def with_messages(self, edges: Iterable[Edge] | None = None) -> Schedule:
        """Adds the messages: each send directly after what makes its value, each receive before what needs it.

        Stages at one place send each other nothing. A schedule that has messages is returned as it is.

        Args:
            edges: pairs (source, target) of stages, beside neighbours, for outputs that skip stages. Their cotangents
                go the other way.

        Raises:
            TypeError: not pairs of ints.
            ValueError: an edge does not lead to a later stage, or a stage has no tasks, or tasks at two places.
        """
        pairs = self.edges(edges)
        if self.has_messages:
            return self
        homes = self.homes
        crossing = [(source, target) for source, target in pairs if homes[source] != homes[target]]
        sources, targets = neighbours(self.stages, crossing)
        places: list[list[Task]] = []
        for tasks in self.places:
            own: list[Task] = []
            for task in tasks:
                # the nearest stage first: it waits for nothing else
                nearer, further = sources[task.stage][::-1], targets[task.stage]
                comes, goes = {Kind.FORWARD: (nearer, further), **dict.fromkeys(COTANGENT, (further, nearer))}.get(
                    task.kind, ((), ())
                )
                own += [Task(Kind.RECEIVE, task.stage, task.microbatch, peer) for peer in comes]
                own.append(task)
                own += [Task(Kind.SEND, task.stage, task.microbatch, peer) for peer in goes]
            places.append(own)
        return replace(self, places=places)

    def __str__(self) -> str:
        count = sum(task.kind is Kind.SEND for tasks in self.places for task in tasks)
        counts = f"stages {self.stages}, microbatches {self.microbatches}, places {len(self.places)}"
        wide = max((len(repr(task)) for tasks in self.places for task in tasks), default=0)
        stages = [", ".join(map(str, self.stages_of(place))) for place in range(len(self.places))]
        heads = [f"stage{'s' * (',' in own)} {own}" if own else "no stage" for own in stages]
        lines = [f"{self.name}: {counts}" + (f", messages {count}" if count else "")]
        for place, tasks in enumerate(self.places):
            head = f"place {place:<{len(str(len(heads) - 1))}} | {heads[place]:<{max(map(len, heads))}}"
            lines.append(f"{head} | {'  '.join(f'{task!r:<{wide}}' for task in tasks)}".rstrip())
        return "\n".join(lines)


def neighbours(stages: int, edges: Iterable[Edge]) -> tuple[list[list[int]], list[list[int]]]:
    """For each stage those that it takes something from, and those that take something from it, ascending."""
    sources: list[list[int]] = [[] for _ in range(stages)]
    targets: list[list[int]] = [[] for _ in range(stages)]
    for source, target in sorted(edges):
        sources[target].append(source)
        targets[source].append(target)
    return sources, targets


def need_counts(who: str, stages: int, microbatches: int) -> None:
    need_int(stages, who, "stages", least=1)
    need_int(microbatches, who, "microbatches", least=1)


def need_schedule(schedule: object, who: str) -> Schedule:
    if not isinstance(schedule, Schedule):
        raise wrong(who, "schedule", schedule, "an fz.schedules.Schedule, such as fz.schedules.gpipe(2, 4) makes")
    return schedule
