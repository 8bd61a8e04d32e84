"""fz.stack and fz.unstack: states of one step as one whose tensors have a leading dim, for torch.vmap, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from fzero.base import pages, pytree
from fzero.base.arguments import named, wrong
from fzero.base.follow import any_follows
from fzero.state.checks import open_to_transforms
from fzero.state.items import items_of
from fzero.state.moments import placed_moments
from fzero.state.placing import placed, settle
from fzero.state.sharded import Sharded, group_of, is_sharded
from fzero.state.train_state import TrainState
from fzero.stores.away import Buffer

_STATES = "a list of states that steps' init returned"


def stack(states: Sequence[TrainState]) -> TrainState:
    """Makes one state of an ensemble's states, over which `torch.vmap(step)` runs: every tensor gets a leading dim.

    - `torch.vmap(step)(stacked, x, y)` gives each member its own inputs, of shape `[members, ...]`.
    - `torch.vmap(step, in_dims=(0, None, None))(stacked, x, y)` gives all members the same ones.
    - Members share what is a number: the step, the optimizer's counts, the loss scale, and the first member's seed.
    - `randomness=` of `torch.vmap` says whether members draw the same random numbers.
    - A member whose gradient is not finite keeps its tensors, and `metrics["skipped"]` says which. The counts go on for
      all.

    Each rank stacks its own buffers. Nothing is sent. What is offloaded is read, and the result lies on the device.

    Args:
        states: at least one state, all of one step over the same leaves, after the same number of updates.

    Returns:
        A new state with buffers `[members, elements]`, for `torch.vmap` and `fz.unstack` only. Encoded states can be
        stacked, but no step can be mapped over them.

    Raises:
        TypeError: something is no state.
        ValueError: there are no states, or one differs from the first in more than tensors' values and its seed.

    Example:
        >>> step = fz.train_step(lambda p, x: ((p["w"] * x) ** 2).sum(), fz.sgd(0.1))
        >>> stacked = fz.stack([step.init({"w": torch.full((1,), w)}) for w in (1.0, 2.0, 3.0)])
        >>> stacked, metrics = torch.vmap(step, in_dims=(0, None))(stacked, torch.ones(1))
        >>> metrics["loss"]
        tensor([1., 4., 9.])
    """
    if not isinstance(states, (list, tuple)):
        raise wrong("stack", "states", states, _STATES)
    for place, state in enumerate(states):
        if not isinstance(state, TrainState):
            raise wrong("stack", f"states[{place}]", state, "a state that a step's init returned")
    if not states:
        raise ValueError(f"stack: got states={states}, expected at least one. Give it {_STATES}.")
    with open_to_transforms("fz.stack", states=states) as (_, states):
        first, *others = states
        for place, other in enumerate(others, 1):
            for (name, own), (_, its) in zip(_shared(first), _shared(other), strict=True):
                if own != its:
                    raise ValueError(
                        f"stack: {name} of states[{place}] is not that of states[0]: got {its}, expected {own}. The "
                        "members of an ensemble are states of one step over the same leaves, after as many updates."
                    )
        return pytree.map(lambda *xs: _stacked(xs), *states)


def unstack(state: TrainState) -> list[TrainState]:
    """The states of an ensemble, each by itself: the inverse of `fz.stack`.

    Args:
        state: what `fz.stack` returned, or `torch.vmap` of a step over it.

    Returns:
        A list of states, with tensors of their own, which are offloaded again if their step says so. All have the seed
        of the stacked state. `state.replace(seed=...)` gives another.

    Raises:
        TypeError: it is no state.
        ValueError: it is not stacked.

    Example:
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1))
        >>> states = [step.init({"w": torch.full((2,), w)}) for w in (1.0, 2.0)]
        >>> fz.gather(fz.unstack(fz.stack(states))[1].params)["w"]
        tensor([2., 2.])
    """
    if not isinstance(state, TrainState):
        raise wrong("unstack", "state", state, "a state that fz.stack returned")
    with open_to_transforms("fz.unstack", state=state) as (_, state):
        own = lambda place: lambda x: x[place].clone(memory_format=torch.contiguous_format)
        return [_settled(pytree.map(own(place), state)) for place in range(_members(state))]


def _members(state: TrainState) -> int:
    """How many states are stacked in this one."""
    count = 0
    for name, item in items_of(state):
        for entry, x, dims in _tensors(item):
            there = x.shape[0] if isinstance(x, torch.Tensor) and x.ndim >= dims else 0
            if not there or there != (count or there):
                raise ValueError(
                    f"unstack: state.{name}{entry}: got {named(x)}, expected a tensor with a leading dim of "
                    f"{count or 'its'} members. Give it what fz.stack returned, or torch.vmap of a step over that."
                )
            count = there
    return count


def _tensors(item: object) -> Iterator[tuple[str, Buffer, int]]:
    """The tensors of an item, each with words for it, and how many dims it has at least where it is stacked."""
    if isinstance(item, torch.Tensor):
        yield "", item, 1
    elif is_sharded(item):
        for name, x in (*item.entries.items(), *item.held_entries.items()):
            yield f" (leaf {item.layout.groups[group_of(name)].slots[0].path!r} and its group)", x, 2


def _stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor of all members', in memory of its own."""
    if any_follows(tensors):
        return torch.stack([*tensors])
    first = tensors[0]
    out = pages.empty(len(tensors) * first.numel(), first.dtype, first.device).view(len(tensors), *first.shape)
    for place, x in zip(out, tensors, strict=True):
        place.copy_(x)
    return out


def _settled(state: TrainState) -> TrainState:
    """The state, its buffers where its rows say."""

    def one(tree: Sharded, kind: str) -> Sharded:
        tree = placed(tree, kind)
        return tree.replaced(held={key: settle(tree, key, kind, x) for key, x in tree.held.items()})

    grads = state.grads and one(state.grads, "grads")
    return state.changed(params=one(state.params, "params"), grads=grads, moments=placed_moments(state.moments))


def _shared(state: TrainState) -> Iterator[tuple[str, object]]:
    """What all members must have alike, by names, in an order in which the first difference says most."""
    yield from [("the step", state.step), ("the signature", state.signature)]
    yield "the number of leaves", len(state.layout.rows)
    for row in state.layout.rows:
        yield "the path of a leaf", row.path
        for name in [field.name for field in dataclasses.fields(row) if field.compare]:
            yield f"the {name} of leaf {row.path!r}", getattr(row, name)
    yield from [("the mesh axis", state.params.axis), ("the structure of the params", state.params.structure)]
    items = items_of(state)
    yield "the list of trees, tensors and numbers", [item.name for item in items]
    for name, item in items:
        yield f"state.{name}", _in_words(item)
        if is_sharded(item):
            yield f"the kind of state.{name}", item.kind
            yield f"the scale of state.{name}", item.scale
            yield f"the buffers of state.{name}", [[*map(str, own)] for own in (item.entries, item.held_entries)]
        for entry, x, _ in _tensors(item):
            shape = tuple(x.shape) if isinstance(x, torch.Tensor) else (x.numel(),)  # wherever it lies
            yield f"state.{name}{entry}", f"on {x.device} a tensor of shape {shape} and dtype {x.dtype}"


def _in_words(item: object) -> object:
    """An item, but for tensors' values."""
    if isinstance(item, pytree.Count):
        return item.said
    return named(item) if is_sharded(item) or isinstance(item, torch.Tensor) else item
