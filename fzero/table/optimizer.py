"""The protocol of optimizers: optax's pair (init, update), on any pytree; and what fzero adds to it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Any, ClassVar, NamedTuple

import torch

Number = float | torch.Tensor  # a 0-d one
Schedule = Callable[[int], Number]
Arrived = list[dict[int, torch.Tensor]]  # what an exchange has brought: leaves, by their numbers
Paused = Generator[Callable[[], Arrived], Arrived, object]


class GradientTransformation(NamedTuple):
    """An optimizer, or a part of one: a pair of pure functions, `init` and `update`, in optax's shape.

    For your own optimizer give these two. In a step both get one leaf at a time, as `{path: leaf}`: a whole leaf, see
    `fz.whole`. So they may use the shape, the norm or the name of a leaf.

    If yours treats every element by itself, say `elementwise=True`. Then the leaf is flat, under ZeRO this rank's piece
    of it, perhaps empty, and nothing is gathered. The declaration is not checked: if it is false, updates are wrong as
    soon as ranks have slices.

    `update` may write in place to `updates` and `state`, which are copies.

    The other fields make fzero's own optimizers fast. Of yours only `label` and `metrics` are read.

    Attributes:
        init: `init(params) -> state`.
        update: `update(updates, state, params) -> (updates, state)`. It may take keywords too, such as `grad_norm`, the
            norm of all gradients, if it stands first in a chain.
        elementwise: True if both may be given pieces of leaves, as they compute each element from the same element of
            what they are given. fzero's own have it, also where they bring whole leaves themselves.
        fused: `fused(params, grads, state) -> state`: update and apply at once, in place.
        label: `label(path) -> str`: the optimizer of a leaf, for the table.
        metrics: `metrics(state) -> {name: number}` of the coming update, such as the learning rate. Yours gets the
            state of the first leaf.
        needs: `"norm"` if it wants the norm of its gradients as `grad_norm`. `"all"` if it wants another norm, and so
            all leaves at once. `""` if none.
        scales: True if it only multiplies all that it gets by a number. Then `update` gets trees as they are stored,
            and may note the factor with `Sharded.scaled`.
        copies: True if `fused` makes new values of all grads before it writes.
        blank: True if `init` gives only zeros and counts. Then a load does not fill them first.
        exchanges: how often `paused` waits for slices that ranks send each other.
        paused: the same as a generator, `paused(params, grads, state)`: it yields what waits for each exchange, is sent
            the result, and returns its part of the state. So other groups go on meanwhile.
        combine: `combine(params, state, parts) -> state`: joins what `paused` has returned for each group.

    Example:
        >>> def init(params):
        ...     return ()
        >>> def update(grads, state, params):  # of one leaf
        ...     return {path: -g / g.norm() for path, g in grads.items()}, state
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.GradientTransformation(init, update))
        >>> state, _ = step(step.init({"w": torch.ones(2)}), torch.tensor([3.0, -4.0]))
        >>> fz.gather(state.params)["w"]
        tensor([0.4000, 1.8000])
    """

    init: Callable[..., Any]
    update: Callable[..., tuple[Any, Any]]
    fused: Callable[..., Any] | None = None
    label: Callable[[str], str] | None = None
    metrics: Callable[..., dict[str, Number]] | None = None
    needs: str = ""
    scales: bool = False
    copies: bool = False  # `fused` then gets one group at a time, if it may
    blank: bool = False
    # not 0: `paused` gets all groups at once, unless it copies or something of them has to be brought, so that one's
    # exchange runs beside another's computation; and it never runs on a thread beside
    exchanges: int = 0
    paused: Callable[..., Paused] | None = None  # given several groups, it may pause or not
    # of the old state; the trees of `parts` are empty. Without it, the last part is the state of all groups
    combine: Callable[..., object] | None = None
    elementwise: bool = False

    @property
    def by_group(self) -> bool:
        """True if groups of leaves may be updated in place one by one."""
        return self.needs != "all"

    def __repr__(self) -> str:
        return f"GradientTransformation({_words(self)})"


class Joined:
    """What makes one optimizer of several, whose methods its functions are."""

    kind: ClassVar[str]

    @property
    def joined(self) -> Iterable[GradientTransformation]:
        raise NotImplementedError


def members_of(optimizer: GradientTransformation) -> list[GradientTransformation]:
    """Those that an optimizer is joined of, itself where it is not."""
    own = getattr(optimizer.update, "__self__", None)
    return [each for member in own.joined for each in members_of(member)] if isinstance(own, Joined) else [optimizer]


def _words(optimizer: GradientTransformation) -> str:
    """What it is joined of, or its name."""
    own = getattr(optimizer.update, "__self__", None)
    if isinstance(own, Joined):
        return f"{own.kind}({', '.join(map(_words, own.joined))})"
    if optimizer.label is not None:
        return optimizer.label("*")
    made = getattr(optimizer.update, "func", optimizer.update)  # functools.partial's
    return getattr(made, "__name__", type(made).__name__).strip("_")
