"""The state of one leaf of an optimizer on whole leaves: its entries, of which some lie in slices."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Sequence

import torch

from fzero.base import private, pytree
from fzero.base.arguments import named
from fzero.base.context import during, of_one_leaf, variable
from fzero.comm.axis import Axis
from fzero.comm.pieces import gathered
from fzero.state.checks import checksum
from fzero.state.items import NUMBERS


class Place:
    """In a leaf's state the place of a tensor of the leaf's shape, which lies in slices in the tree of that number.

    Attributes:
        dtype: what its optimizer keeps it in. The tree has it in that of the leaf's moments.
    """

    def __init__(self, number: int, dtype: torch.dtype) -> None:
        self.number, self.dtype = number, dtype

    def __repr__(self) -> str:
        return f"Place({self.number}, {self.dtype})"


pytree.register(Place, lambda node: ((), (node.number, node.dtype)), lambda own, _: Place(*own))


def exchanged(axis: Axis, states: Sequence[tuple[int, list[torch.Tensor]]]) -> list[list[torch.Tensor]]:
    """Tensors that each one rank has, on every rank: all have others of the same shapes and dtypes."""
    of_rank = lambda r: [x for rank, own in states if rank == r for x in own]
    sizes = [[x.nbytes for x in of_rank(rank)] for rank in range(axis.size)]
    if not any(map(any, sizes)):
        return [own for _, own in states]
    device = next(x.device for _, own in states for x in own)
    mine = [x.contiguous().reshape(-1).view(torch.uint8) for x in of_rank(axis.rank)]
    flat, totals = torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *mine]), list(map(sum, sizes))
    every = gathered(axis, flat, 0, totals, "states of leaves").split(totals)
    parts = [iter(x.split(own)) for x, own in zip(every, sizes, strict=True)]
    # copied to where they are aligned for their dtypes
    return [[next(parts[rank]).clone().view(x.dtype).view(x.shape) for x in own] for rank, own in states]


def _is_entry(node: object) -> bool:
    return isinstance(node, (Place, pytree.Count))


def flat(state: object) -> tuple[list[object], pytree.Spec]:
    return pytree.flatten(state, is_leaf=_is_entry)


def like_leaf(entries: Sequence[object], leaf: torch.Tensor) -> list[int]:
    """Which entries of a leaf's state are floating tensors of its shape."""
    found = [(i, x) for i, x in enumerate(entries) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return [i for i, x in found if x.shape == leaf.shape]


_NUMBERS = (bool, int, float, pytree.Count)


def form(entry: object) -> object:
    """What an update keeps of an entry."""
    if isinstance(entry, torch.Tensor):
        return tuple(entry.shape), entry.dtype
    if isinstance(entry, Place):
        return f"in slices, {entry.number}, {entry.dtype}"
    return next((kind for kind in _NUMBERS if isinstance(entry, kind)), entry)  # a number of NumPy's is loaded as one


def need_kept(who: str, path: str, entries: Sequence[object]) -> None:
    """Refuses what no checkpoint keeps, and no rank tells another."""
    for x in entries:
        if not isinstance(x, (torch.Tensor, pytree.Count, *NUMBERS)):
            raise TypeError(
                f"{who}: the state of leaf {path!r} begins with {named(x)}, expected tensors, numbers, strs and None "
                "in containers. Let the update close over what does not change."
            )


def is_alike(had: Sequence[object], spec: pytree.Spec, has: Sequence[object], now: pytree.Spec) -> bool:
    """Tells whether an update has kept the form of a leaf's state, of which these are the entries."""
    return spec == now and list(map(form, had)) == list(map(form, has))


def changed(old: object, new: object) -> str:
    """What an update has made otherwise in a leaf's state, in words."""
    (names, had, spec), (others, has, now) = [pytree.named_leaves(state, _is_entry) for state in (old, new)]
    if spec != now:
        return f"it has the entries {others[:8]} in its containers, and had {names[:8]}"
    name, x, y = next((name, x, y) for name, x, y in zip(names, had, has, strict=True) if form(x) != form(y))
    words = [f"of type {type(e).__name__}" if isinstance(e, _NUMBERS) else named(e) for e in (y, x)]
    return f"{repr(name) if name else 'it'} is {words[0]}, and was {words[1]}"


def said_of(entry: object) -> object:
    """What ranks must begin an entry with alike."""
    if isinstance(entry, torch.Tensor):
        return form(entry), None if private.is_wrapper(entry) or private.is_fake(entry) or entry.is_meta else checksum(
            entry
        )
    return form(entry) if isinstance(entry, Place) else entry


def tensors_of(rest: object) -> list[torch.Tensor]:
    return [x for x in flat(rest)[0] if isinstance(x, torch.Tensor)]


def numbers_of(rest: object) -> list[float]:
    entries = [x.value if isinstance(x, pytree.Count) else x for x in flat(rest)[0]]
    return [x for x in entries if isinstance(x, (int, float))]


def with_others(rest: object, tensors: Sequence[torch.Tensor], numbers: Sequence[float]) -> object:
    """A leaf's state with other tensors and numbers in the places of its own."""
    entries, spec = flat(rest)
    left, told = iter(tensors), iter(numbers)
    for i, x in enumerate(entries):
        if isinstance(x, torch.Tensor):
            entries[i] = next(left)
        elif isinstance(x, pytree.Count):
            entries[i] = dataclasses.replace(x, value=int(next(told)))
        elif isinstance(x, (int, float)):
            entries[i] = next(told)
    return pytree.unflatten(spec, entries)


@contextlib.contextmanager
def of_leaf(what: str, path: str, who: str, on_meta: bool = False) -> Iterator[None]:
    """Around a function of an optimizer that is given a leaf: what it raises tells what it was given."""
    token = of_one_leaf.set(path)
    try:
        yield
    except Exception as error:
        of_shapes = " A plan has leaves without values: write an init that needs only shapes and dtypes."
        of_trees = " It is given {path: leaf}, a dict: write optree.tree_map(fn, grads) in the place of grads.map(fn)."
        of_norm = " The first of a chain alone is given grad_norm, and no part of a partition: clip before it."
        error.add_note(
            f"This was in the {what} of leaf {path!r}, by {who}.{of_trees * isinstance(error, AttributeError)}"
            f"{of_norm * ('grad_norm' in str(error))}{of_shapes * on_meta}"
        )
        raise
    finally:
        of_one_leaf.reset(token)


_on_pieces: contextvars.ContextVar[bool] = variable("on_pieces", False)


@contextlib.contextmanager
def on_a_piece(around: contextlib.AbstractContextManager[None]) -> Iterator[None]:
    """`of_leaf` around a function of one that is declared elementwise."""
    with around, during(_on_pieces, True):
        yield


def need_whole_leaves(who: str) -> None:
    """Refuses pieces of leaves for what needs whole ones."""
    if _on_pieces.get():
        raise ValueError(
            f"elementwise: got {who!r} inside an optimizer that is declared elementwise, which has pieces of leaves "
            "under ZeRO, and it needs whole ones. Leave elementwise=True out."
        )
