"""What an update takes beside the state, counted: the update itself, run on tensors without values.

What the optimizer takes, the norms of leaves that are asked for, and what entries of the state take that go with it.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

import torch

from fzero.base import pytree, thread_state
from fzero.comm.alone import Alone
from fzero.kernels.onepass import LARGE
from fzero.planning.live import LiveBytes
from fzero.planning.messages import Sent, round_a_ring
from fzero.state.moments import filled, init_extras, init_moments, next_extra
from fzero.state.owners import owners
from fzero.state.sharded import Sharded, trees_of
from fzero.state.squares import metric
from fzero.state.train_state import TrainState
from fzero.table.layout import Key, Layout
from fzero.table.ranks import Ranks, joined
from fzero.table.spec import LEAF_NORMS, Extra, Spec
from fzero.update.update import Update

MOST = 4  # ranks that are looked at
ASSUMED = 8  # copies of whole leaves that are there at once, of an optimizer that does not run without values
_PURPOSES = ("leaves", "leaf norms", "agreement")
Records = Sequence[tuple[str, Hashable, int]]  # operation, tag, bytes


class Taken(NamedTuple):
    """What an update takes."""

    nbytes: int  # at most, beside the old state, the next one and the gradients
    after: int = 0  # the same, of the entries of the state that are updated once all groups are
    # over, tensor: what it sends over the sharded axis, and over the one that leaves are cut over
    over: Records = ()
    tensor: Records = ()

    def messages(self, ranks: Ranks) -> list[Sent]:
        """What it sends."""
        found = list[Sent]()
        for purpose in _PURPOSES:
            for axes, own in ((ranks.sharded, self.over), (ranks.tensor, self.tensor)):
                sizes = [(op, size) for op, tag, size in own if _purpose(op, tag) == purpose]
                sent = sum([round_a_ring(n, ranks.size(axes)) if op == "all_reduce" else n for op, n in sizes])
                found += [Sent(joined(axes), purpose, len(sizes), sent)] if sizes else []
        told = sum([_purpose(op, tag) == "agreement" for op, tag, _ in self.over])
        return found + (
            [Sent(joined(ranks.copies), "agreement", told, 0)] if told and ranks.size(ranks.copies) > 1 else []
        )


def _purpose(op: str, tag: Hashable) -> str:
    """What is sent so in an update."""
    if str(tag) == "the update by fz.whole":
        return "agreement"
    if op == "exchange" or str(tag).startswith("gather of leaf"):
        return "leaves"
    return "leaf norms" if tag == "global_norm" else ""


def taken(step: Spec, layout: Layout, structure: pytree.Spec, one_by_one: bool, rank: int) -> Taken:
    """Counts what an update takes; where leaves are whole on one rank each, also on those ranks that have the most.

    An optimizer that may be given groups one by one, and has no leaves whole, is run on the largest ones alone.

    Args:
        layout: with everything on the device.
        one_by_one: whether something is away, so that groups are updated one by one also where the optimizer would take
            all at once.
        rank: a rank's number on the sharded axis, whose messages these are.
    """
    optimizer, keys = step.optimizer, list(layout.trainable)
    if not keys:
        return Taken(0, _by_entries(step, layout, structure, one_by_one))
    parts = [tuple(keys)]
    if optimizer.by_group:
        keys = keys if optimizer.exchanges else _largest(layout, 2)
        apart = one_by_one or optimizer.copies or step.fusion is not None
        parts = [(key,) for key in keys] if apart else [tuple(keys)]
    ranks = [rank, *[own for own in (_owners(layout, keys) if optimizer.exchanges else ()) if own != rank]]
    found = [_on_rank(step, layout, structure, parts, rank) for rank in ranks]
    most, after = max([each.nbytes for each in found]), _by_entries(step, layout, structure, one_by_one)
    return found[0]._replace(nbytes=most, after=after)


def _largest(layout: Layout, count: int) -> list[Key]:
    """The largest groups of each optimizer, in their order; and the most small ones that are updated together."""
    by_optimizer = collections.defaultdict[str, list[Key]](list)
    for key in layout.trainable:
        by_optimizer[layout.groups[key].row.optimizer].append(key)
    some = {key for own in by_optimizer.values() for key in heapq.nlargest(count, own, key=layout.shard_numel)}
    small = [[key for key in own if layout.shard_numel(key) < LARGE] for own in by_optimizer.values()]
    parts = [part for own in small for part in layout.in_parts(own)]
    some.update(max(parts, key=lambda part: sum(map(layout.shard_numel, part)), default=()))
    return [key for key in layout.trainable if key in some]


def _owners(layout: Layout, keys: Sequence[Key]) -> list[int]:
    """The ranks that have the most of some groups whole."""
    loads = collections.Counter[int]()
    for key in keys:
        group = layout.groups[key]
        by = owners(layout, key) if group.row.cuts and layout.shards > 1 else {}
        for slot in group.slots:
            loads[by.get(slot.leaf, 0)] += slot.numel
    return [rank for rank, _ in loads.most_common(MOST)]


def _on_rank(step: Spec, layout: Layout, structure: pytree.Spec, parts: Sequence[Sequence[Key]], rank: int) -> Taken:
    axis, live = Alone.of_ranks(layout.shards, rank, layout.tensor), Live()
    try:
        with thread_state.without_values(), live:
            _run(step, Sharded(layout, axis, structure, {}, kind="params"), parts, live)
    except Exception:  # of code of the user's own, which wants values
        return Taken(max(live.beyond, _assumed(layout, itertools.chain(*parts))))
    return Taken(live.beyond, 0, axis.sent, axis.tensor.sent if isinstance(axis.tensor, Alone) else ())


def _assumed(layout: Layout, keys: Iterable[Key]) -> int:
    return ASSUMED * sum([layout.groups[key].numel * _wide(layout, key).itemsize for key in keys])


def _run(step: Spec, empty: Sharded, parts: Sequence[Sequence[Key]], live: Live) -> None:
    """Updates some groups as a step does."""
    by_group = tuple([dataclasses.replace(each, every=1) for each in step.extras if each.changes or each.fused])
    plain = dataclasses.replace(step, extras=by_group, donates=False, fusion=None)
    every = list(itertools.chain(*parts))
    params = _filled(empty, every)
    entries = init_extras(plain, _filled(empty, empty.layout.trainable)) if by_group else {}
    entries = {name: tree.only(every) for name, value in entries.items() for tree in trees_of(value)}
    state = TrainState(params, None, init_moments(plain, params), entries, 0, 0, plain.signature)
    mode, scale = step.fused_norm if step.fusion else "held", _scale(step)
    grads = params.with_buffers({} if mode != "held" else {key: _grad(empty.layout, key) for key in every}, scale)
    extra = {"grad_norm": torch.ones((), dtype=torch.float64, device="cpu")}
    with Update(plain, state) as update:
        for axis in (empty.axis, empty.axis.tensor):
            axis.sent.clear() if isinstance(axis, Alone) else None
        made_then = mode in ("once", "twice")  # by the pullback: those of one are known
        live.begin(max([_grad(empty.layout, key).nbytes for key in every if made_then], default=0))
        for some, following in itertools.pairwise((*parts, ())):
            own = _grads(grads, some) if made_then else grads.only(some)
            update.apply(some, own, extra, following)
            del own
        new = update.finish()
        if LEAF_NORMS in step.metrics:
            metric(params, *new, None)


def _scale(step: Spec) -> float:
    """What grads are multiplied by, which an update divides by; another number than 1 where that may be one."""
    scaled = step.optimizer.needs or any(extra.scale for extra in step.extras) or step.microbatches.count > 1
    return 2.0 if scaled else 1.0


def _grads(like: Sharded, keys: Iterable[Key]) -> Sharded:
    return like.with_buffers({key: _grad(like.layout, key) for key in keys})


def _by_entries(step: Spec, layout: Layout, structure: pytree.Spec, away: bool) -> int:
    """What the entries of a state take that are updated after all groups, of all of these at once.

    Args:
        away: whether they are brought to the device, and the next ones are put away once all are made.
    """
    entries, taken = [each for each in step.extras if each.fused is None], 0
    empty = Sharded(layout, Alone.of_ranks(layout.shards, 0, layout.tensor), structure, {}, kind="params")
    for each in entries:
        live = Live()
        try:
            with thread_state.without_values(), live:
                taken = max(taken, _of_entry(step, each, _filled(empty, layout.groups), away, live))
        except Exception:  # as above
            taken = max(taken, live.beyond, _assumed(layout, layout.trainable))
    return taken


def _of_entry(step: Spec, extra: Extra, params: Sharded, away: bool, live: Live) -> int:
    old = init_extras(dataclasses.replace(step, extras=(extra,)), params)[extra.name]
    live.begin(0 if away else _nbytes(old))  # those of the next state are known
    new = next_extra(extra, old, params, True)
    return live.beyond if new is not old else 0


def _filled(empty: Sharded, keys: Iterable[Key]) -> Sharded:
    return filled(empty, dict.fromkeys(keys, torch.device("cpu")))


class Live(LiveBytes):
    """Counts the bytes that a function without values takes. A number that is read is a half."""

    _begun = 0

    def begin(self, spare: int) -> None:
        """Counts from now on, beyond what there is and so many bytes."""
        self.reset_peak()
        self._begun = self.peak + spare

    @property
    def beyond(self) -> int:
        """The most bytes beyond those that there were."""
        return max(0, self.peak - self._begun)

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if str(func) == "aten._local_scalar_dense.default":
            (x,) = args
            assert isinstance(x, torch.Tensor)
            return 0.5 if x.is_floating_point() else x.dtype == torch.bool or 1
        return super().__torch_dispatch__(func, types, args, kwargs)


def _grad(layout: Layout, key: Key) -> torch.Tensor:
    return torch.zeros(layout.shard_numel(key), dtype=layout.groups[key].row.policy.grad, device="cpu")


def _wide(layout: Layout, key: Key) -> torch.dtype:
    dtype = layout.groups[key].row.policy.grad or torch.float32
    return torch.promote_types(dtype, torch.float32)


def _nbytes(moments: object) -> int:
    return sum([x.nbytes for x in pytree.leaves(moments) if isinstance(x, torch.Tensor)])
