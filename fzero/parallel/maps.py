"""Linear maps between the ranks of an axis, each with its transpose, tangents and vmap, of any order.

A value is *invariant* on an axis where it is the same on all of its ranks, and so is its cotangent; it is *varying*
where each rank has its own, and its own cotangent (of the sum over ranks of what they compute). Of these maps `copy`
(invariant to varying) and `sum` (varying to invariant) are transposes of one another, `split` and `gather` are, and
`all_to_all` and `ring_shift` are those of their inverses (Megatron-LM's f and g, arXiv 1909.08053).

On an axis that the running step takes means over every value is varying: each rank has its own loss. There the same
maps have the transposes of that: a sum is its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from fzero.base import private, pytree
from fzero.base.arguments import need_int, wrong
from fzero.base.context import in_function
from fzero.comm import pieces
from fzero.comm.axis import Axis
from fzero.comm.linear import linear
from fzero.comm.playing import playing
from fzero.engine.compiled import leave_out
from fzero.parallel.axis import is_averaged, need_axis, need_dim
from fzero.parallel.forms import Map, typed
from fzero.parallel.types import MOST_DIMS, running
from fzero.parallel.varying import unseen
from fzero.parallel.watched import GATHER_OWN, mapped, need_mappable, note_copy

Sizes = Sequence[int]


def copy(x: torch.Tensor, ax: Axis) -> torch.Tensor:
    """Marks a tensor that is the same on all ranks as each rank's own, before ranks use it differently.

    Nothing is sent, and the values stay. The pullback sums the cotangents over the ranks.

    Args:
        x: the same on all ranks.
        ax: an axis, from `fz.parallel.axis`.

    Example:
        >>> def rank_main(rank):
        ...     ax = fz.parallel.axis(None, "tp")
        ...     grad = torch.func.grad(lambda x: (rank + 1) * fz.parallel.copy(x, ax))(torch.tensor(1.0))
        ...     return grad.item()
        >>> fz.testing.run_ranks(rank_main, 2)
        [3.0, 3.0]
    """
    _need_tensor(x, "copy")
    need_axis(ax, "copy")
    # a tensor of its own, as derivatives would not see writes to one that shares its memory
    if is_averaged(ax):
        return x.clone()
    note_copy("copy", ax)
    return _map("copy", x, ax, torch.clone, functools.partial(_total, ax))


def shared(x: torch.Tensor, ax: Axis) -> torch.Tensor:
    """A copy that nobody writes to, and which shares the memory of x."""
    return x if is_averaged(ax) else _map("copy", x, ax, _same, functools.partial(_total, ax))


def sum(x: torch.Tensor, ax: Axis) -> torch.Tensor:
    """Sums a tensor over the ranks of an axis, in rank order. The result is the same on all ranks.

    16-bit floats are added in float32. The pullback sends nothing in a step, and two numbers outside of one, which tell
    whether the ranks' cotangents are the same. If each rank computes a loss of its own, write `copy(sum(x, ax), ax)`.

    Args:
        x: of the same shape on all ranks.
        ax: an axis, from `fz.parallel.axis`.

    Raises:
        ValueError: in the pullback outside of a step, cotangents differ. It is raised on every rank.

    Example:
        >>> fz.testing.run_ranks(
        ...     lambda rank: fz.parallel.sum(torch.tensor([1.0, rank]), fz.parallel.axis(None, "tp")).tolist(), 3
        ... )
        [[3.0, 3.0], [3.0, 3.0], [3.0, 3.0]]
    """
    _need_tensor(x, "sum")
    need_axis(ax, "sum")
    total = functools.partial(_total, ax)
    return _map("sum", x, ax, total, total if is_averaged(ax) else _held("sum", ax, _same))


def gather(x: torch.Tensor, ax: Axis, dim: int, sizes: Sizes | None = None, own: bool = False) -> torch.Tensor:
    """Concatenates the ranks' tensors along a dim, in rank order. The result is the same on all ranks.

    Args:
        x: this rank's piece. Dims other than `dim` have the same size on all ranks.
        ax: an axis, from `fz.parallel.axis`.
        dim: to concatenate along.
        sizes: of that dim on every rank, if you know them. Otherwise one more message finds them out.
        own: return it as each rank's own, as `copy(gather(x))` does, with half the messages in the pullback. Say so
            outside of a step if each rank computes a loss of its own with it, as with gathered negatives.

    Raises:
        ValueError: shapes do not fit; or, in the pullback outside of a step, cotangents differ. It is raised on every
            rank.

    Example:
        >>> def rank_main(rank):
        ...     return fz.parallel.gather(torch.full((rank + 1,), rank), fz.parallel.axis(None, "tp"), 0).tolist()
        >>> fz.testing.run_ranks(rank_main, 2)
        [[0, 1, 1], [0, 1, 1]]
    """
    dim = _need_dim(x, ax, dim, "gather")
    if own:
        note_copy("gather", ax)
    sizes, averaged = _own_sizes(x, ax, dim, sizes, "gather"), is_averaged(ax)
    there, cut, scattered = [functools.partial(each, ax, dim, sizes) for each in (_joined, _cut, _scattered)]
    back = scattered if own or averaged else _held("gather", ax, cut)
    name = GATHER_OWN if own and not averaged else "gather"  # which is each rank's own there anyway
    return _map(name, x, ax, there, back, (dim,), sizes)


def split(x: torch.Tensor, ax: Axis, dim: int, sizes: Sizes | None = None) -> torch.Tensor:
    """Takes this rank's piece, along a dim, of a tensor that is the same on all ranks.

    Nothing is sent. The pullback gathers the cotangents.

    Args:
        x: the same on all ranks.
        ax: an axis, from `fz.parallel.axis`.
        dim: to cut, in rank order.
        sizes: of the pieces. By default as equal as possible, and the first ones larger by one.

    Example:
        >>> fz.testing.run_ranks(
        ...     lambda rank: fz.parallel.split(torch.arange(5), fz.parallel.axis(None, "tp"), 0).tolist(), 2
        ... )
        [[0, 1, 2], [3, 4]]
    """
    dim = _need_dim(x, ax, dim, "split")
    sizes = _need_sizes(sizes, x, ax, dim, "split")
    back = _padded if is_averaged(ax) else _joined
    there, back = [functools.partial(each, ax, dim, sizes) for each in (_cut, back)]
    return _map("split", x, ax, there, back, (dim,), sizes)


def reduce_scatter(x: torch.Tensor, ax: Axis, dim: int, sizes: Sizes | None = None) -> torch.Tensor:
    """Sums a tensor over the ranks and keeps this rank's piece, as `split(sum(x))` with half the messages.

    Args:
        x: of the same shape on all ranks.
        ax: an axis, from `fz.parallel.axis`.
        dim: to cut, in rank order.
        sizes: of the pieces. By default as equal as possible, and the first ones larger by one.

    Example:
        >>> fz.testing.run_ranks(
        ...     lambda rank: fz.parallel.reduce_scatter(torch.ones(3), fz.parallel.axis(None, "tp"), 0).tolist(), 2
        ... )
        [[2.0, 2.0], [2.0]]
    """
    dim = _need_dim(x, ax, dim, "reduce_scatter")
    sizes = _need_sizes(sizes, x, ax, dim, "reduce_scatter")
    there, back = [functools.partial(each, ax, dim, sizes) for each in (_scattered, _joined)]
    return _map("reduce_scatter", x, ax, there, back, (dim,), sizes)


def all_to_all(
    x: torch.Tensor, ax: Axis, split: int, concat: int, sizes: Sizes | None = None, concat_sizes: Sizes | None = None
) -> torch.Tensor:
    """Cuts one dim into a piece for each rank, and concatenates the pieces from all ranks along another dim.

    Args:
        x: dim `split` has the same size on all ranks; dim `concat` may differ.
        ax: an axis, from `fz.parallel.axis`.
        split: the dim to cut, in rank order.
        concat: the dim to concatenate along, in rank order.
        sizes: of the pieces of `split`. By default as equal as possible, and the first ones larger by one.
        concat_sizes: of dim `concat` on every rank, if you know them. Otherwise one more message finds them out.

    Example:
        >>> def rank_main(rank):
        ...     x = torch.tensor([[10 * rank, 10 * rank + 1, 10 * rank + 2]])
        ...     return fz.parallel.all_to_all(x, fz.parallel.axis(None, "sp"), split=1, concat=0).tolist()
        >>> fz.testing.run_ranks(rank_main, 2)
        [[[0, 1], [10, 11]], [[2], [12]]]
    """
    cut = _need_dim(x, ax, split, "all_to_all", "split")
    join = _need_dim(x, ax, concat, "all_to_all", "concat")
    if cut == join:
        raise ValueError(f"parallel.all_to_all: got split and concat both {cut}, expected two dims.")
    joined = _own_sizes(x, ax, join, concat_sizes, "all_to_all")
    sizes = _need_sizes(sizes, x, ax, cut, "all_to_all")
    there = functools.partial(_exchanged, ax, cut, join, sizes, joined)
    return _map("all_to_all", x, ax, there, functools.partial(_exchanged, ax, join, cut, joined, sizes), (cut, join))


def ring_shift(x: torch.Tensor, ax: Axis, by: int = 1) -> torch.Tensor:
    """Passes each rank's tensor on to the rank `by` places later, round the ring.

    Args:
        x: of the same shape on all ranks.
        ax: an axis, from `fz.parallel.axis`.
        by: number of places.

    Returns:
        The tensor of the rank `by` places before this one.

    Example:
        >>> fz.testing.run_ranks(
        ...     lambda rank: fz.parallel.ring_shift(torch.tensor(rank), fz.parallel.axis(None, "sp")).item(), 3
        ... )
        [2, 0, 1]
    """
    _need_tensor(x, "ring_shift")
    need_axis(ax, "ring_shift")
    by = need_int(by, "parallel.ring_shift", "by")
    return _map("ring_shift", x, ax, functools.partial(_shifted, ax, by), functools.partial(_shifted, ax, -by))


def _map(
    name: str, x: torch.Tensor, ax: Axis, there: Map, back: Map, dims: Sequence[int] = (), sizes: Sizes | None = None
) -> torch.Tensor:
    """Applies a linear map, which every derivative goes through; `back` is its transpose.

    Args:
        dims: that it cuts or joins ranks' tensors along.
        sizes: of the pieces, where all are those of one tensor.
    """
    need_mappable(name, ax, x, dims)
    if (run := running.get()) is not None:
        there, back = typed(run, name, ax, there, back, dims, sizes)
    with unseen():
        out = linear(there, back, x) if pytree.is_real(x) or private.is_wrapper(x) else there(x)
    return mapped(name, ax, x, out, dims, sizes)


leave_out(__name__, "_map")


def _held(who: str, ax: Axis, back: Map) -> Map:
    """A transpose that takes the same cotangent on all ranks, which nothing has proven outside of a step."""
    outside = not in_function.get() and running.get() is None and playing.get() is None  # which says it by itself
    return functools.partial(_held_back, who, ax, back) if outside else back


def _held_back(who: str, ax: Axis, back: Map, x: torch.Tensor) -> torch.Tensor:
    if ax.size > 1 and not ax.fake and not private.is_fake(x):
        flat = (torch.view_as_real(x) if x.is_complex() else x).double().flatten()
        places = torch.arange(flat.numel(), dtype=flat.dtype, device=flat.device)
        own = torch.stack([torch.dot(flat, places.cos()), flat.abs().sum()]).cpu().view(torch.int64).tolist()
        told = torch.tensor(pieces.told(ax, own, f"parallel.{who} cotangents"), device="cpu").view(torch.float64)
        if (told[:, 0] - told[0, 0]).abs().max() > 1e-3 * told[:, 1].max():
            other = "gather(x, ax, dim, own=True)" if who == "gather" else "copy(fz.parallel.sum(x, ax), ax)"
            raise ValueError(
                f"parallel.{who}: outside of a step, ranks of axis {ax.name!r} gave its result different cotangents, "
                f"as if each had a loss of its own; expected the same on all. Write fz.parallel.{other}."
            )
    return back(x)


# ---- what is sent, on plain tensors, whose further dims at the end are mapped over


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _total(ax: Axis, x: torch.Tensor) -> torch.Tensor:
    return pieces.total(ax, x, "parallel.sum")


def _joined(ax: Axis, dim: int, sizes: Sizes, x: torch.Tensor, tag: str = "parallel.gather") -> torch.Tensor:
    return pieces.gathered(ax, x, dim, sizes, tag)


def _scattered(ax: Axis, dim: int, sizes: Sizes, x: torch.Tensor, tag: str = "parallel.reduce_scatter") -> torch.Tensor:
    return pieces.scattered(ax, x, dim, sizes, tag)


def _cut(ax: Axis, dim: int, sizes: Sizes, x: torch.Tensor) -> torch.Tensor:
    return x.narrow(dim, pieces.starts(sizes)[ax.rank], sizes[ax.rank]).clone(memory_format=torch.contiguous_format)


def _padded(ax: Axis, dim: int, sizes: Sizes, x: torch.Tensor) -> torch.Tensor:
    full = x.new_zeros((*x.shape[:dim], pieces.starts(sizes)[-1], *x.shape[dim + 1 :]))
    full.narrow(dim, pieces.starts(sizes)[ax.rank], sizes[ax.rank]).copy_(x)
    return full


def _exchanged(ax: Axis, cut: int, join: int, sizes: Sizes, joined: Sizes, x: torch.Tensor) -> torch.Tensor:
    shapes = []
    for size in joined:
        shape = list(x.shape)
        shape[cut], shape[join] = sizes[ax.rank], size
        shapes.append(shape)
    others = [size for dim, size in enumerate(x.shape) if dim not in (cut, join)]
    tag = f"parallel.all_to_all of {list(sizes)} along dim {cut} to {list(joined)} along dim {join} beside {others}"
    return torch.cat(pieces.exchange(ax, x.split(list(sizes), cut), shapes, tag), join)


def _shifted(ax: Axis, by: int, x: torch.Tensor) -> torch.Tensor:
    to, empty = (ax.rank + by) % ax.size, x.new_empty((0, *x.shape))
    source = (ax.rank - by) % ax.size
    send = [x if rank == to else empty for rank in range(ax.size)]
    shapes = [x.shape if rank == source else empty.shape for rank in range(ax.size)]
    return pieces.exchange(ax, send, shapes, f"parallel.ring_shift of {tuple(x.shape)} by {by}")[source]


# ---- arguments


def _need_tensor(x: object, who: str) -> None:
    if not isinstance(x, torch.Tensor):
        raise wrong(f"parallel.{who}", "x", x, "a tensor")


def _need_dim(x: torch.Tensor, ax: Axis, dim: int, who: str, argument: str = "dim") -> int:
    _need_tensor(x, who)
    need_axis(ax, who)
    return need_dim(dim, x.ndim, who, argument)


def _need_sizes(sizes: Sizes | None, x: torch.Tensor, ax: Axis, dim: int, who: str) -> list[int]:
    """The sizes of the pieces that a dim is cut into."""
    return pieces.balanced(x.shape[dim], ax.size) if sizes is None else _given(sizes, x, ax, dim, who, "that add up to")


def _given(sizes: Sizes, x: torch.Tensor, ax: Axis, dim: int, who: str, what: str = "this rank's") -> list[int]:
    """Sizes for all ranks, of which this rank's is that of a dim, or all together are."""
    out = [need_int(size, f"parallel.{who}", "sizes", "sizes of pieces", least=0) for size in sizes]
    if len(out) != ax.size or x.shape[dim] != (out[ax.rank] if what == "this rank's" else pieces.starts(out)[-1]):
        raise ValueError(
            f"parallel.{who}: got sizes={out}, expected {ax.size} of them, one for each rank of axis {ax.name!r}, "
            f"{what} {x.shape[dim]}, the size of dim {dim} of a tensor of shape {tuple(x.shape)}."
        )
    return out


def _own_sizes(x: torch.Tensor, ax: Axis, dim: int, sizes: Sizes | None, who: str) -> list[int]:
    """The sizes of a dim on all ranks: those that are given, or those that the ranks tell each other."""
    if sizes is not None:
        return _given(sizes, x, ax, dim, who)
    if (run := running.get()) is not None:
        return run.sizes(ax, x.shape[dim])
    shapes = pieces.told(ax, [x.ndim, *(list(x.shape) + [0] * MOST_DIMS)[:MOST_DIMS]], f"parallel.{who} sizes")
    first = _without(shapes[0], dim)
    for rank, shape in enumerate(shapes):
        if _without(shape, dim) != first:
            got = [tuple(shape[1 : 1 + shape[0]]) for shape in shapes]
            raise ValueError(
                f"parallel.{who}: got tensors of shapes {got} from the ranks of axis {ax.name!r}, expected shapes that "
                f"differ in dim {dim} only (rank {rank} differs from rank 0)."
            )
    return [shape[1 + dim] for shape in shapes]


def _without(shape: Sizes, dim: int) -> list[int]:
    return [size for place, size in enumerate(shape) if place != dim + 1]
