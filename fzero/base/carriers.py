"""Objects that hold tensors and go in and out of units: by their types, which say what their content is."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import optree
import torch
import torch.utils._pytree as torch_pytree

from fzero.base.arguments import wrong
from fzero.base.pytree import UNITS, Spec
from fzero.base.refusals import noted

T = TypeVar("T")
_changing: set[type] = set()  # types whose content a unit may change
# leaves that are no tensors; of a Size torch makes a tuple, once its compiler is imported
VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_known: set[type] = {torch.Tensor, *VALUES}
_adopting = threading.RLock()


def register_carrier(
    cls: type[T],
    flatten: Callable[[T], tuple[Iterable[object], object]],
    unflatten: Callable[[Any, Sequence[Any]], T],
) -> None:
    """Makes objects of a type go in and out of units with the tensors that they hold, such as a cache of keys.

    A unit may change such an object (`cache.update(k, v)`): it works on an object that is made anew from the content,
    and afterwards the caller's has the attributes that this one has then. Caches of `transformers` are registered, and
    so are dataclasses and what torch knows as a pytree, which a unit must not change.

    Args:
        cls: the type, exactly. Its objects have a `__dict__`.
        flatten: `flatten(x)` returns its content, pytrees of tensors, and what else makes it up, which has `==`.
        unflatten: `unflatten(rest, content)` makes an object again.

    Raises:
        TypeError: `cls` is no type, or an argument is no function.
        ValueError: the type is registered already.

    Example:
        >>> class Cache:
        ...     def __init__(self, keys=()):
        ...         self.keys = list(keys)
        >>> fz.register_carrier(Cache, lambda c: (c.keys, None), lambda _, keys: Cache(keys))
    """
    if not isinstance(cls, type):
        raise wrong("register_carrier", "cls", cls, "a type")
    for name, fn in (("flatten", flatten), ("unflatten", unflatten)):
        if not callable(fn):
            raise wrong("register_carrier", name, fn, "a function")
    optree.register_pytree_node(cls, flatten, unflatten, namespace=UNITS)  # type: ignore[arg-type]
    _changing.add(cls)
    _known.add(cls)


def flatten(tree: object) -> tuple[list[Any], Spec]:
    """Leaves and structure of what a unit is given or returns; `None` is a leaf."""
    return optree.tree_flatten(tree, none_is_leaf=True, namespace=UNITS)  # type: ignore[arg-type]


def flatten_first(tree: object) -> tuple[list[Any], Spec]:
    """The same, of what a call gives or returns for the first time: types that it has are made known."""
    with _adopting:  # ranks that are threads must not take for a leaf what one of them is making known
        while True:
            leaves, spec = flatten(tree)
            new = {type(x) for x in leaves if not isinstance(x, torch.Tensor)} - _known
            if not any([_adopted(kind) for kind in new]):
                return leaves, spec


def changing(tree: object) -> list[object]:
    """The objects among a tree whose content a unit may change."""
    if not _changing:
        return []
    found: list[object] = optree.tree_leaves(tree, is_leaf=_changes, none_is_leaf=True, namespace=UNITS)  # type: ignore[arg-type]
    found = [x for x in found if _changes(x)]
    if len({*map(id, found)}) < len(found):
        kind = type(found[0]).__name__
        raise noted(
            TypeError(
                f"A unit is given one object twice whose content it may change, of type {kind!r}: it would have two. "
                "Give it once."
            )
        )
    return found


def map_changing(fn: Callable[[object], object], tree: object) -> object:
    """The tree with something else in the place of such objects."""
    return optree.tree_map(
        lambda x: fn(x) if _changes(x) else x,
        tree,  # type: ignore[arg-type]
        is_leaf=_changes,
        none_is_leaf=True,
        namespace=UNITS,
    )


def _changes(x: object) -> bool:
    return type(x) in _changing


def _adopted(kind: type) -> bool:
    """Tells whether objects of a type are pytrees from now on."""
    _known.add(kind)
    is_cache = any(base.__module__ == "transformers.cache_utils" for base in kind.__mro__)
    is_data = dataclasses.is_dataclass(kind) and not kind.__module__.startswith("fzero.")
    taken: Callable[..., object]
    made: Callable[..., object]
    if kind in torch_pytree.SUPPORTED_NODES and not is_cache:
        own = torch_pytree.SUPPORTED_NODES[kind]
        taken, made = own.flatten_fn, lambda context, children: own.unflatten_fn(children, context)
    elif is_cache or is_data:
        slots = [field.name for field in dataclasses.fields(kind)] if is_data else []
        names = lambda x: tuple(getattr(x, "__dict__", slots))
        taken = lambda x: ([getattr(x, name) for name in names(x)], names(x))
        made = lambda names, values: _made(kind, zip(names, values, strict=True))
    else:
        return False
    optree.register_pytree_node(kind, taken, made, namespace=UNITS)  # type: ignore[arg-type]
    if is_cache:
        _changing.add(kind)
    return True


def _made(kind: type[T], attributes: Iterable[tuple[str, object]]) -> T:
    made = kind.__new__(kind)
    for name, value in attributes:
        object.__setattr__(made, name, value)
    return made
