"""fz.scan: many steps as one differentiable function, whose derivative keeps few states and runs the rest again."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as torch_pytree

from fzero.base import private, pytree
from fzero.base.ambient import Ambient
from fzero.base.arguments import named, need_int, wrong
from fzero.base.context import during, jitting
from fzero.base.follow import follows, is_transformed
from fzero.base.node import Op, Tensors, active, apply
from fzero.base.rebound import rebound, tensors_held, tensors_reached
from fzero.engine.hidden import looking
from fzero.state.checks import need_derivative, transform_of
from fzero.state.metrics import Metrics
from fzero.state.train_state import TrainState
from fzero.step import Step
from fzero.table.spec import need_step

Batch = tuple[object, ...]
Run = Callable[[Step, TrainState, Sequence[Batch]], tuple[TrainState, Metrics]]


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
        state, metrics = _part(_each, step, state, part) if apart else _run(step, state, part)
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


def _part(run: Run, step: Step, state: TrainState, batches: Sequence[Batch]) -> tuple[TrainState, Metrics]:
    """`run(step, state, batches)` as one node of whatever differentiates it, which keeps these and runs again."""
    leaves, spec = torch_pytree.tree_flatten(state)
    held, count, flat = _held(step), len(leaves), pytree.Split([*batches], pytree.is_tensor)
    given = (*leaves, *held.values(), *flat.leaves[0])
    if any(transform_of(x) == "torch.autograd.forward_ad" for x in given):
        raise TypeError(
            "scan: got tensors of torch.autograd.forward_ad, expected those of torch.func.jvp, whose levels nest: "
            "torch.func.jvp(f, (x,), (tangent,)) of a function that calls fz.scan."
        )
    specs: list[Any] = []

    def fn(*tensors: torch.Tensor) -> Tensors:
        rest = iter(tensors)
        state: TrainState = torch_pytree.tree_unflatten([*itertools.islice(rest, count)], spec)
        made = _made(step, dict(zip(held, rest, strict=False)))
        new, metrics = run(made, state, flat.join(rest))
        (out, *own), (found, *others) = torch_pytree.tree_flatten(new), pytree.flatten(metrics)
        specs[:] = *own, *others
        return (*out, *found)

    op = Op(fn, None, Ambient(state.params.device.type))
    op.name, op.plain = "fz.scan", False  # steps take what plain autograd differentiates for constants
    out = apply(op, active(given), *given)
    end = specs[0].num_leaves
    return torch_pytree.tree_unflatten(out[:end], specs[0]), pytree.unflatten(specs[1], out[end:])


def _each(step: Step, state: TrainState, batches: Sequence[Batch]) -> tuple[TrainState, Metrics]:
    """`_run`, in which what is differentiated keeps the state before each step, and not what the step computes."""
    if private.level() != 1 or private.forward_mode():  # nothing does, or a second one, for which each would run again
        return _run(step, state, batches)
    found: list[Metrics] = []
    for batch in batches:
        state, metrics = _part(_run, step, state, [batch])
        found.append(metrics)
    return state, _joined(found, torch.cat)


def _held(step: Step) -> dict[int, torch.Tensor]:
    """What a step was made with, and a transform goes on through, by ids."""
    return {id(x): x for x in tensors_held((step.optimizer, step.fn, step.extras)) if follows(x)}


def _made(step: Step, new: Mapping[int, torch.Tensor]) -> Step:
    """The step, with other tensors in the place of those that it was made with."""
    optimizer, fn, extras = rebound((step.optimizer, step.fn, step.extras), lambda x: new.get(id(x), x))
    return dataclasses.replace(step, optimizer=optimizer, fn=fn, extras=extras)


def _refuse_hidden(step: Step, state: TrainState, batches: Sequence[Batch]) -> None:
    """Refuses a step that comes to tensors which a transform goes on through in ways that another run would not see.

    One run in the open, where that transform is: what each step computes with is seen there, and what it has put where
    its next run finds it. Of its derivatives nothing is kept.
    """
    held = _held(step)
    need_derivative(step, state.layout.rows, "scan", state=state, optimizer=[*held.values()], batches=list(batches))
    for x in tensors_reached((step.optimizer, step.extras)):
        if follows(x) and id(x) not in held:
            raise _hidden(x)
    before = {id(x): x for x in tensors_reached(step.fn)}
    # what the step is given are others than those that it may come to as well
    held = {key: x.view_as(x) for key, x in held.items()}
    step = _made(step, held)
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


def _as_tensor(value: object) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, (int, float)):
        raise TypeError(f"scan: got a metric, or aux, of {named(value)}, expected tensors or numbers.")
    return torch.tensor(value, device="cpu")
