"""Scalars that a function returns on ranks that have the same data and slices of the leaves: they must be the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fzero.base import private, pytree
from fzero.comm.axis import Axis
from fzero.comm.pieces import gathered
from fzero.table.placements import Notes


def scalars_in(outputs: object) -> list[torch.Tensor]:
    """The real floating 0-d tensors of some outputs, of no graph and of no transform."""
    leaves = [x for x in pytree.flatten(outputs)[0] if isinstance(x, torch.Tensor) and not x.ndim and pytree.is_real(x)]
    with private.below_transforms():  # a look at what a level wraps would be one from below it
        own = [private.unwrapped(x).detach() for x in leaves]
        return [pytree.as_reals(x) for x in own]


def need_invariant(outputs: object, known: Notes) -> None:
    """Refuses scalars that vary between the ranks of the tensor axis, and copies: derivatives would be added up.

    Args:
        outputs: of a module that is differentiated, where nothing is known of what is computed with them.
    """
    for x in pytree.flatten(outputs)[0]:
        mark = known.of(x)
        if mark is None or not private.is_differentiated(x) or (mark.source and x.ndim):
            continue
        raise ValueError(varies(x, mark.source, known.axis.name))


def varies(x: torch.Tensor, source: str, axis: str, at: str = "") -> str:
    """What is said of a result that varies between the ranks of a tensor axis.

    Args:
        source: the leaf of whose slices it is computed; "" of a copy.
        at: the place that it comes from, in words.
    """
    of = f"of {source!r}, of which each rank has its slice," if source else "of each rank's own copy"
    return (
        f"step: the function returned a tensor of shape {tuple(x.shape)} that was computed {of} and varies between "
        f"the ranks of axis {axis!r}, over which leaves are cut{at}; expected one that is the same on all. "
        "Its gradients would be those of the sum over ranks. Put it together by fz.parallel.sum or gather (for the "
        "module that gives slices, say 'column_gather' in the plan of fz.shard_tensor), or compute it of what is "
        "not a fz.parallel.copy. Where each rank's own slice is meant, return it with a dim, as x[None]. "
        "What torch.distributed puts together by itself is not seen: gather(x, ax, 0).amax(0) is a maximum."
    )


def _near(x: torch.Tensor) -> float:
    """How far apart the same computation may be on two ranks, relative: on a CPU of other addresses only."""
    if x.device.type == "cpu":
        return {8: 1e-10, 4: 1e-6}.get(x.element_size(), 1e-2)
    return 1e-5 if x.element_size() >= 4 else 1e-2


def need_alike(axis: Axis, scalars: Sequence[torch.Tensor], who: str, what: str = "a scalar") -> None:
    """Refuses scalars that differ between the ranks of the tensor axis: their gradients would be wrong there.

    Args:
        axis: of the state.
        scalars: equally many on all ranks; those of a map over examples have a dim of them.
        what: they are, in words.

    Raises:
        ValueError: on all ranks of the tensor axis.
    """
    over = axis.tensor
    if over is None or over.size == 1 or not scalars or any(map(private.is_fake, scalars)):
        return
    with private.below_transforms():
        own = torch.cat([x.reshape(-1).to(over.device, torch.float64) for x in scalars])
        every = gathered(over, own[None], 0, [1] * over.size, "scalars of a function").cpu()
    near, (low, high) = max(map(_near, scalars)), every.aminmax(dim=0)
    finite = every.isfinite()
    apart = (high - low > near * every.abs().amax(0)) | (finite.any(0) & ~finite.all(0))  # or no number anywhere
    for place in apart.nonzero().view(-1).tolist()[:1]:
        got = ", ".join(f"{x:.6g}" for x in every[:, place].tolist())
        raise ValueError(
            f"{who}: the function returned {what} that differs between the ranks of axis {over.name!r}, over which "
            f"leaves are cut: got {got}; expected the same on all. It is made of what each rank has its slice of (what "
            "a column gives: keys and values, attention weights, features that are pooled). Put the slices together "
            "first (fz.parallel.sum or gather; 'column_gather' in the plan of fz.shard_tensor); fz.parallel.check "
            "names the place. Where each rank's own is meant, return it with a dim, as x[None]."
        )
