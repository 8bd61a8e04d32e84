"""The containers of a tree of params as JSON, and back."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from fzero.base import pytree
from fzero.table.module_params import ModuleParams
from fzero.table.slices import Use

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
