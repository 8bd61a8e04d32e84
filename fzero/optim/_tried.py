"""Refuses a user's own optimizer whose update of a buffer is not that of its leaves, or of a slice not that of it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator

from fzero.base import private
from fzero.base.as_written import as_written
from fzero.base.made_with import made_with
from fzero.base.rebound import is_others
from fzero.optim._join import members_with
from fzero.optim._trial import Trial
from fzero.optim._whole import inside
from fzero.state.sharded import Sharded
from fzero.table.optimizer import GradientTransformation

_OF_LEAVES = (
    "Its update is called once for each leaf, on one rank: keep what it counts in its state, and return what is to be "
    "added to the param."
)
_OF_BUFFERS = (
    "An update is given flat buffers, each with this rank's slices of several leaves, and must treat every element by "
    "itself. Use fz.whole(optimizer), which gives it each leaf alone and in its shape, and seeds what it draws; for "
    "the norm of all leaves fz.chain(fz.clip_by_global_norm(limit), optimizer), for noise fz.gradient_noise."
)


def need_elements(who: str, optimizer: GradientTransformation, params: Sharded) -> None:
    """Refuses an optimizer of the user's own that is not by elements where it meets buffers, or slices of them.

    Each is tried once for a state and those that come of it, also where another one has begun it; and it is compared
    among ranks, as each updates its slices by its own numbers.

    What the trial changes in what the optimizer comes to is put back. Where nothing can do so, or it cannot be tried
    otherwise, every rank warns: it raises, needs other leaves, comes to too much, hides tensors of a transform of
    torch.func, or sends something to other ranks by torch.distributed. A sum over all elements is right where no rank
    has slices.

    Raises:
        ValueError: it makes other updates of them than of leaves alone, or draws random numbers, or ranks have made it
            with other numbers, on every rank.
    """
    if any(each is optimizer.update for each in params.layout.tried):
        return
    trained = params.only(params.layout.trainable)
    if any(map(private.is_fake, trained.entries.values())):
        return
    params.axis.check_same(
        f"one that was made with {made_with(optimizer)}",
        f"{who}: The optimizers",
        "Make it with the same numbers on every rank: each updates its slices by its own.",
    )
    for member, own, whole in _members(optimizer, trained, False):
        if (trial := Trial.of(own)) is None:
            continue
        with private.below_transforms(), as_written():
            found, why = trial.tried(member, whole)
        for axis in (params.axis, params.axis.tensor):  # a rank whose slices are right raises too
            if axis is not None and axis.ranks > 1:
                heard = [
                    json.loads(text) for text in axis.exchange(json.dumps((found, why)), "a trial of the optimizer")
                ]
                found, why = (next(filter(None, said), "") for said in zip(*heard, strict=True))
        label = f" ({member.label(trial.rows[0].path)})" if member.label else ""
        wants = _OF_LEAVES if whole else _OF_BUFFERS
        if found:
            raise ValueError(
                f"{who}: got an optimizer of your own{label}{' in fz.whole' if whole else ''} that {found}. {wants}"
            )
        if why:
            warnings.warn(
                f"{who}: an optimizer of your own{label} could not be tried on small leaves: {why}. {wants}",
                stacklevel=3,
            )
    params.layout.tried.append(optimizer.update)


def _members(
    optimizer: GradientTransformation, params: Sharded, whole: bool
) -> Iterator[tuple[GradientTransformation, Sharded, bool]]:
    """The user's own that an optimizer is made of, with the params that each is given, and whether leaf by leaf."""
    for member, own in members_with(optimizer, params):
        inner = inside(member)
        if inner is not None:
            yield from _members(inner, own, True)
        elif is_others(member.update):
            yield member, own, whole
