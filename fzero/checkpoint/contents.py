"""What a checkpoint keeps of a tree: its containers, slices of leaves, and the formats that they are stored in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

from fzero.base import pytree
from fzero.checkpoint.manifest import DTYPES
from fzero.formats.formats import ALIGN, Blocks, Companded, Corrected, Exact, Format, Plain, entries
from fzero.state.sharded import Sharded
from fzero.table.layout import Key, Layout
from fzero.table.module_params import ModuleParams
from fzero.table.slices import Use


class Run(NamedTuple):
    """Consecutive elements of a leaf, or of this rank's slice of it, in one part of its format.

    Attributes:
        leaf: its index.
        start, stop: in elements of the leaf or the slice, row by row; start is a multiple of 64.
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


def written(layout: Layout, leaf: int) -> bool:
    """Tells whether this rank of the tensor axis writes its part of a leaf: of copies one does, by turns."""
    rank, ranks = layout.tensor
    return layout.rows[leaf].slices is not None or leaf % ranks == rank


def share(tree: Sharded, key: Key) -> tuple[int, int, int]:
    """Where this rank's buffer of a group begins, and the range that it saves: ranks with the same one divide it."""
    size, axis = tree.layout.shard_numel(key), tree.axis_of(key)
    copies, number = axis.ranks // axis.size, axis.data_rank // axis.size
    base, blocks = tree.rank_of(key) * size, size // ALIGN
    return base, base + blocks * number // copies * ALIGN, base + blocks * (number + 1) // copies * ALIGN


def format_named(name: str, kind: str) -> Format | None:
    """The format of a kind of tree by its name; None where this version knows none."""
    known = [
        *[Plain(dtype, rounds) for dtype in DTYPES.values() for rounds in (False, True)],
        *[Companded(kind == "signed", width) for width in (8, 4)],
        *(Exact(), Corrected(), Blocks()),
    ]
    return next((form for form in known if str(form) == name), None)


_KEYS = (str, int, bool, type(None))


class Unnamed(ValueError):
    """A container that JSON cannot name."""


def described(structure: pytree.Spec) -> object:
    """A structure as JSON, whose leaves are their numbers; a container of another kind is named for the error."""
    return _described(pytree.unflatten(structure, range(structure.num_leaves)))


def _described(node: Any) -> Any:
    kind = type(node)
    if kind is int:
        return node
    if kind in (dict, OrderedDict, ModuleParams) and all(type(key) in _KEYS for key in node):
        said = {"frozen": list(node.frozen), "hints": list(node.hints)} if kind is ModuleParams else {}
        return {"kind": kind.__name__, "keys": list(node), "items": [_described(x) for x in node.values()], **said}
    if kind in (list, tuple):
        return {"kind": kind.__name__, "items": [_described(x) for x in node]}
    return {"kind": f"{kind.__module__}.{kind.__qualname__}"}


def built(description: object) -> pytree.Spec:
    """The structure again.

    Raises:
        Unnamed: it has a container of another kind than dict, OrderedDict, list, tuple and what `functional` gives.
    """
    return pytree.flatten(_built(description))[1]


def _built(node: Any) -> Any:
    if isinstance(node, int):
        return 0
    kind, items = node["kind"], [_built(x) for x in node.get("items", ())]
    if kind in ("list", "tuple"):
        return items if kind == "list" else tuple(items)
    if kind not in ("dict", "OrderedDict", "ModuleParams"):
        raise Unnamed(kind)
    pairs = list(zip(node["keys"], items, strict=True))
    if kind == "ModuleParams":
        hints = {name: tuple(Use(*use) for use in hint) for name, hint in node.get("hints", ())}
        return ModuleParams(pairs, frozen=node["frozen"], hints=hints)
    return OrderedDict(pairs) if kind == "OrderedDict" else dict(pairs)
