"""fz.plan: the rows of the table with bytes and traffic per rank, before anything is allocated; and their plot."""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fzero import traffic
from fzero.bandwidth import Bandwidth, need_bandwidth
from fzero.base.arguments import need_int, need_number, wrong
from fzero.base.patterns import ROOT
from fzero.comm import backend
from fzero.comm.axis import Axis
from fzero.formats.formats import Blocks, Plain, nbytes
from fzero.state.init import leaf_specs
from fzero.state.moments import filled
from fzero.state.sharded import Sharded
from fzero.stores.put import DEVICE, HOST, name_of
from fzero.table.layout import Layout
from fzero.table.module_params import frozen_leaves, hints_of
from fzero.table.rows import Kept, Row
from fzero.table.spec import Spec, need_step
from fzero.traffic import DISK


@dataclass(frozen=True)
class Plan:
    """The resolved table; `print` it. All numbers are bytes per rank, alignment included.

    Attributes:
        rows: one per leaf.
        params, grads, moments, extra: state between updates (grads: as many as live at once, reduced).
        gathered: the largest unit's full params, and `root`, those of the leaves outside any unit (where they are made
            for each use: in ZeRO-3, and of offloaded params).
        sent: per step without accumulation, by the params' gathers and the gradients' reduction.
        device, host, disk: the same state by the memory that it lies in.
        moved: per step without accumulation, by memory: `moved["host"]` is (to the device, from the device),
            `moved["disk"]` (read, written). Counted are params, grads and moments of a step after the first, as if each
            unit ran once, in the order of their names, and were pulled back; not activations, nor what an `fz.Extra`
            or an optimizer's norm of its own reads.
        peak: what a step takes at most, by memory ("device", "host", "disk"), but for activations: the state (twice, of
            params and moments that are not overwritten: on a disk, and without `fz.donate`), the root's and two units'
            full params, one unit's full gradients, and what the update of two units has brought. Up to
            `fz.Disk(in_flight=...)` bytes more are on their way to files.
    """

    rows: tuple[Row, ...]
    header: tuple[str, ...]
    world_size: int
    layout: Layout
    params: int
    grads: int
    moments: int
    extra: int
    gathered: int
    root: int
    sent: int
    device: int
    host: int
    disk: int
    moved: Mapping[str, tuple[int, int]] = field(hash=False)
    peak: Mapping[str, int] = field(hash=False)

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

    def __str__(self) -> str:
        head = ("leaf", "shape", "unit", "params", "grads", "moments", "compute", "reduce", "gathered for", "optimizer")
        body = [_cells(row) for row in self.rows]
        widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
        body = [head, ["-" * width for width in widths], *body]
        lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in body]
        total = sum(row.numel for row in self.rows)
        extra = f", further state {_bytes(self.extra)}" if self.extra else ""
        lines += [
            "",
            *self.header,
            f"{len(self.rows)} leaves, {total:,} parameters, {len({row.unit for row in self.rows})} units, "
            f"{self.world_size} ranks",
            f"per rank: params {_bytes(self.params)}, grads {_bytes(self.grads)}, moments {_bytes(self.moments)}"
            f"{extra}; gathered at once: root {_bytes(self.root)} + largest unit {_bytes(self.gathered)}; "
            f"sent per step {_bytes(self.sent)}",
        ]
        if any(memory != DEVICE for row in self.rows for memory in row.memories):
            places = {"device": self.device, HOST: self.host, DISK: self.disk}
            lines += [
                f"between steps: {_by_name(places)}; at most in a step: {_by_name(self.peak)}, and activations",
                f"moved per step: host to device {_bytes(self.moved[HOST][0])}, device to host "
                f"{_bytes(self.moved[HOST][1])}; disk read {_bytes(self.moved[DISK][0])}, written "
                f"{_bytes(self.moved[DISK][1])}",
            ]
        return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    policy, whole = row.policy, " (full)" if row.held else ""
    assert policy.compute and policy.reduce
    notes = [word for word, said in (("remat", row.remat), ("compiled", row.compile)) if said and row.unit]
    return (
        row.path,
        "×".join(map(str, row.shape)) or "scalar",
        row.unit or "(root)",
        _kept(row.params) + whole,
        _kept(row.grads),
        _kept(row.moments),
        str(Plain(policy.compute)) + (" by 8-bit" if policy.gather else ""),
        "–" if row.frozen else str(Plain(policy.reduce)),
        row.lifetime if row.unit or row.lifetime != "one use" else "the step",
        ", ".join([row.optimizer, *notes]),
    )


def _kept(kept: Kept | None) -> str:
    """How one kind of state is stored, and the axes that it is cut over."""
    if kept is None:
        return "none"
    stored = str(Plain(kept.stored) if isinstance(kept.stored, torch.dtype) else kept.stored)
    return ", ".join(
        [stored, *(cut.axis for cut in kept.cuts), *([name_of(kept.memory)] if kept.memory != DEVICE else [])]
    )


def transfers(plan: Plan, bandwidth: Bandwidth) -> list[float]:
    """The seconds that a step's bytes take: to and from the host, from and to the disk."""
    out = []
    for memory in (HOST, DISK):
        for count, way in zip(plan.moved[memory], ("read", "write"), strict=True):
            speed: float | None = getattr(bandwidth, f"{memory}_{way}")
            if count and speed is None:
                raise ValueError(
                    f"Plan.seconds: got a bandwidth without {memory}_{way}, and {count} bytes go that way in a step. "
                    "Give it: fz.Bandwidth(..., disk_read=..., disk_write=...), or fz.measure_bandwidth(fz.Disk(path))."
                )
            out.append(count / speed if count and speed else 0.0)
    return out


def _by_name(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {_bytes(size)}" for name, size in sizes.items())


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def plan(step: Spec, params: object, world_size: int | None = None) -> Plan:
    """The state that `init` would make of these params, counted and not made: no process group, no memory.

    Args:
        step: any step.
        params: the pytree given to `init` (real, fake or meta tensors, or callables).
        world_size: ranks of the sharded axis; that of the process group by default, or 1.

    Raises:
        ValueError: a pattern that matches no leaf, a column set twice.

    Example:
        >>> step = fz.shard_zero3(fz.train_step(lambda p, x: (x @ p["w"]).sum(), fz.adamw(1e-3)))
        >>> fz.plan(step, {"w": torch.empty(64, 64, device="meta")}, world_size=4).params
        4096
    """
    need_step(step, "plan")
    if world_size is not None:
        need_int(world_size, "plan", "world_size", "a number of ranks or None", least=1)
    specs, _, structure = leaf_specs(params)
    if world_size is None:
        world_size = step.axis().size if step.sharding and backend.initialized() else 1
    frozen = frozen_leaves(structure)
    rows = step.rows(specs, frozen, hints_of(structure))
    size = world_size if step.sharding else 1
    layout = Layout.build(rows, size)
    sent, gathered = 0, collections.Counter[str]()
    for group in layout.groups.values():
        row, policy = group.row, group.row.policy
        assert policy.compute and policy.reduce
        share, full = group.numel * (size - 1) // size, group.numel * policy.compute.itemsize
        if row.params.cuts or row.fetched:
            gathered[group.unit] += full
        if not row.frozen:  # what is whole on every rank goes round twice
            sent += share * policy.wire.itemsize if row.cuts else 2 * share * policy.reduce.itemsize
        gathers = (2 if group.unit else 1) if row.params.cuts else int(row.held and not row.frozen)
        sent += gathers * (nbytes(Blocks(), share) if policy.gather else share * policy.compute.itemsize)
    empty = Sharded(layout, Axis(), structure, {}, kind="params")
    like = filled(empty, dict.fromkeys(layout.groups, torch.device("meta")))
    pieces = traffic.pieces_of(step, layout, like)
    by_kind = {kind: traffic.total(p for p in pieces if p.kind == kind) for kind in ("grads", "moments", "extra")}
    by_memory = {memory: traffic.total(p for p in pieces if p.memory == memory) for memory in traffic.MEMORIES}
    alone = [*(p for p in pieces if p.kind != "grads"), *traffic.grads_of(step, layout, several=False)]
    paths = [rows[index].path for index in sorted(frozen)]
    some = ", ".join(paths[:4]) + (", ..." if len(paths) > 4 else "")
    return Plan(
        rows=rows,
        header=(*step.header(), *([f"frozen, as their module has requires_grad=False: {some}"] if paths else [])),
        world_size=world_size,
        layout=layout,
        params=traffic.total(p for p in pieces if p.kind in ("params", "held")),
        **by_kind,
        gathered=max((n for unit, n in gathered.items() if unit), default=0),
        root=gathered[ROOT],
        sent=sent,
        **by_memory,
        moved=traffic.moved(alone),
        peak=traffic.peak(step, pieces, layout, like, gathered),
    )


def plot_plan(plans: Mapping[str, Plan], axes: Any = None) -> object:
    """Draws the bytes a parameter of each plan, over all ranks, stacked by kind of state.

    Grads are those that live at most at once, reduced; gathered params and activations are not counted.

    Args:
        plans: label -> what `fz.plan` returned.
        axes: of matplotlib, to draw into; new ones by default.

    Returns:
        The axes.

    Example:
        >>> step = fz.train_step(lambda p: p, fz.adamw(1e-3), fz.Policy.compact16())
        >>> plan = fz.plan(step, {"w": torch.empty(64, 64, device="meta")})
        >>> len(fz.plot_plan({"compact16": plan}).patches)
        3
    """
    if not isinstance(plans, Mapping) or not all(isinstance(plan, Plan) for plan in plans.values()):
        raise wrong("plot_plan", "plans", plans, "a dict of labels to what fz.plan returned")
    if not plans:
        raise ValueError("plot_plan: got no plans; give at least one, {'label': fz.plan(step, params)}.")
    if axes is not None and not hasattr(axes, "barh"):
        raise wrong("plot_plan", "axes", axes, "axes of matplotlib or None")
    if axes is None:
        from matplotlib.figure import Figure  # matplotlib is no dependency of fzero

        axes = Figure(figsize=(7, 0.8 + 0.4 * len(plans)), layout="constrained").add_subplot()
    left = [0.0] * len(plans)
    for kind in ("params", "moments", "grads"):
        sizes = [getattr(plan, kind) * plan.world_size / sum(row.numel for row in plan.rows) for plan in plans.values()]
        axes.barh(list(plans), sizes, left=left, label=kind)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    for place, size in enumerate(left):
        axes.text(size, place, f" {size:.1f}", va="center")
    axes.set_xlim(0, 1.12 * max(left))
    axes.invert_yaxis()
    axes.set_xlabel("bytes a parameter, over all ranks")
    axes.legend(loc="lower right")
    return axes
