"""fz.stream: full leaves, unit by unit, from the slices of all ranks; what fz.gather is made of."""

from __future__ import annotations

import itertools
import typing
from collections.abc import Callable, Generator, Iterator

import torch

from fzero.base import pages, private
from fzero.base.arguments import named, need_int, need_str, renamed, wrong
from fzero.base.follow import any_follows
from fzero.base.patterns import matches
from fzero.comm import backend
from fzero.comm.axis import Axis
from fzero.comm.linear import Wire
from fzero.comm.pieces import told
from fzero.formats.formats import CHUNK, chunks
from fzero.state.checks import constants
from fzero.state.sharded import Sharded, check_buffers, entries_of
from fzero.state.sliced import whole_of
from fzero.state.squares import over_ranks, squares_of
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
