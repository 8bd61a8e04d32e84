"""Tensor parallelism: leaves that are cut over a mesh axis (Megatron-LM, Shoeybi et al. 2019, arXiv 1909.08053)."""

from __future__ import annotations

from collections.abc import Mapping

from fzero.base.arguments import need_bool, need_str, wrong
from fzero.comm.backend import Mesh, need_axes
from fzero.table.slices import AUTO, STYLES, Cut, TensorAxis
from fzero.table.spec import S, need_step

Plan = Mapping[str, "str | int | Cut"]


def shard_tensor(step: S, plan: Plan | str, mesh: Mesh | None = None, axis: str = "tp", sequence: bool = False) -> S:
    """Tensor parallelism: cuts leaves along a dim over a mesh axis. The function gets this rank's slices of them.

    - A module of `fz.functional` needs no change. Linear layers, embeddings and convolutions exchange values by
      themselves, as their weight is cut: along an output dim (`"column"`) or an input dim (`"row"`).
    - What follows a `"column"` stays cut until a `"row"`. In between, code that mixes features or heads, or uses the
      size of a slice as a number, is refused. This is looked at in the first run with inputs of a structure, of shapes
      and dtypes, and in each run of a function that reads a tensor's value.
    - A pure function computes with the slices, and exchanges values by the maps of `fz.parallel`. Its outputs must be
      the same on all ranks of the axis. A scalar output that was computed from slices, without such a map behind, is
      refused.

    `fz.gather` gives whole leaves.

    Args:
        step: any step.
        plan: `{pattern: how}`, or `"auto"` for a Hugging Face model's own `tp_plan`. A pattern is fnmatch over dotted
            paths of leaves, or of the modules that have them. Leaves that no pattern matches stay whole. `how` is one
            of the following.

            - `"column"`, `"row"`: of a linear layer, an embedding or a convolution.
            - `"column_gather"`: a column whose output is gathered.
            - `"vocabulary"`: of an embedding, and of a head that is tied to it. The head's outputs are gathered.
            - `"whole"`: not cut.
            - a dim, as an int, or `fz.parallel.cut(...)`, which says more.

            Sizes need not divide: pieces are in the order of ranks, the first ones larger.
        mesh: a torch DeviceMesh. None takes the default process group, which is looked up when it is first needed.
        axis: the mesh axis.
        sequence: True: sequence parallelism for modules. Where nothing is cut, between a row or an embedding and the
            next column, each rank keeps a piece of the tokens (the dim before the last). Activations of norms, dropout
            and residuals there take one part by rank. Code that needs other tokens finds whole tensors. States are the
            same with and without it. `fz.compile` leaves units of such modules uncompiled.

    Returns:
        A new step.

    Raises:
        TypeError: a `plan` that is no dict.
        ValueError: the mesh has no such axis; the state is sharded over this axis too; a leaf is cut in two ways. From
            `init`: a pattern that matches nothing, a leaf without such a dim.

    Source:
        Megatron-LM, Shoeybi et al. 2019, arXiv 1909.08053. Sequence: Korthikanti et al. 2022, arXiv 2205.05198.

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
