"""Trees as values of a small vocabulary, which can be sent and compared: containers and constants, leaves apart.

Nothing that arrives names code: a NamedTuple is one of those that this process has imported already.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fzero.base import pytree
from fzero.base.arguments import named
from fzero.table.module_params import ModuleParams

Skeleton = tuple[Any, ...]  # of a container, a constant or a leaf: its kind first
LEAF: Skeleton = ("leaf",)
_CONSTANTS = (int, str, bytes, type(None), torch.dtype)
_CODES: dict[Any, tuple[Callable[[Any], object], Callable[[Any], object]]] = {
    bool: (str, lambda said: said == "True"),  # True is equal to 1
    float: (float.hex, float.fromhex),  # a nan is equal to itself, and -0.0 is not to 0.0
    pytree.Count: (lambda count: count.said, pytree.Count.of),
    torch.Size: (tuple, torch.Size),
}
_DECODE = {"constant": lambda x: x, **{kind.__name__: decode for kind, (_, decode) in _CODES.items()}}
_KEYS = (str, int, bool, type(None))


class Packed(NamedTuple):
    """A tree as its skeleton and its leaves, in the order in which the tree lists them."""

    skeleton: Skeleton
    leaves: list[Any]


def packed(tree: object, is_leaf: Callable[[object], bool], what: str) -> Packed:
    """A tree taken apart.

    Args:
        what: the tree is, for the error.

    Raises:
        TypeError: it holds something that cannot be sent.
    """
    leaves: list[object] = []
    return Packed(_skeleton(tree, is_leaf, what, leaves), leaves)


def _skeleton(node: Any, is_leaf: Callable[[object], bool], what: str, leaves: list[object]) -> Skeleton:
    if is_leaf(node):
        leaves.append(node)
        return LEAF
    kind: Any = type(node)
    if kind in _CONSTANTS:
        return ("constant", node)
    if kind in _CODES:
        return (kind.__name__, _CODES[kind][0](node))
    if kind in (list, tuple):
        return (kind.__name__, tuple([_skeleton(x, is_leaf, f"{what}[{i}]", leaves) for i, x in enumerate(node)]))
    if kind in (dict, OrderedDict, ModuleParams) and all(type(key) in _KEYS for key in node):
        children = tuple([_skeleton(x, is_leaf, f"{what}[{key!r}]", leaves) for key, x in node.items()])
        known = (node.frozen, node.hints) if kind is ModuleParams else ()
        kinds = tuple([type(key).__name__ for key in node if type(key) is not str])
        return (kind.__name__, tuple(node), children, known, kinds)
    fields: Any = getattr(kind, "_fields", None) if isinstance(node, tuple) else None
    if fields is not None:
        items = zip(fields, node, strict=True)
        children = tuple([_skeleton(x, is_leaf, f"{what}.{field}", leaves) for field, x in items])
        return ("namedtuple", kind.__module__, kind.__qualname__, children)
    raise TypeError(
        f"{what}: got {named(node)}, expected tensors, numbers, strings and None in dicts (with keys that are strings "
        "or ints), lists, tuples and NamedTuples: a component on ranks of its own is sent nothing else."
    )


def unpacked(skeleton: Skeleton, leaves: Sequence[object]) -> Any:
    """The tree again, with these leaves.

    Raises:
        TypeError: it has a NamedTuple whose class this process does not know.
    """
    rest = iter(leaves)
    tree = _tree(skeleton, rest)
    assert next(rest, rest) is rest, "more leaves than places"
    return tree


class Slot:
    """What stands for a leaf of a tree, by its number."""

    def __init__(self, number: int) -> None:
        self.number = number


def slots_of(skeleton: Skeleton) -> Any:
    """The tree with a slot in place of each leaf."""
    return unpacked(skeleton, [Slot(number) for number in range(places_of(skeleton))])


def _tree(skeleton: Skeleton, leaves: Iterator[object]) -> Any:
    kind = skeleton[0]
    if kind == "leaf":
        return next(leaves)
    if kind in _DECODE:
        return _DECODE[kind](skeleton[1])
    if kind in ("list", "tuple"):
        items = [_tree(child, leaves) for child in skeleton[1]]
        return items if kind == "list" else tuple(items)
    if kind == "namedtuple":
        return _class(*skeleton[1:3])._make([_tree(child, leaves) for child in skeleton[3]])
    pairs = [(key, _tree(child, leaves)) for key, child in zip(skeleton[1], skeleton[2], strict=True)]
    if kind == "ModuleParams":
        params = ModuleParams(pairs, frozen=skeleton[3][0])
        params.hints = skeleton[3][1]
        return params
    return OrderedDict(pairs) if kind == "OrderedDict" else dict(pairs)


def _class(module: str, name: str) -> Any:
    """A NamedTuple's class, of those that are imported here."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")):
        raise TypeError(
            f"A value of the NamedTuple {module}.{name} arrived, which is not imported in this process; expected one "
            f"that is. Import {module} here, or return a dict."
        )
    return found


def places_of(skeleton: Skeleton) -> int:
    """How many leaves a tree has."""
    if skeleton[0] == "leaf" or skeleton[0] in _DECODE:
        return int(skeleton[0] == "leaf")
    return sum(map(places_of, skeleton[{"list": 1, "tuple": 1, "namedtuple": 3}.get(skeleton[0], 2)]))
