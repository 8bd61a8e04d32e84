"""The protocol of optimizers: optax's pair (init, update), on any pytree; and what fzero adds to it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fzero.table.layout import Key

Number = float | torch.Tensor  # a 0-d one
Schedule = Callable[[int], Number]
Arrived = list[dict[int, torch.Tensor]]  # what an exchange has brought: leaves, by their numbers
Paused = Generator[Callable[[], Arrived], Arrived, object]
PausedUpdate = Generator[Callable[[], Arrived], Arrived, tuple[object, object]]


class Whole(NamedTuple):
    """What an update brings of one group to the ranks that have its leaves whole.

    Attributes:
        to, back: how many buffers of the group's size go there, and back.
        itemsize: bytes of each of their elements.
        told: leaf -> bytes of its state that its rank tells every other one.
    """

    to: int
    back: int
    itemsize: int
    told: Mapping[int, int] = {}


class GradientTransformation(NamedTuple):
    """A pure transformation of gradients, in optax's shape, with optional extras.

    In a step `init` and `update` get trees of flat buffers, each with this rank's slices of several leaves, and treat
    every element by itself: that is tried as a state begins, by a few updates of small leaves. `fz.whole` gives each
    leaf by itself. `update` may write in place to `updates` and `state`, which are copies.

    Attributes:
        init: `init(params) -> state`.
        update: `update(updates, state, params) -> (updates, state)`; may take keywords (`grad_norm`) too. Those of this
            library take any, so that a wrapper passes on all that it is given.
        fused: `fused(params, grads, state) -> state`, equal to update and apply, writing params and moments in place
            (the step passes buffers that nobody else holds).
        label: `label(path) -> str`, which optimizer a leaf gets: a column of the table.
        metrics: `metrics(state) -> {name: number}` of the coming update, such as the learning rate.
        by_leaf: whether it treats every element by itself, but for a norm that it is given: then it may be applied
            group by group, and its moments be in any format, as `init` and `fused` get trees as they are stored.
        needs: "norm" where it wants `grad_norm`, the norm of the gradients that it is given; "all" where it wants
            another one, of some leaves or behind another member, and so all leaves at once.
        scales: whether it only multiplies all it is given by a number: then `update` gets trees as they are stored and
            may note the factor (`Sharded.scaled`). Otherwise it gets values, in float32 or float64.
        copies: whether `fused` makes other values of all grads it is given, before it writes (a chain that does more
            than scale them): it is then given one group at a time, where it may be.
        blank: whether `init` gives zeros and counts only: a load then makes no memory that it would overwrite.
        exchanges: how often a group's update in `fused` waits for slices that ranks send each other. Where it does, it
            is given all groups at once, unless it copies or something of them has to be brought, so that one's exchange
            runs beside another's computation, and it never runs on a thread beside.
        paused: `paused(params, grads, state)`, `fused` as a generator that gives what waits for each exchange that it
            has begun, is sent what that brings, and returns its part of the state: so groups that are updated one by
            one, as the pullback of others goes on, do not wait either. Given several groups, it may pause or not.
        sends: `sends(params, state) -> [{group: what it brings to whole leaves}]`, for each optimizer that exchanges
            them, which `fz.plan` counts.
        measures: whether `fused` adds up the squares of what it computes where it is asked to (`params.draw.squares`).
        combine: `combine(params, state, parts) -> state`, after all groups, of the old state and what `paused` has
            returned of each of them, whose trees are empty. Without it the last one is the state of all.
        paused_update: `paused_update(updates, state, params) -> (updates, its part of the state)`, `update` as such a
            generator, for the members of a chain that others come behind: it writes its trees in place, and no params.
    """

    init: Callable[..., Any]
    update: Callable[..., tuple[Any, Any]]
    fused: Callable[..., Any] | None = None
    label: Callable[[str], str] | None = None
    metrics: Callable[..., dict[str, Number]] | None = None
    by_leaf: bool = False
    needs: str = ""
    scales: bool = False
    copies: bool = False
    blank: bool = False
    exchanges: int = 0
    paused: Callable[..., Paused] | None = None
    sends: Callable[..., Sequence[Mapping[Key, Whole]]] | None = None
    measures: bool = False
    combine: Callable[..., object] | None = None
    paused_update: Callable[..., PausedUpdate] | None = None

    @property
    def by_group(self) -> bool:
        """True where groups may be updated in place one by one."""
        return self.fused is not None and self.by_leaf and self.needs != "all"

    def __repr__(self) -> str:
        return f"GradientTransformation({_words(self)})"


def _words(optimizer: GradientTransformation) -> str:
    """What it is joined of, or its name."""
    own = getattr(optimizer.update, "__self__", None)
    if joined := getattr(own, "members", ()):
        return f"chain({', '.join(map(_words, joined))})"
    if optimizer.label is not None:
        return optimizer.label("*")
    made = getattr(optimizer.update, "func", optimizer.update)  # functools.partial's
    return getattr(made, "__name__", type(made).__name__).strip("_")
