"""fz.scan: many steps as one differentiable function, whose derivative keeps few states and runs the rest again."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.utils import _pytree as torch_pytree

from fzero.base import private, pytree
from fzero.base.arguments import named, need_int, wrong
from fzero.base.context import during, jitting
from fzero.base.follow import follows, is_transformed
from fzero.base.node import Op, Tensors, active, apply, first_order
from fzero.base.pytree import is_real
from fzero.base.rebound import rebound, tensors_held, tensors_reached
from fzero.engine.hidden import looking
from fzero.state.checks import need_derivative, transform_of
from fzero.state.metrics import Metrics
from fzero.state.train_state import TrainState
from fzero.step import Step
from fzero.table.spec import need_step

_Kept = tuple[list[torch.Tensor], torch_pytree.TreeSpec]  # a state taken apart
Batch = tuple[object, ...]


def scan(
    step: Step, state: TrainState, batches: object, remat_every: int | None = None
) -> tuple[TrainState, Metrics]:
    """Runs many steps as one differentiable function, with memory for few states: JAX's `lax.scan` with checkpoints.

    It is `state, metrics = step(state, *batch)` for each batch. `torch.func` differentiates it by the state, the
    batches, and tensors that the optimizer or the function was made with. Reverse mode keeps the batches and each
    `remat_every`-th state. The states between are computed again. So n steps keep about 2 √n states, and run once more.
    Under a transform each step runs several times, so its function must be pure: a counter of its own would go on.

    Args:
        step: any step that has a derivative.
        state: the state before the first step.
        batches: a list with one batch for each step, a tuple of inputs or one input. Or a tuple of inputs, tensors or
            trees of them, whose leading dim counts steps.
        remat_every: the number of steps from one kept state to the next. None takes the square root of their number.

    Returns:
        `(state, metrics)`: the state after the last step, and each metric of all steps as a tensor `[steps, ...]`.

    Raises:
        TypeError: batches of another kind, or metrics that are no tensors or numbers.
        ValueError: no batches, or inputs of different lengths.

    Source:
        Chen et al. 2016, arXiv 1604.06174.

    Example:
        >>> def trained(lr):
        ...     step = fz.train_step(lambda p, x: ((p["w"] - x) ** 2).sum(), fz.sgd(lr))
        ...     state, metrics = fz.scan(step, step.init({"w": torch.zeros(2)}), [torch.ones(2)] * 9)
        ...     return step.forward(state, torch.ones(2))
        >>> round(torch.func.grad(trained)(torch.tensor(0.01)).item(), 3)
        -51.071
    """
    need_step(step, "scan")
    split = _split(batches)
    if remat_every is None:
        remat_every = math.isqrt(len(split) - 1) + 1
    every = need_int(remat_every, "scan", "remat_every", "a number of steps or None", least=1)
    found: list[Metrics] = []
    if is_transformed():
        _refuse_hidden(step, state, split)
    if is_transformed() and state.grads is not None:  # which the first update clears: a state of another structure
        state, first = _run(step, state, split[:1])
        split, found = split[1:], [first]
    for begin in range(0, len(split), every):
        part = split[begin : begin + every]
        apart = is_transformed() and jitting.get() is None  # a graph keeps what it needs itself
        state, metrics = _part(step, state, part) if apart else _run(step, state, part)
        found.append(metrics)
    return state, _joined(found, torch.cat)


def _split(batches: object) -> list[Batch]:
    """The inputs of each step."""
    if isinstance(batches, list):
        if not batches:
            raise ValueError("scan: got batches=[], expected at least one batch.")
        return [batch if isinstance(batch, tuple) else (batch,) for batch in batches]
    if isinstance(batches, torch.Tensor):
        batches = (batches,)
    expected = "a list of batches, each a tuple of inputs, or a tuple of inputs with a leading dim of steps"
    if type(batches) is not tuple or not batches or any(isinstance(each, tuple) for each in batches):
        raise wrong("scan", "batches", batches, expected)
    names, leaves, spec = pytree.named_leaves(batches)
    for name, leaf in zip(names, leaves, strict=True):
        if not isinstance(leaf, torch.Tensor) or not leaf.ndim:
            raise TypeError(f"scan: got batches[{name}]={named(leaf)}, expected tensors with a leading dim of steps.")
    lengths = {name: leaf.shape[0] for name, leaf in zip(names, leaves, strict=True)}
    if len(set(lengths.values())) != 1 or not min(lengths.values()):
        raise ValueError(f"scan: got inputs of {lengths} steps, expected the same number in all, at least one.")
    return [pytree.unflatten(spec, own) for own in zip(*[leaf.unbind() for leaf in leaves], strict=True)]


def _run(step: Step, state: TrainState, batches: Sequence[Batch]) -> tuple[TrainState, Metrics]:
    found: list[Metrics] = []
    for batch in batches:
        state, metrics = step(state, *batch)
        found.append(pytree.map(_as_tensor, metrics))
    return state, _joined(found, torch.stack)


def _joined(parts: Sequence[Metrics], join: Callable[..., torch.Tensor]) -> Metrics:
    """The metrics of several steps."""
    return pytree.map(lambda *each: join(each), *parts)


# ---- a part, between two kept states


def _part(step: Step, state: TrainState, batches: Sequence[Batch]) -> tuple[TrainState, Metrics]:
    """`_run` as one node of whatever differentiates it, which keeps the first state, the batches, and nothing else."""
    leaves, spec = torch_pytree.tree_flatten(state)
    own = (step.optimizer, step.fn, step.extras)
    held = {id(x): x for x in tensors_held(own) if follows(x)}
    flat = [pytree.Split(batch, pytree.is_tensor) for batch in batches]
    given = (*leaves, *held.values(), *[x for each in flat for x in each.leaves[0]])
    if any(transform_of(x) == "torch.autograd.forward_ad" for x in given):
        raise TypeError(
            "scan: got tensors of torch.autograd.forward_ad, expected those of torch.func.jvp, whose levels nest: "
            "torch.func.jvp(f, (x,), (tangent,)) of a function that calls fz.scan."
        )
    op = _Steps(step, spec, len(leaves), [*held], flat, state.params.device.type)
    out = apply(op, active(given), *given)
    assert op.spec is not None
    return torch_pytree.tree_unflatten(out[: len(leaves)], op.spec), op.metrics(out[len(leaves) :])


def _refuse_hidden(step: Step, state: TrainState, batches: Sequence[Batch]) -> None:
    """Refuses a step that comes to tensors which a transform goes on through in ways that another run would not see.

    One run in the open, where that transform is: what each step computes with is seen there, and what it has put where
    its next run finds it. Of its derivatives nothing is kept.
    """
    own = (step.optimizer, step.fn, step.extras)
    held = {id(x): x for x in tensors_held(own) if follows(x)}
    need_derivative(step, state.layout.rows, "scan", state=state, optimizer=[*held.values()], batches=list(batches))
    for x in tensors_reached((step.optimizer, step.extras)):
        if follows(x) and id(x) not in held:
            raise _hidden(x)
    before = {id(x): x for x in tensors_reached(step.fn)}
    # what the step is given are others than those that it may come to as well
    held = {key: x.view_as(x) for key, x in held.items()}
    optimizer, fn, extras = rebound(own, lambda x: held.get(id(x), x))
    step = dataclasses.replace(step, optimizer=optimizer, fn=fn, extras=extras)
    for batch in batches:
        split = pytree.Split(batch, pytree.is_tensor)
        inputs = split.join([x.view_as(x) if follows(x) else x for x in split.leaves[0]])
        state = torch_pytree.tree_map(lambda x: x.detach() if follows(x) else x, state)
        with during(looking, _hidden):
            state, metrics = step(state, *inputs)
        pytree.map(_as_tensor, metrics)
    for x in tensors_reached(step.fn):
        if id(x) not in before and id(x) not in set(map(id, held.values())):
            if private.is_differentiated(x) or private.is_mapped(x):
                raise ValueError(
                    f"scan: fn keeps a tensor of shape {tuple(x.shape)}, which depends on what a transform goes on "
                    "through, from one call to the next (a cache, an attribute, a list), so that its derivative would "
                    "be lost; expected a function that computes it in each call. Take the cache out, or pass the "
                    "tensor as an input."
                )


def _hidden(x: torch.Tensor) -> ValueError:
    return ValueError(
        f"scan: the step comes to a tensor of shape {tuple(x.shape)}, which a transform goes on through, by an object, "
        "a class, a global or a cache, where another run would not see it; expected one that its function closes over, "
        "or that its optimizer was made with. Say w = holder.w outside of the function and use w in it. Of a state or "
        "its params, which are slices, take w = fz.gather(state.params) there."
    )


class _Steps(Op):
    """Some steps, from the tensors of the first state to those of the last one and of the metrics.

    Its tensors are those of the state, what the step was made with, and those of each batch.

    Args:
        spec: of the first state, which has `count` tensors.
        held: the ids of what the step was made with, and a transform goes on through.
        batches: each without its tensors.

    Attributes:
        spec: that of the last state, once it has run.
    """

    name, plain = "fz.scan", False  # steps take what plain autograd differentiates for constants

    def __init__(
        self,
        step: Step,
        spec: torch_pytree.TreeSpec,
        count: int,
        held: Sequence[int],
        batches: Sequence[pytree.Split],
        device: str,
    ) -> None:
        super().__init__(self._all, None, device)
        self._step, self._first, self._count, self._held, self._batches = step, spec, count, held, batches
        ends = itertools.accumulate([len(batch.places[0]) for batch in batches], initial=count + len(held))
        self._bounds = [*itertools.pairwise(ends)]  # of each batch among the tensors
        self.spec: torch_pytree.TreeSpec | None = None
        self._metrics: pytree.Spec | None = None

    def metrics(self, leaves: Sequence[torch.Tensor]) -> Metrics:
        assert self._metrics is not None
        return pytree.unflatten(self._metrics, leaves)

    def _made(self, held: Sequence[torch.Tensor]) -> Step:
        """The step, with other tensors in the place of those that it was made with."""
        new = dict(zip(self._held, held, strict=True))
        own = (self._step.optimizer, self._step.fn, self._step.extras)
        optimizer, fn, extras = rebound(own, lambda x: new.get(id(x), x))
        return dataclasses.replace(self._step, optimizer=optimizer, fn=fn, extras=extras)

    def _one(
        self, step: Step, number: int, spec: torch_pytree.TreeSpec, leaves: Sequence[torch.Tensor], batch: Tensors
    ) -> tuple[list[torch.Tensor], torch_pytree.TreeSpec, list[torch.Tensor]]:
        """A step: the tensors and the structure of the next state, and the metrics."""
        state = torch_pytree.tree_unflatten(leaves, spec)
        state, metrics = step(state, *self._batches[number].join(batch))
        flat, self._metrics = pytree.flatten(pytree.map(_as_tensor, metrics))
        return (*torch_pytree.tree_flatten(state), flat)

    def _states(self, tensors: Tensors) -> list[_Kept]:
        """The state before each step."""
        step = self._made(tensors[self._count : self._bounds[0][0]])
        out: list[_Kept] = [(list(tensors[: self._count]), self._first)]
        for number, (begin, end) in enumerate(self._bounds[:-1]):
            out.append(self._one(step, number, out[-1][1], out[-1][0], tensors[begin:end])[:2])
        return out

    def _all(self, *tensors: torch.Tensor) -> Tensors:
        step = self._made(tensors[self._count : self._bounds[0][0]])
        leaves, spec, found = list(tensors[: self._count]), self._first, list[list[torch.Tensor]]()
        for number, (begin, end) in enumerate(self._bounds):  # of the states one is alive at a time
            leaves, spec, metrics = self._one(step, number, spec, leaves, tensors[begin:end])
            found.append(metrics)
        self.spec = spec
        return (*leaves, *[torch.stack(each) for each in zip(*found, strict=True)])

    def transposed(self, count: int, wanted: Sequence[int], real: Sequence[int]) -> Op:
        general = super().transposed(count, wanted, real)

        def fn(*args: torch.Tensor) -> Tensors:
            if not first_order():
                return general.fn(*args)
            return self._pulled(args[:count], wanted, dict(zip(real, args[count:], strict=True)))

        op = self.derived(fn)
        op.unused = general.unused
        return op

    def _pulled(self, tensors: Tensors, wanted: Sequence[int], cotangents: Mapping[int, torch.Tensor]) -> Tensors:
        """The cotangents of the wanted tensors: from the last step to the first, whose states are made again."""
        count, start = self._count, self._bounds[0][0]
        states = self._states(tensors)
        of_state = {place: cotangents[place] for place in range(count) if place in cotangents}
        totals = dict[int, torch.Tensor]()
        for number, (begin, end) in reversed([*enumerate(self._bounds)]):
            leaves, spec = states.pop()
            own = (*leaves, *tensors[count:start], *tensors[begin:end])
            places = [*range(start), *range(begin, end)]
            moving = [i for i, x in enumerate(own) if is_real(x) and (i < count or places[i] in wanted)]
            of_metrics = {place: x[number] for place, x in cotangents.items() if place >= count}
            found = self._pulled_one(number, spec, own, moving, {**of_state, **of_metrics})
            of_state = {i: x for i, x in found.items() if i < count}
            for i, x in found.items():
                if i >= count:
                    totals[places[i]] = totals[places[i]] + x if places[i] in totals else x
        totals |= of_state
        return tuple(totals[i] if i in totals else torch.zeros_like(tensors[i]) for i in wanted)

    def _pulled_one(
        self,
        number: int,
        spec: torch_pytree.TreeSpec,
        tensors: Tensors,
        moving: Sequence[int],
        cotangents: Mapping[int, torch.Tensor],
    ) -> dict[int, torch.Tensor]:
        """The cotangents of those tensors of one step that move, by place."""
        count, held = self._count, len(self._held)

        def forward(*primals: torch.Tensor) -> Tensors:
            own = list(tensors)
            for place, primal in zip(moving, primals, strict=True):
                own[place] = primal
            step = self._made(own[count : count + held])
            leaves, _, metrics = self._one(step, number, spec, own[:count], tuple(own[count + held :]))
            out = (*leaves, *metrics)
            return tuple(out[place] for place in cotangents)

        _, pull = torch.func.vjp(forward, *[tensors[i] for i in moving])  # type: ignore[misc]
        with torch.no_grad():
            found = pull(tuple(cotangents.values()), retain_graph=False, create_graph=False)
        return dict(zip(moving, found, strict=True))


def _as_tensor(value: object) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, (int, float)):
        raise TypeError(f"scan: got a metric, or aux, of {named(value)}, expected tensors or numbers.")
    return torch.tensor(value, device="cpu")
