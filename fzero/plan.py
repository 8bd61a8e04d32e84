"""fz.plan: the rows of the table with bytes and traffic per rank, before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fzero.base import pytree
from fzero.base.arguments import need_int
from fzero.comm import backend
from fzero.comm.axis import Axis
from fzero.formats.formats import Blocks, Companded, Plain, nbytes, zeros
from fzero.state.init import leaf_specs
from fzero.state.moments import init_extras, init_moments
from fzero.state.sharded import Sharded, is_sharded, part_names
from fzero.table.layout import Layout
from fzero.table.module_params import frozen_leaves
from fzero.table.needs import need_step
from fzero.table.rows import Kept, Row
from fzero.table.spec import Spec, header


@dataclass(frozen=True)
class Plan:
    """The resolved table; `print` it. All numbers are bytes per rank, alignment included.

    Attributes:
        rows: one per leaf.
        params, grads, moments, extra: state between updates (grads: as many as live at once, reduced).
        gathered: the largest unit's full params, and `root`, those of the leaves outside any unit (ZeRO-3).
        sent: per step without accumulation, by the params' gathers and the gradients' reduction.
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

    def __str__(self) -> str:
        head = ("leaf", "shape", "unit", "params", "grads", "moments", "compute", "reduce", "gathered for", "optimizer")
        body = [_cells(row) for row in self.rows]
        widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in [head, *body]
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
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
        return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    policy, frozen, whole = row.policy, row.frozen, " (full)" if row.held else ""
    notes = [word for word, said in (("remat", row.remat), ("compiled", row.compile)) if said and row.unit]
    return (
        row.path,
        "×".join(map(str, row.shape)) or "scalar",
        row.unit or "(root)",
        _kept(row.params) + whole,
        _kept(row.grads),
        _kept(row.moments),
        _short(policy.compute) + (" by 8-bit" if policy.gather else ""),
        "–" if frozen else _short(policy.reduce),
        row.lifetime if row.unit or row.lifetime != "one use" else "the step",
        ", ".join([row.optimizer, *notes]),
    )


def _kept(kept: Kept | None) -> str:
    """How one kind of state is stored, and the axes that it is cut over."""
    if kept is None:
        return "none"
    stored = _short(kept.stored) if isinstance(kept.stored, torch.dtype) else str(kept.stored)
    return ", ".join([stored, *(cut.axis for cut in kept.cuts), *([kept.memory] if kept.memory != "device" else [])])


def _short(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def plan(step: Spec, params: Any, world_size: int | None = None) -> Plan:
    """What `init` would make of these params, without making it: no process group, no memory.

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
        need_int(world_size, "plan", "world_size", "a number of ranks or None")
    specs, _, structure = leaf_specs(params)
    if world_size is None:
        world_size = step.axis().size if step.sharding and backend.initialized() else 1
    if world_size < 1:
        raise ValueError(f"plan: got world_size={world_size}, expected at least 1.")
    frozen = frozen_leaves(structure)
    rows = step.rows(specs, frozen)
    size = world_size if step.sharding else 1
    layout = Layout.build(rows, size)
    totals = dict.fromkeys(("params", "sent"), 0)
    gathered: dict[str, int] = {}
    for key, group in layout.groups.items():
        row, policy, shard = group.row, group.row.policy, layout.shard_numel(key)
        assert policy.compute and policy.reduce
        share = group.numel * (size - 1) // size
        if row.held:
            totals["params"] += group.numel * policy.compute.itemsize
        if not (row.held and policy.computes_as_stored):
            totals["params"] += nbytes(policy.param_format, shard)
        if row.params.cuts:
            gathered[group.unit] = gathered.get(group.unit, 0) + group.numel * policy.compute.itemsize
        if not row.frozen:  # what is whole on every rank goes round twice
            totals["sent"] += share * policy.wire.itemsize if row.cuts else 2 * share * policy.reduce.itemsize
        gathers = (2 if group.unit else 1) if row.params.cuts else int(row.held and not row.frozen)
        totals["sent"] += gathers * (nbytes(Blocks(), share) if policy.gather else share * policy.compute.itemsize)
    like = _without_memory(layout, structure)
    return Plan(
        rows=rows,
        header=(*header(step), *_frozen_by_module(rows, frozen)),
        world_size=world_size,
        layout=layout,
        params=totals["params"],
        grads=_living_grads(step, layout),
        moments=_bytes_of(init_moments(step, like)),
        extra=_bytes_of(init_extras(step, like)),
        gathered=max((n for unit, n in gathered.items() if unit), default=0),
        root=gathered.get("", 0),
        sent=totals["sent"],
    )


def _living_grads(step: Spec, layout: Layout) -> int:
    """All of them; of a fused update the largest unit's, where they are not held until their norm is known."""
    mode, units = step.fusion.mode(step.optimizer, step.scales) if step.fusion else "held", dict[str, int]()
    sums = step.microbatches.count > 1  # which are kept in the dtype of sums
    for key in layout.trainable:
        policy = layout.groups[key].row.policy
        grad = policy.reduce if sums else policy.grad
        assert grad
        held = Companded(signed=True) if mode == "8-bit" else Plain(grad)
        unit = layout.groups[key].unit
        units[unit] = units.get(unit, 0) + nbytes(held, layout.shard_numel(key))
    return sum(units.values()) if mode in ("held", "8-bit") else max(units.values(), default=0)


def _without_memory(layout: Layout, structure: Any) -> Sharded:
    """Params of which an optimizer or a transform may be asked for its state."""
    buffers: dict[Any, torch.Tensor] = {}
    for key, group in layout.groups.items():
        form = group.row.policy.param_format
        buffers.update(zip(part_names(form, key), zeros(form, layout.shard_numel(key), "meta"), strict=True))
    return Sharded(layout, Axis(), structure, buffers, kind="params")


def _bytes_of(state: Any) -> int:
    trees = [node for node in pytree.flatten(state, is_leaf=is_sharded)[0] if is_sharded(node)]
    return sum(buffer.numel() * buffer.itemsize for tree in trees for buffer in tree.buffers.values())


def _frozen_by_module(rows: Sequence[Row], frozen: Iterable[int]) -> tuple[str, ...]:
    paths = [rows[index].path for index in sorted(frozen)]
    more = ", ..." if len(paths) > 4 else ""
    return (f"frozen, as their module has requires_grad=False: {', '.join(paths[:4])}{more}",) if paths else ()
