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
from fzero.base.display import counted, folded, in_bytes
from fzero.base.patterns import ROOT
from fzero.comm import backend
from fzero.comm.axis import Axis
from fzero.parallel.check import Report, sent_by
from fzero.planning import traffic
from fzero.planning.activations import Activations, activation_lines, activations_of, without_axis
from fzero.planning.bandwidth import Bandwidth, need_bandwidth
from fzero.planning.update import Taken, taken
from fzero.planning.words import HEAD, by_name, cells, sent_as
from fzero.state.init import leaf_specs
from fzero.state.moments import filled
from fzero.state.sent import OF_PARAMS, Sent, sent_of
from fzero.state.sharded import Sharded
from fzero.stores.put import DEVICE, HOST
from fzero.table.held import Held, Holdings, cuts_of
from fzero.table.layout import Layout
from fzero.table.module_params import frozen_leaves, hints_of
from fzero.table.ranks import AnyMesh, Ranks, joined, ranks_of
from fzero.table.rows import KINDS, Row
from fzero.table.spec import Spec, need_step

_MEMORIES = tuple([f"{kind} in" for kind in KINDS])  # columns


@dataclass(frozen=True, repr=False)
class Plan:
    """The resolved table; `print` it, or end a cell of a notebook with it.

    All numbers are bytes of one rank, alignment included.

    Attributes:
        rows: one per leaf.
        world_size: all ranks of the mesh.
        ranks: the mesh by numbers: `ranks.sizes` are those of its axes.
        rank: whose numbers these are; other ranks of a tensor axis may have smaller slices.
        params, grads, moments, extra: state between updates (grads: as many as live at once, reduced).
        gathered: the largest unit's full params, and `root`, those of the leaves outside any unit (where they are made
            for each use: in ZeRO-3, and of offloaded params).
        sent: per step without accumulation, by the params' gathers and the gradients' reduction, over all axes.
        messages: what is sent per step without accumulation, axis by axis, for each purpose: those two, the means of
            replicas, the norm and a loss in float32, and what the function sends by its maps of `fz.parallel` where
            `inputs=` were given. Units are counted as in `moved`.
        device, host, disk: the same state by the memory that it lies in.
        moved: per step without accumulation, by memory: `moved["host"]` is (to the device, from the device),
            `moved["disk"]` (read, written). Counted are params, grads and moments of a step after the first, as if each
            unit ran once, in the order of their names, and were pulled back; not activations, nor what an `fz.Extra`
            or an optimizer's norm of its own reads.
        peak: what a step takes at most, by memory ("device", "host", "disk"), but for activations: the state (twice, of
            params and moments that are not overwritten: on a disk, and without `fz.donate`), the root's and two units'
            full params, one unit's full gradients, and what the update of two units has brought. What an optimizer and
            entries of the state (`fz.Extra`) take is counted in a run on tensors without values: a number that they
            read is a half there, and one that does not run so is taken to need eight times the leaves that it is given
            at once. Up to `fz.Disk(in_flight=...)` bytes more are on their way to files.
        activations: where `inputs=` were given, what like units keep for their pullback, of one microbatch: by each
            choice of names (`fz.name`), and as the step says; and what is computed again. It is counted on one rank
            of a step whose params are whole.
        flops: of a microbatch's forward run and pullback, by torch's formulas for matrix products, convolutions and
            attention, with nothing computed again; 0 without `inputs=`.
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

    @property
    def mesh(self) -> Mapping[str, int]:
        """Axis -> its number of ranks."""
        return self.ranks.sizes

    @property
    def by_axis(self) -> dict[str, tuple[int, int]]:
        """Axis (`dp×sp` where two are taken as one) -> the bytes that a rank sends over it in a step, and in how many
        collectives.
        """
        axes = dict.fromkeys(each.axis for each in self.messages)
        own = {axis: [each for each in self.messages if each.axis == axis] for axis in axes}
        return {axis: (sum(e.nbytes for e in some), sum(e.messages for e in some)) for axis, some in own.items()}

    @cached_property
    def holdings(self) -> Holdings:
        """The parts of all leaves on all ranks."""
        return Holdings(self.rows, self.ranks)

    def held(self, path: str, rank: int) -> Held:
        """A rank's part of a leaf: its slice along a dim, and the flat piece of that slice.

        Args:
            path: of the leaf.
            rank: its number in the mesh, whose first axis is the slowest.

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
        """Estimates the seconds of a step at best, whose transfers run while it computes: the longest of them.

        That is max(compute, to the device, from the device, disk), each bytes / bandwidth. To and from the host bytes
        go at once; a disk's reads and writes share it, and are added. What a step must wait for comes on top: the
        first unit for its params, an update for its norm.

        Args:
            bandwidth: measured by `fz.measure_bandwidth`, or made of known numbers.
            compute: seconds that the step takes with everything on the device, measured; None counts transfers only.

        Raises:
            ValueError: state lies on a disk, and the bandwidth says nothing of one.

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
        head, body = self._table()
        widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
        body = [head, ["-" * width for width in widths], *body]
        return "\n".join(["  ".join(map(str.ljust, line, widths)).rstrip() for line in body] + ["", *self._lines()])

    def _repr_html_(self) -> str:
        lines, most = self._lines(), len(self.header)
        return folded(f"Plan: {lines.pop(most)}", *self._table(), "\n".join(lines))

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
            places = {"device": self.device, HOST: self.host, traffic.DISK: self.disk}
            (down, up), (read, written) = [map(in_bytes, self.moved[memory]) for memory in (HOST, traffic.DISK)]
            lines += [
                f"between steps: {by_name(places)}; at most in a step: {by_name(self.peak)}, and activations",
                f"moved per {step}: host to device {down}, device to host {up}; disk read {read}, written {written}",
            ]
        return [*lines, *(["", *activation_lines(self.activations, self.flops)] if self.activations else [])]


def transfers(plan: Plan, bandwidth: Bandwidth) -> list[float]:
    """The seconds that a step's bytes take: to and from the host, from and to the disk."""
    out = []
    for memory in (HOST, traffic.DISK):
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
    """The state that `init` would make of these params, counted and not made: no process group, no memory.

    Args:
        step: any step.
        params: the pytree given to `init` (real, fake or meta tensors, or callables). An optimizer on whole leaves that
            asks for their values at its init is begun on zeros, one leaf at a time.
        world_size: ranks of the sharded axis; that of the process group by default, or 1.
        mesh: the sizes of all axes, `{"dp": 64, "tp": 8}`, the first one slowest, or a DeviceMesh: of any number of
            ranks, in place of `world_size`. By default those of the step's own meshes.
        rank: whose bytes are counted, by its number in the mesh. Rank 0 has the largest pieces of every leaf.
        inputs: a batch, `(tokens, targets)`, of which only shapes are read: what the function and its modules send by
            the maps of `fz.parallel` is counted too, by `fz.parallel.check`, which refuses a wrong function. A step
            with a tensor axis is on a mesh of this process then (`fz.testing.fake_mesh`), whose rank here it counts
            for. Attention counts by its formula; not counted is what `fz.remat` and a second pullback send once more.
            What units keep, and what it costs to compute some of it again, is in `activations`, but of those that
            the function differentiates itself. Modules of `fz.functional` keep nothing of it; other objects, as a
            dict in which the function keeps tables, do.

    Raises:
        ValueError: a pattern that matches no leaf, a column set twice, a mesh without an axis of the step.

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
    messages, pieces = sent_of(step, layout, like, ranks, rank), traffic.pieces_of(step, layout, like)
    gathered = collections.Counter[str]()
    if not isinstance(inputs, (tuple, list, type(None))):
        raise wrong("plan", "inputs", inputs, "a tuple of what the step is given besides its state, or None")
    activations, flops = (), 0
    if inputs is not None:
        here = step if step.tensor_axis is not None or backend.initialized() else without_axis(step)
        messages += _of_function(sent_by(here, params, _beside(params, inputs)))
        activations, flops = activations_of(step, params, inputs)
    for group in layout.groups.values():
        if group.row.params.cuts or group.row.fetched:
            assert group.row.policy.compute
            gathered[group.unit] += group.numel * group.row.policy.compute.itemsize
    moves = any(piece.memory != DEVICE for piece in pieces)
    if moves not in updates:
        here = dataclasses.replace(step, rules=tuple([rule for rule in step.rules if rule.column not in _MEMORIES]))
        bare = Holdings(here.rows(specs, frozen, hints_of(structure)), ranks).layout(rank)
        updates[moves] = taken(here, bare, structure, moves)
    update = updates[moves]
    messages += update.messages(ranks)
    by_kind = {kind: traffic.total(p for p in pieces if p.kind == kind) for kind in ("grads", "moments", "extra")}
    by_memory = {memory: traffic.total(p for p in pieces if p.memory == memory) for memory in traffic.MEMORIES}
    alone = [*(p for p in pieces if p.kind != "grads"), *traffic.grads_of(step, layout, several=False)]
    paths = [rows[index].path for index in sorted(frozen)]
    some = ", ".join(paths[:4]) + (", ..." if len(paths) > 4 else "")
    return Plan(
        rows=rows,
        header=(*step.header(), *([f"frozen, as their module has requires_grad=False: {some}"] if paths else [])),
        world_size=ranks.count,
        ranks=ranks,
        rank=rank,
        layout=layout,
        params=traffic.total(p for p in pieces if p.kind in ("params", "held")),
        **by_kind,
        gathered=max((n for unit, n in gathered.items() if unit), default=0),
        root=gathered[ROOT],
        sent=sum(each.nbytes for each in messages if each.purpose in OF_PARAMS),
        messages=tuple(messages),
        **by_memory,
        moved=traffic.moved(alone),
        peak=traffic.peak(step, pieces, layout, update, gathered),
        activations=activations,
        flops=flops,
    )


def _beside(params: object, inputs: Sequence[object]) -> Sequence[object]:
    """The inputs on the meta device, where the params are."""
    if not any(isinstance(x, torch.Tensor) and x.is_meta for x in pytree.leaves(params)):
        return inputs
    return [pytree.map_leaves(lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x, each) for each in inputs]


def _of_function(report: Report) -> list[Sent]:
    """What a function's own maps send."""
    axes = [axis for axis in dict.fromkeys(each.axis for each in report.conversions) if report.messages(axis)]
    return [Sent(joined(axis.split(", ")), "function", report.messages(axis), report.sent(axis)) for axis in axes]


def _need_rank(rank: int, ranks: Ranks, who: str) -> int:
    if rank >= ranks.count:
        raise ValueError(f"{who}: got rank={rank}, expected one from 0 to {ranks.count - 1}, of the mesh {ranks}.")
    return rank
