"""ZeRO stages 1, 2 and 3 (Rajbhandari et al. 2020, arXiv 1910.02054)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fzero.base.arguments import wrong
from fzero.base.patterns import also
from fzero.comm.backend import Mesh, need_axes
from fzero.table.rows import Sharding
from fzero.table.spec import S, need_step

Axes = str | Sequence[str]


def shard_zero1(
    step: S, mesh: Mesh | None = None, axis: Axes = "dp", replicate: Axes | None = None, pattern: str = "*"
) -> S:
    """Shards the optimizer's moments over a mesh axis: ZeRO stage 1.

    - Every rank holds the full params in their compute dtype. If they are stored in another dtype, the stored ones
      (master params) are sharded.
    - Params are gathered once, after each update.
    - With `fz.accumulate`, each rank sums full gradients, which are reduced once, after the last microbatch.

    Take it if params and one full set of gradients fit on each rank.

    Args:
        step: any step.
        mesh: a torch DeviceMesh with the axes below. None takes the default process group, which is looked up when it
            is first needed: you can build and plan the step without one.
        axis: the mesh axis to shard over. A tuple, in the mesh's order, is taken as one axis: `("dp", "sp")` if ranks
            of `sp` have pieces of one sequence.
        replicate: a further mesh axis, or several, over which the shards are repeated: hybrid sharding, HSDP in FSDP2.
            Gradients are averaged over it too.
        pattern: fnmatch over dotted paths, alternatives separated by `|`: the leaves to shard so. Other leaves stay
            whole on every rank, and their gradients are means over the same ranks.

    Returns:
        A new step. Sizes of leaves need not divide by the number of ranks.

    Raises:
        TypeError: `mesh` is no DeviceMesh, or an axis is no name.
        ValueError: the mesh has no such axis; several axes, or `replicate`, without a mesh; a leaf that is sharded
            already, at another stage; other axes than those of other leaves of the step.

    Source:
        Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054, section 5.1.

    Example:
        >>> step = fz.shard_zero1(fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1)))
        >>> step.rows([("w", (4,), torch.float32)])[0].lifetime
        'the step'
    """
    return _shard(step, 1, mesh, axis, replicate, pattern)


def shard_zero2(
    step: S, mesh: Mesh | None = None, axis: Axes = "dp", replicate: Axes | None = None, pattern: str = "*"
) -> S:
    """Shards moments and gradients over a mesh axis: ZeRO stage 2.

    - Every rank holds the full params in their compute dtype. If they are stored in another dtype, the stored ones
      (master params) are sharded.
    - Params are gathered once, after each update.
    - With `fz.accumulate`, the gradients of each microbatch are reduced and cut at once. No rank keeps a full sum.

    Take it instead of stage 1 if you accumulate, and a full set of gradients does not fit.

    Args:
        step: any step.
        mesh: a torch DeviceMesh with the axes below. None takes the default process group, which is looked up when it
            is first needed: you can build and plan the step without one.
        axis: the mesh axis to shard over. A tuple, in the mesh's order, is taken as one axis: `("dp", "sp")` if ranks
            of `sp` have pieces of one sequence.
        replicate: a further mesh axis, or several, over which the shards are repeated: hybrid sharding, HSDP in FSDP2.
            Gradients are averaged over it too.
        pattern: fnmatch over dotted paths, alternatives separated by `|`: the leaves to shard so. Other leaves stay
            whole on every rank, and their gradients are means over the same ranks.

    Returns:
        A new step. Sizes of leaves need not divide by the number of ranks.

    Raises:
        TypeError: `mesh` is no DeviceMesh, or an axis is no name.
        ValueError: the mesh has no such axis; several axes, or `replicate`, without a mesh; a leaf that is sharded
            already, at another stage; other axes than those of other leaves of the step.

    Source:
        Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054, section 5.2.

    Example:
        >>> step = fz.shard_zero2(fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1)))
        >>> step.rows([("w", (4,), torch.float32)])[0].lifetime
        'the step'
    """
    return _shard(step, 2, mesh, axis, replicate, pattern)


def shard_zero3(
    step: S, mesh: Mesh | None = None, axis: Axes = "dp", replicate: Axes | None = None, pattern: str = "*"
) -> S:
    """Shards params, gradients and moments over a mesh axis: ZeRO stage 3, which FSDP calls full sharding.

    - Every rank stores its slice of each leaf. A unit's params are gathered for each use, in their compute dtype, and
      freed after it. The next unit's are gathered meanwhile.
    - What is in no unit is gathered once and kept for the whole step. Keep that small.
    - A rank needs memory for its slices, the root and two units. It sends more than at stages 1 and 2.

    Take it if the params themselves do not fit on each rank. See `fz.unit` for what a unit is.

    Args:
        step: any step.
        mesh: a torch DeviceMesh with the axes below. None takes the default process group, which is looked up when it
            is first needed: you can build and plan the step without one.
        axis: the mesh axis to shard over. A tuple, in the mesh's order, is taken as one axis: `("dp", "sp")` if ranks
            of `sp` have pieces of one sequence.
        replicate: a further mesh axis, or several, over which the shards are repeated: hybrid sharding, HSDP in FSDP2.
            Gradients are averaged over it too.
        pattern: fnmatch over dotted paths, alternatives separated by `|`: the leaves to shard so. Other leaves stay
            whole on every rank, and their gradients are means over the same ranks.

    Returns:
        A new step. Sizes of leaves need not divide by the number of ranks.

    Raises:
        TypeError: `mesh` is no DeviceMesh, or an axis is no name.
        ValueError: the mesh has no such axis; several axes, or `replicate`, without a mesh; a leaf that is sharded
            already, at another stage; other axes than those of other leaves of the step.

    Source:
        Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054, section 5.3.

    Example:
        >>> step = fz.shard_zero3(fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1)))
        >>> step.rows([("w", (4,), torch.float32)])[0].lifetime
        'one use'
    """
    return _shard(step, 3, mesh, axis, replicate, pattern)


def _shard(step: S, stage: int, mesh: Mesh | None, axis: Axes, replicate: Axes | None, pattern: str) -> S:
    """A step whose state is cut over `axis`, from this ZeRO stage on."""
    name = f"shard_zero{stage}"
    need_step(step, name, pattern)
    axes, copies = _need_axes(axis, name, "axis"), () if replicate is None else _need_axes(replicate, name, "replicate")
    if mesh is not None and not (hasattr(mesh, "mesh_dim_names") and hasattr(mesh, "get_group")):
        raise wrong(name, "mesh", mesh, "a DeviceMesh (torch.distributed.init_device_mesh makes one) or None")
    if mesh is None and (replicate is not None or len(axes) > 1):
        said = f"replicate={replicate!r}" if replicate is not None else f"axis={axis!r}"
        raise ValueError(f"{name}: got {said} without a mesh; expected a mesh that has these axes.")
    if mesh is not None:
        need_axes(mesh, axes, name)
        need_axes(mesh, copies, name, "replicate")
        if twice := [each for each in copies if each in axes]:
            raise ValueError(
                f"{name}: got replicate={replicate!r}, of which {twice[0]!r} is the axis too; expected another mesh "
                "axis."
            )
    own, other = Sharding(stage, mesh, axes, copies), step.sharding
    if other is not None and dataclasses.replace(other, stage=stage) != own:
        raise ValueError(
            f"{name}: this step is sharded over axis {', '.join(other.axes)!r} already, and got axis={axis!r}, "
            f"replicate={replicate!r} or another mesh; expected one for all of its leaves. Keep one."
        )
    given = f"axis={(axes[0] if len(axes) == 1 else axes)!r}"
    said = f"{name}({given}" + (f", replicate={replicate!r}" if replicate else "") + also(pattern) + ")"
    return step.with_rule("axis", own, said, pattern)


def _need_axes(axis: Axes, who: str, argument: str) -> tuple[str, ...]:
    """The names of one mesh axis or of several, none twice."""
    axes = (axis,) if isinstance(axis, str) else tuple(axis) if isinstance(axis, (tuple, list)) else ()
    if not axes or not all(isinstance(name, str) for name in axes):
        raise wrong(who, argument, axis, "the name of a mesh axis, or a tuple of names")
    if len(set(axes)) < len(axes):
        raise ValueError(f"{who}: got {argument}={axis!r}, expected every mesh axis once.")
    return axes
