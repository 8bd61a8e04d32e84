"""fz.plan: the rows of the table with bytes and traffic of a rank, before anything is allocated."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from fzero.base import pytree
from fzero.base.arguments import need_int, need_number, wrong
from fzero.base.display import counted, in_bytes
from fzero.base.patterns import ROOT
from fzero.comm import backend
from fzero.comm.axis import Axis
from fzero.parallel.check import sent_by
from fzero.planning import memories
from fzero.planning.activations import Activations, activation_lines, activations_of, without_axis
from fzero.planning.bandwidth import Bandwidth, need_bandwidth
from fzero.planning.messages import (
    HEAD,
    OF_PARAMS,
    Sent,
    Turn,
    by_name,
    cells,
    sent_as,
    sent_of,
    table,
    turn_lines,
    turns_of,
)
from fzero.planning.update import Taken, taken
from fzero.state.init import leaf_specs
from fzero.state.moments import filled
from fzero.state.sharded import Sharded
from fzero.stores.memories import DEVICE, HOST
from fzero.table.layout import Layout
from fzero.table.module_params import frozen_leaves, hints_of
from fzero.table.ranks import AnyMesh, Held, Holdings, Ranks, cuts_of, joined, ranks_of
from fzero.table.rows import KINDS, Row
from fzero.table.spec import Spec, need_step

_MEMORIES = tuple([f"{kind} in" for kind in KINDS])  # columns


@dataclass(frozen=True, repr=False)
class Plan:
    """What each rank of a step holds and sends; `fz.plan` returns it. `print` it for a table, or end a cell
    of a notebook with it.

    All numbers are bytes of one rank, with alignment, for a step without accumulation.

    Attributes:
        rows: one row of the table per leaf.
        world_size: number of ranks in the mesh.
        ranks: the mesh; `ranks.sizes` has the size of each axis.
        rank: the rank that is counted.
        params: bytes of params between updates.
        moments: bytes of moments between updates.
        extra: bytes of other state (`fz.Extra`) between updates.
        grads: reduced gradients that live at most at once.
        gathered: full params of the largest unit.
        root: full params of the leaves outside of any unit, where they are gathered (ZeRO-3, offloaded params).
        sent: what a step sends to gather params and to reduce gradients, over all axes.
        messages: what a step sends, by axis and purpose: params, gradients, means of replicas, norms, the loss, and
            with `inputs=` the maps of `fz.parallel` in the function.
        device: state between updates on the device that computes.
        host: state between updates in the host's memory.
        disk: state between updates on a disk.
        moved: bytes that a step moves: `moved["host"]` is (to the device, from the device), `moved["disk"]` is (read,
            written). It counts params, grads and moments, with each unit run once; not activations.
        peak: the most that a step needs, by memory ("device", "host", "disk"), without activations: the state (twice,
            without `fz.donate`), full params of the root and two units, full gradients of one unit and of small ones
            that are pulled back together, and what an update needs. `fz.Disk(in_flight=...)` comes on top.
        activations: with `inputs=`, what units keep for their pullback and what they may keep instead. Counted for one
            rank with whole params, and one microbatch.
        flops: with `inputs=`, FLOPs of a microbatch's forward and pullback, without recomputation. They count matrix
            products, convolutions and attention. Otherwise 0.
        schedule: of a step of `fz.jit`, what is on its way between the ranks of the sharded axis while which unit
            computes.
    """

    rows: tuple[Row, ...]
    header: tuple[str, ...]
    world_size: int
    ranks: Ranks
    rank: int
    layout: Layout
    params: int
    grads: int
    moments: int
    extra: int
    gathered: int
    root: int
    sent: int
    messages: tuple[Sent, ...]
    device: int
    host: int
    disk: int
    moved: Mapping[str, tuple[int, int]] = field(hash=False)
    peak: Mapping[str, int] = field(hash=False)
    activations: tuple[Activations, ...] = ()
    flops: int = 0
    schedule: tuple[Turn, ...] = ()

    @property
    def mesh(self) -> Mapping[str, int]:
        """Axis -> its number of ranks."""
        return self.ranks.sizes

    @property
    def by_axis(self) -> dict[str, tuple[int, int]]:
        """Axis -> (bytes, collectives) that a rank sends over it in a step. Two axes used as one are named `dp×sp`."""
        axes = dict.fromkeys(each.axis for each in self.messages)
        own = {axis: [each for each in self.messages if each.axis == axis] for axis in axes}
        return {axis: (sum(e.nbytes for e in some), sum(e.messages for e in some)) for axis, some in own.items()}

    @cached_property
    def holdings(self) -> Holdings:
        """Which part of each leaf each rank holds."""
        return Holdings(self.rows, self.ranks)

    def held(self, path: str, rank: int) -> Held:
        """Which part of a leaf a rank holds: its slice along a dim, and its flat piece of that slice.

        Args:
            path: dotted path of the leaf.
            rank: number of the rank in the mesh. The first axis is the slowest.

        Raises:
            KeyError: there is no such leaf.

        Example:
            >>> step = fz.shard_zero3(fz.shard_tensor(fz.train_step(lambda p, x: x, fz.sgd(0.1)), {"w": 1}))
            >>> plan = fz.plan(step, {"w": torch.empty(64, 8)}, mesh={"dp": 2, "tp": 4})
            >>> plan.held("w", rank=7)
            Held(dim=1, ranges=((6, 2),), shape=(64, 2), start=64, stop=128)
        """
        if not any(row.path == path for row in self.rows):
            raise KeyError(f"no leaf {path!r}; the leaves are {', '.join(row.path for row in self.rows)}")
        rank = need_int(rank, "Plan.held", "rank", "a number of a rank", least=0)
        return self.holdings.of(path, _need_rank(rank, self.ranks, "Plan.held"))

    def seconds(self, bandwidth: Bandwidth, compute: float | None = None) -> float:
        """Estimates the time of a step, in seconds, if all transfers run while it computes.

        It is the largest of `compute` and the time for each way: to the device, from the device, and the disk, whose
        reads and writes add up. The first unit's params and an update that waits for a norm come on top.

        Args:
            bandwidth: of `fz.measure_bandwidth`, or with numbers that you know.
            compute: measured seconds of the step with everything on the device; None counts transfers only.

        Raises:
            ValueError: state is on a disk, and `bandwidth` has no rates of one.

        Example:
            >>> step = fz.train_step(lambda p, x: (x @ p["w"]).sum(), fz.adamw(1e-3))
            >>> plan = fz.plan(fz.offload(step, params="host"), {"w": torch.empty(1000, 1000, device="meta")})
            >>> plan.seconds(fz.Bandwidth(host_read=4e9, host_write=4e9))
            0.002
        """
        need_bandwidth(bandwidth, "Plan.seconds")
        if compute is not None:
            need_number(compute, "Plan.seconds", "compute", "a number of seconds or None")
        if compute is not None and not 0 <= compute < math.inf:
            raise ValueError(f"Plan.seconds: got compute={compute}, expected at least 0 seconds.")
        to_device, from_device, read, written = transfers(self, bandwidth)
        return max(float(compute or 0.0), to_device, from_device, read + written)

    def __repr__(self) -> str:
        leaves, ranks = counted(len(self.rows), "leaf"), counted(self.world_size, "rank")
        return f"Plan({leaves} on {ranks}; print it to see its table)"

    def __str__(self) -> str:
        return "\n".join([*table(*self._table()), "", *self._lines()])

    def _table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        body = [cells(row) for row in self.rows]
        if not any(row.slices is not None for row in self.rows):
            return HEAD, body
        cut = [(*own[:2], cuts_of(row, self.ranks), *own[2:]) for own, row in zip(body, self.rows, strict=True)]
        return (*HEAD[:2], "cut", *HEAD[2:]), cut

    def _lines(self) -> list[str]:
        extra = f", further state {in_bytes(self.extra)}" if self.extra else ""
        step = "step without accumulation" if any(line.startswith("accumulate") for line in self.header) else "step"
        lines = [
            *self.header,
            f"{counted(len(self.rows), 'leaf')}, {counted(sum(row.numel for row in self.rows), 'parameter')}, "
            f"{counted(len({row.unit for row in self.rows}), 'unit')}, {counted(self.world_size, 'rank')}"
            + (f" ({self.ranks})" if len(self.mesh) > 1 else ""),
            f"{f'rank {self.rank}' if self.ranks.tensor else 'per rank'}: params {in_bytes(self.params)}, "
            f"grads {in_bytes(self.grads)}, moments {in_bytes(self.moments)}"
            f"{extra}; gathered at once: root {in_bytes(self.root)} + largest unit {in_bytes(self.gathered)}; "
            f"sent per {step} {in_bytes(self.sent)}",
        ]
        if len(self.by_axis) > 1:
            own = {axis: [each for each in self.messages if each.axis == axis] for axis in self.by_axis}
            lines += [f"sent per {step} over {axis}: {sent_as(some)}" for axis, some in own.items()]
        if any(memory != DEVICE for row in self.rows for memory in row.memories):
            places = {"device": self.device, HOST: self.host, memories.DISK: self.disk}
            (down, up), (read, written) = [map(in_bytes, self.moved[memory]) for memory in (HOST, memories.DISK)]
            lines += [
                f"between steps: {by_name(places)}; at most in a step: {by_name(self.peak)}, and activations",
                f"moved per {step}: host to device {down}, device to host {up}; disk read {read}, written {written}",
            ]
        lines += ["", *turn_lines(self.schedule)] if self.schedule else []
        return [*lines, *(["", *activation_lines(self.activations, self.flops)] if self.activations else [])]


def transfers(plan: Plan, bandwidth: Bandwidth) -> list[float]:
    """The seconds that a step's bytes take: to and from the host, from and to the disk."""
    out = []
    for memory in (HOST, memories.DISK):
        for count, way in zip(plan.moved[memory], ("read", "write"), strict=True):
            speed: float | None = getattr(bandwidth, f"{memory}_{way}")
            if count and speed is None:
                raise ValueError(
                    f"Plan.seconds: got a bandwidth without {memory}_{way}, and {count} bytes go that way in a step. "
                    "Give it: fz.Bandwidth(..., disk_read=..., disk_write=...), or fz.measure_bandwidth(fz.Disk(path))."
                )
            out.append(count / speed if count and speed else 0.0)
    return out


def plan(
    step: Spec,
    params: object,
    world_size: int | None = None,
    mesh: AnyMesh | None = None,
    rank: int = 0,
    inputs: Sequence[object] | None = None,
) -> Plan:
    """Counts what a step holds and sends on each rank, before anything is allocated.

    No process group is needed, and no memory: params may be on the meta device.

    Args:
        step: any step.
        params: the pytree for `init` (real, fake or meta tensors, or callables).
        world_size: number of ranks of the sharded axis. By default that of the process group, or 1.
        mesh: sizes of all axes, such as `{"dp": 64, "tp": 8}`, the slowest first, or a DeviceMesh. Use it instead of
            `world_size`. By default the meshes of the step.
        rank: the rank that is counted. Rank 0 has the largest pieces.
        inputs: a batch, such as `(tokens, targets)`. Then the function runs on shapes alone, and the plan also counts
            its activations, FLOPs and the messages of `fz.parallel`. A wrong function is refused as by
            `fz.parallel.check`. A step with a tensor axis needs a mesh of this process, such as `fz.testing.fake_mesh`.
            Messages of a second pullback and of `fz.remat` are not counted.

    Returns:
        The plan.

    Raises:
        ValueError: a pattern matches no leaf, two transforms disagree about a leaf, or the mesh lacks an axis of the
            step.

    Example:
        >>> step = fz.shard_zero3(fz.train_step(lambda p, x: (x @ p["w"]).sum(), fz.adamw(1e-3)))
        >>> fz.plan(step, {"w": torch.empty(64, 64, device="meta")}, world_size=4).params
        4096
        >>> step = fz.shard_tensor(step, {"w": 1})
        >>> plan = fz.plan(step, {"w": torch.empty(64, 64, device="meta")}, mesh={"dp": 4, "tp": 2})
        >>> plan.params, plan.by_axis
        (2048, {'dp': (12306, 4), 'tp': (16, 2)})
        >>> apply, params = fz.functional(torch.nn.Linear(64, 64))
        >>> with fz.testing.fake_mesh({"dp": 64, "tp": 8}) as mesh:
        ...     step = fz.train_step(lambda p, x: apply(p, x).square().mean(), fz.adamw(1e-3))
        ...     step = fz.shard_zero3(fz.shard_tensor(step, {"weight": "row"}, mesh=mesh), mesh=mesh)
        ...     fz.plan(step, params, mesh=mesh, inputs=(torch.empty(16, 64),)).by_axis["tp"]
        (28840, 3)
    """
    return planned(step, params, world_size, mesh, rank, inputs, {})


def planned(
    step: Spec,
    params: object,
    world_size: int | None,
    mesh: AnyMesh | None,
    rank: int,
    inputs: Sequence[object] | None,
    updates: dict[bool, Taken],
) -> Plan:
    """The same, of a step that has been planned in other memories.

    Args:
        updates: what its update takes, as far as it was counted: whether anything is away -> that.
    """
    need_step(step, "plan")
    if world_size is not None:
        need_int(world_size, "plan", "world_size", "a number of ranks or None", least=1)
    ranks = ranks_of(step, world_size, mesh, "plan")
    rank = _need_rank(need_int(rank, "plan", "rank", "a number of a rank", least=0), ranks, "plan")
    specs, _, structure = leaf_specs(params)
    frozen = frozen_leaves(structure)
    rows = step.rows(specs, frozen, hints_of(structure))
    layout = Holdings(rows, ranks).layout(rank)
    empty = Sharded(layout, Axis(), structure, {}, kind="params")
    like = filled(empty, dict.fromkeys(layout.groups, torch.device("meta")))
    messages, pieces = sent_of(step, layout, ranks), memories.pieces_of(step, layout, like)
    gathered = collections.Counter[str]()
    if not isinstance(inputs, (tuple, list, type(None))):
        raise wrong("plan", "inputs", inputs, "a tuple of what the step is given besides its state, or None")
    activations, flops = (), 0
    if inputs is not None:
        here = step if step.tensor_axis is not None or backend.initialized() else without_axis(step)
        report = sent_by(here, params, _beside(params, inputs))
        for axis in dict.fromkeys(each.axis for each in report.conversions):  # what its own maps send
            if count := report.messages(axis):
                messages.append(Sent(joined(axis.split(", ")), "function", count, report.sent(axis)))
        activations, flops = activations_of(step, params, inputs)
    for group in layout.groups.values():
        if group.row.params.cuts or group.row.fetched:
            assert group.row.policy.compute
            gathered[group.unit] += group.numel * group.row.policy.compute.itemsize
    moves = any(piece.memory != DEVICE for piece in pieces)
    if moves not in updates:
        here = dataclasses.replace(step, rules=tuple([rule for rule in step.rules if rule.column not in _MEMORIES]))
        bare = Holdings(here.rows(specs, frozen, hints_of(structure)), ranks).layout(rank)
        updates[moves] = taken(here, bare, structure, moves, ranks.place(ranks.sharded, rank))
    update = updates[moves]
    messages += update.messages(ranks)
    by_kind = {kind: memories.total(p for p in pieces if p.kind == kind) for kind in ("grads", "moments", "extra")}
    by_memory = {memory: memories.total(p for p in pieces if p.memory == memory) for memory in memories.MEMORIES}
    alone = [*(p for p in pieces if p.kind != "grads"), *memories.grads_of(step, layout, several=False)]
    paths = [rows[index].path for index in sorted(frozen)]
    some = ", ".join(paths[:4]) + (", ..." if len(paths) > 4 else "")
    return Plan(
        rows=rows,
        header=(*step.header(), *([f"frozen, as their module has requires_grad=False: {some}"] if paths else [])),
        world_size=ranks.count,
        ranks=ranks,
        rank=rank,
        layout=layout,
        params=memories.total(p for p in pieces if p.kind in ("params", "held")),
        **by_kind,
        gathered=max((n for unit, n in gathered.items() if unit), default=0),
        root=gathered[ROOT],
        sent=sum(each.nbytes for each in messages if each.purpose in OF_PARAMS),
        messages=tuple(messages),
        **by_memory,
        moved=memories.moved(alone),
        peak=memories.peak(step, pieces, layout, update, gathered),
        activations=activations,
        flops=flops,
        schedule=turns_of(layout) if step.graphs is not None else (),
    )


def _beside(params: object, inputs: Sequence[object]) -> Sequence[object]:
    """The inputs on the meta device, where the params are."""
    if not any(isinstance(x, torch.Tensor) and x.is_meta for x in pytree.leaves(params)):
        return inputs
    return [pytree.map_leaves(lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x, each) for each in inputs]


def _need_rank(rank: int, ranks: Ranks, who: str) -> int:
    if rank >= ranks.count:
        raise ValueError(f"{who}: got rank={rank}, expected one from 0 to {ranks.count - 1}, of the mesh {ranks}.")
    return rank
