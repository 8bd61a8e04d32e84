"""fz.pipeline: a component made of components, which run a batch by a schedule."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, cast

import torch

from fzero.base import private
from fzero.base.arguments import named, need_argnums, need_int, need_norm, wrong
from fzero.base.follow import below_unless, is_transformed
from fzero.components.call import Call, goes_forward, need_constants, need_one_place, told
from fzero.components.line import Line
from fzero.components.parts import ALL_KNOW, AllPlaces, PerStage, PipelineState, line_over, load_parts, need_groups
from fzero.components.pullback import Losses, PipelinePullback
from fzero.components.remote.component import RemoteComponent
from fzero.components.stages import (
    Stage,
    constants_of,
    goes_on_through,
    init_stage,
    need_stages,
    stages_of,
    timeline_of,
    updated,
)
from fzero.components.wiring import Number, Wiring, wiring
from fzero.schedules.check import check
from fzero.schedules.task import Schedule, Task
from fzero.schedules.timeline import Timeline
from fzero.state.beyond import here
from fzero.state.checks import constants, need_derivatives
from fzero.state.metrics import Metrics
from fzero.step import Step
from fzero.table.microbatch import Microbatches, need_in_dims, need_weights

SEEDS = 1_000_003  # between the seeds of stages, whose random numbers must differ


class Pipeline:
    """A component made of stages, which run each batch in microbatches. Made by `fz.pipeline`, used as a step is.

    Its states, params and grads have one entry for each component. Numbers are those of `fz.accumulate` over the
    stages' functions, one after the other.

    Attributes:
        steps: the components, stages first.
        schedule: who does what in which order.
    """

    def __init__(
        self,
        steps: Sequence[Step | RemoteComponent],
        schedule: Schedule,
        wires: Wiring,
        in_dims: int | tuple[int | None, ...] | None,
        groups: object,
        weights: Callable[..., object] | None,
    ) -> None:
        self.steps, self.schedule, self._wires, self._groups = tuple(steps), schedule, wires, groups
        self._micro = Microbatches(schedule.microbatches, in_dims, weights)
        self._stages, self._report = stages_of(steps, self._micro), check(schedule, wires.edges)

    def __repr__(self) -> str:
        return f"Pipeline({self.schedule.name}, {len(self.steps)} steps, {self._micro.count} microbatches)"

    # ---- places

    @cached_property
    def _places(self) -> AllPlaces:
        own = [step for step in self.steps if isinstance(step, Step)]  # all of them, where there are groups
        return AllPlaces(line_over(self._groups, self.schedule, own, self._wires), self._wires.home)

    @property
    def _line(self) -> Line | None:
        return self._places.line

    @cached_property
    def _tasks(self) -> tuple[Task, ...]:
        """What this place does, in order."""
        if self._line is not None:
            return self.schedule.with_messages(self._wires.edges).places[self._line.place]
        return tuple(task for _, task in self._report.order if task.peer is None)

    @cached_property
    def _here(self) -> tuple[int, ...]:
        """The components that run in this place."""
        line, home = self._line, self._wires.home
        every = range(len(self.steps))
        return tuple(c for c in every if line is None or self.schedule.place_of(home[c]) == line.place)

    @property
    def _last(self) -> int:
        return self.schedule.stages - 1

    # ---- verbs

    def init(self, params: Sequence[Any] | None = None, seed: int = 0, sync: bool = False) -> PipelineState:
        """Makes the states of all components.

        Args:
            params: a sequence with the params of each component, in the order of `steps`. Those that lie in other
                places may be None, and so may those of a component of `fz.remote`, which has its own.
            seed: seeds everything random in the run. Each component draws from a seed of its own.
            sync: as in `Step.init`.

        Raises:
            TypeError, ValueError: params of more or fewer components; and as `Step.init`.
        """
        own = self._places.agree(lambda: self._begun(params, seed, sync))
        return PipelineState([own.get(c) for c in range(len(self.steps))], self._places)

    def vjp(
        self, state: PipelineState, *inputs: object, argnums: int | Sequence[int] | None = None, rng: int = 0
    ) -> tuple[Any, PipelinePullback, *tuple[Any, ...]]:
        """The outputs of the last stage and their pullback: all forward tasks of the schedule.

        Args:
            state: a state of this pipeline.
            *inputs: this rank's share of the batch.
            argnums: the inputs to differentiate by. None: every floating one.
            rng: varies the random numbers of this call.

        Returns:
            `(outputs, pullback)`, or `(outputs, pullback, aux)` if the last stage has aux. In places that do not have
            the last stage, outputs with dims are placeholders on the device "meta". So are input cotangents where the
            stage is not.
        """

        def begun() -> tuple[Call, Sequence[object]]:
            self._check(state, "pipeline.vjp")
            own = here(inputs)
            chosen = need_argnums(argnums, own)
            need_derivatives("pipeline.vjp")
            wanted = range(len(own)) if chosen is None else chosen
            if self._line is not None:
                need_constants("pipeline.vjp", inputs=own)
                need_one_place(self._wires, self.schedule, own, wanted)
            return self._call(state, own, wanted, rng), own

        call, given = told(self._line, "vjp", begun)
        call.run("vjp", goes_forward, lambda _: None)
        outputs, aux = call.known(lambda: (call.merged(call.flow.outputs, "outputs"), self._aux(call)))
        pullback = PipelinePullback(call, given)
        return (outputs, pullback, aux) if self._has_aux else (outputs, pullback)

    def forward(self, state: PipelineState, *inputs: object, rng: int = 0) -> Any:
        """The outputs without gradients. `(outputs, aux)` if the last stage has aux. Arguments are those of `vjp`."""

        def begun() -> Call:
            self._check(state, "pipeline.forward")
            known = {"inputs": here(inputs)}
            own, given = constants_of(self._own, self._line is None, "pipeline.forward", state, known)
            return self._call(own, given, None, rng)

        call = told(self._line, "forward", begun)
        mode = contextlib.nullcontext() if is_transformed() else torch.no_grad()  # a stage's own runs say it too
        with private.outside_inference(), mode:
            call.run("forward", goes_forward, lambda _: None)
            outputs, aux = call.known(lambda: (call.merged(call.flow.outputs, "outputs"), self._aux(call)))
        return (outputs, aux) if self._has_aux else outputs

    def __call__(
        self, state: PipelineState, *inputs: object, cotangent: object = None, rng: int = 0
    ) -> tuple[PipelineState, Metrics]:
        """One update by the whole schedule.

        Args:
            state: a state of this pipeline.
            *inputs: this rank's share of the batch.
            cotangent: of the outputs, if they are not a scalar loss.
            rng: varies the random numbers of this call.

        Returns:
            `(new_state, metrics)`, as a step. `"grad_norm"` is that of all components. A metric that differs by
            component is `"lr.0"`, `"lr.1"`, ...
        """
        call, (loss, times, aux) = self._run(state, inputs, cotangent, rng, records=False)
        new, metrics = self._updated(state, call.grads(times), None)
        metrics |= {"loss": loss} if loss is not None else {}
        return new, cast(Metrics, metrics | ({"aux": aux} if self._has_aux else {}))

    def timeline(self, state: PipelineState, *inputs: object, cotangent: object = None, rng: int = 0) -> Timeline:
        """Measures when each task of one step begins and ends, for `fz.plot_schedule`. Arguments: as a step."""
        for stage in range(self.schedule.stages):
            self._stages[stage].spans(stage)  # of what was before
        return timeline_of(self._run(state, inputs, cotangent, rng, records=True)[0], self._stages, self.schedule)

    def update(self, state: PipelineState, grads: PerStage, grad_norm: object = None) -> tuple[PipelineState, Metrics]:
        """Updates all components, clipped by their common norm. If a gradient in one is not finite, all skip.

        Args:
            state: a state of this pipeline.
            grads: what a pullback of this pipeline returned.
            grad_norm: a norm to clip by instead, from `fz.global_norm`.
        """

        def checked() -> tuple[PipelineState, PerStage, object]:
            self._check(state, "pipeline.update")
            self._check_grads(state, grads)
            norm = here(grad_norm)
            need_norm(norm, "pipeline.update")
            if self._followed(state, grads, norm):
                return state, grads, norm
            return tuple(constants("pipeline.update", state=state, grads=grads, grad_norm=norm))

        return self._updated(*told(self._line, ALL_KNOW, checked))

    def add_grads(self, state: PipelineState, grads: PerStage) -> PipelineState:
        """Adds grads to those that the state keeps for the next update."""
        self._check(state, "pipeline.add_grads")
        self._check_grads(state, grads)
        own = {c: self._stages[c].add_grads(state[c], grads[c]) for c in self._here}
        return PipelineState([own.get(c) for c in range(len(state))], self._places)

    def load_from(self, path: str, options: Mapping[str, Any]) -> PipelineState:
        """The states of a checkpoint. Use `fz.load(path, pipeline)`."""
        own = {c: self.steps[c] for c in self._here}
        parts = self._places.agree(lambda: load_parts(path, own, len(self.steps), options))
        return PipelineState(parts, self._places)

    # ---- what they are made of

    def _begun(self, params: object, seed: int, sync: bool) -> dict[int, object]:
        seed = need_int(seed, "pipeline.init", "seed")
        given: object = [None] * len(self.steps) if params is None else params
        if not isinstance(given, (tuple, list)) or len(given) != len(self.steps):
            got = f"{len(given)} of them" if isinstance(given, (tuple, list)) else type(params).__name__
            raise wrong("pipeline.init", "params", got, f"a list of {len(self.steps)} trees, one for each component")
        return {c: init_stage(c, self._stages[c], given[c], seed + SEEDS * c, sync) for c in self._here}

    @property
    def _has_aux(self) -> bool:
        return self._stages[self._last].has_aux

    def _check(self, state: object, who: str) -> None:
        if not isinstance(state, PipelineState):
            raise wrong(who, "state", state, "what the init of this pipeline returned")
        here = tuple(c for c, own in enumerate(state) if own is not None)
        if len(state) != len(self.steps) or here != self._here:
            raise ValueError(
                f"{who}: got a state of {len(state)} components, of which {list(here)} are here, expected one of "
                f"{len(self.steps)}, of which {list(self._here)} are. Use the state that this pipeline's init returned."
            )
        for c in self._here:
            self._stages[c].check(state[c], f"{who}, component {c}")

    @property
    def _own(self) -> dict[int, Stage]:
        return {c: self._stages[c] for c in self._here}

    def _followed(self, state: PipelineState, *trees: object) -> bool:
        """Tells whether a transform goes on through all components, which run here."""
        return self._line is None and goes_on_through(self._own, self.steps, state, trees)

    def _check_grads(self, state: PipelineState, grads: object) -> None:
        if not isinstance(grads, PerStage) or len(grads) != len(state):
            raise wrong("pipeline.update", "grads", grads, "the first value that a pullback of this pipeline returned")
        for c in self._here:
            self._stages[c].check_grads(state[c], grads[c], f"grads[{c}]")

    def _call(
        self,
        state: PipelineState,
        inputs: Sequence[object],
        wanted: Sequence[int] | None,
        rng: int,
        at_once: bool = False,
        records: bool = False,
        keep: Callable[[int, object], object] = lambda _, output: output,
    ) -> Call:
        rng = need_int(rng, "pipeline", "rng")
        passes = {c: self._stages[c].passes(state[c], self._micro.count, rng, at_once) for c in self._here}
        own = self._wires, self._micro, self._tasks, self._places
        return Call(*own, passes, inputs, wanted, records, keep, state[self._last])

    def _updated(self, state: PipelineState, grads: PerStage, grad_norm: object) -> tuple[PipelineState, Metrics]:
        with private.of_normal_tensors(), below_unless(self._followed(state, grads, grad_norm)):
            return updated(self._own, state, grads, grad_norm, self._places)

    def _aux(self, call: Call) -> object:
        return call.merged(call.flow.auxes, "aux") if self._has_aux else None

    def _run(
        self, state: PipelineState, inputs: Sequence[object], cotangent: object, rng: int, records: bool
    ) -> tuple[Call, tuple[Any, float, object]]:
        """All tasks; and (the loss, by what to divide the gradients, aux)."""

        def begun() -> tuple[Call, Losses]:
            self._check(state, "pipeline")
            for c in self._here:
                self._stages[c].check_step(state[c])
            need_derivatives("pipeline")
            both: dict[str, object] = dict(zip(("inputs", "cotangent"), here((inputs, cotangent)), strict=True))
            own, given, ct = constants_of(self._own, self._line is None, "pipeline", state, both)
            losses = Losses(self._micro, ct)
            call = self._call(own, given, (), rng, True, records, losses.note)
            losses.begin(call.counts)
            return call, losses

        call, losses = told(self._line, "the pipeline's step", begun)
        call.run("the pipeline's step", lambda _: True, losses.piece)
        last = self._stages[self._last]
        axis = state[self._last].params.axis if call.has_last and not last.distant else None
        return call, call.known(lambda: (losses.mean(axis), losses.times, self._aux(call)))


def pipeline(
    steps: Sequence[Step | RemoteComponent],
    schedule: Schedule,
    groups: object = None,
    *,
    inputs: Number | None = None,
    skips: Mapping[Any, int | Sequence[int]] | None = None,
    shared: Number | None = None,
    in_dims: int | tuple[int | None, ...] | None = 0,
    weights: Callable[..., object] | None = None,
) -> Pipeline:
    """Makes a pipeline of stages, each with a table, an optimizer and a mesh of its own. Clipping is joint.

    The first input goes to the first stage, further ones to the last. A stage's function takes its params, then the
    output of the stage before, then what skips to it, then the inputs that it takes, then what it shares. Each may be a
    pytree.

    Numbers are those of one step whose function calls the stages one after the other, with `fz.accumulate(step,
    schedule.microbatches)`, to the bit for any schedule. Two exceptions: each stage draws its own random numbers; and
    cotangents of a value that is used three times or more may be added in another order.

    Args:
        steps: one for each stage, in order, then one for each component that stages share. One may be a component of
            `fz.remote`: values between two of these go straight from rank to rank.
        schedule: from `fz.schedules`, or your own.
        groups: where stages run. None: all in this process, on each rank with its share of the batch. `mesh["pp"]`, a
            mesh of one axis: rank i of it is place i of the schedule, and steps may be sharded over the other axes. Or
            a list of one rank for each place: `[[0], [1]]`.
        inputs: `{stage: inputs that it takes, by number}`.
        skips: `{(stage, item): later stage or stages}`: an item of a stage's output that goes there instead of to the
            next.
        shared: `{component: stages that get its output}`, for tied weights. Its function takes params alone.
        in_dims: the dim of inputs to split, as in `fz.accumulate`.
        weights: `weights(*inputs)` of a microbatch, as in `fz.accumulate`. Every rank needs all inputs of its share.

    Returns:
        A `Pipeline`.

    Raises:
        TypeError, ValueError: not one step for each stage; a schedule that cannot run, with the reason; wires that lead
            nowhere.

    Example:
        >>> stage = lambda p, h: torch.tanh(h @ p["w"])
        >>> head = lambda p, h, y: ((h @ p["w"] - y) ** 2).mean()
        >>> steps = [fz.train_step(fn, fz.sgd(0.1)) for fn in (stage, stage, head)]
        >>> pipe = fz.pipeline(steps, fz.schedules.one_f_one_b(stages=3, microbatches=2))
        >>> state = pipe.init([{"w": torch.eye(2)}, {"w": torch.eye(2)}, {"w": torch.ones(2, 1)}])
        >>> state, metrics = pipe(state, torch.zeros(4, 2), torch.ones(4, 1))
        >>> metrics["loss"], state.step
        (tensor(1.), 1)
    """
    if not isinstance(steps, (tuple, list)) or not steps:
        given = "an empty list" if isinstance(steps, (tuple, list)) else named(steps)
        raise TypeError(f"pipeline: got steps={given}, expected a list of steps, one for each stage of the schedule.")
    if not isinstance(schedule, Schedule):
        raise wrong("pipeline", "schedule", schedule, "a schedule, as fz.schedules.one_f_one_b(stages, microbatches)")
    wires = wiring(len(steps), schedule.stages, inputs, skips, shared)
    need_stages(steps, schedule, groups is not None, weights is not None)
    need_in_dims(in_dims, "pipeline")
    need_weights(weights, "pipeline")
    need_groups(groups, schedule)
    return Pipeline(steps, schedule, wires, in_dims, groups, weights)
