"""What a pipeline asks of a component, a step in this process or on ranks of its own; and the update of all as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch

from fzero.base import private
from fzero.base.arguments import as_float64, wrong
from fzero.base.follow import root
from fzero.base.rebound import tensors_held
from fzero.components.call import Call
from fzero.components.parts import AllPlaces, PerStage, PipelineState, tried
from fzero.components.remote.component import RemoteComponent, fetch
from fzero.components.remote.handle import RemoteState, RemoteTree, squares_on
from fzero.components.remote.pullback import RemotePasses
from fzero.engine.carry import refuse_carry
from fzero.engine.passes import Passes
from fzero.schedules.task import Kind, Schedule, Task
from fzero.schedules.timeline import Timeline
from fzero.state.check_state import check_grads, check_optimizer, check_same_optimizer, check_state
from fzero.state.checks import can_follow_here, constants, goes_on, refuse_captured
from fzero.state.gather import sum_by_leaf
from fzero.state.metrics import Metrics
from fzero.state.squares import LeafSquares, over_ranks, squares_of
from fzero.table.microbatch import Microbatches
from fzero.table.spec import Spec
from fzero.update.update import apply_update, known_metrics, with_kept

State = Any  # a TrainState, or a handle of one
Grads = Any  # a Sharded, or a handle of one
Updated = tuple[State, dict[str, Any]]  # the next state, and the metrics
KINDS = {
    ("pass_forward", ""): Kind.FORWARD,
    ("pass_pull", "both"): Kind.BACKWARD,
    ("pass_pull", "inputs"): Kind.INPUTS,
    ("pass_params", ""): Kind.PARAMS,
}


class Weighed(NamedTuple):
    """Grads, with those that the state keeps, and their squares."""

    grads: Grads
    # the sum of squares of each leaf, over all shards, float64: [leaves]; of a component on ranks of its own a handle
    by_leaf: Any
    own: LeafSquares  # those of this rank's parts
    metrics: Mapping[str, object]  # of its update that are known before it: "lr", the loss scale


class LocalStage:
    """A step in this process, with what a pipeline asks of a stage."""

    distant = False

    def __init__(self, step: Any, micro: Microbatches) -> None:
        self._in_parts = dataclasses.replace(step, microbatches=micro)
        self.step, self.has_aux = step, step.has_aux

    def init(self, params: object, seed: int, sync: bool) -> State:
        return self.step.init(params, seed, sync)

    def check(self, state: State, who: str) -> None:
        check_state(self.step, state, who)

    def check_step(self, state: State) -> None:
        check_optimizer(self.step, state)
        check_same_optimizer("pipeline", self.step.optimizer, state.params)

    def check_captured(self, who: str) -> None:
        refuse_captured(who, self.step.fn)

    def follows(self, state: State, trees: object) -> bool:
        return can_follow_here(self.step, state, trees)

    def check_grads(self, state: State, grads: object, argument: str) -> None:
        check_grads(self.step, state, grads, argument)

    def passes(self, state: State, count: int, rng: int, at_once: bool) -> Passes:
        return Passes(self._in_parts, state, count, rng, at_once)

    def weighed(self, state: State, grads: Grads) -> Weighed:
        grads = with_kept(state, grads)
        squares = squares_of(grads)
        return Weighed(grads, over_ranks(squares, grads), squares, known_metrics(self.step, state))

    def update(self, state: State, weighed: Weighed, norm: object) -> Updated:
        return apply_update(self.step, state, weighed.grads, norm, (weighed.by_leaf.sum(), weighed.own))

    def add_grads(self, state: State, grads: Grads) -> State:
        return self.step.add_grads(state, grads)

    def spans(self, stage: int) -> None:
        return None  # whoever runs it notes when


class DistantStage:
    """A component on ranks of its own, whose values are handles."""

    distant = True

    def __init__(self, component: RemoteComponent) -> None:
        self.component, self.has_aux = component, False

    def init(self, params: object, seed: int, sync: bool) -> State:
        if params is not None:
            raise TypeError(
                f"pipeline.init: got params of {self.component.name!r}, expected None: what `build` returned on its "
                "ranks are the params of a component on ranks of its own."
            )
        return self.component.init(seed)

    def check(self, state: State, who: str) -> None:
        self.component._need_state(state, who)

    def check_step(self, state: State) -> None:
        pass  # its ranks do

    def check_captured(self, who: str) -> None:
        pass  # its function closes over nothing of this process

    def follows(self, state: State, trees: object) -> bool:
        return False

    def check_grads(self, state: RemoteState, grads: object, argument: str) -> None:
        self.component._need_grads(grads, argument)

    def passes(self, state: RemoteState, count: int, rng: int, at_once: bool) -> RemotePasses:
        return self.component.passes(state, count, rng, at_once)

    def weighed(self, state: RemoteState, grads: RemoteTree) -> Weighed:
        return Weighed(grads, squares_on(grads, state), LeafSquares.joined([]), {})

    def update(self, state: RemoteState, weighed: Weighed, norm: object) -> Updated:
        return self.component.update(state, weighed.grads, norm)

    def add_grads(self, state: RemoteState, grads: RemoteTree) -> State:
        return self.component.add_grads(state, grads)

    def spans(self, stage: int) -> list[tuple[Task, float, float]]:
        """When the tasks of this stage ran, since this was last asked for."""
        out = []
        for span in self.component.spans():
            kind = KINDS.get((span.verb, span.half))
            if kind is not None:
                out.append((Task(kind, stage, span.microbatch), span.start, span.end))
        return out


Stage = LocalStage | DistantStage


def stages_of(steps: Sequence[Spec | RemoteComponent], micro: Microbatches) -> list[Stage]:
    """The components of a pipeline."""
    return [DistantStage(own) if isinstance(own, RemoteComponent) else LocalStage(own, micro) for own in steps]


def timeline_of(call: Call, stages: Sequence[Stage], schedule: Schedule) -> Timeline:
    """When the tasks of a call began and ended, in all places."""
    own = call.spans
    if call.line is None:
        for stage in range(schedule.stages):
            found = stages[stage].spans(stage)
            if found is not None:  # its own ranks know better than who has called them
                own = [span for span in own if span[0].stage != stage] + found
        return Timeline([(schedule.place_of(task.stage), task, start, end) for task, start, end in own], "measured")
    call.line.begin_call("a timeline")
    said = call.agreed([(list(task), start, end) for task, start, end in own])
    spans = [(place, Task(*task), *times) for place, rank in enumerate(call.line.ranks) for task, *times in said[rank]]
    return Timeline(spans, "measured")


def init_stage(c: int, stage: Stage, params: object, seed: int, sync: bool) -> State:
    """The state of component `c`; an error says which one it is."""
    try:
        return stage.init(params, seed, sync)
    except (TypeError, ValueError) as error:
        error.add_note(
            f"This is params[{c}] of pipeline.init, for steps[{c}]. Every component needs at least one leaf: join a "
            "stage without params to the one before it."
        )
        raise


def need_stages(steps: Sequence[object], schedule: Schedule, grouped: bool, weighted: bool) -> None:
    """Refuses what is no component, or none that can be a stage.

    Args:
        grouped: whether places are ranks of a process group.
        weighted: whether microbatches have weights.
    """
    for c, step in enumerate(steps):
        if isinstance(step, RemoteComponent):
            if weighted:
                raise ValueError(
                    f"pipeline: got weights= and steps[{c}], a component on ranks of its own, expected one of them: "
                    "its ranks are not told which microbatches do not count. Return the loss as a sum and a count, "
                    "with a dim, and give cotangent=; or make the stages steps."
                )
            if grouped:
                raise ValueError(
                    f"pipeline: got steps[{c}], a component on ranks of its own, and groups, expected groups=None: "
                    "places that are ranks of a process group have steps. Drive all stages from one process."
                )
            continue
        if not isinstance(step, Spec):
            raise wrong("pipeline", f"steps[{c}]", step, "a step, such as fz.train_step makes, or what fz.remote made")
        if step.microbatches.count > 1 or step.microbatches.weights is not None:
            raise ValueError(
                f"pipeline: got steps[{c}] with fz.accumulate(..., {step.microbatches.count}), expected none: the "
                f"schedule says how many microbatches there are, {schedule.microbatches}, and fz.pipeline(..., "
                "weights=...) what they count. Leave accumulate out."
            )
        refuse_carry(step, f"pipeline: steps[{c}]")
        if step.has_aux and c != schedule.stages - 1:
            raise ValueError(
                f"pipeline: got steps[{c}] with has_aux=True, expected that of the last stage alone, "
                f"{schedule.stages - 1}. Return what it has to say as an output that the next stage hands on."
            )


def _may_follow(stages: Mapping[int, Stage], state: PipelineState, trees: object) -> bool:
    return all(stage.follows(state[c], trees) for c, stage in stages.items())


def goes_on_through(
    stages: Mapping[int, Stage], steps: Sequence[object], state: PipelineState, trees: Sequence[object]
) -> bool:
    """Tells whether a transform goes on through components, by their state, some trees, or their optimizers."""
    held = [tensors_held(step.optimizer) for step in steps if isinstance(step, Spec)]
    return _may_follow(stages, state, trees) and goes_on(state, held, *trees)


def constants_of(
    stages: Mapping[int, Stage], alone: bool, who: str, state: PipelineState, arguments: Mapping[str, object]
) -> list[Any]:
    """State and arguments: as they are where a transform may go on through all components, otherwise as constants.

    Args:
        alone: whether all components run in this place.
    """
    if alone and _may_follow(stages, state, tuple(arguments.values())):
        return [state, *arguments.values()]
    own = constants(who, state=state, **arguments)
    for stage in stages.values():
        stage.check_captured(who)
    return own


def updated(
    stages: Mapping[int, Stage],
    state: PipelineState,
    grads: PerStage,
    grad_norm: object,
    places: AllPlaces,
) -> tuple[PipelineState, Metrics]:
    """The next states and the metrics, of the stages that run in this place."""
    weighed: dict[int, Weighed] = {}

    def weigh() -> dict[int, tuple[Any, Mapping[str, object], int]]:
        weighed.update({c: stage.weighed(state[c], grads[c]) for c, stage in stages.items()})
        count = lambda c: -1 if stages[c].distant else state[c].step
        return {c: (fetch(weight.by_leaf), weight.metrics, count(c)) for c, weight in weighed.items()}

    said = places.of_all(*tried(weigh))
    every = {c: by_leaf for c, (by_leaf, *_) in said.items()}
    counts = {c: count for c, (_, _, count) in said.items() if count >= 0}
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"pipeline: the components' states are after {counts} updates, by component; expected the same number of "
            "all. Go on from states that one call has returned."
        )
    norm = root(sum_by_leaf([x for c in sorted(every) for x in every[c].unbind()]))
    # one that is not finite skips all, whatever they are to be clipped by
    clip = norm if grad_norm is None else _chosen(norm, grad_norm)
    # all have the next state, or none
    made = places.agree(lambda: {c: stage.update(state[c], weighed[c], clip) for c, stage in stages.items()})
    new, found = ({c: own[i] for c, own in made.items()} for i in range(2))
    skipped = next(iter(found.values()))["skipped"]  # which all do, or none
    elsewhere = {c: {**known, "skipped": skipped} for c, (_, known, _) in said.items() if c not in found}
    metrics = {**_metrics(dict(sorted({**fetch(found), **elsewhere}.items()))), "grad_norm": norm}
    return PipelineState([new.get(c) for c in range(len(state))], places), cast(Metrics, metrics)


def _chosen(norm: torch.Tensor, given: object) -> object:
    """The norm that is given, where the components' own one is finite."""
    if private.is_mapped(norm):
        return torch.where(torch.isfinite(norm), as_float64(given), norm)
    return given if bool(torch.isfinite(norm)) else norm


def _alike(value: object, first: object) -> bool:
    """Tells whether a metric is the same in two components, and for all members of a map."""
    if not (isinstance(value, torch.Tensor) and isinstance(first, torch.Tensor)):
        return bool(value == first)
    with private.below_transforms():
        return bool((private.unwrapped(value) == private.unwrapped(first)).all())


def _metrics(found: Mapping[int, Mapping[str, object]]) -> dict[str, object]:
    """The components' metrics by name; those that differ between them with the component's number."""
    out: dict[str, object] = {}
    for name in dict.fromkeys(name for own in found.values() for name in own if name != "grad_norm"):
        values = {c: own[name] for c, own in found.items() if name in own}
        first = next(iter(values.values()))
        alike = all(_alike(value, first) for value in values.values())
        out |= {name: first} if alike else {f"{name}.{c}": value for c, value in values.items()}
    return out
