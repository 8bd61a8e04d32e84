"""Step: a function, an optimizer and the rules of the table; init, vjp, forward, update."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from fzero.base import private, pytree
from fzero.base.arguments import need_argnums, need_bool, need_int, need_norm, wrong
from fzero.base.context import jitting
from fzero.base.follow import is_transformed
from fzero.engine.alike import need_alike, scalars_in
from fzero.engine.batch import Batch, Pullback, as_grads, grads_of, reduce_whole, seed_of, sum_of
from fzero.engine.carry import Carry
from fzero.engine.passes import evaluated
from fzero.engine.weighing import counted
from fzero.optim._pieces import of_slices
from fzero.state.beyond import here
from fzero.state.check_state import check_optimizer, check_same_optimizer, check_state, taken_grads
from fzero.state.checks import (
    can_follow_here,
    constants,
    follows_step,
    goes_on,
    need_derivatives,
    open_to_transforms,
    refuse_captured,
)
from fzero.state.init import init_state
from fzero.state.metrics import Metrics
from fzero.state.placing import settle
from fzero.state.train_state import TrainState
from fzero.stores.away import Buffer
from fzero.table.layout import Key
from fzero.table.needs import need_function
from fzero.table.optimizer import GradientTransformation
from fzero.table.policy import ByPath, Policy
from fzero.table.spec import LEAF_NORMS, Spec, need_step
from fzero.update.fused import fused_call, fuses
from fzero.update.update import apply_update

Updated = tuple[TrainState, Metrics]


@dataclass(frozen=True)
class Step(Spec):
    """A training step, as an immutable value: a pure function, an optimizer, and the rules that transforms have added.

    `fz.train_step` makes one. Each transform (`fz.shard_zero3`, `fz.autocast`, ...) returns a new one with one more
    rule. `print(step)` lists the rules. `fz.plan(step, params)` shows what they mean for each leaf.

    - `init` makes the state.
    - `step(state, *inputs)` is one whole update.
    - `vjp` and `update` are its two halves, for losses that are not computed here.
    - `forward` gives outputs without gradients.

    You can pickle a step if you can pickle its functions. A step over a mesh can be unpickled only while the groups of
    that mesh live.

    Example:
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1))
        >>> state = step.init({"w": torch.ones(2)})
        >>> state, metrics = step(state, torch.ones(2))
        >>> step.forward(state, torch.ones(2))
        tensor(1.8000)
    """

    def init(self, params: Any, seed: int = 0, sync: bool = False) -> TrainState:
        """Makes the state: params, which are copied, and the optimizer's moments, both as this rank's slices.

        All ranks of the step call it.

        Args:
            params: a pytree of floating tensors, the full leaves, equal on all ranks. A leaf may be a function without
                arguments that makes the tensor. These are called unit by unit, so no rank ever holds the full model.
            seed: seeds everything random in the run, such as dropout and stochastic rounding. The same on all ranks.
            sync: True takes rank 0's params on all ranks. False raises an error if ranks have different params.

        Returns:
            A `TrainState`.

        Raises:
            ValueError: a pattern of a transform matches no leaf, or ranks gave different params. The error names the
                pattern or the leaf.
            TypeError: a leaf is no floating tensor, and no function that makes one.
            RuntimeError: the step is sharded and there is no process group. Call
                `torch.distributed.init_process_group`.

        Example:
            >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1))
            >>> step.init({"w": lambda: torch.ones(3)}).params["w"]
            tensor([1., 1., 1.])
        """
        seed = need_int(seed, "step.init", "seed")
        need_bool(sync, "step.init", "sync")
        if is_transformed():  # what callables make may be what a transform goes on through
            params = pytree.map(lambda x: x() if callable(x) and not isinstance(x, torch.Tensor) else x, params)
        (params,) = (params,) if goes_on(params) else constants("step.init", params=params)
        with private.of_normal_tensors():
            state = init_state(self, params, seed, sync)
            check_same_optimizer("step.init", self.optimizer, state.params)
            return state

    def vjp(
        self, state: TrainState, *inputs: object, argnums: int | Sequence[int] | None = None, rng: int = 0
    ) -> tuple[Any, Pullback, *tuple[Any, ...]]:
        """The outputs and their pullback: `torch.func.vjp` of the function, with sharded params.

        Args:
            state: a state of this step.
            *inputs: this rank's share of the batch.
            argnums: the inputs to differentiate by, counted from 0 without the state: an int or a tuple. None takes
                every input with a floating tensor.
            rng: a number that varies the random numbers of this call. The state's seed and step vary them too.

        Returns:
            `(outputs, pullback)`, or `(outputs, pullback, aux)` if the step has aux or a carry (`fz.carry`). Outputs
            are this rank's own. `pullback(cotangent)` returns `(grads, input_cotangents)`: see `Pullback`.

        Example:
            >>> step = fz.train_step(lambda p, x: x @ p["w"], fz.sgd(0.1))
            >>> state = step.init({"w": torch.ones(2, 1)})
            >>> outputs, pullback = step.vjp(state, torch.ones(3, 2))
            >>> grads, (x_cotangent,) = pullback(torch.ones_like(outputs))
            >>> fz.gather(grads)["w"].flatten(), x_cotangent.shape
            (tensor([3., 3.]), torch.Size([3, 2]))
        """
        check_state(self, state)
        rng = need_int(rng, "step.vjp", "rng")
        need_derivatives("step.vjp")
        inputs = here(inputs)
        pullback = Pullback(self, state, inputs, need_argnums(argnums, inputs), rng)
        outputs, aux = pullback.taken()
        return (outputs, pullback, aux) if self.has_aux or self.carries else (outputs, pullback)

    def forward(self, state: TrainState, *inputs: object, rng: int = 0) -> Any:
        """The outputs without gradients, for evaluation.

        Modules stay in the mode that they were in when `fz.functional` took them: dropout is on if it was on then. For
        plain autograd the outputs are constants. Transforms of `torch.func` go through this call.

        Args:
            state: a state of this step.
            *inputs: this rank's share of the batch.
            rng: as in `vjp`.

        Returns:
            The outputs of this rank. `(outputs, aux)` if the step has aux. A new carry is dropped.
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
        with private.outside_inference(), contextlib.nullcontext() if follows else torch.no_grad():
            parts, counts = counted(micro, state, inputs)
            for i, part in enumerate(parts):
                out, aux = evaluated(self, state, own.given(part), seed_of(state, rng, i), counts.mask(i), follows)
                pairs.append((out, own.taken(aux)))
            outputs, auxes = zip(*pairs, strict=True)
            need_alike(state.params.axis, scalars_in(outputs), "step.forward")
            merged = micro.merge(outputs, factors=counts.factors)
        return (merged, micro.merge(auxes, "aux", counts.of_rank)) if self.has_aux else merged

    def __call__(self, state: TrainState, *inputs: object, cotangent: object = None, rng: int = 0) -> Updated:
        """One update: forward, pullback, and the optimizer. All ranks of the step call it.

        Transforms of `torch.func` go through the call: by the state, the inputs, the cotangent, and by tensors that the
        optimizer or the function was made with. A gradient by a value that all ranks share is that of the mean over
        ranks.

        Args:
            state: a state of this step. With `fz.donate` it is dead afterwards.
            *inputs: this rank's share of the batch.
            cotangent: the cotangent of the outputs. Needed if they are not a scalar loss, whose cotangent is 1.
            rng: as in `vjp`.

        Returns:
            `(new_state, metrics)`. Metrics are 0-d tensors, the same on all ranks. None has a graph, as the update is
            done: for `loss.backward()` take `fz.tape`, for gradients `step.vjp`.

            - `"loss"`: the mean over microbatches and ranks, if the outputs are a scalar.
            - `"grad_norm"`: of the mean gradient, before clipping.
            - `"lr"`: the learning rate of this update, if the optimizer has one.
            - `"skipped"`: True if the gradient was not finite. Then params, moments and `state.step` are as before.
            - `"collected"`: this rank's values of `fz.collect`, if there are any: a dict of lists.
            - others that transforms and optimizers add, such as `"loss_scale"`, and this rank's `"aux"` if the step has
              aux.

        Raises:
            ValueError: the state belongs to another step, the outputs are no scalar and there is no `cotangent`, or the
                function uses none of the leaves that the step trains (looked at in a state's first update).
            TypeError: a transform of `torch.func` goes through a step that has no derivative: with `fz.donate`, with
                states on a disk, or with states in a format of few bits. The error says which.

        Example:
            >>> step = fz.train_step(lambda p, x: x @ p["w"], fz.sgd(0.1))
            >>> state = step.init({"w": torch.ones(2)})
            >>> state, metrics = step(state, torch.eye(2), cotangent=torch.tensor([1.0, 0.0]))
            >>> fz.gather(state.params)["w"]
            tensor([0.9000, 1.0000])
        """
        check_state(self, state)
        check_optimizer(self, state)
        check_same_optimizer("step", self.optimizer, state.params)
        rng = need_int(rng, "step", "rng")
        need_derivatives("step")
        if (regions := jitting.get()) is not None and regions.takes():
            return cast(Updated, regions.call(self, _call, state, inputs, cotangent, rng))
        inputs, cotangent = here((inputs, cotangent))
        if not can_follow_here(self, state, inputs, cotangent):
            follows_step(self, state, "step", inputs=inputs, cotangent=cotangent)
            state, inputs, cotangent = constants("step", state=state, inputs=inputs, cotangent=cotangent)
            refuse_captured("step", self.fn)
        if fuses(self):
            return cast(Updated, fused_call(self, state, inputs, cotangent, rng))
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
        return cast(Updated, (new, {**metrics, **loss, **batch.aux()}))

    def update(self, state: TrainState, grads: object, grad_norm: object = None) -> Updated:
        """Applies grads: the optimizer's half of a step. Grads that `add_grads` has kept are added, then cleared.

        Args:
            state: a state of this step.
            grads: what a pullback of this step returned. Or full leaves, equal on all ranks, in the structure of the
                params or as `{path: leaf}`: the mean gradient, without a loss scale. These are not reduced again.
            grad_norm: a norm to clip by, instead of that of these grads: `fz.global_norm` of several components. The
                metric `"grad_norm"` stays the norm of these grads.

        Returns:
            `(new_state, metrics)`, as a step returns, without `"loss"` and `"aux"`.

        Raises:
            ValueError: the grads do not fit the state, with the leaf's path.

        Example:
            >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1))
            >>> state = step.init({"w": torch.ones(2)})
            >>> state, metrics = step.update(state, {"w": torch.tensor([1.0, 2.0])})
            >>> fz.gather(state.params)["w"]
            tensor([0.9000, 0.8000])
        """
        own = taken_grads(self, state, grads, "step.update")
        check_optimizer(self, state)
        check_same_optimizer("step.update", self.optimizer, state.params)
        grad_norm = here(grad_norm)
        need_norm(grad_norm, "step.update")
        return cast(Updated, apply_update(self, state, own, grad_norm))

    def add_grads(self, state: TrainState, grads: object) -> TrainState:
        """Adds grads to those that the state keeps for its next update: several losses or pullbacks, one update.

        Args:
            state: a state of this step.
            grads: as in `update`.

        Returns:
            A new state, with the sum in `state.grads`. The next `update` or step adds it to its own grads and clears
            it.

        Example:
            >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1))
            >>> state = step.init({"w": torch.ones(1)})
            >>> state = step.add_grads(state, {"w": torch.ones(1)})
            >>> state, _ = step.update(state, {"w": torch.ones(1)})
            >>> fz.gather(state.params)["w"], state.grads
            (tensor([0.8000]), None)
        """
        given = taken_grads(self, state, grads, "step.add_grads")
        with open_to_transforms("step.add_grads", state=state, grads=given) as (_, state, given):
            kept, layout = state.grads, state.layout
            own: dict[Key, Buffer] = {}
            for key in given.groups:
                new = given.local(key).to(layout.groups[key].row.policy.reduce, copy=True)
                if kept is not None:
                    ratio = kept.scale / given.scale
                    new = kept.local(key) + (new * ratio if ratio != 1.0 else new)
                own[key] = settle(given, key, "grads", new)
            return state.changed(grads=(kept or given).with_buffers(own))


def _call(step: Step, state: TrainState, inputs: Sequence[object], cotangent: object, rng: int) -> Updated:
    return step(state, *inputs, cotangent=cotangent, rng=rng)


def train_step(
    fn: Callable[..., object],
    optimizer: GradientTransformation,
    policy: Policy | ByPath | None = None,
    units: str | Sequence[str] | None = None,
    has_aux: bool = False,
    metrics: Sequence[str] = (),
) -> Step:
    """Makes a training step of a pure function and an optimizer.

    Args:
        fn: `fn(params, *inputs) -> outputs`. The outputs may be any pytree of tensors. If they are a scalar loss,
            `step(state, *inputs)` needs no cotangent.
        optimizer: a `GradientTransformation`, such as `fz.adamw(1e-3)`.
        policy: the dtypes of leaves: a `Policy`, or `Policy.by_path`. None keeps each leaf's own dtype everywhere.
        units: fnmatch patterns over dotted paths, one or several. A path that matches is a unit, together with all
            leaves below it. The shortest match counts. None cuts each path behind its first integer: `blocks.0.mlp.up`
            is in the unit `blocks.0`. Leaves in no unit form the root.
        has_aux: True if `fn` returns `(outputs, aux)`.
        metrics: further metrics, as a tuple of names. There is one: `"leaf_norms"`, a dict `{"params" | "grads" |
            "updates": {path: norm}, "moments": {name: {path: norm}}}` of 0-d float64 tensors. Each is the norm of one
            trained leaf over all shards. Params and moments are those after the update. Updates are the change of the
            stored params, with their rounding. Grads are the mean gradient before clipping.

    Returns:
        A `Step`.

    Raises:
        TypeError: an argument of another kind.
        ValueError: a metric that there is not.

    Example:
        >>> step = fz.train_step(lambda p, x, y: ((x @ p["w"] - y) ** 2).mean(), fz.sgd(0.1))
        >>> state = step.init({"w": torch.zeros(2, 1)})
        >>> state, metrics = step(state, torch.ones(4, 2), torch.ones(4, 1))
        >>> metrics["loss"], state.step
        (tensor(1.), 1)
    """
    need_function(fn, "train_step")
    optimizer = of_slices(optimizer, "train_step")
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
    """The same step with another function: for evaluation, generation or a second loss over the same state.

    Args:
        step: any step.
        fn: `fn(params, *inputs) -> outputs`.
        has_aux: whether `fn` returns `(outputs, aux)`. None keeps what `step` says.

    Returns:
        A step with the rules and the optimizer of `step`. Both take each other's states.

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
