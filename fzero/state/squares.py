"""Sums of squares of leaves, over all shards: what norms are made of; norms leaf by leaf, the metric "leaf_norms"."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from fzero.base import private, pytree
from fzero.base.arguments import as_float64
from fzero.base.follow import follows, root
from fzero.comm.axis import Axis
from fzero.comm.linear import summed, summed_pieces
from fzero.comm.pieces import gathered
from fzero.formats.formats import ALIGN
from fzero.state.items import trained_moments
from fzero.state.sharded import Sharded, is_sharded, trees_of
from fzero.table.layout import Key, Layout

SMALL = 1 << 14  # elements of a buffer, up to which the calls of torch cost more than what they do
ROW = 2048  # elements
ROWS = 64  # from which on a norm by rows is the quicker one


class LeafSquares:
    """The sums of squares of some leaves, in the order of their numbers: a float64 vector."""

    def __init__(self, leaves: Sequence[int], vector: torch.Tensor) -> None:
        if sorted(leaves) != list(leaves):
            order = sorted(range(len(leaves)), key=leaves.__getitem__)
            leaves, vector = [leaves[i] for i in order], vector[order]
        self.leaves, self.vector = leaves, vector

    @staticmethod
    def joined(parts: Sequence[LeafSquares]) -> LeafSquares:
        vector = torch.cat([own.vector for own in parts]) if parts else as_float64([])
        return LeafSquares([leaf for own in parts for leaf in own.leaves], vector)


def square(pieces: list[torch.Tensor]) -> torch.Tensor:
    """The sum of squares of each, in float64: [pieces]."""
    if private.transforms() or any([piece.requires_grad for piece in pieces]):
        wide = [piece.to(torch.float64).reshape(-1) for piece in pieces]
        return torch.stack([torch.dot(x, x) for x in wide])  # in one pass, and with derivatives of any order at zero
    return _norms_of(pieces).square()


def _norms_of(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norm of each, float64[pieces]; within 1e-8 of float64 throughout."""
    by_rows = {i: _norm_by_rows(x) for i, x in enumerate(pieces) if x.numel() >= ROWS * ROW and _is_on_host(x)}
    if not by_rows:
        return torch.stack(torch._foreach_norm([*pieces], 2, dtype=torch.float64))
    others = [piece for i, piece in enumerate(pieces) if i not in by_rows]
    norms = iter(torch._foreach_norm(others, 2, dtype=torch.float64) if others else ())
    return torch.stack([by_rows[i] if i in by_rows else next(norms) for i in range(len(pieces))])


def _is_on_host(piece: torch.Tensor) -> bool:
    plain = piece.is_contiguous() and not private.is_fake(piece) and piece.device.type == "cpu"
    return plain and piece.dtype in (torch.float32, torch.bfloat16)


def _norm_by_rows(piece: torch.Tensor) -> torch.Tensor:
    """The norm in float64 of norms of rows in float32: two to seven times as quick."""
    whole = piece.numel() // ROW * ROW
    rows, rest = piece.view(-1)[:whole].view(-1, ROW), piece.view(-1)[whole:].float()
    parts = [rows] if piece.dtype == torch.float32 else rows.split(ROWS)  # what is converted stays in cache
    by_row = [torch.linalg.vector_norm(part.float(), dim=1) for part in parts]
    norms = torch.cat([*by_row, torch.linalg.vector_norm(rest).view(1)])
    norm = torch.linalg.vector_norm(norms, dtype=torch.float64)
    in_range = 1e-12 < norm < 1e12  # squares of much less vanish in float32, of much more are infinite
    return norm if in_range else torch.linalg.vector_norm(piece, dtype=torch.float64)


def squares_of(tree: Sharded) -> LeafSquares:
    """The sums of squares of this rank's parts of leaves."""
    groups = tree.groups
    if tree.away and len(groups) > 1:  # never all of them on the device
        return LeafSquares.joined([squares_of(tree.only([key])) for key in groups])
    buffers = {key: tree.local(key) for key in groups}
    small = [] if private.transforms() else [key for key, buffer in buffers.items() if _is_small(buffer)]
    leaves = [slot.leaf for key in small for slot in tree.layout.groups[key].slots]
    squares = _squares_of_small(tree, small, [buffers.pop(key) for key in small]) if small else as_float64([])
    pieces: list[torch.Tensor] = []
    for key, buffer in buffers.items():
        leaves += [slot.leaf for slot in tree.layout.groups[key].slots]
        pieces += tree.layout.cut(key, tree.rank_of(key), buffer)
    if pieces:
        squares = torch.cat((squares.to(pieces[0].device), square(pieces))) if small else square(pieces)
    if tree.scale != 1.0:
        scale = tree.scale * tree.scale
        squares = squares / scale if 0.0 < scale < math.inf else squares / tree.scale / tree.scale
    return LeafSquares(leaves, squares)


def _is_small(buffer: torch.Tensor) -> bool:
    on_host = buffer.device.type == "cpu" and not private.is_fake(buffer)
    return on_host and buffer.numel() <= SMALL and buffer.is_floating_point() and not buffer.requires_grad


def _squares_of_small(tree: Sharded, keys: Sequence[Key], buffers: Sequence[torch.Tensor]) -> torch.Tensor:
    """The same for the leaves of several groups at once, by rows of `ALIGN` elements, where each leaf begins one."""
    ranks = tuple([tree.rank_of(key) for key in keys])
    places = tree.layout.places.get((*keys, ranks)) or _places(tree.layout, keys, ranks)
    tree.layout.places[(*keys, ranks)] = places
    leaf_of_row, gaps, count = torch.from_numpy(places[0]), torch.from_numpy(places[1]), places[2]
    values = torch.cat([*buffers]).index_fill_(0, gaps, 0.0)
    squares = torch.linalg.vector_norm(values.view(-1, ALIGN), dim=1, dtype=torch.float64).square_()
    return squares.new_zeros(count + 1).index_add_(0, leaf_of_row, squares)[:count]


def _places(layout: Layout, keys: Sequence[Key], ranks: Sequence[int]) -> tuple[np.ndarray, np.ndarray, int]:
    """In these groups' buffers, one after the other: the leaf of each row, the elements of none, how many leaves."""
    sizes = [layout.shard_numel(key) for key in keys]
    leaves, count, start = np.full(sum(sizes), -1), 0, 0
    for key, rank, size in zip(keys, ranks, sizes, strict=True):
        for _, begin, end in layout.pieces(key, rank):
            leaves[start + begin : start + end] = count
            count += 1
        start += size
    of_row = leaves[::ALIGN]
    return np.where(of_row < 0, count, of_row).astype(np.int32), np.flatnonzero(leaves < 0), count


def over_ranks(squares: LeafSquares, like: Sharded) -> torch.Tensor:
    """The squares of whole leaves, of this rank's parts, in leaf order, so that no cut changes the order: [leaves]."""
    leaves, total, rows = squares.leaves, squares.vector, like.layout.rows
    total = _joined(
        total,
        [place for place, leaf in enumerate(leaves) if rows[leaf].cuts],
        lambda parts: summed(like.axis, parts) if follows(parts) else like.axis.sum(parts, "global_norm"),
    )
    over = like.axis.tensor
    if over is not None and over.size > 1 and leaves:
        sliced = [place for place, leaf in enumerate(leaves) if rows[leaf].slices is not None]
        if follows(total):
            summed_up = summed_pieces(over, total) if sliced else total
        else:
            every = gathered(over, total.unsqueeze(0), 0, [1] * over.size, "global_norm")
            _need_alike(every, leaves, like)
            summed_up = functools.reduce(torch.add, every.unbind())  # in rank order
        total = _joined(total, sliced, lambda _: summed_up[sliced])
    return total


def _joined(
    vector: torch.Tensor, places: Sequence[int], change: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """A vector in which some places are what `change` makes of them."""
    if not places:
        return vector
    if len(places) == len(vector):
        return change(vector)
    every = dict(zip(places, change(vector[list(places)]).unbind(), strict=True))
    return torch.stack([every.get(place, x) for place, x in enumerate(vector.unbind())])


def need_alike_beside(squares: LeafSquares, params: Sharded) -> None:
    """Refuses grads that differ over an axis of the function's maps that the step says nothing of, if params do not.

    Args:
        squares: of `squares_of` every group of the grads.
        params: which they are of. Ranks that have others, as stages have, have grads of their own.
    """
    axis = params.axis
    known = {axis.tensor.members} if axis.tensor is not None else set[tuple[int, ...]]()
    for other in [each for members, each in axis.further.items() if members not in known]:
        apart = _apart(squares, axis, other)
        if not apart or any(private.is_wrapped(x) for x in params.locals().values()):
            continue
        if _apart(squares_of(params), axis, other):
            continue
        path = params.layout.rows[squares.leaves[apart[0]]].path
        raise ValueError(
            f"The grads of leaf {path!r} differ between the ranks of axis {other.name!r}, over which the function has "
            "maps, and all of these have the same params, which would drift apart; expected the same on all. Let the "
            "step take means over that axis (fz.shard_zero1, 2 or 3 with axis=(..., name)), or make leaves each rank's "
            "own in the function (fz.parallel.copy), so that their cotangents are summed."
        )


def _apart(squares: LeafSquares, shards: Axis, axis: Axis) -> list[int]:
    """The places of leaves whose squares, over all shards so that these agree, differ between the ranks of an axis."""
    own = squares.vector.detach()
    if private.is_wrapped(own) or private.is_fake(own):
        return []
    own = shards.sum(own, "global_norm")
    return _differing(gathered(axis, own.unsqueeze(0), 0, [1] * axis.size, "global_norm"))


def _differing(squares: torch.Tensor) -> list[int]:
    """The places of leaves of which ranks have other squares, [ranks, leaves]; not where they are no numbers."""
    low, high = squares.amin(0), squares.amax(0)
    return (high - low > 1e-6 * high + 1e-16 * squares.sum(1).amax()).nonzero().view(-1).tolist()


def _need_alike(squares: torch.Tensor, leaves: Sequence[int], like: Sharded) -> None:
    """Refuses leaves that are whole on every rank of the tensor axis, and of which ranks have other squares."""
    over = like.axis.tensor
    for place in _differing(squares):
        row = like.layout.rows[leaves[place]]
        if row.slices is None and over is not None:
            norms = ", ".join(f"{norm:.4g}" for norm in squares[:, place].sqrt().tolist())
            raise ValueError(
                f"The values (of grads, in a step) of leaf {row.path!r}, which all ranks of axis {over.name!r} have in "
                f"full, differ between them: their norms are {norms}; expected the same on all. What ranks compute "
                "apart must be put together again (fz.parallel.sum or gather), and what all have must be made each "
                "rank's own before it meets that (fz.parallel.copy; 'copied' in a plan of fz.shard_tensor). "
                "fz.parallel.check names the place."
            )


_TREES = ("params", "grads", "updates")  # the other names are those of moments
Metric = dict[str, object]
Norms = dict[str, torch.Tensor]  # path of a leaf -> 0-d float64
Named = tuple[str, LeafSquares]  # a tree's name, and the sums of squares of this rank's parts of its leaves


def norms_by_leaf(tree: Sharded) -> Norms:
    """Leaf path -> the norm of the leaf's decoded values over all shards."""
    return norms_of_squares([("", squares_of(tree))], tree)[""]


def moments_by_name(moments: object) -> dict[str, list[Sharded]]:
    """The trees among an optimizer's moments by their names, such as "mu" and "nu": those of all its parts.

    Where two of them have a leaf in common, as members of a chain may, a name begins with the member's.
    """
    names, leaves, _ = pytree.named_leaves(moments, is_leaf=is_sharded)
    out: dict[str, list[Sharded]] = {}
    for name, tree in zip(names, leaves, strict=True):
        if is_sharded(tree):
            short = name.rpartition(".")[2]
            met = {key for other in out.get(short, ()) for key in other.groups}
            out.setdefault(name if met & set(tree.groups) else short, []).append(tree)
    return out


def moment_squares(moments: object) -> list[Named]:
    return [(name, squares_of(tree)) for name, trees in moments_by_name(moments).items() for tree in trees]


def moment_norms(moments: object) -> dict[str, Norms]:
    """Name of a moment -> leaf path -> norm."""
    trees = trees_of(moments)
    return norms_of_squares(moment_squares(moments), trees[0]) if trees else {}


def norms_of_squares(trees: Sequence[Named], like: Sharded) -> dict[str, Norms]:
    """Name of a tree -> the norms of its leaves, of this rank's parts of them: one exchange for all.

    Args:
        trees: of the same leaves, in the same order, on all ranks.
    """
    out: dict[str, Norms] = {name: {} for name, _ in trees}
    names = sorted([(leaf, name) for name, own in trees for leaf in own.leaves], key=lambda pair: pair[0])
    if names:
        vector = torch.cat([own.vector.to(like.device) for _, own in trees])
        squares = LeafSquares([leaf for _, own in trees for leaf in own.leaves], vector)  # in the order of names
        for (leaf, name), norm in zip(names, root(over_ranks(squares, like)).unbind(), strict=True):
            out[name][like.layout.rows[leaf].path] = norm
    return out


def metric(old: Sharded, params: Sharded, moments: object, grads: LeafSquares | None) -> Metric:
    """The norms after an update; NaN for grads that nobody has come to know.

    Args:
        old: the params before it; the same ones where it was skipped.
        grads: squares of this rank's parts.
    """
    before, after = (tree.only(tree.layout.trainable) for tree in (old, params))
    if not after.groups:  # all is frozen
        return _ordered({name: {} for name in _TREES})
    parts = [("params", squares_of(after)), *moment_squares(trained_moments(moments))]
    if params is old:
        parts.append(("updates", LeafSquares(parts[0][1].leaves, torch.zeros_like(parts[0][1].vector))))
    for key in after.groups if params is not old else ():
        new = after.local(key)
        new = new.to(torch.promote_types(new.dtype, torch.float32))  # in which differences of close values are exact
        update = after.with_buffers({key: new - before.local(key).to(new.dtype)})
        parts.append(("updates", squares_of(update)))
    norms = norms_of_squares([("grads", grads), *parts] if grads is not None else parts, after)
    nothing = {path: torch.full_like(x, torch.nan) for path, x in norms["params"].items()}
    return _ordered({"grads": nothing, **norms})


def _ordered(norms: Mapping[str, Mapping[str, torch.Tensor]]) -> Metric:
    moments = {name: own for name, own in norms.items() if name not in _TREES}
    return {**{name: norms[name] for name in _TREES}, "moments": moments}
