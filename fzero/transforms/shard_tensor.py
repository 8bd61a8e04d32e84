"""Tensor parallelism: leaves that are cut over a mesh axis (Megatron-LM, Shoeybi et al. 2019, arXiv 1909.08053)."""

from __future__ import annotations

from collections.abc import Mapping

from fzero.base.arguments import need_bool, need_str, wrong
from fzero.comm.axis import need_axes
from fzero.comm.backend import Mesh
from fzero.table.slices import AUTO, STYLES, Cut, TensorAxis
from fzero.table.spec import S, need_step

Plan = Mapping[str, "str | int | Cut"]


def shard_tensor(step: S, plan: Plan | str, mesh: Mesh | None = None, axis: str = "tp", sequence: bool = False) -> S:
    """Cuts leaves along a dim over a mesh axis; the function is given this rank's slices of them.

    A pure function computes with the slices and says itself where ranks exchange values, by the maps of `fz.parallel`:
    outputs and what is not cut are the same on all ranks of the axis. A module of `fz.functional` gets these maps by
    itself, from the dim that its weight is cut along: linear layers (an output dim is "column", an input dim "row"),
    embeddings and convolutions. What follows a column stays cut until a row, but for "column_gather"; what mixes
    features or heads in between, or uses a slice's size as a number, is refused. So is a scalar output that was
    computed of slices, or of a copy, with no map of `fz.parallel` behind that puts them together.

    Args:
        step: any step.
        plan: pattern (fnmatch over dotted paths of leaves, or of the modules that have them) -> "column", "row",
            "column_gather", "vocabulary" (of an embedding, and of a head that is tied to it, whose outputs are
            gathered), "whole", a dim, or `fz.parallel.cut(...)`, which says more. "auto" takes a Hugging Face model's
            own tp_plan, which travels with the params of `fz.functional`. Leaves that no pattern matches stay whole.
            Sizes need not be divisible: pieces are in rank order, the first ones larger.
        mesh: a torch DeviceMesh; None takes the default process group, looked up when first needed.
        axis: the mesh axis.
        sequence: modules keep a piece of the tokens on each rank where nothing is cut, between a row or an embedding
            and the next column, with norms, dropout, residuals and layers that are whole (Korthikanti et al. 2022,
            arXiv 2205.05198): activations there, and what is computed with them, fall to one part by rank. Tokens are
            the dim before the last. Code that needs other tokens finds whole tensors. It says nothing of functions
            without modules, nor of the state: steps with and without it go on with one another's. `fz.compile` leaves
            units of such modules as they are.

    Raises:
        ValueError: the mesh has no such axis, or the axis is one that the step's state is sharded over; a leaf is cut
            in two ways. By `init`: a pattern that matches nothing, a leaf without such a dim.

    Example:
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1))
        >>> step = fz.shard_tensor(step, {"w": 0})
        >>> step.rows([("w", (4, 2), torch.float32)])[0].slices.sizes(3)
        [2, 1, 1]
    """
    need_step(step, "shard_tensor")
    need_str(axis, "shard_tensor", "axis", "the name of a mesh axis")
    if mesh is not None:
        if not (hasattr(mesh, "mesh_dim_names") and hasattr(mesh, "get_group")):
            raise wrong("shard_tensor", "mesh", mesh, "a DeviceMesh (torch.distributed.init_device_mesh) or None")
        need_axes(mesh, (axis,), "shard_tensor")
    if plan == AUTO:
        plan = {"*": AUTO}
    if not isinstance(plan, Mapping) or not plan:
        raise wrong(
            "shard_tensor", "plan", plan, "'auto', or a dict of at least one pattern over paths -> a style or dim"
        )
    need_bool(sequence, "shard_tensor", "sequence")
    step = step.with_rule("tensor axis", TensorAxis(mesh, axis, sequence), f"shard_tensor(axis={axis!r})")
    for pattern, how in plan.items():
        need_str(pattern, "shard_tensor", "plan", "a pattern over leaf paths for each key")
        known = isinstance(how, str) and how in (*STYLES, AUTO)
        if not (known or isinstance(how, Cut) or (isinstance(how, int) and not isinstance(how, bool))):
            raise ValueError(
                f"shard_tensor: got plan[{pattern!r}]={how!r}, expected one of {', '.join(map(repr, STYLES))}, a dim, "
                "or fz.parallel.cut(...)."
            )
        cut = how if isinstance(how, Cut) else Cut(how)
        step = step.with_rule("tensor", cut, f"shard_tensor({{{pattern!r}: {cut}}})", pattern)
    return step
