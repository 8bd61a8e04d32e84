"""fz.gather, fz.stream and fz.global_norm: full leaves and their norm, from the slices of all ranks; unit by unit."""

from __future__ import annotations

import functools
import itertools
import typing
from collections.abc import Callable, Generator, Iterator, Sequence

import torch

from fzero.base import pages, private, pytree
from fzero.base.arguments import as_float64, named, need_int, need_str, renamed, wrong
from fzero.base.context import of_one_leaf
from fzero.base.follow import any_follows, root
from fzero.base.patterns import matches
from fzero.comm import backend
from fzero.comm.axis import Axis
from fzero.comm.linear import Wire
from fzero.comm.pieces import told
from fzero.formats.formats import CHUNK, chunks
from fzero.state.beyond import Distant, Measurable
from fzero.state.checks import constants, open_to_transforms
from fzero.state.sharded import Sharded, check_buffers, entries_of, is_sharded
from fzero.state.sliced import whole_of
from fzero.state.squares import LeafSquares, over_ranks, square, squares_of
from fzero.state.train_state import TrainState
from fzero.table.layout import Key, Slot

Leaves = Generator[tuple[str, typing.Any], None, None]  # None where they are another rank's
Leaf = tuple[Slot, torch.Tensor]  # a full leaf, often a view of its group's buffer


@renamed(dst="to")
def stream(tree: Sharded, dtype: torch.dtype | None = None, pattern: str = "*", to: int | None = None) -> Leaves:
    """Full leaves, unit by unit: to hand weights to an inference engine while training stands. All ranks iterate.

    While you use the leaves of one unit, those of the next are on their way. No rank holds more than these two units
    beside its state. A leaf is a view of its unit's memory: clone what you keep.

    Values are decoded, as those of `fz.gather`. A tied weight comes once, by its first name. If a rank leaves the loop
    early, its iterator takes part in what is left as it is closed, so that the others get all leaves. An iterator that
    you keep and do not finish needs its `close()` before the rank does anything else.

    Args:
        tree: `state.params`, or a tree like it, such as `state.extra["ema"]` or grads.
        dtype: of the leaves. Values are cast before they travel. None: the dtype of `fz.gather`.
        pattern: fnmatch over dotted paths, alternatives separated by `|`: only the leaves that match.
        to: the rank, as in `torch.distributed.get_rank()`, that gets the leaves. The others take part, and get None in
            their place. None: all ranks get them.

    Returns:
        An iterator of pairs: a leaf's dotted path, which is the name that `fz.save_safetensors` gives it, and the leaf.

    Raises:
        TypeError: `tree` is no sharded tree, autograd or a transform of `torch.func` follows it, or an argument is of a
            wrong kind.
        ValueError: the pattern matches no leaf, `to` is none of the ranks, or the ranks differ in their arguments.
            It is raised on every rank.
        RuntimeError: in the loop, on every rank, if a step has overwritten the state (`fz.donate`).

    Example:
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1))
        >>> state = step.init({"w": torch.ones(2), "b": torch.zeros(1)})
        >>> for path, leaf in fz.stream(state.params, dtype=torch.bfloat16):
        ...     print(path, leaf)
        b tensor([0.], dtype=torch.bfloat16)
        w tensor([1., 1.], dtype=torch.bfloat16)
    """
    who = "fz.stream"
    if not isinstance(tree, Sharded):
        raise wrong(who, "tree", tree, "state.params, or a tree like it, such as state.extra['ema']")
    (tree,) = constants(who, tree=tree)
    with private.of_normal_tensors(), private.below_transforms():
        check_buffers(who, "the tree", tree)
        forms = [f"{path}: {tree.format(tree.layout.key_of[path][0]).dtype}" for path in tree]
        followed = any_follows(entries_of(tree))
        said = [f"pattern={named(pattern)}", f"dtype={dtype}", f"to={named(to)}", f"component {tree.axis.who}", *forms]
        said += ["a tree that autograd follows"] * followed
        tree.axis.check_same("\n".join(said), "The arguments", f"Call {who} on every rank with the same ones.")
        # what is wrong now is wrong on every rank
        if followed:
            raise TypeError(
                f"{who}: got a tree that autograd follows, expected one that it does not: a streamed leaf has no "
                "derivative. Take fz.gather, which autograd goes on through, or stream inside torch.no_grad()."
            )
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise wrong(who, "dtype", dtype, "a floating dtype, such as torch.bfloat16, or None")
        need_str(pattern, who, "pattern", "a pattern over the paths of leaves")
        need_match(who, pattern, tree)
        kept = is_kept(who, to)
        need_receiver(who, tree.axis, to)
        need_whole_alike(tree)
    leaves = _in_step(leaves_of(tree, pattern, dtype), kept)
    next(leaves)  # from here on it takes part until the end, also where nobody takes a leaf
    return leaves


def _in_step(leaves: Iterator[Leaf], kept: bool) -> Leaves:
    """The leaves for whoever iterates; where that ends early, this rank goes on with the others to their end."""
    try:
        yield "", None
        while (found := _next(leaves)) is not None:
            yield found[0].path, found[1] if kept else None
    finally:
        while _next(leaves) is not None:
            pass


def _next(leaves: Iterator[Leaf]) -> Leaf | None:
    with private.of_normal_tensors(), private.below_transforms(), torch.no_grad():
        return next(leaves, None)


def leaves_of(tree: Sharded, pattern: str, dtype: torch.dtype | None = None) -> Iterator[Leaf]:
    """The full leaves whose paths match, group by group; all ranks take them in step, to the end.

    If autograd follows the buffers, it follows the leaves too, and they keep their dtype.

    Args:
        dtype: None for that of the values.
    """
    rows, groups = tree.layout.rows, tree.layout.groups
    wanted = {slot.leaf for key in tree.groups for slot in groups[key].slots if matches(pattern, slot.path)}
    keys = [key for key in tree.groups if any(slot.leaf in wanted for slot in groups[key].slots)]
    coming = _start(tree, keys[0], dtype) if keys else None
    for key, after in itertools.zip_longest(keys, keys[1:]):
        assert coming is not None
        views, coming = groups[key].views(coming()), None
        for slot in [slot for slot in groups[key].slots if slot.leaf in wanted]:
            yield slot, whole_of(rows[slot.leaf], tree.axis_of(key), views.pop(slot.leaf))
            if coming is None and after is not None:  # not before: the unit before may have been held until here
                coming = _start(tree, after, dtype)
        del views


def _start(tree: Sharded, key: Key, dtype: torch.dtype | None) -> Callable[[], torch.Tensor]:
    """Begins to bring a group's full buffer; what waits for it."""
    axis, tag, placed = tree.axis_of(key), f"gather of {key}", tree.placed(key)
    if any_follows(placed.parts):
        values = tree.local(key) if tree.scale == 1.0 else tree.local(key) / tree.scale
        return lambda: Wire(tag, axis, values.dtype, values.dtype, values.dtype).spread(values)
    dtype = dtype or placed.dtype
    full = pages.empty(placed.numel() * axis.size, dtype, placed.device, mapped=True)  # goes as its last leaf does
    own, plain = full.chunk(axis.size)[axis.rank], placed.format.plain and tree.scale == 1.0
    stored = placed.start([own] if plain and placed.dtype == dtype else ())()  # in its place, if it is read from afar
    if plain:
        own.copy_(stored.parts[0])
    else:
        for start, stop in chunks(own, CHUNK):
            values = stored.cut(start, stop).to(stored.dtype)
            wide = torch.promote_types(values.dtype, dtype)  # what the loss scale keeps from underflow is kept on
            own[start:stop].copy_(values if tree.scale == 1.0 else values.to(wide) / tree.scale)
    del stored
    wait = axis.start_gather(full, own, tag)

    def arrived() -> torch.Tensor:
        wait()
        _ = tree.entries  # raises where a step has overwritten the state meanwhile
        return full

    return arrived


def is_kept(who: str, to: object) -> bool:
    """Tells whether this rank gets leaves that go to a rank, or to all; refuses what is no rank."""
    if to is None:
        return True
    rank, world = need_int(to, who, "to", "a rank"), backend.size_of(backend.world())
    if rank not in range(world):
        raise ValueError(f"{who}: got to={rank}, expected one of the ranks of this run, 0 to {world - 1}.")
    return rank == (backend.global_rank() if backend.initialized() else 0)


def need_match(who: str, pattern: str, *trees: Sharded) -> None:
    """Refuses a pattern that matches no leaf."""
    if trees and not any(matches(pattern, path) for tree in trees for path in tree):
        paths = ", ".join(dict.fromkeys(path for tree in trees for path in tree))
        raise ValueError(f"{who}: got pattern={pattern!r}, expected one that matches some of the leaves {paths}.")


def need_receiver(who: str, axis: Axis, to: int | None) -> None:
    """Refuses a rank that no rank of this axis, of its tensor groups or replicas is: none would get the result."""
    if to is None or axis.group is None or axis.replicas:
        return
    over = axis.tensor
    there = [(to in axis.members,)] if over is None or over.size == 1 else told(axis, [to in over.members], f"{who} to")
    if not any(here for (here,) in there):
        raise ValueError(f"{who}: got to={to}, expected one of the ranks of {axis.place}.")


def need_whole_alike(tree: Sharded) -> None:
    """Refuses whole leaves that differ over the tensor axis, as gradients of a wrong function do."""
    over = tree.axis.tensor
    if over is None or over.size == 1:
        return
    own = [x for x in entries_of(tree) if isinstance(x, torch.Tensor)]
    if not any(x.requires_grad or private.is_wrapped(x) or private.is_fake(x) for x in own):
        over_ranks(squares_of(tree), tree)


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
    counted = any(isinstance(node, pytree.Count) for node in _nodes(tree, pytree.Count))  # an optimizer's moments
    if whole or tree is None or (bare and not counted):
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
        copied = lambda x: x.clone() if isinstance(x, torch.Tensor) else x
        out = pytree.map(lambda x: own(x) if is_sharded(x) else copied(x), tree, is_leaf=is_sharded)
    return out if kept else None


def _nodes(tree: object, *more: type) -> Sequence[object]:
    """The leaves of a pytree; whole are states, sharded trees and what is of further types."""
    return pytree.flatten(tree, is_leaf=lambda node: _is_node(node) or isinstance(node, more))[0]


def _is_node(node: object) -> bool:
    return is_sharded(node) or isinstance(node, TrainState)


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
    if path := of_one_leaf.get():
        raise ValueError(
            f"global_norm: got leaf {path!r} alone, by an optimizer on whole leaves; expected all leaves. Clip before "
            "it, fz.chain(fz.clip_by_global_norm(limit), optimizer), or take the keyword grad_norm of its update. For "
            "the norm of the leaf write g.norm()."
        )
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
