"""fz.gather and fz.global_norm: full tensors and their norm, from the slices of all ranks."""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterator, Sequence

import torch

from fzero.base import pytree
from fzero.base.arguments import as_float64, named, need_str, renamed
from fzero.base.follow import root
from fzero.base.norms import need_all_leaves
from fzero.base.patterns import matches
from fzero.state.beyond import Distant, Measurable
from fzero.state.checks import open_to_transforms
from fzero.state.sharded import Sharded, check_buffers, is_sharded
from fzero.state.squares import LeafSquares, over_ranks, square, squares_of
from fzero.state.stream import is_kept, leaves_of, need_match, need_receiver, need_whole_alike
from fzero.state.train_state import TrainState


@typing.overload
def gather(tree: Sharded, pattern: str, to: None = None) -> dict[str, torch.Tensor]: ...


@typing.overload
def gather(tree: object, pattern: str | None = None, to: int | None = None) -> typing.Any: ...


@renamed(dst="to")
def gather(tree: object, pattern: str | None = None, to: int | None = None) -> object:
    """Full tensors from the slices of all ranks: what `full_tensor()` is to DTensor. All ranks call it.

    Values are decoded, and grads are without their loss scale. `fz.scatter` is the way back.

    If autograd follows the buffers, as with `create_graph=True`, it follows the full tensors too. Then what ranks
    compute from them counts as a mean over ranks, like a loss.

    Args:
        tree: `state.params`, grads, `state.moments`, an entry of `state.extra`, or any pytree that holds such trees.
            Other tensors in it are copied.
        pattern: fnmatch over dotted paths, alternatives separated by `|`: gathers only the leaves that match.
        to: the rank, as in `torch.distributed.get_rank()`, that gets the result. The others take part, and get None.
            None: all ranks get it. `dst`, torch's name, works too.

    Returns:
        New tensors of each leaf's full shape, in the structure that `init` was given, or as `{path: full leaf}` with
        a pattern. In grads and moments, None stands for a frozen leaf.

    Raises:
        TypeError: there is nothing sharded in `tree`; it is a whole state (gather its fields); or `to` is given under a
            transform of `torch.func`.
        ValueError: the pattern matches no leaf, or `to` is none of the ranks.

    Example:
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1))
        >>> state = step.init({"w": torch.ones(3), "b": torch.zeros(1)})
        >>> fz.gather(state.params)
        {'w': tensor([1., 1., 1.]), 'b': tensor([0.])}
        >>> fz.gather(state.params, "w")
        {'w': tensor([1., 1., 1.])}
    """
    need_str(pattern, "gather", "pattern", "a pattern over the paths of leaves, or None", or_none=True)
    kept = is_kept("gather", to)
    nodes = _nodes(tree)
    if any(isinstance(node, Distant) for node in nodes):
        if to is not None:
            raise ValueError("gather: got to= and what lies on the ranks of another component. Leave it out.")
        each = [n.gathered(pattern) if isinstance(n, Distant) else n and gather(n, pattern) for n in nodes]
        return pytree.unflatten(pytree.flatten(tree, _is_node)[1], each)
    whole = any(isinstance(node, TrainState) for node in nodes)
    bare = any(n is not None for n in nodes) and not any(is_sharded(node) for node in nodes)
    # slices have forgotten what they are slices of
    if whole or tree is None or (bare and not _is_counted(tree)):
        raise TypeError(
            f"gather: got tree={named(tree)}, {'which holds a whole state' if whole else 'in which no tree is sharded'}"
            "; expected state.params, grads, state.moments, or a pytree that holds such trees."
        )
    trees = [node for node in nodes if is_sharded(node)]
    if pattern is not None:
        need_match("gather", pattern, *trees)
    with open_to_transforms("fz.gather", tree=tree) as (follows, tree):
        if follows and to is not None:
            raise TypeError("gather: got to= under a transform of torch.func, expected that all ranks gather: no to=")
        own = functools.partial(_gather_one, pattern, to, kept)
        out = pytree.map(lambda x: own(x) if is_sharded(x) else _copied(x), tree, is_leaf=is_sharded)
    return out if kept else None


def _nodes(tree: object, *more: type) -> Sequence[object]:
    """The leaves of a pytree; whole are states, sharded trees and what is of further types."""
    return pytree.flatten(tree, is_leaf=lambda node: _is_node(node) or isinstance(node, more))[0]


def _is_node(node: object) -> bool:
    return is_sharded(node) or isinstance(node, TrainState)


def _is_counted(tree: object) -> bool:
    """Tells whether a tree is an optimizer's moments, which count updates: of factors alone no rank has slices."""
    return any(isinstance(node, pytree.Count) for node in _nodes(tree, pytree.Count))


def _copied(x: object) -> object:
    return x.clone() if isinstance(x, torch.Tensor) else x


def _gather_one(pattern: str | None, to: int | None, kept: bool, tree: Sharded) -> object:
    """The full leaves of a tree, group by group; on a rank that is not asked for them none."""
    check_buffers("gather", "the tree", tree)
    rows, groups = tree.layout.rows, tree.layout.groups
    keys = [key for key in tree.groups if any(matches(pattern or "*", slot.path) for slot in groups[key].slots)]
    need_whole_alike(tree if pattern is None else tree.only(keys))
    need_receiver("gather", tree.axis, to)
    leaves = {slot.leaf: leaf.clone() for slot, leaf in leaves_of(tree, pattern or "*") if kept}
    if pattern is not None:
        return {rows[index].path: leaves[index] for index in sorted(leaves)}
    return pytree.unflatten(tree.structure, [leaves.get(index) for index in range(len(rows))])


def global_norm(*trees: object) -> torch.Tensor:
    """The Euclidean norm over all leaves and shards of several trees: to clip several components by one norm.

    All ranks call it: for grads of a pipeline, the ranks of all places. Give the result to `step.update(state, grads,
    grad_norm=...)`.

    Args:
        *trees: grads of one or more components or pipelines, without their loss scale, or pytrees of full tensors.

    Returns:
        A 0-d float64 tensor, the same on all ranks.

    Example:
        >>> fz.global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
        tensor(5., dtype=torch.float64)
    """
    need_all_leaves()
    # leaf by leaf, so that several components have the norm of one that has all of their leaves
    return root(sum_by_leaf([square for squares in measured(trees) for square in squares.unbind()]))


def measured(trees: Sequence[object]) -> Iterator[torch.Tensor]:
    """The sums of squares of each tree in some pytrees, leaf by leaf, float64: [leaves]."""
    for place, tree in enumerate(trees):
        for node in _nodes(tree, Measurable):
            if isinstance(node, Measurable):
                yield torch.stack([*node.squares_by_leaf()])
            elif is_sharded(node):
                yield squares_by_leaf(node, f"trees[{place}]")
            elif isinstance(node, torch.Tensor) and node.is_floating_point():
                yield square([node])
            elif node is not None or tree is None:
                raise TypeError(
                    f"global_norm: got {named(node)} in trees[{place}], expected grads of a step, or a pytree of full "
                    "floating tensors (of a complex one torch.view_as_real)."
                )


def squares_by_leaf(grads: Sharded, argument: str = "grads") -> torch.Tensor:
    """The sum of squares over all shards of each leaf that has any, in leaf order, float64: [leaves]."""
    with open_to_transforms("fz.global_norm", **{argument: grads}) as (_, own):
        check_buffers("global_norm", argument, own)
        return over_ranks(squares_of(own), own)


def sum_by_leaf(squares: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of 0-d tensors, in their order, a 0-d float64 tensor."""
    if len({square.device for square in squares}) > 1:  # of components on several devices
        squares = [square.cpu() for square in squares]
    return torch.stack(list(squares)).sum() if squares else as_float64(0.0)


def squares_in(grads: Sharded, argument: str = "grads") -> tuple[torch.Tensor, LeafSquares]:
    """The sum of squares over all leaves and shards, a 0-d float64 tensor, and `squares_of` them."""
    with open_to_transforms("fz.global_norm", **{argument: grads}) as (_, own):
        squares = squares_of(own)
        return over_ranks(squares, own).sum(), squares
