"""fz.schedules.check: proves that a schedule can run and computes everything once, or names what is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fzero.schedules.task import COTANGENT, Edge, Kind, Schedule, Task, need_schedule


@dataclass(frozen=True)
class Report:
    """What `fz.schedules.check` found about a schedule that can run.

    Attributes:
        alive: for each place, the most pullbacks that exist at once. A pullback exists from its FORWARD until its
            BACKWARD or PARAMS.
        messages: number of messages between places.
        waiting: for each stage, how many gradients of params wait at once, so that they are added in microbatch order.
            0 if they are computed in that order.
        order: all tasks, with messages, as (place, task), in an order in which they can run one after the other.
    """

    alive: tuple[int, ...]
    messages: int
    waiting: tuple[int, ...]
    order: tuple[tuple[int, Task], ...] = field(repr=False)

    def __str__(self) -> str:
        late = ", ".join(f"{count} of stage {stage}" for stage, count in enumerate(self.waiting) if count)
        order = f"that wait for earlier microbatches: {late}" if late else "in microbatch order"
        return (
            f"pullbacks alive at once, by place: {', '.join(map(str, self.alive))}; messages: {self.messages}; "
            f"gradients of params {order}"
        )


def check(schedule: Schedule, edges: Iterable[Edge] | None = None) -> Report:
    """Proves that a schedule computes everything once and cannot deadlock.

    - Every stage runs each microbatch forward once and backward once (whole, or inputs before params), in the order of
      the edges.
    - Between places, messages are those of `Schedule.with_messages`. Sends do not wait, receives do. There must be an
      order of all tasks in which every send comes before its receive.

    Args:
        schedule: without messages, or with those that `Schedule.with_messages` adds.
        edges: pairs (source, target) of stages, beside neighbours, for outputs that skip stages. None takes those of
            the schedule's messages.

    Returns:
        What exists at once, the number of messages, and an order.

    Raises:
        TypeError: not a schedule, or not pairs.
        ValueError: the schedule is wrong. The message names the first tasks, what was expected, and what to do.

    Example:
        >>> report = fz.schedules.check(fz.schedules.one_f_one_b(stages=3, microbatches=6))
        >>> print(report)
        pullbacks alive at once, by place: 3, 2, 1; messages: 24; gradients of params in microbatch order
        >>> report.order[:4]
        ((0, F0.0), (0, S0.0>1), (1, R1.0<0), (1, F1.0))
    """
    need_schedule(schedule, "check")
    if edges is None and schedule.has_messages:
        told = ((task.stage, task.peer) for tasks in schedule.places for task in tasks if task.peer is not None)
        edges = {(min(pair), max(pair)) for pair in told}
    pairs = schedule.edges(edges)
    bare = schedule.computes
    proof = _Proof(bare, bare.homes, _found(bare))
    proof.need_all()
    proof.need_order(pairs)
    full = bare.with_messages(pairs)
    if schedule.has_messages and schedule != full:
        raise ValueError(
            f"check: {schedule.name!r} has other messages than those that schedule.with_messages(edges) adds, expected "
            "these or none. Give it without them, schedule.computes, and say edges= where outputs skip stages."
        )
    return Report(
        alive=tuple(alive(tasks) for tasks in full.places),
        messages=sum(task.kind is Kind.SEND for tasks in full.places for task in tasks),
        waiting=tuple(_waiting(full.places[place], stage) for stage, place in enumerate(full.homes)),
        order=_order(full),
    )


def _found(schedule: Schedule) -> dict[Task, tuple[int, int]]:
    """Where each task stands: (place, how many before it)."""
    found: dict[Task, tuple[int, int]] = {}
    for place, tasks in enumerate(schedule.places):
        if not tasks:
            raise ValueError(f"check: place {place} of {schedule.name!r} has no tasks; leave it out.")
        for at, task in enumerate(tasks):
            if task in found:
                raise ValueError(
                    f"check: {schedule.name!r} has {task!r} twice at place {place}, as tasks {found[task][1]} and "
                    f"{at}, expected once; leave one out."
                )
            found[task] = place, at
    return found


@dataclass(frozen=True)
class _Proof:
    """A schedule, the place of each stage, and where each task stands."""

    schedule: Schedule
    homes: Sequence[int]
    found: dict[Task, tuple[int, int]]

    def back(self, stage: int, microbatch: int) -> Task:
        """What makes the cotangents of a stage's inputs."""
        whole, half = (Task(kind, stage, microbatch) for kind in COTANGENT)
        return whole if whole in self.found else half

    def need_all(self) -> None:
        """Every stage runs each microbatch once forward and once back."""
        for stage, place in enumerate(self.homes):
            for microbatch in range(self.schedule.microbatches):
                kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUTS, Kind.PARAMS)
                forward, whole, inputs, params = (Task(kind, stage, microbatch) for kind in kinds)
                halves = [half for half in (inputs, params) if half in self.found]
                if whole in self.found and halves:
                    raise ValueError(
                        f"check: {self.schedule.name!r} has {whole!r} and {halves[0]!r} at place {place}, expected "
                        f"{whole!r} alone, or {inputs!r} and {params!r}; leave out one or the other."
                    )
                for task in (forward, inputs, params) if halves else (forward, whole):
                    if task not in self.found:
                        raise ValueError(
                            f"check: {self.schedule.name!r} has no {task!r} at place {place}, expected it, as every "
                            f"stage runs each microbatch forward once, and back once, by {whole!r} or by {inputs!r} "
                            f"and {params!r}; put it in."
                        )

    def need_order(self, edges: Sequence[Edge]) -> None:
        """At each place: back after forward, and stages as the edges lead."""
        for microbatch in range(self.schedule.microbatches):
            for stage in range(self.schedule.stages):
                forward, back = Task(Kind.FORWARD, stage, microbatch), self.back(stage, microbatch)
                self._need_before(forward, back, "a pullback is there after its forward")
                if back.kind is Kind.INPUTS:
                    params = back._replace(kind=Kind.PARAMS)
                    self._need_before(back, params, "the params' gradients come from what the inputs' left")
            for source, target in edges:
                if self.homes[source] == self.homes[target]:
                    first, then = (Task(Kind.FORWARD, stage, microbatch) for stage in (source, target))
                    self._need_before(first, then, f"stage {target} takes what stage {source} makes")
                    first, then = (self.back(stage, microbatch) for stage in (target, source))
                    self._need_before(first, then, f"stage {source} takes the cotangent that stage {target} makes")

    def _need_before(self, first: Task, then: Task, why: str) -> None:
        (place, at), (_, later) = self.found[first], self.found[then]
        if at > later:
            raise ValueError(
                f"check: {self.schedule.name!r} has {then!r} before {first!r} at place {place}, as tasks {later} and "
                f"{at}, expected it behind, as {why}; move one of them."
            )


def _order(schedule: Schedule) -> tuple[tuple[int, Task], ...]:
    """All tasks in an order in which each can run; every place in turn computes once."""
    next_of = [0] * len(schedule.places)
    sent: set[Task] = set()
    order: list[tuple[int, Task]] = []
    while True:
        before = len(order)
        for place, tasks in enumerate(schedule.places):
            computed = False
            while next_of[place] < len(tasks):
                task = tasks[next_of[place]]
                if (computed and task.kind is not Kind.SEND) or (
                    task.kind is Kind.RECEIVE and task.other_end not in sent
                ):
                    break
                if task.kind is Kind.SEND:
                    sent.add(task)
                computed = computed or not task.is_message
                order.append((place, task))
                next_of[place] += 1
        if len(order) == before:
            break
    heads = {place: tasks[next_of[place]] for place, tasks in enumerate(schedule.places) if tasks[next_of[place] :]}
    if heads:
        waits = [f"place {place} waits at {task!r} for {task.other_end!r}" for place, task in heads.items()]
        raise ValueError(
            f"check: {schedule.name!r} stops after {len(order)} tasks, as places wait for each other: "
            f"{'; '.join(waits)}. Expected an order in which every send can come before its receive: move a task that "
            "makes what another place waits for before one that needs what its own place waits for."
        )
    return tuple(order)


def begun_by(task: Task) -> int:
    """How many more pullbacks are alive behind a task: 1 of a FORWARD, -1 of what ends one."""
    return (task.kind is Kind.FORWARD) - (task.kind in (Kind.BACKWARD, Kind.PARAMS))


def alive(tasks: Iterable[Task]) -> int:
    """The most pullbacks of a place at once."""
    own = most = 0
    for task in tasks:
        own += begun_by(task)
        most = max(most, own)
    return most


def _waiting(tasks: Iterable[Task], stage: int) -> int:
    """The most gradients of a stage's params that wait at once until all earlier microbatches were added."""
    due, held, most = 0, set[int](), 0
    for task in tasks:
        if task.stage == stage and task.kind in (Kind.BACKWARD, Kind.PARAMS):
            held.add(task.microbatch)
            while due in held:
                held.remove(due)
                due += 1
            most = max(most, len(held))
    return most
