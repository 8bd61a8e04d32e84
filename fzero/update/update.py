"""The update: decode the grads, norm, skip or apply, in place where the state was donated."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from fzero.base import pages, private, pytree
from fzero.base.arguments import as_float64
from fzero.comm.backend import finish_all
from fzero.engine.use import start_gather
from fzero.formats.formats import Stored
from fzero.optim._join import need_states
from fzero.optim._paused import Running, call_paused, combined, finished
from fzero.optim.base import values
from fzero.state.checks import constants, follows_step
from fzero.state.gather import squares_in
from fzero.state.moments import next_extra
from fzero.state.placing import memory_of
from fzero.state.sharded import Draw, Sharded, entries_of, is_sharded, map_trees, trees_of
from fzero.state.squares import LeafSquares, metric, need_alike_beside
from fzero.state.train_state import TrainState, being_saved
from fzero.stores.away import Away, donated_to
from fzero.stores.memories import HOST, HostBuffer
from fzero.table.layout import Key, Layout
from fzero.table.optimizer import Paused
from fzero.table.spec import LEAF_NORMS, Spec
from fzero.update.cpu_worker import begun, spare_cores
from fzero.update.differentiable import differentiable_update
from fzero.update.writing import Entry, Writing, due

Squares = tuple[torch.Tensor, LeafSquares]  # over all leaves and shards, and of this rank's parts


def apply_update(
    step: Spec, state: TrainState, grads: Sharded, grad_norm: object, squares: Squares | None = None
) -> tuple[TrainState, dict[str, object]]:
    """The next state and the metrics; the old state is dead afterwards where the step donates.

    Args:
        squares: of these grads, which then have those that the state keeps in them (`with_kept`).
    """
    with private.of_normal_tensors():
        if follows_step(step, state, "step.update", grads=grads, grad_norm=grad_norm):
            grads = with_kept(state, grads) if squares is None else grads
            return differentiable_update(step, state, grads, grad_norm, known_metrics(step, state))
        state, grads, grad_norm = constants("step.update", state=state, grads=grads, grad_norm=grad_norm)
        # below levels around the call, which would wrap what ranks send each other and what is overwritten
        with private.below_transforms(), state.donated() if step.donates else contextlib.nullcontext(state) as own:
            return _applied(step, own, grads, grad_norm, squares)


def with_kept(state: TrainState, grads: Sharded) -> Sharded:
    """These grads and those that the state keeps."""
    return grads if state.grads is None else values(grads).map(torch.add, values(state.grads.only(grads.groups)))


def _applied(
    step: Spec, state: TrainState, grads: Sharded, grad_norm: object, known: Squares | None
) -> tuple[TrainState, dict[str, object]]:
    grads = with_kept(state, grads) if known is None else grads
    total, squares = known or squares_in(grads)
    decision = Decision(step, state, total.sqrt(), grad_norm, squares)
    if state.params.axis.further:
        need_alike_beside(squares, state.params)
    if decision.finite:
        with Update(step, state) as update:
            trainable = state.layout.trainable
            # the others' gathers then run meanwhile, and transfers
            parts = [trainable]
            if step.optimizer.by_group and (step.optimizer.copies or update.moves or grads.away):
                parts = [(key,) for key in trainable] or parts  # an update of nothing counts, too
            elif update.together and state.params.held_entries:
                parts = state.layout.in_parts(trainable)
            try:
                for keys, following in itertools.pairwise((*parts, ())):
                    update.apply(keys, grads.only(keys), decision.extra, following)
            except BaseException as error:
                update.lost(error)
                raise
            return decision.next_state(update)
    return decision.next_state(None)


def known_metrics(step: Spec, state: TrainState) -> dict[str, object]:
    """The metrics of an update that do not depend on its gradients: "lr", the loss scale."""
    need_states(step.optimizer, state.moments)
    known = step.optimizer.metrics(state.moments) if step.optimizer.metrics else {}
    scales = {extra.name: extra.factor(state.extra[extra.name]) for extra in step.extras if extra.scale}
    return {name: as_float64(value) for name, value in [*known.items(), *scales.items()]}


def is_finite(norm: torch.Tensor) -> bool:
    """Tells whether a norm is finite; a fake tensor, which has no value, is."""
    return private.is_fake(norm) or math.isfinite(norm)


def on_host(step: Spec, layout: Layout) -> frozenset[Key]:
    """The groups whose update runs in the host's memory, as all that it writes lies elsewhere than on the device."""
    keys = frozenset(key for key in layout.trainable if layout.groups[key].row.updates_on_host)
    return keys if step.optimizer.by_group or len(keys) == len(layout.trainable) else frozenset()


class Decision:
    """The decision by an update's norm: whether it is applied, the metrics, the next loss scale.

    Args:
        squares: of this rank's parts of the grads, where they are known.
    """

    def __init__(
        self,
        step: Spec,
        state: TrainState,
        norm: torch.Tensor,
        joint: object = None,
        squares: LeafSquares | None = None,
    ) -> None:
        self.step, self.state, self._squares = step, state, squares
        self.extra: dict[str, object] = {"grad_norm": norm}
        self.finite = is_finite(norm)
        if joint is not None:
            joint = as_float64(joint)
            self.finite = self.finite and is_finite(joint)
            self.extra["joint_norm"] = joint
        self.metrics: dict[str, object] = {"grad_norm": norm, **known_metrics(step, state)}
        self.metrics["skipped"] = torch.tensor(not self.finite, device="cpu")

    def next_state(self, update: Update | None) -> tuple[TrainState, dict[str, object]]:
        """The state after this update, or after one that was skipped (None)."""
        step, state = self.step, self.state
        params, moments = update.finish() if update is not None else (state.params, state.moments)
        try:
            if LEAF_NORMS in step.metrics:
                self.metrics[LEAF_NORMS] = metric(state.params, params, moments, self._squares)
            old = {**state.extra, **(update.extra() if update is not None else {})}
            own = {
                extra.name: old[extra.name]
                if extra.fused and update is not None
                else next_extra(extra, old[extra.name], params, self.finite)
                for extra in step.extras
            }
        except BaseException as error:
            if update is not None:
                update.lost(error, " in the update of state.extra")
            raise
        count = state.step + (update is not None)
        new = state.changed(params=params, moments=moments, grads=None, extra=own, step=count)
        return new.made_by(step), self.metrics


def _to_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


class Update:
    """One update on its way: the next state's trees, which are written group by group.

    A context: what is on its way is waited for at the end, also where something fails.
    """

    def __init__(self, step: Spec, state: TrainState) -> None:
        self.step, self._state, self.old, self.layout = step, state, state.params, state.layout
        copied: list[str] = []
        saved = bool(being_saved)  # asked first: a save may end while one looks at what it held
        self._on_host = on_host(step, self.layout)
        compares = LEAF_NORMS in step.metrics  # params with those before
        self.params = Writing(self.old, "params", step.donates and not compares, copied.append, self._on_host)
        self._draw = Draw(state.seed, state.step, step.table(state.layout).compiled)
        # what has no trees in it stays as it is: it may be as much as there are leaves, for each group
        self._split = pytree.Split(state.moments, is_sharded, is_leaf=lambda x: is_sharded(x) or not trees_of(x))
        self._moments = [
            Writing(tree, "moments", step.donates, copied.append, self._on_host) for tree in self._split.leaves[0]
        ]
        entries = [*due(step, state), *[x for x in step.extras if x.fused]]  # what changes the params goes first
        self._entries = [Entry(x, state, step.donates, copied.append, self._on_host) for x in entries]
        self._trees = [self.params, *self._moments, *[each.writing for each in self._entries]]
        if copied and not saved:
            warnings.warn(
                f"fz.donate: {len(copied)} buffers of the donated state are still held elsewhere (that of leaf "
                f"{copied[0]!r} first) and were copied instead of overwritten. Drop views, detach()ed tensors "
                "and pullbacks of the state before the update.",
                UserWarning,
                stacklevel=6,
            )
        self._cores = spare_cores(self.old.device) if self._on_host and not step.optimizer.exchanges else 0
        self._thread = ThreadPoolExecutor(1, "fzero-update") if self._cores else None
        self._beside: Future[tuple[Sequence[Key], Sharded | None]] | None = None  # the update that runs there
        self._waits: list[Callable[[], None]] = []
        self._running = Running(ahead=1)  # the next unit is pulled back while one waits
        self._parts: list[object] = []  # what the optimizer has returned of each group
        self.applied: list[Key] = []  # the groups that have been written

    @property
    def moves(self) -> bool:
        """Tells whether any of what is updated is away."""
        return any(tree.tree.away for tree in self._trees)

    @property
    def together(self) -> bool:
        """Tells whether several small groups may be updated at once, each as by itself."""
        own = self.step.optimizer
        return own.by_group and not (own.copies or own.exchanges or self.moves)

    def lost(self, error: BaseException, where: str = "") -> None:
        """After an error: a donated state may be half written."""
        if self.step.donates and self.applied:
            said = f"{self._begun()}{where}"
            error.add_note(f"{said}. Go on from another state, or leave fz.donate out.")
            self._state.overwritten(f"{said} ({type(error).__name__}: {error}). Go on from another state.")

    def _begun(self) -> str:
        return (
            f"This state was donated to update {self._state.step + 1}, which had begun with "
            f"{len(self.applied)} of its {len(self.layout.trainable)} groups, among them that of leaf "
            f"{self.layout.groups[self.applied[0]].slots[0].path!r}, and then failed"
        )

    def start(self, keys: Sequence[Key]) -> None:
        """Begins to bring what is away of groups that will be updated soon."""
        for tree in self._trees:
            tree.start([key for key in keys if not self.layout.groups[key].row.frozen])

    @torch.no_grad()
    def apply(
        self, keys: Sequence[Key], grads: Sharded, extra: Mapping[str, object], following: Sequence[Key] = ()
    ) -> None:
        """Updates some groups, and starts to gather what every rank holds of them.

        In the host's memory one update runs beside what computes, where there are cores for it, until the next one.

        Args:
            following: what will be updated next, if that is known: it is brought meanwhile.
        """
        self._catch_up()
        self.start(following)
        if self.step.donates and not self.applied:
            self._tell(grads)
        if not self._on_host.issuperset(keys):
            writing = self._write(keys, grads, extra)
        else:
            down, extra = self._down(grads), {name: _to_cpu(value) for name, value in extra.items()}
            del grads
            if self._thread is not None:
                job = functools.partial(self._write_down, keys, down, extra)
                self._beside = begun(self._thread, job, self.old.device, self._cores)
                return
            writing = self._write(keys, down(), extra)
        self._running.begin(self._then_gather(keys, writing))

    def _then_gather(self, keys: Sequence[Key], writing: Paused) -> Paused:
        self._written(keys, (yield from writing))

    def _write_down(
        self, keys: Sequence[Key], down: Callable[[], Sharded], extra: Mapping[str, object]
    ) -> tuple[Sequence[Key], Sharded | None]:
        """Updates some groups; returns what is to be gathered of them."""
        own = finished(self._write(keys, down(), extra))
        assert isinstance(own, Sharded)
        return keys, own if self.params.held else None

    def _catch_up(self) -> None:
        """Waits for the update that runs beside."""
        job, self._beside = self._beside, None
        if job is not None:
            self._written(*job.result())

    def _write(self, keys: Sequence[Key], grads: Sharded, extra: Mapping[str, object]) -> Paused:
        """Updates some groups; returns their params."""
        own = self.params.open(keys).replaced(draw=self._draw)
        moments = self._split.join([tree.open(keys) for tree in self._moments])
        self._begin(keys)
        run = call_paused(self.step.optimizer, own, grads, moments, extra)
        del moments, grads
        part = yield from run
        del run
        self._parts.append(map_trees(lambda tree: tree.over({}), part))
        for tree in self._moments:
            tree.close(keys)
        for each in self._entries:
            each.write(keys, own)
        self.params.close(keys)
        return own

    def _begin(self, keys: Sequence[Key]) -> None:
        """All that some groups need is there: from now on a donated state is being overwritten."""
        self.applied += keys
        if self.step.donates and self.applied:  # an interrupt may come at any moment
            self._state.overwritten(f"{self._begun()}. Go on from another state.")

    def _written(self, keys: Sequence[Key], own: object) -> None:
        """What every rank holds of groups that are updated is gathered."""
        for key in keys:
            if isinstance(own, Sharded) and key in self.params.held:
                self._start_gather(key, own)

    def _tell(self, grads: Sharded) -> None:
        """Says what keeps the old state from its store while nothing of it is lost, and lets nobody say it later."""
        entries = [each.writing.tree for each in self._entries]
        for tree in (self.old, *trees_of(self._state.moments), *entries, grads):
            for buffer in entries_of(tree):
                if isinstance(buffer, Away):
                    buffer.tell()
        donated_to.add(self)

    def _down(self, grads: Sharded) -> Callable[[], Sharded]:
        """Begins to bring grads of an update on the host into its memory; the result waits for them."""
        waits: dict[Key, Callable[[], torch.Tensor]] = {}
        for key, buffer in grads.entries.items():
            if isinstance(buffer, Away):
                waits[key] = buffer.start_open(False)
            elif memory_of(self.layout.groups[key].row, "params") == HOST:
                waits[key] = HostBuffer.of(buffer, buffer.device, f"the grads of {key}").start_open(True)
            else:
                waits[key] = functools.partial(_to_cpu, buffer)
        bare = grads.over({})  # or what lies on the device would stay there
        return lambda: bare.over({key: wait() for key, wait in waits.items()})

    def _start_gather(self, key: Key, own: Sharded) -> None:
        """Starts to gather what every rank holds of a group."""
        held, group = self.params.held[key], self.layout.groups[key]
        full = held
        if not isinstance(full, torch.Tensor):
            self._finish()  # one at a time, as it lies on the device until it has arrived
            full = pages.empty(full.numel(), full.dtype, full.device)
        axis, tag = self.old.axis_of(key), f"update of {key}"
        if key in self._on_host and group.row.params.memory == HOST:  # what is computed with is brought from there
            in_8_bits, new = group.row.policy.gather is not None, self.params.finished().placed(key)
            shard = (new if in_8_bits else new.of(full.dtype)).stored()
        else:
            shard = own.stored(key)
            shard = Stored(shard.format, tuple([part.to(full.device) for part in shard.parts]))
        wait = start_gather(axis, full, shard, group.row.policy.gather is not None, tag)

        def finish() -> None:
            wait()
            if full is not held or group.row.fetched:
                self.params.hold(key, full)

        self._waits.append(finish)

    def _finish(self) -> None:
        waits, self._waits = self._waits, []
        finish_all(waits)

    def __enter__(self) -> Update:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        donated_to.discard(self)
        # what came first says more than what still was on its way then
        with contextlib.nullcontext() if error is None else contextlib.suppress(RuntimeError, OSError):
            ends: list[Callable[[], object]] = [*self._running.waits]
            ends += [self._thread.shutdown] if self._thread is not None else []
            finish_all([*ends, self._finish, *[tree.forget for tree in self._trees]])

    def extra(self) -> dict[str, Sharded]:
        """The entries of the next state that went with the params, once all groups are updated."""
        return {each.extra.name: each.writing.finished() for each in self._entries}

    def finish(self) -> tuple[Sharded, object]:
        """The new params and moments, once all groups are updated."""
        after = self._state.moments
        try:
            self._catch_up()
            with torch.no_grad():
                self._running.finish()
                self._finish()
                if self._parts:
                    own = self.old.only(self.layout.trainable)
                    after = combined(self.step.optimizer, own, after, self._parts)
        except BaseException as error:
            self.lost(error)
            raise
        params, trees = self.params.finished(), iter(self._moments)
        return params, map_trees(lambda _: next(trees).finished(), after)
