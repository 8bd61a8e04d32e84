"""What of a state is kept in a checkpoint: its trees and numbers by their names, and their slices of leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from fzero.base import pytree
from fzero.base.arguments import named
from fzero.formats.formats import ALIGN, Blocks, Companded, Corrected, Exact, Format, Part, Plain
from fzero.state.sharded import Sharded, is_sharded
from fzero.state.train_state import TrainState
from fzero.table.layout import Key, Layout

NUMBERS = (bool, int, float, str, type(None))
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Item(NamedTuple):
    """One tree, tensor or number of a state, by its dotted name."""

    name: str
    value: Any


def items_of(state: TrainState) -> list[Item]:
    """Everything that a state keeps.

    Raises:
        TypeError: an entry of `state.extra` or of the moments is of another kind.
    """
    found = [Item("params", state.params)]
    found += [] if state.grads is None else [Item("grads", state.grads)]
    found += _items("moments", state.moments)
    for name, value in state.extra.items():
        found += _items(f"extra.{name}", value)
    return found


def _items(name: str, tree: object) -> list[Item]:
    paths, nodes, _ = pytree.named_leaves(tree, is_leaf=_is_item)
    items = [Item(f"{name}.{path}".removesuffix("."), node) for path, node in zip(paths, nodes, strict=True)]
    for item in items:
        if not (_is_item(item.value) or isinstance(item.value, (torch.Tensor, *NUMBERS))):
            raise TypeError(
                f"state.{item.name}: got {named(item.value)}, expected a tensor, a number, a str or None: nothing else "
                "is kept in a checkpoint."
            )
    return items


def refilled(name: str, tree: object, value_of: Callable[[Item], object]) -> Any:
    """A tree of moments or of an extra with other values in the same places."""
    _, spec = pytree.flatten(tree, is_leaf=_is_item)
    return pytree.unflatten(spec, [value_of(item) for item in _items(name, tree)])


def kind_of(value: object) -> str:
    """What an item is, in a word."""
    if is_sharded(value):
        return value.kind
    if isinstance(value, torch.Tensor):
        return "tensor"
    return "count" if isinstance(value, pytree.Count) else "number"


def _is_item(node: object) -> bool:
    return is_sharded(node) or isinstance(node, pytree.Count)


class Run(NamedTuple):
    """Consecutive elements of a leaf, in one part of its format.

    Attributes:
        leaf: its index.
        start, stop: in elements of the leaf, row by row; start is a multiple of 64.
        low, high: in entries of the part, from where the range begins.
    """

    leaf: int
    start: int
    stop: int
    low: int
    high: int


def runs(layout: Layout, key: Key, form: Format, low: int, high: int) -> Iterator[tuple[int, list[Run]]]:
    """What the range [low, high) of the full buffer of a group holds, by the number of the format's part."""
    for number, part in enumerate(form.parts):
        found = []
        for slot in layout.groups[key].slots:
            start, stop = max(low, slot.offset), min(high, slot.offset + slot.numel)
            if start < stop:
                at, count = (start - low) // part.every, entries(form, part, stop - start)
                found.append(Run(slot.leaf, start - slot.offset, stop - slot.offset, at, at + count))
        yield number, found


def entries(form: Format, part: Part, count: int) -> int:
    """How many entries a part has for a leaf's elements: those that share a scale or a byte stay together."""
    return (count if form.group == 1 else -(-count // ALIGN) * ALIGN) // part.every


def share(tree: Sharded, key: Key) -> tuple[int, int, int]:
    """Where this rank's buffer of a group begins, and the range that it saves: ranks with the same one divide it."""
    size, axis = tree.layout.shard_numel(key), tree.axis_of(key)
    copies, number = axis.ranks // axis.size, axis.data_rank // axis.size
    base, blocks = tree.rank_of(key) * size, size // ALIGN
    return base, base + blocks * number // copies * ALIGN, base + blocks * (number + 1) // copies * ALIGN


def format_named(name: str, kind: str) -> Format | None:
    """The format of a kind of tree by its name; None where this version knows none."""
    known = [
        *[Plain(dtype, rounds) for dtype in _FLOATS for rounds in (False, True)],
        *[Companded(kind == "signed", width) for width in (8, 4)],
        *(Exact(), Corrected(), Blocks()),
    ]
    return next((form for form in known if str(form) == name), None)
