"""An update that a transform goes on through: the optimizer's formula in torch's operations, on this rank's slices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fzero.base import private, pytree
from fzero.base.arguments import as_float64
from fzero.base.context import jitting
from fzero.base.follow import root
from fzero.base.rebound import is_others, tensors_reached
from fzero.base.thread_state import only_maps
from fzero.optim.base import call_update, values
from fzero.state.checks import check_values, transform_of
from fzero.state.gather import squares_in
from fzero.state.items import trained_moments, with_kept_moments
from fzero.state.moments import copied, next_extra
from fzero.state.sharded import Draw, Sharded, is_item, is_sharded, map_trees
from fzero.state.sliced import cuts, held_of
from fzero.state.squares import metric, squares_of
from fzero.state.train_state import TrainState
from fzero.table.spec import LEAF_NORMS, Extra, Spec
from fzero.update.writing import changed

Applied = bool | torch.Tensor  # of the members that are mapped over, where these differ


def differentiable_update(
    step: Spec, state: TrainState, grads: Sharded, grad_norm: object, known: Mapping[str, object]
) -> tuple[TrainState, dict[str, object]]:
    """The next state and the metrics, as differentiable functions of the state, the grads and the optimizer's tensors.

    Args:
        grads: with those that the state keeps.
        known: the metrics that do not depend on them.
    """
    if cuts(state.params):
        _refuse_of_others(step, state)
    norm = root(squares_in(grads)[0])
    extra: dict[str, object] = {"grad_norm": norm}
    if grad_norm is not None:
        extra["joint_norm"] = as_float64(grad_norm)
    applied = _applied([as_float64(x) for x in extra.values()])
    skipped = ~applied if isinstance(applied, torch.Tensor) else torch.tensor(not applied, device="cpu")
    metrics: dict[str, object] = {"grad_norm": norm, **known, "skipped": skipped}
    params, moments, count, used = state.params, state.moments, state.step, grads
    if isinstance(applied, torch.Tensor):  # or what is not finite in one member would be in what all share
        used = grads.map(lambda g: torch.where(applied, g, torch.zeros_like(g)))
    if applied is not False:
        own = params.only(params.layout.trainable).replaced(draw=Draw(state.seed, state.step))
        given = values(own)
        before = trained_moments(moments)
        updates, new = call_update(step.optimizer, used, before, given, extra)
        stepped = given.map(torch.add, values(updates))
        params, count = _stepped(params, own, stepped, applied), _next(count, applied)
        moments = with_kept_moments(_kept(map_trees(_in_moment_dtype, new), before, applied), moments)
        params, extras = _changed_by(step, state, params, applied)
    else:
        extras = state.extra
    if LEAF_NORMS in step.metrics:
        metrics[LEAF_NORMS] = metric(state.params, params, moments, squares_of(grads))
    others = {each.name: _next_extra(each, extras[each.name], params, applied) for each in step.extras}
    return state.changed(params=params, moments=moments, grads=None, extra=others, step=count), metrics


def _applied(norms: list[torch.Tensor]) -> Applied:
    """Whether these norms are finite; where that differs between the members of a map, of each of them."""
    finite = torch.stack([torch.isfinite(norm) for norm in norms]).all(0)
    if jitting.get() is not None:
        return finite
    every = private.unwrapped(finite)
    with private.below_transforms():
        if bool(every.all()):
            return True
        return finite if bool(every.any()) else False


def _next(count: Any, applied: Applied) -> Any:
    """The count after an update, one for all members; a tensor where it is one of a graph."""
    if not isinstance(count, torch.Tensor):
        return count + 1
    assert isinstance(applied, torch.Tensor)
    with private.below_transforms():
        return count + private.unwrapped(applied).any()


def _chosen(applied: Applied, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return torch.where(applied, new, old) if isinstance(applied, torch.Tensor) else new


def _in_moment_dtype(tree: Sharded) -> Sharded:
    """New moments in the dtypes that they are stored in."""
    dtypes = {key: tree.layout.groups[key].row.policy.moment for key in tree.groups}
    return tree.with_buffers({key: tree.local(key).to(dtypes[key]) for key in tree.groups})  # type: ignore[arg-type]


def _stepped(params: Sharded, own: Sharded, new: Sharded, applied: Applied) -> Sharded:
    """The params after an update, in the dtypes that they are stored in, also those that are held in full."""
    buffers, held = dict(params.buffers), dict(params.held)
    for key in own.groups:
        old = own.local(key)
        shard = _chosen(applied, new.local(key).to(old.dtype), old)
        if key in params.entries:
            buffers[key] = shard
        if key in held:
            held[key] = held_of(params, key, shard, held[key].dtype, f"update of {key}")
    return params.replaced(buffers=buffers, held=held, stale=params.stale - set(own.groups))


def _changed_by(
    step: Spec, state: TrainState, params: Sharded, applied: Applied
) -> tuple[Sharded, Mapping[str, object]]:
    """The params and the entries to go on with, after those that change the params have."""
    extras = dict(state.extra)
    for extra in step.extras:
        due = extra.is_due(state.step + 1)  # a tensor in a function's graph
        if due is False:
            continue
        now = applied if due is True else applied & due
        old, own = extras[extra.name], params.only(params.layout.trainable)
        assert is_sharded(old)
        old = copied(old) if is_others(extra.changes) else old  # which may write to it
        value, new = changed(extra, old, values(own))
        extras[extra.name] = _kept(value, state.extra[extra.name], now)
        params = _stepped(params, own, new, now)
    return params, extras


def _kept(new: object, old: object, applied: Applied) -> object:
    """The moments after an update, their trees of the kind that they were; of members that skip it the old ones."""

    def one(new: object, old: object) -> object:
        if is_sharded(new) and is_sharded(old):
            return old.over({key: _chosen(applied, new.local(key), old.local(key)) for key in new.groups})
        if isinstance(new, pytree.Count) and isinstance(new.value, torch.Tensor) and isinstance(old, pytree.Count):
            return pytree.Count(_next(old.value, applied), new.missed, new.paused)
        if jitting.get() is not None and isinstance(new, (int, float)) and new != old:
            raise TypeError(
                f"step.update: the state of an optimizer or transform of your own has the number {old!r}, and {new!r} "
                "after an update, which a graph would have as constants, also where an update is skipped; expected a "
                "0-d tensor in a function of fz.jit. Begin with torch.zeros(()), or call the step outside of it."
            )
        both = isinstance(new, torch.Tensor) and isinstance(old, torch.Tensor)
        return _chosen(applied, new, old) if both else new  # type: ignore[arg-type]

    return pytree.map(one, new, old, is_leaf=is_item)


def _next_extra(extra: Extra, old: object, params: Sharded, applied: Applied) -> object:
    """An entry of the state after an update; of members that skip it the tensors stay, as numbers are all members'."""
    new = next_extra(extra, old, params, applied is not False)
    if not isinstance(applied, torch.Tensor):
        return new
    # which may be of another kind than the entry began with
    return _kept(new, map_trees(lambda tree, own: own.over(tree.locals()), old, new), applied)


def _refuse_of_others(step: Spec, state: TrainState) -> None:
    """Refuses the user's own functions where ranks have slices of leaves: nobody says how their tensors meet these."""
    every = [x for x in tensors_reached(step.optimizer) if transform_of(x) is not None]
    if every:
        check_values(
            state.params.axis,
            every,
            "The numbers that the optimizer was made with, and torch.func goes on through,",
            "Give all ranks the same.",
        )
    own = [extra for extra in step.extras if any(map(is_others, (extra.update, extra.changes, extra.scale)))]
    if own and not only_maps():
        raise TypeError(
            f"step.update: the update of state.extra[{own[0].name!r}] ({own[0].source}) is your own, torch.func goes "
            "on through this step, and each rank has a slice of the leaves, so that the derivative of a tensor that it "
            "holds would be a part of the whole one; expected a transform of fzero (fz.ema), or a step that is not "
            "sharded."
        )
