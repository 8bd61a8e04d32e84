"""Which leaves a function uses in its first update: if it uses none, nothing trains, and nothing else says so."""

from __future__ import annotations

import json
import warnings

from fzero.engine.leaves import known
from fzero.engine.schedule import Record
from fzero.state.sharded import Sharded
from fzero.state.train_state import TrainState
from fzero.table.spec import Spec

_LOOKED_AT = object()
_SHOWN = 3  # paths in a message


def first_use(step: Spec, state: TrainState) -> set[int] | None:
    """An empty set for the leaves that a function uses in its first update; None in every later one."""
    return None if _LOOKED_AT in known(step, state) else set()


def need_used(step: Spec, state: TrainState, used: set[int], grads: Sharded | None = None) -> None:
    """Refuses a first update in which no rank uses a leaf; warns of single leaves that no rank uses.

    Args:
        used: the leaves that this rank uses, in any microbatch.
        grads: of this update. A leaf with a gradient is used, even if no graph shows it.

    Raises:
        ValueError: on every rank.
    """
    axis, layout = state.params.axis, state.layout
    paths = {slot.leaf: slot.path for key in layout.trainable for slot in layout.groups[key].slots}
    missing = paths.keys() - used
    if missing and grads is not None:
        missing -= {slot.leaf for key in grads.groups for slot, piece in grads.pieces(key) if piece.any()}
    for over in (axis, axis.tensor):
        if over is not None and over.ranks > 1 and not over.fake:
            said = over.exchange(json.dumps(sorted(missing)), "the unused leaves of a first update")
            missing = set.intersection(*[set(json.loads(text)) for text in said])
    names = [paths[leaf] for leaf in sorted(missing)]
    shown = ", ".join(map(repr, names[:_SHOWN])) + (", ..." if len(names) > _SHOWN else "")
    if names and len(names) == len(paths):
        raise ValueError(
            f"step: the function uses none of the {len(paths)} leaves that this step trains ({shown}), so nothing "
            "would learn. Did you mean apply(params, x)? A module that is called itself, as in net(x), computes with "
            "its own parameters. Compute the outputs with the params that the function is given, and do not detach "
            "them."
        )
    known(step, state)[_LOOKED_AT] = Record()
    if names:
        warnings.warn(
            f"step: the function does not use {len(names)} of the {len(paths)} leaves that this step trains: {shown}. "
            f"Their gradients are zero. If that is meant, freeze them: fz.freeze(step, {names[0]!r}).",
            stacklevel=4 if grads is not None else 6,  # the call of the step
        )
