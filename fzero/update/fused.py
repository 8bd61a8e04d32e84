"""The update inside the pullback: each group is updated as soon as its reduced grads are there, and they are gone.

What an update needs of all gradients (their norm, for clipping and for skipping what is not finite) is known by pulling
twice, or by holding the reduced shards until then.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

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
from fzero.table.layout import SMALL, Key
from fzero.table.spec import Spec
from fzero.update.update import Decision, Update, apply_update, is_finite, with_kept


class _Grads:
    """The grads that the last microbatch's pullback delivers, some groups at once, with what earlier ones left."""

    def __init__(self, step: Spec, state: TrainState, earlier: Sums, times: float) -> None:
        self.step, self.state, self.earlier, self.times = step, state, earlier, times
        self.squares_of: dict[tuple[Key, ...], LeafSquares] = {}

    def of(self, shards: dict[Key, torch.Tensor]) -> Sharded:
        """The whole gradients of some groups: this pullback's, earlier microbatches' and what the state keeps."""
        for key in self.earlier.keys() & shards:
            shards[key] = tensor_of(self.earlier[key]) + shards[key]
        grads = as_grads(self.state.layout, shards)
        return with_kept(self.state, grads_of(self.step, self.state, grads, self.times))

    def measured(self, shards: dict[Key, torch.Tensor]) -> Sharded:
        """These grads, their squares noted for the norm."""
        grads = self.of(shards)
        self.squares_of[tuple(shards)] = squares_of(grads)
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

        def at_once(shards: dict[Key, torch.Tensor]) -> None:
            update.apply([*shards], _finite_only(grads.measured(shards), grads.squares_of[*shards]), {})

        _pull(update, run, ct, at_once, before=update.start)
        decision = Decision(step, state, grads.norm(), None, grads.squares)
        decision.finite, decision.metrics["skipped"] = True, torch.tensor(False, device="cpu")  # it was applied already
        return decision
    if mode == "twice":
        _pull(update, run, ct, grads.measured, retain_graph=True)
        decision = Decision(step, state, grads.norm(), None, grads.squares)
        if decision.finite:
            own = lambda shards: update.apply([*shards], grads.of(shards), decision.extra)
            _pull(update, run, ct, own, before=update.start)
        run.drop()
        return decision
    held: list[Sharded] = []
    _pull(update, run, ct, lambda shards: held.append(placed(grads.measured(shards), "grads")))
    decision = Decision(step, state, grads.norm(), None, grads.squares)
    if held and not step.optimizer.by_group:
        held = [held[0].with_buffers({key: x for part in held for key, x in part.entries.items()})]
    while decision.finite and held:
        own = held.pop(0)
        update.apply(own.groups, own, decision.extra, held[0].groups if held else ())
    return decision


def _pull(
    update: Update,
    run: Run,
    ct: object,
    take: Callable[[dict[Key, torch.Tensor]], object],
    retain_graph: bool = False,
    before: Callable[[Sequence[Key]], object] | None = None,
) -> None:
    """Pulls back, and hands on reduced grads as they arrive, small groups together; the rest as in `Run.pull`."""
    waiting, numel, enough = dict[Key, torch.Tensor](), 0, SMALL if update.together else 0

    def receive(key: Key, shard: torch.Tensor) -> None:
        nonlocal waiting, numel
        waiting[key], numel = shard, numel + shard.numel()
        if numel >= enough:
            taken, waiting, numel = waiting, {}, 0
            take(taken)

    run.pull(ct, retain_graph, receive=receive, before=before)
    if waiting or not update.layout.trainable:  # an update of nothing counts, too
        take(waiting)


def _finite_only(grads: Sharded, squares: LeafSquares) -> Sharded:
    """The grads without elements that are not finite, which would stay in the params for ever."""
    if all(map(is_finite, squares.vector.unbind())):
        return grads
    return grads.with_buffers({key: x.nan_to_num(0.0, 0.0, 0.0) for key, x in grads.locals().items()})
