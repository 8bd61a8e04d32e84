"""Passes: a step's microbatches one by one, forward and back in the order of a schedule, with one sum of gradients."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence

import torch

from fzero.base import private, pytree
from fzero.base.ambient import without_fast_attention
from fzero.base.follow import is_transformed
from fzero.comm.divergence import failing
from fzero.engine.alike import need_alike, scalars_in
from fzero.engine.batch import Sums, as_grads, by_input, grads_of, mean_grads, reduce_whole, scale_of, seed_of, sum_of
from fzero.engine.function import call_function, traversal_of
from fzero.engine.hidden import in_a_level
from fzero.engine.outcome import split_result
from fzero.engine.run import Run, run_of
from fzero.state.checks import can_follow_here
from fzero.state.sharded import Sharded
from fzero.state.train_state import TrainState
from fzero.table.counting import Counts, Mask
from fzero.table.spec import Spec


def evaluated(
    step: Spec,
    state: TrainState,
    inputs: Sequence[object],
    seed: tuple[int, ...],
    mask: Mask | None,
    follows: bool = False,
) -> tuple[object, object]:
    """(outputs, aux) of one run of the step's function, of which gradients are taken by a transform around it only.

    Args:
        mask: whether it then adds anything to gradients.
        follows: whether one may be.
    """
    if step.graphs is not None and not follows:
        own = functools.partial(evaluated, dataclasses.replace(step, graphs=None), state, inputs, seed, mask)
        return step.graphs.forward(step, state, inputs, own, seed=seed, mask=mask)
    grads = contextlib.nullcontext() if follows else torch.no_grad()
    with failing("a forward"), private.outside_inference(), without_fast_attention(), grads:
        traversal, primals, fixed = traversal_of(step, state, seed, derived=follows, mask=mask)
        traversal.guards = follows and traversal.mask.partial
        call = functools.partial(call_function, step, state, traversal, {**primals, **fixed}, inputs)
        return split_result(step, call() if traversal.fn is None or not private.level() else in_a_level(call))


class Passes:
    """What a pipeline asks of a stage during one call: a forward and a pullback per microbatch, and the sum of grads.

    Microbatches may be run, and pulled back, in any order. Their gradients are added in the order of the microbatches,
    so that the sum has the bits of `fz.accumulate`; those that come early wait for their turn.

    Args:
        count: the number of microbatches.
        rng: as in `step.vjp`.
        at_once: where no rank keeps a slice of the gradients, reduce the sum of all microbatches, as `step(...)` does;
            otherwise each of them, as `step.vjp` does.

    Attributes:
        scale: by which cotangents are multiplied inside of the pullback.
        counts: what the microbatches count.
    """

    def __init__(self, step: Spec, state: TrainState, count: int, rng: int = 0, at_once: bool = True) -> None:
        if step.graphs is not None:
            raise ValueError("pipeline: got a stage whose step is one of fz.jit. Leave jit out: stages have no graphs.")
        self._step, self._state, self._rng, self.count, self.counts = step, state, rng, count, Counts()
        self._at_once, self._unreduced = at_once, at_once and count > 1 and not is_transformed()
        self._like, self.scale = grads_of(step, state, {}), scale_of(step, state)
        self._runs: dict[int, Run] = {}
        self._specs: dict[int, pytree.Spec] = {}
        self._half: dict[int, Run] = {}  # of microbatches whose first half is done
        self._early: dict[int, Sums] = {}  # sums of microbatches whose turn has not come
        self._total: Sums | None = None
        self._next = 0
        self._scalars: list[torch.Tensor] = []

    def begin(self) -> None:
        """Forgets what an earlier pullback, which may have failed, has left of its sums."""
        self._total, self._next = None, 0
        self._early.clear()
        self._half.clear()

    def forward(self, microbatch: int, inputs: Sequence[object], wanted: Iterable[int] = ()) -> tuple[object, object]:
        """(outputs, aux) of one microbatch, whose pullback is kept.

        Args:
            wanted: the inputs to differentiate, where they float.
        """
        assert microbatch not in self._runs, f"microbatch {microbatch} was run before"
        several = self.count > 1
        seed, scale = seed_of(self._state, self._rng, microbatch), self.scale
        chosen = frozenset(wanted)
        run = run_of(
            self._step,
            self._state,
            inputs,
            chosen,
            seed,
            scale,
            unreduced=self._unreduced,
            alone=False,  # other runs wait for their pullbacks meanwhile
            partial=several,
            mask=self.counts.mask(microbatch),
            halves=True,
        )
        self._scalars += scalars_in(run.outputs)
        self._runs[microbatch], self._specs[microbatch] = run, pytree.flatten(tuple(inputs))[1]
        outputs, aux = run.outputs, run.aux
        run.outputs = run.aux = None
        return outputs, aux

    def backward(self, microbatch: int, cotangent: object, retain_graph: bool = False) -> tuple[object, ...]:
        """The cotangents of a microbatch's inputs, one per input, None where it was not differentiated."""
        run = self._runs[microbatch]
        into = self._total if microbatch == self._next else None
        grads, flat = run.pull(cotangent, retain_graph, into=into)
        self._pulled(microbatch, run)
        self._add(microbatch, grads)
        return by_input(self._specs[microbatch], flat)

    def early(self, microbatch: int, cotangent: object) -> tuple[tuple[object, ...], Callable[[], None]]:
        """`backward` in two: the inputs' cotangents, and what goes on from there, in the order of microbatches."""
        run = self._runs[microbatch]
        if not run.waits():
            return self.backward(microbatch, cotangent), lambda: None
        return self.inputs(microbatch, cotangent), functools.partial(self.params, microbatch)

    def inputs(self, microbatch: int, cotangent: object, retain_graph: bool = False) -> tuple[object, ...]:
        """The first half of `backward`: the cotangents of a microbatch's inputs."""
        run = self._runs[microbatch]
        flat = run.pull_inputs(cotangent, retain_graph)
        self._pulled(microbatch, run)
        self._half[microbatch] = run
        return by_input(self._specs[microbatch], flat)

    def _pulled(self, microbatch: int, run: Run) -> None:
        """Forgets a run that cannot be pulled back again; after an error, such as of a wrong cotangent, it can."""
        if run.is_used_up():
            del self._runs[microbatch]

    def params(self, microbatch: int) -> None:
        """The second half: its gradients."""
        into = self._total if microbatch == self._next else None
        self._add(microbatch, self._half.pop(microbatch).pull_params(into))

    def outputs(self, microbatch: int, inputs: Sequence[object]) -> tuple[object, object]:
        """(outputs, aux) of one microbatch without gradients."""
        seed = seed_of(self._state, self._rng, microbatch)
        follows = can_follow_here(self._step, self._state, inputs)
        return evaluated(self._step, self._state, inputs, seed, self.counts.mask(microbatch), follows)

    def _add(self, microbatch: int, grads: Sums) -> None:
        self._early[microbatch] = grads
        while self._next in self._early:
            self._total = sum_of(self._total, self._early.pop(self._next))
            self._next += 1

    def reduce(self) -> None:
        """Reduces what is left of the sum of all microbatches, once all have been pulled back; what can fail does."""
        total = self._total
        assert self._next == self.count and total is not None, f"{self._next} of {self.count} were pulled back"
        scalars, self._scalars = self._scalars, []
        need_alike(self._like.axis, scalars, "pullback")
        if self._unreduced:
            reduce_whole(self._state.params, total)

    def grads(self, times: float = 1.0) -> Sharded:
        """The gradients of all microbatches, which have been reduced.

        Args:
            times: by what the sum is to be divided.
        """
        total, self._total, self._next = self._total, None, 0
        assert total is not None
        if times != 1.0 and self._at_once:  # as `step(...)` does; its pullback divides
            return grads_of(self._step, self._state, as_grads(self._like.layout, total), times)
        return mean_grads(self._like, total, times)
