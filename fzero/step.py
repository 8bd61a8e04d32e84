"""Step: a function, an optimizer and the rules of the table; init, vjp, forward, update."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fzero.base import private, pytree
from fzero.base.arguments import need_argnums, need_bool, need_int, need_norm, wrong
from fzero.base.follow import below_unless, is_transformed
from fzero.base.interrupts import as_found
from fzero.engine.alike import need_alike, scalars_in
from fzero.engine.batch import Batch, Pullback, as_grads, grads_of, reduce_whole, seed_of, sum_of
from fzero.engine.carry import Carry
from fzero.engine.passes import evaluated
from fzero.engine.weighing import counted
from fzero.optim._late import need_own_counts
from fzero.optim._tried import need_elements
from fzero.state.beyond import here
from fzero.state.check_state import check_optimizer, check_state, taken_grads
from fzero.state.checks import (
    can_follow_here,
    constants,
    follows_step,
    goes_on,
    need_derivatives,
    refuse_captured,
)
from fzero.state.init import init_state
from fzero.state.placing import settle
from fzero.state.speed import warn_where_slow
from fzero.state.train_state import TrainState
from fzero.stores.away import Buffer
from fzero.table.layout import Key
from fzero.table.needs import need_function, need_optimizer
from fzero.table.optimizer import GradientTransformation
from fzero.table.policy import ByPath, Policy
from fzero.table.spec import LEAF_NORMS, Spec, need_step
from fzero.update.fused import fused_call, fuses
from fzero.update.update import apply_update


@dataclass(frozen=True)
class Step(Spec):
    """An immutable description of one training step; transforms return a step with one more rule.

    `init`, `vjp`, `forward` and `update` are the interface of every component. Made by `train_step`. It is pickled
    wherever its functions are: over the default process group for any run, over a mesh within the life of its groups.
    """

    def init(self, params: Any, seed: int = 0, sync: bool = False) -> TrainState:
        """The state for these params, which are copied.

        Args:
            params: a pytree of floating tensors; a leaf may be a callable that makes one, called unit by unit, so
                that no rank ever holds the full model.
            seed: of everything random in the run, the same on all ranks.
            sync: take rank 0's params on all ranks; otherwise different params are an error.

        Raises:
            TypeError, ValueError: a leaf that cannot be trained, a pattern that matches nothing, ranks that disagree.
            RuntimeError: the step is sharded and there is no process group.
        """
        seed = need_int(seed, "step.init", "seed")
        need_bool(sync, "step.init", "sync")
        if is_transformed():  # what callables make may be what a transform goes on through
            params = pytree.map(lambda x: x() if callable(x) and not isinstance(x, torch.Tensor) else x, params)
        (params,) = (params,) if goes_on(params) else constants("step.init", params=params)
        with as_found(), private.of_normal_tensors():
            state = init_state(self, params, seed, sync)
            need_elements("step.init", self.optimizer, state.params)
            need_own_counts("step.init", self.optimizer, state.moments, state.layout)
            warn_where_slow(state)
            return state

    def vjp(self, state: TrainState, *inputs: object, argnums: int | Sequence[int] | None = None, rng: int = 0) -> Any:
        """Outputs and their pullback, `torch.func.vjp` through the sharded params.

        Args:
            state: of this step.
            inputs: this rank's share of the batch.
            argnums: the inputs to differentiate; every floating one by default.
            rng: varies everything random in the function, beside the state's seed and step.

        Returns:
            `(outputs, pullback)`, or `(outputs, pullback, aux)` where the step has aux, or carries something
            (`fz.carry`).
        """
        check_state(self, state)
        rng = need_int(rng, "step.vjp", "rng")
        need_derivatives("step.vjp")
        inputs = here(inputs)
        with as_found():
            pullback = Pullback(self, state, inputs, need_argnums(argnums, inputs), rng)
            outputs, aux = pullback.taken()
            return (outputs, pullback, aux) if self.has_aux or self.carries else (outputs, pullback)

    def forward(self, state: TrainState, *inputs: object, rng: int = 0) -> Any:
        """The outputs without gradients; `(outputs, aux)` where the step has aux.

        None flows into the inputs either: what plain autograd differentiates counts as a constant. A transform of
        torch.func goes through it as through any function.
        """
        check_state(self, state)
        rng = need_int(rng, "step.forward", "rng")
        inputs = here(inputs)
        if not (follows := can_follow_here(self, state, inputs)):
            follows_step(self, state, "step.forward", inputs=inputs)  # which says what of the step is in the way
            state, inputs = constants("step.forward", state=state, inputs=inputs)
            refuse_captured("step.forward", self.fn)
        micro = self.microbatches
        pairs, own = [], Carry(self, state)
        with as_found(), private.outside_inference(), contextlib.nullcontext() if follows else torch.no_grad():
            parts, counts = counted(micro, state, inputs)
            for i, part in enumerate(parts):
                out, aux = evaluated(self, state, own.given(part), seed_of(state, rng, i), counts.mask(i), follows)
                pairs.append((out, own.taken(aux)))
            outputs, auxes = zip(*pairs, strict=True)
            need_alike(state.params.axis, scalars_in(outputs), "step.forward")
            merged = micro.merge(outputs, factors=counts.factors)
        return (merged, micro.merge(auxes, "aux", counts.of_rank)) if self.has_aux else merged

    def __call__(self, state: TrainState, *inputs: object, cotangent: object = None, rng: int = 0) -> Any:
        """One update: `(new state, metrics)`.

        Transforms of torch.func go through it, by the state, the inputs, the cotangent, and tensors that the optimizer
        or the function was made with; gradients by what all ranks have alike are those of the mean over ranks.

        Args:
            inputs: this rank's share of the batch.
            cotangent: of the outputs, where they are not a scalar loss.

        Returns:
            The next state, and 0-d tensors "loss" (mean over microbatches and ranks), "grad_norm" (of the mean
            gradient, before clipping), "lr", "skipped", ..., and "aux" where the step has aux. None has a graph: the
            update is done. For loss.backward() take `fz.tape`, for gradients `step.vjp`.

        Raises:
            ValueError: the function uses none of the leaves that the step trains. Only its first update is looked at.
            TypeError: such a transform goes through a step that has no derivative: of encoded or stochastically rounded
                states that are not straight-through, of states on a disk, with fz.donate; the error names which.
        """
        check_state(self, state)
        check_optimizer(self, state)
        need_elements("step", self.optimizer, state.params)
        rng = need_int(rng, "step", "rng")
        need_derivatives("step")
        inputs, cotangent = here((inputs, cotangent))
        if not can_follow_here(self, state, inputs, cotangent):
            follows_step(self, state, "step", inputs=inputs, cotangent=cotangent)
            state, inputs, cotangent = constants("step", state=state, inputs=inputs, cotangent=cotangent)
            refuse_captured("step", self.fn)
        with as_found():
            if fuses(self, state):
                return fused_call(self, state, inputs, cotangent, rng)
            batch, total = Batch(self, state, inputs, cotangent, rng), None
            for run, ct in batch:
                grads, _ = run.pull(ct, into=total)
                del run
                total = sum_of(total, grads)
                del grads
            assert total is not None
            if self.microbatches.count > 1 and not batch.followed:
                reduce_whole(state.params, total)
            sharded = grads_of(self, state, as_grads(state.layout, total), batch.times)
            del total
            loss = batch.loss()
            batch.need_used(sharded)
            new, metrics = apply_update(self, state, sharded, None)
            new = batch.kept(new, metrics)
            return new, {**metrics, **loss, **batch.aux()}

    def update(self, state: TrainState, grads: object, grad_norm: object = None) -> tuple[TrainState, dict[str, Any]]:
        """The optimizer's update with these grads, and with those that the state keeps, which are cleared.

        Args:
            grads: what a pullback of this step returned; or full leaves, equal on all ranks, in the params' structure
                or by path: they are the mean gradients already, without a loss scale, and are not reduced again.
            grad_norm: a norm to clip by instead of these grads' own: `fz.global_norm` of several components. The metric
                "grad_norm" stays these grads' own.
        """
        own = taken_grads(self, state, grads, "step.update")
        check_optimizer(self, state)
        need_elements("step.update", self.optimizer, state.params)
        grad_norm = here(grad_norm)
        need_norm(grad_norm, "step.update")
        if not (follows := follows_step(self, state, "step.update", grads=own, grad_norm=grad_norm)):
            state, own, grad_norm = constants("step.update", state=state, grads=own, grad_norm=grad_norm)
        with as_found(), private.of_normal_tensors(), below_unless(follows):
            return apply_update(self, state, own, grad_norm)

    def add_grads(self, state: TrainState, grads: object) -> TrainState:
        """A state that keeps these grads for the next update: several losses, several pullbacks, one update."""
        given = taken_grads(self, state, grads, "step.add_grads")
        if not (follows := goes_on(state, given)):
            state, given = constants("step.add_grads", state=state, grads=given)
        kept, layout = state.grads, state.layout
        with as_found(), private.of_normal_tensors(), below_unless(follows):
            own: dict[Key, Buffer] = {}
            for key in given.groups:
                new = given.local(key).to(layout.groups[key].row.policy.reduce, copy=True)
                if kept is not None:
                    ratio = kept.scale / given.scale
                    new = kept.local(key) + (new * ratio if ratio != 1.0 else new)
                own[key] = settle(given, key, "grads", new)
            return state.changed(grads=(kept or given).with_buffers(own))


def train_step(
    fn: Callable[..., object],
    optimizer: GradientTransformation,
    policy: Policy | ByPath | None = None,
    units: str | Sequence[str] | None = None,
    has_aux: bool = False,
    metrics: Sequence[str] = (),
) -> Step:
    """A training step of a pure function.

    Args:
        fn: `fn(params, *inputs) -> outputs`, any pytree of tensors; a scalar for `step(state, *inputs)`.
        optimizer: a `GradientTransformation`.
        policy: dtypes by leaf; every leaf keeps its own by default.
        units: fnmatch patterns over paths, the shortest path that matches is the unit; None takes every path up to
            its first integer part, the elements of lists and ModuleLists; of ParameterLists, which nobody calls, none.
        has_aux: `fn` returns `(outputs, aux)`.
        metrics: those that an update gives besides the usual ones. "leaf_norms" is `{"params": {path: norm}, "grads":
            ..., "updates": ..., "moments": {"mu": ..., ...}}`, 0-d float64 norms of each trained leaf over all shards:
            params and moments after the update, what it adds to the params, and the mean gradient before clipping.
            Elementwise optimizers sum them up as they come by, before values are rounded to a policy's formats; of
            others new values are read again, and the old params are kept meanwhile.

    Example:
        >>> step = fz.train_step(lambda p, x, y: ((x @ p["w"] - y) ** 2).mean(), fz.sgd(0.1))
        >>> state = step.init({"w": torch.zeros(2, 1)})
        >>> state, metrics = step(state, torch.ones(4, 2), torch.ones(4, 1))
        >>> metrics["loss"], state.step
        (tensor(1.), 1)
    """
    need_function(fn, "train_step")
    need_optimizer(optimizer, "train_step")
    need_bool(has_aux, "train_step", "has_aux")
    if policy is not None and not isinstance(policy, (Policy, ByPath)):
        raise wrong("train_step", "policy", policy, "fz.Policy or fz.Policy.by_path")
    if units is not None and not (isinstance(units, (str, tuple, list)) and all(isinstance(u, str) for u in units)):
        raise wrong("train_step", "units", units, "a pattern over module paths, several of them, or None")
    if not isinstance(metrics, (tuple, list)) or not all(isinstance(name, str) for name in metrics):
        raise wrong("train_step", "metrics", metrics, f"a tuple of names, such as ({LEAF_NORMS!r},)")
    unknown = [name for name in metrics if name != LEAF_NORMS]
    if unknown:
        raise ValueError(f"train_step: got metrics={tuple(metrics)}, expected none or ({LEAF_NORMS!r},).")
    patterns = (units,) if isinstance(units, str) else None if units is None else tuple(units)
    return Step(fn, optimizer, policy or Policy(), patterns, has_aux, metrics=tuple(dict.fromkeys(metrics)))


def with_fn(step: Step, fn: Callable[..., object], has_aux: bool | None = None) -> Step:
    """A step over the same table and state with another function: evaluation, generation, a second loss.

    Args:
        step: any step.
        fn: `fn(params, *inputs) -> outputs`.
        has_aux: as in `train_step`; that of `step` by default.

    Example:
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1))
        >>> state = step.init({"w": torch.ones(2)})
        >>> fz.with_fn(step, lambda p, x: p["w"] + x).forward(state, torch.ones(2))
        tensor([2., 2.])
    """
    need_step(step, "with_fn")
    need_function(fn, "with_fn")
    need_bool(has_aux, "with_fn", "has_aux", or_none=True)
    return dataclasses.replace(step, fn=fn, has_aux=step.has_aux if has_aux is None else has_aux)
