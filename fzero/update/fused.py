"""The update inside the pullback: each group is updated as soon as its reduced grads are there, and they are gone.

What an update needs of all gradients (their norm, for clipping and for skipping what is not finite) is known by pulling
twice, or by holding the reduced shards until then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence

import torch

from fzero.base.arguments import as_float64
from fzero.base.follow import is_transformed
from fzero.engine.batch import Batch, Sums, as_grads, grads_of, sum_of
from fzero.engine.function import sums_whole
from fzero.engine.run import Run
from fzero.state.gather import squares_in
from fzero.state.placing import placed
from fzero.state.sharded import Sharded
from fzero.state.squares import LeafSquares, need_alike_beside, over_ranks, squares_of
from fzero.state.train_state import TrainState
from fzero.stores.away import tensor_of
from fzero.table.layout import Key
from fzero.table.spec import Spec
from fzero.update.update import Decision, Update, apply_update, is_finite, with_kept


class _Grads:
    """The grads that the last microbatch's pullback delivers, group by group, with what earlier ones left."""

    def __init__(self, step: Spec, state: TrainState, earlier: Sums, times: float) -> None:
        self.step, self.state, self.earlier, self.times = step, state, earlier, times
        self.squares_of: dict[Key, LeafSquares] = {}

    def of(self, key: Key, shard: torch.Tensor) -> Sharded:
        """The whole gradient of a group: this pullback's, earlier microbatches' and what the state keeps."""
        if key in self.earlier:
            shard = tensor_of(self.earlier[key]) + shard
        grads = as_grads(self.state.layout, {key: shard})
        return with_kept(self.state, grads_of(self.step, self.state, grads, self.times))

    def measured(self, key: Key, shard: torch.Tensor) -> Sharded:
        """These grads, their squares noted for the norm."""
        grads = self.of(key, shard)
        self.squares_of[key] = squares_of(grads)
        return grads

    @property
    def squares(self) -> LeafSquares:
        return LeafSquares.joined([*self.squares_of.values()])

    def norm(self) -> torch.Tensor:
        if self.state.params.axis.further:
            need_alike_beside(self.squares, self.state.params)
        return over_ranks(self.squares, self.state.params).sum().sqrt()


def fused_call(
    step: Spec, state: TrainState, inputs: Sequence[object], cotangent: object, rng: int
) -> tuple[TrainState, dict[str, object]]:
    """`step(state, *inputs)` of a step whose update is fused into its pullback."""
    with (
        state.donated() if step.donates else contextlib.nullcontext(state) as state,
        Update(step, state) as update,  # made before a run holds the buffers that it may overwrite
    ):
        batch, earlier = Batch(step, state, inputs, cotangent, rng, fused=True), None
        forwards = iter(batch)
        for _ in range(step.microbatches.count - 1):
            run, ct = next(forwards)
            grads, _cotangents = run.pull(ct)
            del run
            earlier = sum_of(earlier, grads)
            del grads
        run, ct = next(forwards)
        loss, earlier = batch.loss(), earlier or {}
        batch.need_used(run=run)
        run.unreduced = {key: tensor_of(earlier.pop(key)) for key in list(earlier) if sums_whole(state.params, key)}
        try:
            told = loss.get("loss", batch.times)  # which is not finite where no microbatch counts
            decision = _pulled(update, run, ct, _Grads(step, state, earlier, batch.times), told)
        except BaseException as error:
            update.lost(error)
            raise
        new, metrics = decision.next_state(update if decision.finite else None)
        new = batch.kept(new, metrics)
        return new, {**metrics, **loss, **batch.aux()}


def fuses(step: Spec) -> bool:
    """Tells whether a call of this step updates inside its pullback."""
    return step.fusion is not None and not is_transformed()


def update_as_fused(
    step: Spec, state: TrainState, grads: Sharded, loss: torch.Tensor | None
) -> tuple[TrainState, dict[str, object]]:
    """What `fused_call` makes of a state, with all of the gradients at once, and those that the state keeps in them."""
    squares, taken = squares_in(grads), grads
    if step.fused_norm == "once":
        if loss is not None and not is_finite(loss):
            return Decision(step, state, loss.double()).next_state(None)
        taken = _finite_only(grads, squares[1])
        squares = squares_in(taken)
    return apply_update(dataclasses.replace(step, fusion=None), state, taken, None, squares)


def _pulled(update: Update, run: Run, ct: object, grads: _Grads, loss: torch.Tensor | float) -> Decision:
    """Pulls back and updates; returns what was decided."""
    step, state = grads.step, grads.state
    mode = step.fused_norm
    if mode == "once":
        loss = as_float64(loss)
        if not is_finite(loss):
            run.drop()
            return Decision(step, state, loss)

        def at_once(key: Key, shard: torch.Tensor) -> None:
            update.apply([key], _finite_only(grads.measured(key, shard), grads.squares_of[key]), {})

        run.pull(ct, receive=at_once, before=update.start)
        decision = Decision(step, state, grads.norm(), None, grads.squares)
        decision.finite, decision.metrics["skipped"] = True, torch.tensor(False, device="cpu")  # it was applied already
        return decision
    if mode == "twice":
        run.pull(ct, retain_graph=True, receive=grads.measured)
        decision = Decision(step, state, grads.norm(), None, grads.squares)
        if decision.finite:
            extra = decision.extra
            run.pull(ct, receive=lambda k, shard: update.apply([k], grads.of(k, shard), extra), before=update.start)
        run.drop()
        return decision
    held: dict[Key, Sharded] = {}

    def hold(key: Key, shard: torch.Tensor) -> None:
        held[key] = placed(grads.measured(key, shard), "grads")

    run.pull(ct, receive=hold)
    decision = Decision(step, state, grads.norm(), None, grads.squares)
    parts = [[key] for key in held] if step.optimizer.by_group else [list(held)]
    for keys, following in itertools.pairwise((*parts, [])) if decision.finite else ():
        own = [held.pop(key) for key in keys]
        buffers = {name: x for part in own for name, x in part.entries.items()}
        update.apply(keys, own[0].with_buffers(buffers), decision.extra, following)
    return decision


def _finite_only(grads: Sharded, squares: LeafSquares) -> Sharded:
    """The grads without elements that are not finite, which would stay in the params for ever."""
    if all(map(is_finite, squares.vector.unbind())):
        return grads
    return grads.with_buffers({key: x.nan_to_num(0.0, 0.0, 0.0) for key, x in grads.locals().items()})
