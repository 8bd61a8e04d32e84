"""Where a step's state lies between updates, and how often one step moves each piece."""

from __future__ import annotations

import collections
import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fzero.base import pytree
from fzero.base.patterns import ROOT
from fzero.formats.formats import Format, Plain
from fzero.planning.messages import uses_of
from fzero.planning.update import Taken
from fzero.state.moments import init_extras, init_moments
from fzero.state.placing import memory_of
from fzero.state.sharded import Sharded, group_of, is_sharded, trees_of
from fzero.state.squares import ROW, ROWS, SMALL
from fzero.stores.blocks import rounded
from fzero.stores.memories import DEVICE, HOST, name_of
from fzero.table.layout import Key, Layout
from fzero.table.rows import Row
from fzero.table.spec import LEAF_NORMS, Spec
from fzero.update.update import on_host

DISK = "disk"
MEMORIES = (DEVICE, HOST, DISK)


@dataclass(frozen=True)
class Piece:
    """One kind of state of a group, on one rank."""

    kind: str  # "params" (this rank's slice), "held" (all of them, in ZeRO-1 and 2), "grads", "moments" or "extra"
    unit: str
    memory: str  # "device", "host" or "disk"
    parts: tuple[int, ...]  # the bytes of each of its buffers
    reads: int = 0  # how often a step brings all of it to the device (or, to update it, from the disk to the host)
    writes: int = 0  # how often a step puts it away
    copies: bool = False  # whether an update makes the next one before it lets go of the last one
    fetches: int = 0  # how often it brings what it computes with, `fetched` bytes
    fetched: int = 0
    down: int = 0  # bytes of grads that a step puts beside it, to update it there

    @property
    def nbytes(self) -> int:
        return sum(self.parts)


def pieces_of(step: Spec, layout: Layout, like: Sharded) -> list[Piece]:
    """All pieces of a step's state.

    A unit's params are brought for the forward and again for every pullback, but those of the unit that ran last, which
    are still there; those of the root once. The update reads grads, those that wait for it once more for their norm,
    and reads and writes what lies on a disk. What lies on the host is updated there.

    Args:
        like: the state's params, on the meta device.
    """
    there = on_host(step, layout)
    out = [piece for key in layout.groups for piece in _params(step, layout, key, key in there)]
    return [*out, *grads_of(step, layout, step.microbatches.count > 1), *_moments(step, like), *_extras(step, like)]


def _params(step: Spec, layout: Layout, key: Key, on_host: bool) -> list[Piece]:
    group = layout.groups[key]
    row, memory = group.row, name_of(group.row.params.memory)
    assert row.policy.compute
    uses = uses_of(step, layout, key.unit) if row.fetched else 0
    changes = not row.frozen
    passes = int(memory == DISK or (memory == HOST and not on_host))
    copies = changes and not (step.donates and LEAF_NORMS not in step.metrics)  # which compare
    out = []
    if row.held:
        parts = (group.numel * row.policy.compute.itemsize,)
        kept = changes and memory == DEVICE and _holds(step) != "held"  # by the graph, which is pulled back meanwhile
        out.append(Piece("held", key.unit, memory, parts, uses, int(changes and row.fetched), copies or kept))
    if row.beside:
        parts = _sizes(row.policy.param_format, layout.shard_numel(key))
        there = changes and memory == HOST and not passes  # where it is updated, and what is held is gathered from
        opens, fetches = int(changes) * passes, int(there) if row.held else uses
        form = row.policy.param_format
        # the first part may be all that is computed with
        alone = form.upper == row.policy.compute and row.policy.gather is None
        fetched = parts[0] if alone else sum(parts)
        down = 0
        if there and not _grads_are_there(step, row):
            assert row.policy.grad
            down = layout.shard_numel(key) * row.policy.grad.itemsize
        out.append(Piece("params", key.unit, memory, parts, opens, opens, copies, fetches, fetched, down))
    return out


def _grads_are_there(step: Spec, row: Row) -> bool:
    """Tells whether an update finds grads as they are in another memory."""
    return row.grads is not None and row.grads.memory != DEVICE and _holds(step) == "held"


def _holds(step: Spec) -> str:
    """How grads wait for their norm."""
    return step.fused_norm if step.fusion else "held"


def grads_of(step: Spec, layout: Layout, several: bool) -> list[Piece]:
    """All grads; of a fused update the largest unit's, where they are not held until the norm is known.

    Args:
        several: whether microbatches are added up, in the dtype of their sum.
    """
    units = collections.defaultdict[str, list[Piece]](list)
    waits, there = _holds(step) == "held", on_host(step, layout)
    for key in layout.trainable:
        row = layout.groups[key].row
        grad = row.policy.reduce if several and not step.fusion else row.policy.grad
        assert grad and row.grads
        memory = name_of(row.grads.memory) if waits else DEVICE
        read = int(memory == DISK or not _grads_are_there(step, row) or key not in there)
        reads, writes = (read + (not step.fusion), 1) if memory != DEVICE else (0, 0)
        parts = _sizes(Plain(grad), layout.shard_numel(key))
        units[key.unit].append(Piece("grads", key.unit, memory, parts, reads, writes))
    if waits:
        return [piece for own in units.values() for piece in own]
    return max(units.values(), key=total, default=[])


def _moments(step: Spec, like: Sharded) -> list[Piece]:
    moments, there = init_moments(step, like), on_host(step, like.layout)
    tensors = [x for x in pytree.flatten(moments, is_leaf=is_sharded)[0] if isinstance(x, torch.Tensor)]
    out = [Piece("moments", ROOT, DEVICE, (x.nbytes,), copies=True) for x in tensors]
    for tree in trees_of(moments):
        for name, buffer in tree.entries.items():
            key = group_of(name)
            row = tree.layout.groups[key].row
            assert row.moments
            memory = name_of(row.moments.memory)
            moves = int(not row.frozen and (memory == DISK or (memory == HOST and key not in there)))
            copies = not (row.frozen or step.donates)
            out.append(Piece("moments", key.unit, memory, (buffer.nbytes,), moves, moves, copies))
    return out


def _extras(step: Spec, like: Sharded) -> list[Piece]:
    """What transforms keep; of one that changes the params what an update moves in which it does.

    What goes with the update group by group is updated where the moments are.
    """
    out, there = list[Piece](), on_host(step, like.layout)
    by_name = {extra.name: extra for extra in step.extras}
    for name, value in init_extras(step, like).items():
        by_group = (by_name[name].changes or by_name[name].fused) is not None
        for x in pytree.flatten(value, is_leaf=is_sharded)[0]:
            for key, buffer in x.entries.items() if is_sharded(x) else ():
                memory = name_of(memory_of(x.layout.groups[group_of(key)].row, "moments"))
                moves = int(memory == DISK or (memory == HOST and not (by_group and key in there)))
                copies = not (by_group and step.donates)
                out.append(Piece("extra", group_of(key).unit, memory, (buffer.nbytes,), moves, moves, copies))
            if isinstance(x, torch.Tensor):
                out.append(Piece("extra", ROOT, DEVICE, (x.nbytes,), copies=True))
    return out


def _sizes(form: Format, numel: int) -> tuple[int, ...]:
    return tuple(numel // part.every * part.dtype.itemsize for part in form.parts)


# ---- sums


def total(pieces: Iterable[Piece]) -> int:
    return sum(piece.nbytes for piece in pieces)


def moved(pieces: Sequence[Piece]) -> dict[str, tuple[int, int]]:
    """Memory -> bytes that a step brings from it, and puts there."""
    away = {memory: [piece for piece in pieces if piece.memory == memory] for memory in (HOST, DISK)}
    return {
        memory: (
            sum(p.nbytes * p.reads + p.fetched * p.fetches for p in own),
            sum(p.nbytes * p.writes + p.down for p in own),
        )
        for memory, own in away.items()
    }


def peak(
    step: Spec, pieces: Sequence[Piece], layout: Layout, made: Taken, gathered: Mapping[str, int]
) -> dict[str, int]:
    """Memory -> bytes that a step takes there at most, but for activations.

    On the device are, beside its state and while it runs: the full params of the root and of the two largest units (one
    that runs, one that is brought meanwhile), the largest full cotangent of a unit, and what it takes to reduce it over
    ranks. While it is updated, or meanwhile where that is fused: what the update of a unit and of the next one has
    brought there (of all of them, where the optimizer wants all at once), and what the optimizer makes. Where an
    accelerator computes, what is read from a disk for an update takes the host's memory instead. In every memory the
    next state is made before the last one goes, unless it is overwritten, as `fz.donate` says. Microbatches take the
    sum of the grads so far and the grads of one more, where these belong.

    Args:
        made: what an update takes beside the state and the gradients.
        gathered: unit -> bytes of its full params, where they are made for each use.
    """
    units = [nbytes for unit, nbytes in gathered.items() if unit != ROOT]
    runs = gathered.get(ROOT, 0) + sum(heapq.nlargest(2, units)) + _cotangents(step, layout)
    runs += max(_reducing(step, layout).values(), default=0)
    one, small = _measuring(layout)
    runs = runs + one if step.fusion else max(runs, small)
    after = max(made.after, small) if LEAF_NORMS in step.metrics else made.after
    updating, several = _updating(step, pieces), step.microbatches.count
    if not step.fusion:
        updating[DEVICE] += max(made.nbytes, after)
        if several == 1:
            updating[DEVICE] = max(updating[DEVICE], _taken(DEVICE, pieces) + runs)
    elif _holds(step) == "held":  # its next state is made before all is pulled back
        updating[DEVICE] += max(made.nbytes, after, runs)
    else:  # while others are pulled back, or brought
        updating[DEVICE] += max(made.nbytes + runs, after)
    if several == 1:
        return updating
    sums, whole = _sums(layout)
    others = [piece for piece in pieces if piece.kind != "grads"]
    adding = {memory: _taken(memory, others) for memory in MEMORIES}
    if step.fusion:  # its next state is made before
        adding[DEVICE] += total(p for p in pieces if p.memory == DEVICE and p.copies)
    adding[DEVICE] += runs + 2 * max([size for memory in (HOST, DISK) for size in sums[memory]], default=0)
    if step.fusion:  # a group's sum, with what is added to it
        updating[DEVICE] += 2 * max([size for sizes in sums.values() for size in sizes], default=0)
    for memory, sizes in sums.items():
        if step.fusion:  # the last microbatch's are delivered, beside the sum of the others
            updating[memory] += sum(sizes)
            updating[DEVICE] += whole[memory] if memory != DEVICE else 0
        adding[memory] += 2 * sum(sizes) + (max(sizes, default=0) if memory != DEVICE else 0)
    adding[DEVICE] -= 0 if step.fusion else _added(step, layout)
    return updating if step.fusion and several == 2 else {m: max(updating[m], adding[m]) for m in MEMORIES}


def _cotangents(step: Spec, layout: Layout) -> int:
    """Bytes of full cotangents: those of the groups that share a node, which wait for each other, and of one unit."""
    acting, several = step.table(layout).acting, step.microbatches.count > 1
    rows = {key: layout.groups[key].row for key in layout.trainable if key.unit not in acting}
    small = layout.together(
        [key for key, row in rows.items() if layout.shards == 1 or (several and row.grads and not row.grads.cuts)]
    )
    out, waiting = collections.Counter[str](), 0
    for key in layout.trainable:
        group = layout.groups[key]
        policy = group.row.policy
        assert policy.compute
        if key in small:
            waiting += group.numel * policy.compute.itemsize
        if key not in small or policy.wire != policy.grad:
            out[key.unit] += group.numel * policy.wire.itemsize
    return waiting + max(out.values(), default=0)


def _reducing(step: Spec, layout: Layout) -> collections.Counter[str]:
    """Unit -> bytes that it takes to reduce its full cotangent, and to put the result where it waits.

    Over ranks they are one buffer, and what others send of their slices; on one rank the buffer is the result, unless
    that is of another dtype.
    """
    out = collections.Counter[str]()
    for key in layout.trainable:
        group, own = layout.groups[key], layout.shard_numel(key)
        row, policy, wire = group.row, group.row.policy, group.row.policy.wire.itemsize
        assert row.grads and policy.reduce and policy.grad
        alike, over = policy.wire == policy.reduce, row.cuts and layout.shards > 1
        if over:
            out[key.unit] += (2 * group.numel - own * alike) * wire
        elif not alike or layout.shards > 1:
            out[key.unit] += group.numel * wire
        if not alike and (step.fusion or step.microbatches.count == 1):  # or it is kept as it was summed
            out[key.unit] += own * max(0, policy.reduce.itemsize - policy.grad.itemsize)
        if step.fusion and step.donates and not (over or row.fetched or _holds(step) == "held"):
            # params that the graph holds are copied, while the next unit is pulled back
            out[key.unit] += 2 * own * wire
        if name_of(row.grads.memory) != DEVICE:
            out[key.unit] += 3 * own * wire
    return out


def _measuring(layout: Layout) -> tuple[int, int]:
    """Bytes that it takes to measure one group's grads as they come; and all at once, small ones in one buffer."""
    one = small = 0
    for key in layout.trainable:
        numel, grad = layout.shard_numel(key), layout.groups[key].row.policy.grad
        assert grad
        if numel <= SMALL:  # and its rows' norms in float64
            own = numel * grad.itemsize + numel // 8
            one, small = max(one, own), small + own
        elif grad == torch.bfloat16:
            one = max(one, torch.float32.itemsize * min(ROWS * ROW, numel))
    return one, max(one, small)


def _taken(memory: str, pieces: Iterable[Piece]) -> int:
    """Bytes of the pieces in a memory; files have whole blocks."""
    own = [part for piece in pieces if piece.memory == memory for part in piece.parts]
    return sum(map(rounded, own) if memory == DISK else own)


def _sums(layout: Layout) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Memory -> bytes of each group's sum over microbatches; and of all that are whole, as no rank keeps a slice."""
    out: dict[str, list[int]] = {memory: [] for memory in MEMORIES}
    whole: dict[str, int] = dict.fromkeys(MEMORIES, 0)
    for key in layout.trainable:
        group = layout.groups[key]
        row = group.row
        assert row.grads and row.policy.reduce
        numel = layout.shard_numel(key) if row.grads.cuts else group.numel
        nbytes, memory = numel * row.policy.reduce.itemsize, name_of(row.grads.memory)
        out[memory].append(rounded(nbytes) if memory == DISK else nbytes)
        whole[memory] += nbytes if layout.shards > 1 and not row.grads.cuts else 0
    return out, whole


def _added(step: Spec, layout: Layout) -> int:
    """Bytes of the sums on the device that later microbatches' gradients are added to without a buffer between."""
    acting, out = step.table(layout).acting, 0
    for key in layout.trainable:
        row = layout.groups[key].row
        assert row.grads and row.policy.reduce and row.policy.compute
        exact = row.policy.compute == row.policy.wire == row.policy.reduce
        whole = layout.shards == 1 or not row.grads.cuts
        if exact and whole and key.unit not in acting and name_of(row.grads.memory) == DEVICE:
            out += layout.groups[key].numel * row.policy.reduce.itemsize
    return out


def _updating(step: Spec, pieces: Sequence[Piece]) -> dict[str, int]:
    """Memory -> bytes that an update takes there beside what runs, and beside what the optimizer makes."""
    copied = [piece for piece in pieces if piece.copies]
    out: dict[str, int] = {memory: _taken(memory, pieces) + _taken(memory, copied) for memory in MEMORIES}
    brought, down = collections.Counter[str](), collections.Counter[str]()
    for piece in pieces:
        down[piece.unit] += piece.down
        passes = piece.reads if piece.kind in ("params", "moments") else 1
        if piece.memory == DISK or (piece.memory == HOST and passes):
            brought[piece.unit] += piece.nbytes
    by_group = step.optimizer.by_group
    out[HOST] += max(down.values(), default=0) if by_group else down.total()
    waiting = step.optimizer.exchanges if step.optimizer.paused else 0  # of as many units, each for another one
    out[DEVICE] += sum(heapq.nlargest(2 + waiting if by_group else len(brought), brought.values()))
    return out
