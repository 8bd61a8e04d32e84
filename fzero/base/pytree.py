"""The one façade over optree: every flatten of fzero goes through here, so leaf orders never mix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import optree
import torch
import torch.utils._pytree as torch_pytree

PyTree = Any
Spec = optree.PyTreeSpec


def flatten(tree: PyTree, is_leaf: Callable[[object], bool] | None = None) -> tuple[list[Any], Spec]:
    """Leaves and structure; `None` is a leaf, so that it keeps its place."""
    return optree.tree_flatten(tree, is_leaf=is_leaf, none_is_leaf=True)


def unflatten(spec: Spec, leaves: list[Any]) -> PyTree:
    return optree.tree_unflatten(spec, leaves)


def named_leaves(tree: PyTree, is_leaf: Callable[[object], bool] | None = None) -> tuple[list[str], list[Any], Spec]:
    """Dotted paths (`blocks.0.attn.weight`), leaves and structure; `None` is a leaf."""
    accessors, leaves, spec = optree.tree_flatten_with_accessor(tree, is_leaf=is_leaf, none_is_leaf=True)
    return [".".join(_part(entry) for entry in accessor) for accessor in accessors], leaves, spec


def _part(entry: optree.PyTreeEntry) -> str:
    """A NamedTuple's field by its name, anything else by its key or index."""
    return entry.field if isinstance(entry, optree.NamedTupleEntry) else str(entry.entry)


def leaves(tree: PyTree) -> list[Any]:
    """The leaves; `None` is not one."""
    return optree.tree_leaves(tree)


def map(
    fn: Callable[..., object], tree: PyTree, *rest: PyTree, is_leaf: Callable[[object], bool] | None = None
) -> PyTree:
    """`fn` over the leaves of trees of one structure; `None` is kept as it is."""
    return optree.tree_map(fn, tree, *rest, is_leaf=is_leaf)


def is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def map_leaves(fn: Callable[[object], object], tree: PyTree) -> PyTree:
    """`fn` over the leaves, None counted; the tree itself where it changes none of them."""
    leaves, spec = flatten(tree)
    new = [fn(leaf) for leaf in leaves]
    return tree if all(a is b for a, b in zip(leaves, new, strict=True)) else unflatten(spec, new)


class Split:
    """A tree taken apart by kinds of leaves, for `join`: those of no kind are kept here."""

    def __init__(
        self, tree: PyTree, *kinds: Callable[[object], bool], is_leaf: Callable[[object], bool] | None = None
    ) -> None:
        leaves, self.spec = flatten(tree, is_leaf)
        self._kinds = [next((i for i, is_kind in enumerate(kinds) if is_kind(leaf)), None) for leaf in leaves]
        self._others = [leaf if kind is None else None for leaf, kind in zip(leaves, self._kinds, strict=True)]
        self.places = [[place for place, kind in enumerate(self._kinds) if kind == i] for i in range(len(kinds))]
        self.leaves: list[list[Any]] = [[leaves[place] for place in places] for places in self.places]

    def join(self, *leaves: Iterable[Any]) -> PyTree:
        """The tree with other leaves of each kind."""
        iterators = [iter(own) for own in leaves]
        pairs = zip(self._kinds, self._others, strict=True)
        return unflatten(self.spec, [other if kind is None else next(iterators[kind]) for kind, other in pairs])


def register(
    cls: type,
    flatten_fn: Callable[[Any], tuple[tuple[Any, ...], Any]],
    unflatten_fn: Callable[[Any, tuple[Any, ...]], Any],
) -> None:
    """Makes `cls` a node for optree and for torch; `unflatten_fn(metadata, children)`."""
    optree.register_pytree_node(cls, flatten_fn, unflatten_fn, namespace=optree.registry.__GLOBAL_NAMESPACE)  # type: ignore[attr-defined]
    torch_pytree.register_pytree_node(
        cls,
        lambda node: (list(flatten_fn(node)[0]), flatten_fn(node)[1]),
        lambda children, metadata: unflatten_fn(metadata, tuple(children)),
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
    )


def register_dict(
    cls: type[dict[Any, Any]],
    known: Callable[[Any], Mapping[str, Any]],
    make: Callable[[Mapping[str, Any], Iterable[tuple[Any, Any]]], Any],
) -> None:
    """Makes a subclass of dict a node whose leaves have the paths and, in each library, the order of a plain dict's.

    Args:
        known: what a node carries beside its items. It does not take part in comparisons of structures.
        make: `make(known, items)`.
    """

    def sorted_items(node: Any) -> tuple[tuple[Any, ...], Any, tuple[Any, ...]]:
        keys = tuple(sorted(node, key=str))
        return tuple(node[key] for key in keys), (keys, Unseen((dict(known(node)), tuple(node)))), keys

    def of_sorted(metadata: Any, children: Any) -> Any:
        keys, unseen = metadata
        carried, order = unseen.value
        values = dict(zip(keys, children, strict=True))
        return make(carried, [(key, values[key]) for key in order])

    optree.register_pytree_node(
        cls,  # type: ignore[arg-type]
        sorted_items,
        of_sorted,
        path_entry_type=optree.MappingEntry,
        namespace=optree.registry.__GLOBAL_NAMESPACE,  # type: ignore[attr-defined]
    )

    def context(node: Any) -> Any:
        return list(node), Unseen(dict(known(node)))

    def with_keys(node: Any) -> Any:
        return [(torch_pytree.MappingKey(key), leaf) for key, leaf in node.items()], context(node)

    torch_pytree.register_pytree_node(
        cls,
        lambda node: (list(node.values()), context(node)),
        lambda children, metadata: make(metadata[1].value, zip(metadata[0], children, strict=True)),
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        flatten_with_keys_fn=with_keys,
    )


class Unseen:
    """Metadata of a node that does not take part in comparisons: a step counter, a loss scale.

    Two states of different steps then have one structure, and `tree_map` averages them.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unseen)

    def __hash__(self) -> int:
        return hash(Unseen)

    def __repr__(self) -> str:
        return f"Unseen({self.value!r})"


class Count:
    """A number that travels in a pytree without being a leaf of it."""

    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Count({self.value})"


register(Count, lambda node: ((), Unseen(node.value)), lambda metadata, _: Count(metadata.value))
