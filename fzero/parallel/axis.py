"""fz.parallel.axis: one mesh axis, or several as one, over which a function's own maps go."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fzero.base.arguments import need_int, wrong
from fzero.base.context import averaged, beside, exchanges, one_by_one
from fzero.comm import backend
from fzero.comm.axis import Axis
from fzero.comm.backend import Mesh


def axis(mesh: Mesh | None, name: str | Sequence[str]) -> Axis:
    """Makes an axis of a mesh, which the maps of `fz.parallel` communicate over.

    All ranks of the mesh make the same axes in the same order.

    Args:
        mesh: a torch DeviceMesh; None takes the default process group.
        name: name of a mesh axis. Several names are used as one axis, the first of them the slowest.

    Returns:
        The axis. `ax.size` is its number of ranks, and `ax.rank` is this rank's number on it.

    Raises:
        RuntimeError: there is no process group. Call `torch.distributed.init_process_group()` first.
        ValueError: the mesh has no such axis.

    Example:
        >>> def rank_main(rank):
        ...     ax = fz.parallel.axis(None, "tp")
        ...     return fz.parallel.sum(torch.tensor(float(rank)), ax).item()
        >>> fz.testing.run_ranks(rank_main, 3)
        [3.0, 3.0, 3.0]
    """
    names = (name,) if isinstance(name, str) else tuple(name) if isinstance(name, (tuple, list)) else ()
    if not names or not all(isinstance(each, str) for each in names):
        raise wrong("parallel.axis", "name", name, "the name of a mesh axis, or a tuple of names")
    if mesh is not None and not hasattr(mesh, "mesh_dim_names"):
        raise wrong(
            "parallel.axis", "mesh", mesh, "a DeviceMesh (torch.distributed.init_device_mesh makes one) or None"
        )
    if not backend.initialized():
        raise RuntimeError(
            f"parallel.axis: there is no process group whose ranks axis {', '.join(names)!r} could go over. Start one "
            "with torch.distributed.init_process_group('gloo') under torchrun, or run on ranks with "
            "fz.testing.run_ranks."
        )
    return Axis.of(mesh, names, None, "parallel.axis")


def need_axis(ax: object, who: str) -> Axis:
    if not isinstance(ax, Axis):
        raise wrong(f"parallel.{who}", "ax", ax, "an axis that fz.parallel.axis(mesh, name) made")
    if any(len(_common(each.members, ax)) > 1 for each in one_by_one.get()):
        raise ValueError(
            f"parallel.{who}: fz.per_example_grads takes examples one by one, and the function exchanges values over "
            f"axis {ax.name!r} of ranks {list(ax.members)}, which have other examples. Give a function of whole "
            "sequences by fz.with_fn: if a sequence is cut over an axis, or a mean goes over it, one example has no "
            "gradient of its own."
        )
    noted = beside.get()
    if noted is not None and ax.size > 1 and all(len(_common(each.members, ax)) < 2 for each in averaged.get()):
        noted(ax.members, ax)
    exchanged = exchanges.get()
    if exchanged is not None and any(len(_common(each.members, ax)) > 1 for each in averaged.get()):
        exchanged()
    return ax


def need_dim(dim: object, ndim: int, who: str, argument: str = "dim") -> int:
    """A dim of a tensor, counted from the front."""
    number = need_int(dim, f"parallel.{who}", argument, "a dim of the tensor")
    if not -ndim <= number < ndim:
        raise ValueError(
            f"parallel.{who}: got {argument}={number} of a tensor with {ndim} dims, expected one from {-ndim} to "
            f"{ndim - 1}."
        )
    return number % ndim


def is_averaged(ax: Axis) -> bool:
    """Tells whether the running step takes means over all ranks of an axis, each of which then has its own values."""
    own = [each.members for each in averaged.get()]
    spanned = math.prod(map(len, own)) == len(ax.members) and all({*ax.members}.issuperset(each) for each in own)
    if len(own) > 1 and spanned:
        return True
    for members in own:
        common = _common(members, ax)
        if len(common) > 1:
            if len(common) < len(ax.members):
                raise ValueError(
                    f"parallel: axis {ax.name!r} goes over ranks {list(ax.members)}, and the running step takes "
                    f"means over only some of them, {list(members)}; expected all of them or none. Take the axes of "
                    "the mesh one by one."
                )
            return True
    return False


def _common(members: Sequence[int], ax: Axis) -> set[int]:
    return set(members).intersection(ax.members)
