"""Other derivatives of a step's function over the same sharded state: tape, hvp, per_example_grads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fzero.base import collecting, private, pytree
from fzero.base.arguments import named, need_str
from fzero.base.context import during, one_by_one
from fzero.base.patterns import matches
from fzero.base.random import seeded
from fzero.comm.divergence import failing
from fzero.engine.alike import need_alike, scalars_in
from fzero.engine.batch import seed_of
from fzero.engine.carry import Carry, refuse_carry
from fzero.engine.function import call_function, traversal_of
from fzero.engine.outcome import scalar_loss, split_result
from fzero.engine.traversal import autocast, known, running
from fzero.state.check_state import check_state, taken_grads
from fzero.state.checks import constants, need_derivatives
from fzero.state.sharded import Sharded
from fzero.state.sliced import whole_of
from fzero.state.train_state import TrainState
from fzero.table.layout import Key
from fzero.table.placements import FirstRun, has_run, noted, notes
from fzero.table.spec import Spec


class Tape:
    """A step's function under plain autograd. Made by `fz.tape`."""

    def __init__(self, step: Spec, state: TrainState) -> None:
        check_state(step, state, "tape")
        self._step, self._state, self._calls = step, state, 0
        _, primals, self._fixed = traversal_of(step, state, (0,))
        self._leaves = {key: primal.detach().requires_grad_() for key, primal in primals.items()}

    def __call__(self, *inputs: object) -> Any:
        """The outputs, which `backward` and `torch.autograd.grad` go through."""
        need_derivatives("the model of fz.tape")
        _refuse_transforms("the model of fz.tape")
        with failing("a forward of a tape"):
            traversal, _, _ = traversal_of(self._step, self._state, seed_of(self._state, self._calls, 0))
            self._calls += 1
            out = call_function(self._step, self._state, traversal, {**self._leaves, **self._fixed}, inputs)
            need_alike(self._state.params.axis, scalars_in(out), "the model of fz.tape")
            return out

    def grads(self) -> Sharded:
        """The sum of all backward passes since the last call, for `step.update` or `step.add_grads`."""
        params = self._state.params
        found = {key: torch.zeros_like(x) if x.grad is None else x.grad for key, x in self._leaves.items()}
        for leaf in self._leaves.values():
            leaf.grad = None
        return Sharded(params.layout, params.axis, params.structure, found)


@contextlib.contextmanager
def tape(step: Spec, state: TrainState) -> Iterator[Tape]:
    """A step's function through plain autograd, for code that calls `loss.backward()`.

    Inside the `with`, `model(*inputs)` returns outputs with a graph, `backward` adds to gradients, and `model.grads()`
    returns their sum and starts again from zero. They are means over ranks, as those of a pullback. The loss scale is
    not applied, and batches are not split into microbatches.

    Args:
        step: a step without a carry and without `weights` of `fz.accumulate`.
        state: a state of this step.

    Returns:
        A context manager. It gives the model.

    Raises:
        TypeError: a transform of `torch.func` around it (use `step.vjp` there), or the step has a carry.
        ValueError: the step has `weights`. Give it the step before `fz.accumulate`, and weigh the loss yourself. Or it
            is one of `fz.jit`.

    Example:
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1))
        >>> state = step.init({"w": torch.ones(2)})
        >>> with fz.tape(step, state) as model:
        ...     model(torch.ones(2)).backward()
        ...     grads = model.grads()
        >>> fz.gather(grads)["w"]
        tensor([1., 1.])
    """
    need_derivatives("fz.tape")
    _refuse_transforms("fz.tape")
    if getattr(step, "graphs", None) is not None:
        raise ValueError("fz.tape: got a step of fz.jit, whose graphs have pullbacks of their own. Take step.vjp.")
    made = Tape(step, state)
    refuse_carry(step, "tape")
    _refuse_weights(step, "tape")
    with torch.enable_grad():  # alone, as it may be left at another time and place, by a generator or a task
        yield made


def _refuse_transforms(who: str) -> None:
    if private.transforms():
        raise TypeError(
            f"{who}: got a call inside a transform of torch.func, or of forward mode, expected one outside: a tape is "
            "plain autograd's. Call step.vjp, step.forward or the step itself, which such transforms go through."
        )


def hvp(step: Spec, state: TrainState, v: object, *inputs: object) -> Sharded:
    """The Hessian of the mean loss times a vector, for curvature and influence functions.

    Batches are not split into microbatches.

    Args:
        step: a step whose function returns a scalar loss, without `weights` of `fz.accumulate`.
        state: a state of this step.
        v: the vector, in the form of grads: what a pullback returned, an earlier product, or full leaves that are equal
            on all ranks, as `step.update` takes them. What it has of frozen leaves is left out.
        *inputs: this rank's share of the batch.

    Returns:
        The product, sharded like grads, a mean over ranks.

    Raises:
        ValueError: the step has `weights`. Give it the step before `fz.accumulate`.

    Source:
        Pearlmutter 1994, https://doi.org/10.1162/neco.1994.6.1.147. Reverse mode over reverse mode.

    Example:
        >>> step = fz.train_step(lambda p, x: (p["w"] ** 3 * x).sum(), fz.sgd(0.1))
        >>> state = step.init({"w": torch.ones(2)})
        >>> out, pullback = step.vjp(state, torch.ones(2))
        >>> fz.gather(fz.hvp(step, state, pullback(torch.ones(()))[0], torch.ones(2)))["w"]
        tensor([18., 18.])
    """
    check_state(step, state, "hvp")
    need_derivatives("fz.hvp")
    state, v, inputs = constants("fz.hvp", state=state, v=v, inputs=inputs)
    vector = taken_grads(step, state, v, "hvp", "v")
    _refuse_weights(step, "hvp")
    given = Carry(step, state).given(inputs)
    _, primals, _ = traversal_of(step, state, seed_of(state, 0, 0))

    def loss(primals: dict[Key, torch.Tensor]) -> torch.Tensor:
        traversal, _, fixed = traversal_of(step, state, seed_of(state, 0, 0))
        out = call_function(step, state, traversal, {**primals, **fixed}, given)
        return scalar_loss(split_result(step, out)[0], "hvp")

    with failing("a product with the Hessian"), torch.no_grad():
        _, pullback, value = torch.func.vjp(torch.func.grad_and_value(loss), primals, has_aux=True)  # type: ignore[misc]
        need_alike(state.params.axis, scalars_in(value), "hvp", "a loss")
        (product,) = pullback(vector.locals(), retain_graph=False, create_graph=False)
    return vector.with_buffers(product)


def _refuse_weights(step: Spec, who: str) -> None:
    if step.microbatches.weights is not None:
        raise ValueError(
            f"{who}: got a step with fz.accumulate(..., weights=...), expected one without: it splits no batch, and "
            "its result is a plain mean over ranks. Give it the step as it was before fz.accumulate, with a loss of "
            "fz.parallel.weighted_mean; or call step.vjp."
        )


def per_example_grads(step: Spec, state: TrainState, *inputs: object, only: str | None = None) -> Any:
    """The gradient of each example by itself, as for differential privacy. Nothing is reduced over ranks.

    All params are gathered whole, so the model must fit on one device. `only` keeps the gradients small. Values are
    computed as the step does: in compute dtypes, under its autocast, and in the dtype of its grads.

    Args:
        step: a step whose function returns a scalar loss of a batch.
        state: a state of this step.
        *inputs: this rank's share of the batch, examples along dim 0 of every tensor. Each runs as a batch of one.
            There may be 0 examples. Inputs that are no tensors are passed as they are.
        only: fnmatch over dotted paths, alternatives separated by `|`: the leaves to differentiate by. None: all.

    Returns:
        A tree in the structure of the params. Each leaf is `[examples of this rank, *leaf shape]`, None for leaves that
        were not chosen.

    Raises:
        TypeError: no input is a tensor, or the step has a carry. Make a step whose function takes it as an input.
        ValueError: no leaf matches; tensors have different numbers of examples; some units run under another autocast
            than others; or the function exchanges values between ranks whose examples differ.

    Example:
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1))
        >>> fz.per_example_grads(step, step.init({"w": torch.ones(1)}), torch.tensor([[1.0], [3.0]]))["w"]
        tensor([[1.],
                [3.]])
    """
    check_state(step, state, "per_example_grads")
    need_derivatives("fz.per_example_grads")
    need_str(only, "per_example_grads", "only", "a pattern over leaf paths or None", or_none=True)
    refuse_carry(step, "per_example_grads")
    state, inputs = constants("fz.per_example_grads", state=state, inputs=inputs)
    names, flat, spec = pytree.named_leaves(tuple(inputs))
    dims = [0 if isinstance(x, torch.Tensor) else None for x in flat]
    tensors = {name: x for name, x in zip(names, flat, strict=True) if isinstance(x, torch.Tensor)}
    count = _count_examples(tensors, inputs)
    rows = state.layout.rows
    chosen = [i for i, row in enumerate(rows) if not row.frozen and (only is None or matches(only, row.path))]
    if not chosen:
        raise ValueError(
            f"per_example_grads: got only={only!r}, expected a pattern that matches a trained leaf"
            f"{'; every leaf is frozen' if all(row.frozen for row in rows) else ''}."
        )
    traversal, primals, fixed = traversal_of(step, state, seed_of(state, 0, 0))
    other = next((row for row in traversal.table.rows if row.autocast != traversal.table.outside), None)
    if other is not None:
        raise ValueError(
            f"per_example_grads: unit {other.unit!r} runs under another autocast than what is around it, and here its "
            "leaves are whole. Say fz.autocast without a pattern, or leave it out."
        )
    leaves: dict[int, torch.Tensor] = {}
    for key in (*primals, *fixed):
        leaves.update(state.layout.groups[key].views(traversal.uses[key].value()))

    def loss(values: dict[int, torch.Tensor], *example: Any) -> torch.Tensor:
        full = leaves | values
        each = [full[i] for i in range(len(rows))]
        tree = pytree.unflatten(state.params.structure, each)
        given = pytree.unflatten(spec, [x if dim is None else x[None] for x, dim in zip(example, dims, strict=True)])
        told = noted(axis.tensor, before, example, (step, state.params, given))
        of_leaves = during(known, (traversal, {id(x): i for i, x in full.items()}))
        alone = during(one_by_one, traversal.averaged)
        outside = autocast(traversal.device, traversal.table.outside)
        with during(running, state.layout), alone, of_leaves, outside, during(notes, told), collecting.run():
            out = step.fn(tree, *given)
        value = scalar_loss(split_result(step, out)[0], "per_example_grads")
        has_run(told, before, example)
        return value

    axis = state.params.axis
    before = dict[object, FirstRun]()
    with contextlib.suppress(TypeError):  # a function that cannot be referred to weakly
        key = "examples", hash(state.layout), traversal.table.sequence
        before = axis.records.setdefault(step.fn, {}).setdefault(key, before)
    mapped = torch.func.vmap(torch.func.grad_and_value(loss), in_dims=(None, *dims), randomness="different")
    own = {i: leaves[i] for i in chosen}
    with failing("gradients of examples"), torch.no_grad(), seeded(traversal.next_seed()):
        if count:
            grads, losses = mapped(own, *flat)
        else:  # which torch maps nothing over; nor does any rank that has the same examples
            grads, losses = {i: x.new_empty((0, *x.shape)) for i, x in own.items()}, torch.empty(0, device="cpu")
        need_alike(axis, [losses.detach()], "per_example_grads", "a loss")
    found = [whole_of(row, axis, grads[i], 1).to(row.policy.grad) if i in grads else None for i, row in enumerate(rows)]
    return pytree.unflatten(state.params.structure, found)


def _count_examples(tensors: Mapping[str, torch.Tensor], inputs: Sequence[object]) -> int:
    """The number of examples along dim 0, the same in all tensors of the inputs; otherwise these are refused."""
    for name, x in tensors.items():
        if not x.ndim:
            raise ValueError(
                f"per_example_grads: got input {name} of shape (), expected examples along its dim 0. Let the function "
                "close over what holds for all examples."
            )
    sizes = {name: x.shape[0] for name, x in tensors.items()}
    if not sizes:
        got = ", ".join(map(named, inputs)) or "no inputs"
        raise TypeError(f"per_example_grads: got input {got}, expected at least one tensor with examples along dim 0.")
    if len(set(sizes.values())) > 1:
        said = ", ".join(f"{size} in input {name}" for name, size in sizes.items())
        raise ValueError(f"per_example_grads: got examples along dim 0: {said}; expected the same number in all.")
    return next(iter(sizes.values()))
