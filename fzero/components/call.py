"""Call: one run of a pipeline by its schedule, and what all places know of it at its end."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from fzero.base import private, pytree
from fzero.components.flow import Flow, StagePasses
from fzero.components.line import Line, shapes_of
from fzero.components.parts import AllPlaces, PerStage
from fzero.components.remote.component import fetch
from fzero.components.wiring import Wiring, default_inputs
from fzero.engine.batch import by_input
from fzero.engine.weighing import counted, own_weights, share
from fzero.schedules.check import begun_by
from fzero.schedules.task import Kind, Schedule, Task
from fzero.state.checks import constants
from fzero.state.train_state import TrainState
from fzero.table.counting import Counts
from fzero.table.microbatch import Microbatches

Pieces = Callable[[int], object]
T = TypeVar("T")


def goes_forward(task: Task) -> bool:
    """Tells whether a task is one of the forward, or a message of it."""
    if task.peer is None:
        return task.kind is Kind.FORWARD
    return (task.peer > task.stage) is (task.kind is Kind.SEND)


class Call:
    """One run of a pipeline: its forward and backward tasks, apart or in one go.

    Args:
        tasks: of this place, in order; messages too where there are other places.
        places: of all components; its line is this rank's place, None where all stages are driven from here.
        inputs: of the pipeline.
        records: whether to note when each task began and ended, in `spans`.
        last: the state of the last stage, where that runs here.

    Attributes:
        counts: what microbatches count, once they run.
    """

    def __init__(
        self,
        wires: Wiring,
        micro: Microbatches,
        tasks: Sequence[Task],
        places: AllPlaces,
        passes: Mapping[int, StagePasses],
        inputs: Sequence[object],
        wanted: Iterable[int] | None,
        records: bool = False,
        keep: Callable[[int, object], object] = lambda _, output: output,
        last: TrainState | None = None,
    ) -> None:
        self._tasks = tasks
        self._error: BaseException | None = None
        self._rests = collections.deque[tuple[Task, Callable[[], None]]]()  # of backward tasks, in their order
        self._alive = 0  # pullbacks
        self.counts = Counts()
        parts: Sequence[Sequence[object]] = ()
        try:
            wires = default_inputs(wires, len(inputs))
            if places.line is None:
                parts, self.counts = counted(micro, last, inputs)
            else:
                if micro.count > 1 and (sizes := micro.examples(inputs)) is not None:
                    self.counts.split(sizes)
                parts = micro.split(inputs)
        except Exception as caught:  # perhaps of this rank's inputs alone
            if places.line is None:
                raise
            self._error = caught
        self.flow, self._parts, self._last = Flow(wires, passes, parts, wanted, keep), parts, last
        for own in passes.values():
            own.counts = self.counts
        self.wires, self.passes, self.micro, self.line, self._places = wires, passes, micro, places.line, places
        self._records = records
        self.spans: list[tuple[Task, float, float]] = []
        self._pulled = False  # whether a pullback was begun
        self.is_intact = True  # whether it can be pulled back from the beginning
        numbers = [number for number, tree in enumerate(inputs) for _ in pytree.flatten(tree)[0]]
        self._differentiated = {i for i, number in enumerate(numbers) if number in (wanted or ())}
        self.has_last = wires.stages - 1 in passes

    # ---- tasks

    def run(self, verb: str, chosen: Callable[[Task], bool], pieces: Pieces, retain_graph: bool = False) -> None:
        """Does the chosen tasks.

        Args:
            verb: the call that they are of.
            pieces: gives the cotangent of the last stage's outputs of a microbatch, when it is needed.
        """
        tasks = [task for task in self._tasks if chosen(task)]
        if self.line is not None and self.micro.weights is not None and any(map(goes_forward, tasks)):
            self._weigh(verb, self.line)
        if any(not goes_forward(task) for task in tasks):
            if self._pulled:
                self.flow.begin_again()
                self._rests.clear()  # of one that was given up
            self._pulled = True
        if self.line is not None:
            self.line.begin_call(verb)
        for place, task in enumerate(tasks):
            if self._error is not None:
                break
            self._go_on(self._room(task))
            leaves = place + 1 < len(tasks) and tasks[place + 1].kind is Kind.SEND
            begun = time.monotonic()
            if self.line is None:
                self._do(task, pieces, retain_graph, False)
            else:
                self._do_or_note(task, pieces, retain_graph, self.line, leaves)
            if self._records:
                self.spans.append((task, begun, time.monotonic()))
            self._alive += begun_by(task)
        self._go_on(0)
        if any(not goes_forward(task) for task in tasks) and self._error is None:
            try:
                for own in self.passes.values():
                    own.reduce()
            except Exception as error:
                if self.line is None:
                    raise
                self._error = error

    def _weigh(self, verb: str, line: Line) -> None:
        """Notes what microbatches count; where they have no weights on one rank, all are told why."""
        line.begin_call(verb)
        own: list[float] | None = None
        try:
            own = own_weights(self.micro, self._parts) if self._error is None else None
        except Exception as error:
            self._error = error
        self.agreed(None)
        assert own is not None
        if self._last is not None:
            share(self.counts, self._last.params.axis, self._last.params.device, own)
        else:  # where nothing is averaged, and all that matters is which of them count
            self.counts.weigh(own, [1.0] * len(own))

    def _room(self, task: Task) -> int:
        """How many backward tasks whose cotangents have left may wait with their gradients while a task is done.

        As many as there are places behind which others wait for cotangents, where this place has no more alive with
        them than the schedule has at some place.
        """
        if self.line is None or task.kind in (Kind.INPUTS, Kind.PARAMS):
            return 0
        if task.kind is Kind.SEND:
            return len(self._rests)
        return min(self.line.most_alive - self._alive - (task.kind is Kind.FORWARD), len(self.line.ranks) - 1)

    def _go_on(self, room: int) -> None:
        """Ends backward tasks whose cotangents have left, the first ones first, until few enough wait."""
        while len(self._rests) > max(room, 0):
            task, rest = self._rests.popleft()
            if self._error is not None:
                continue
            begun = time.monotonic()
            try:
                rest()
            except Exception as error:
                self._error = error
            if self._records:
                self.spans.append((task, begun, time.monotonic()))

    def _do_or_note(self, task: Task, pieces: Pieces, retain_graph: bool, line: Line, leaves: bool) -> None:
        """Does a task, or sends or receives a message; an error is told to all at the end of the call."""
        try:
            if task.kind is Kind.RECEIVE:
                self._arrived(task, line.receive(task))
            elif task.kind is Kind.SEND:
                line.send(task, self._leaving(task))
            else:
                self._do(task, pieces, retain_graph, leaves)
        except Exception as error:
            self._error = error

    def _do(self, task: Task, pieces: Pieces, retain_graph: bool, leaves: bool) -> None:
        """Does a task.

        Args:
            leaves: whether a message follows: one of cotangents leaves before the gradients are computed, where it can.
        """
        stage, microbatch, last = task.stage, task.microbatch, task.stage == self.wires.stages - 1
        if task.kind is Kind.FORWARD:
            self.flow.forward(stage, microbatch)
        elif task.kind is Kind.PARAMS:
            self.flow.params(stage, microbatch)
        else:
            cotangent = pieces(microbatch) if last else None
            if task.kind is Kind.INPUTS:
                self.flow.inputs(stage, microbatch, cotangent, retain_graph)
            elif leaves and not retain_graph:
                self._rests.append((task, self.flow.early(stage, microbatch, cotangent)))
            else:
                self.flow.backward(stage, microbatch, cotangent, retain_graph)
            self.is_intact = self.is_intact and retain_graph

    def _leaving(self, task: Task) -> tuple[object, ...]:
        """The values that a message carries."""
        assert task.peer is not None
        if task.peer > task.stage:
            wires = self.wires.between(task.stage, task.peer)
            return tuple(self.flow.take(wire, task.microbatch, task.peer) for wire in wires)
        wires = self.wires.between(task.peer, task.stage)
        return tuple(self.flow.give_back(wire, task.microbatch, task.stage) for wire in wires)

    def _arrived(self, task: Task, values: Sequence[object]) -> None:
        assert task.peer is not None
        if task.peer < task.stage:
            wires = self.wires.between(task.peer, task.stage)
            for wire, value in zip(wires, values, strict=True):
                self.flow.arrived(wire, task.microbatch, value, [task.stage])
            return
        for wire, value in zip(self.wires.between(task.stage, task.peer), values, strict=True):
            self.flow.came_back(wire, task.microbatch, task.peer, value)

    # ---- what all places know at the end

    def agreed(self, own: object) -> list[Any]:
        """What every rank says, in rank order; raises on all of them if a task has failed on one."""
        assert self.line is not None
        error, self._error = self._error, None
        return self.line.exchange(own, error)

    def known(self, make: Callable[[], object]) -> Any:
        """What the place of the last stage makes of this run; in the other places with placeholders for its tensors."""
        if self.line is None:
            return make()
        own: object = None
        if self.has_last and self._error is None:
            try:
                own = make()
            except Exception as error:
                self._error = error
        last = self.wires.stages - 1
        said = self.agreed((shapes_of(own) if self.has_last else None, sum(self.counts.sizes or ())))
        self.line.need_same([examples for _, examples in said], last)
        return own if self.has_last else said[self.line.rank_of(last)][0]

    def grads(self, times: float) -> PerStage:
        """The gradients of the components here, over `times`."""
        count = len(self.wires.home)
        return PerStage([self.passes[c].grads(times) if c in self.passes else None for c in range(count)], self._places)

    def merged(self, found: Mapping[int, object], what: str) -> object:
        """The last stage's outputs, or aux, of all microbatches."""
        factors = self.counts.of_rank if what == "aux" else self.counts.factors
        return self.micro.merge([fetch(found[i]) for i in range(self.micro.count)], what, factors)

    def input_cotangents(self, inputs: Sequence[object], times: float) -> tuple[object, ...]:
        """One for each of the pipeline's inputs, None where it was not differentiated."""
        flat = [
            [fetch(x) for number in range(len(inputs)) for x in self.flow.of_inputs(number, i)]
            for i in range(self.micro.count)
        ]
        whole = self.micro.merge_inputs(inputs, flat)
        if times != 1.0:
            whole = [None if x is None else x / times for x in whole]
        if self.line is not None:
            leaves = pytree.flatten(tuple(inputs))[0]
            for place in self._differentiated:  # those of stages at other places
                if whole[place] is None and isinstance(leaves[place], torch.Tensor) and pytree.is_real(leaves[place]):
                    whole[place] = torch.empty_like(leaves[place], device="meta")
        return by_input(pytree.flatten(tuple(inputs))[1], whole)


def told(line: Line | None, verb: str, check: Callable[[], T]) -> T:
    """`check()`, which looks at the arguments of a call; where it fails on one rank, it fails on all."""
    try:
        return check()
    except Exception as error:
        if line is not None:
            with private.below_transforms(), torch.no_grad():  # which may be what is wrong
                line.begin_call(verb)
                line.exchange(None, error)
        raise


def need_constants(who: str, **arguments: object) -> None:
    """Refuses what somebody else differentiates: derivatives do not go from one place to another by themselves."""
    constants(who, **arguments)
    for argument, tree in arguments.items():
        if torch.is_grad_enabled() and any(
            isinstance(x, torch.Tensor) and x.requires_grad for x in pytree.leaves(tree)
        ):
            raise TypeError(
                f"{who}: got {argument} that plain autograd differentiates, expected tensors that are constants to it: "
                "no derivative goes from one place of a pipeline to another but by its pullback. Pass x.detach()."
            )


def need_one_place(wires: Wiring, schedule: Schedule, inputs: Sequence[object], chosen: Iterable[int]) -> None:
    """Refuses to differentiate an input that stages at several places take, each with a part of its cotangent."""
    wires = default_inputs(wires, len(inputs))
    for number in chosen:
        real = any(isinstance(x, torch.Tensor) and pytree.is_real(x) for x in pytree.leaves(inputs[number]))
        places = {schedule.place_of(stage) for stage, numbers in wires.inputs if number in numbers}
        if real and len(places) > 1:
            raise ValueError(
                f"pipeline.vjp: input {number} is taken by stages at places {sorted(places)}, and is to be "
                "differentiated; expected one place, as its cotangent is the sum of theirs. Leave it out of argnums, "
                "or let the first of them hand it on."
            )
