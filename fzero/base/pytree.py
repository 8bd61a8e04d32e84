"""The one façade over optree: every flatten of fzero goes through here, so leaf orders never mix."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import optree
import torch
import torch.utils._pytree as torch_pytree

Spec = optree.PyTreeSpec
Test = Callable[[object], bool]
Node = TypeVar("Node")
Item = TypeVar("Item")
Dict = TypeVar("Dict", bound=dict[Any, Any])
_GLOBAL = optree.registry.__GLOBAL_NAMESPACE  # type: ignore[attr-defined]
# namespaces in which dicts keep the order of their entries, which structures then compare, too
UNITS, _ORDERED = "fzero", "fzero.ordered"
_kept = [optree.dict_insertion_ordered(True, namespace=name) for name in (UNITS, _ORDERED)]
for _each in _kept:  # for as long as this module is there
    _each.__enter__()


def flatten(tree: Any, is_leaf: Test | None = None) -> tuple[list[Any], Spec]:
    """Leaves and structure; `None` is a leaf, so that it keeps its place."""
    return optree.tree_flatten(tree, is_leaf=is_leaf, none_is_leaf=True)


def ordered(tree: Any, is_leaf: Test | None = None) -> tuple[list[Any], Spec]:
    """The same, each dict in the order of its entries: of trees in another order, structures are not equal."""
    return optree.tree_flatten(tree, is_leaf=is_leaf, none_is_leaf=True, namespace=_ORDERED)


def unflatten(spec: Spec, leaves: Iterable[object]) -> Any:
    return optree.tree_unflatten(spec, leaves)


def one_level(tree: Any) -> tuple[Sequence[object], tuple[Hashable, ...], Callable[[Sequence[Any]], object] | None]:
    """A node's children, their keys, and what makes such a node of others; nothing of a leaf."""
    if optree.tree_is_leaf(tree, none_is_leaf=True):
        return (), (), None
    children, metadata, keys, made = optree.tree_flatten_one_level(tree, none_is_leaf=True)
    return children, keys, partial(made, metadata)


def spread(prefix: object, tree: object) -> list[object]:
    """For every leaf of a tree, None counted, the leaf of a prefix of it that stands there."""
    return optree.broadcast_prefix(prefix, tree, none_is_leaf=True)  # type: ignore[arg-type]


def named_leaves(
    tree: Any, is_leaf: Test | None = None, name: Callable[[str], str] = str
) -> tuple[list[str], list[Any], Spec]:
    """Dotted paths (`blocks.0.attn.weight`), leaves and structure; `None` is a leaf.

    Args:
        name: what stands for a key in its path.
    """
    accessors, leaves, spec = optree.tree_flatten_with_accessor(tree, is_leaf=is_leaf, none_is_leaf=True)
    return [".".join(name(_part(entry)) for entry in accessor) for accessor in accessors], leaves, spec


def _part(entry: optree.PyTreeEntry) -> str:
    """A NamedTuple's field by its name, anything else by its key or index."""
    return entry.field if isinstance(entry, optree.NamedTupleEntry) else str(entry.entry)


def leaves(tree: Any) -> list[Any]:
    """The leaves; `None` is not one."""
    return optree.tree_leaves(tree)


def tensors_in(*values: object) -> list[torch.Tensor]:
    """The tensors among what an operation is given or returns, most of which is no container."""
    out: list[torch.Tensor] = []
    for x in values:
        if isinstance(x, torch.Tensor):
            out.append(x)
        elif isinstance(x, (list, tuple, dict)):
            out += [y for y in leaves(x) if isinstance(y, torch.Tensor)]
    return out


def map(fn: Callable[..., object], tree: Any, *rest: Any, is_leaf: Test | None = None) -> Any:
    """`fn` over the leaves of trees of one structure; `None` is kept as it is."""
    return optree.tree_map(fn, tree, *rest, is_leaf=is_leaf)


def is_real(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor has a derivative: real or complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


def as_reals(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose complex numbers are pairs in a last dim: a view of it, but for conjugates that are none yet."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def map_leaves(fn: Callable[[object], object], tree: object, is_leaf: Test | None = None) -> object:
    """`fn` over the leaves, None counted; the tree itself where it changes none of them."""
    leaves, spec = flatten(tree, is_leaf)
    new = [fn(leaf) for leaf in leaves]
    return tree if all(a is b for a, b in zip(leaves, new, strict=True)) else unflatten(spec, new)


class Split:
    """A tree taken apart by kinds of leaves, for `join`: those of no kind are kept here.

    Args:
        like: of a tree that had other leaves at the same places, whose kinds hold where it is of one structure.
    """

    def __init__(self, tree: object, *kinds: Test, is_leaf: Test | None = None, like: Split | None = None) -> None:
        leaves, self.spec = flatten(tree, is_leaf)
        if like is not None and like.spec == self.spec:
            self._kinds = like._kinds
        else:
            self._kinds = [next((i for i, is_kind in enumerate(kinds) if is_kind(leaf)), None) for leaf in leaves]
        self.others = [leaf if kind is None else None for leaf, kind in zip(leaves, self._kinds, strict=True)]
        self.places = [[place for place, kind in enumerate(self._kinds) if kind == i] for i in range(len(kinds))]
        self.leaves: list[list[Any]] = [[leaves[place] for place in places] for places in self.places]

    def join(self, *leaves: Iterable[object]) -> Any:
        """The tree with other leaves of each kind."""
        iterators = [iter(own) for own in leaves]
        pairs = zip(self._kinds, self.others, strict=True)
        return unflatten(self.spec, [other if kind is None else next(iterators[kind]) for kind, other in pairs])


def register(
    cls: type[Node],
    flatten_fn: Callable[[Node], tuple[tuple[object, ...], object]],
    unflatten_fn: Callable[[Any, tuple[Any, ...]], Node],
) -> None:
    """Makes `cls` a node for optree and for torch; `unflatten_fn(metadata, children)`."""
    optree.register_pytree_node(cls, flatten_fn, unflatten_fn, namespace=_GLOBAL)  # type: ignore[arg-type]
    torch_pytree.register_pytree_node(
        cls,
        flatten_fn,  # type: ignore[arg-type]
        lambda children, metadata: unflatten_fn(metadata, tuple(children)),
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
    )


def register_dict(
    cls: type[Dict],
    known: Callable[[Dict], Mapping[str, object]],
    make: Callable[[Mapping[str, object], Iterable[tuple[Any, object]]], Dict],
) -> None:
    """Makes a subclass of dict a node whose leaves have the paths and, in each library, the order of a plain dict's.

    `make(known(node), items)` makes one again; what is known takes no part in comparisons of structures.
    """

    def items(order: Callable[..., Iterable[object]], node: Any) -> tuple[list[object], object, tuple[object, ...]]:
        keys = tuple(order(node))
        return [node[key] for key in keys], (keys, Unseen((dict(known(node)), tuple(node)))), keys

    def of_items(metadata: Any, children: Iterable[object]) -> Dict:
        keys, unseen = metadata
        carried, order = unseen.value
        values = dict(zip(keys, children, strict=True))
        return make(carried, [(key, values[key]) for key in order])

    def context(node: Dict) -> tuple[list[object], Unseen]:
        return list(node), Unseen(dict(known(node)))

    for name, order in ((_GLOBAL, lambda node: sorted(node, key=str)), (UNITS, tuple), (_ORDERED, tuple)):
        own = partial(items, order)
        optree.register_pytree_node(cls, own, of_items, path_entry_type=optree.MappingEntry, namespace=name)
    torch_pytree.register_pytree_node(
        cls,
        lambda node: (list(node.values()), context(node)),
        lambda children, metadata: make(metadata[1].value, zip(metadata[0], children, strict=True)),
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        flatten_with_keys_fn=lambda node: ([(torch_pytree.MappingKey(k), x) for k, x in node.items()], context(node)),  # type: ignore[arg-type]
    )


@dataclass(eq=False, slots=True)
class Unseen:
    """Metadata that takes no part in comparisons: states of different steps have one structure for `tree_map`."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unseen)

    def __hash__(self) -> int:
        return hash(Unseen)


Counted = tuple[tuple[str, int], ...]  # paths of leaves, each with a number


@dataclass(eq=False, repr=False, slots=True)
class Count:
    """How many updates an optimizer has applied: numbers that travel in a pytree without being leaves of it.

    Attributes:
        value: the run's updates, which schedules go by.
        missed: the leaves that train and have seen fewer updates than the run, each with how many it has not seen.
        paused: the frozen leaves that keep their moments, each with its own count.
    """

    value: int
    missed: Counted = ()
    paused: Counted = ()

    def next(self) -> Count:
        """The count after one more update."""
        return Count(self.value + 1, self.missed, self.paused)

    def own(self) -> Callable[[str], int]:
        """Path of a leaf -> how many updates it has seen, of which its bias correction goes."""
        missed, paused = dict(self.missed), dict(self.paused)
        return lambda path: paused[path] if path in paused else self.value - missed.get(path, 0)

    @property
    def said(self) -> object:
        """All of it in numbers, strings and tuples; the number alone if no leaf has another one."""
        return (self.value, self.missed, self.paused) if self.missed or self.paused else self.value

    @staticmethod
    def of(said: object) -> Count:
        """The count again, also of what JSON makes of `said`."""
        if not isinstance(said, (tuple, list)):
            return Count(said)  # type: ignore[arg-type] - a number, or a tensor where a graph counts
        value, *counted = said
        return Count(value, *[tuple([(path, number) for path, number in each]) for each in counted])

    def __repr__(self) -> str:
        named = zip(("missed", "paused"), (self.missed, self.paused), strict=True)
        return f"Count({', '.join([str(self.value), *[f'{name}={dict(own)}' for name, own in named if own]])})"


register(Count, lambda node: ((), Unseen(node.said)), lambda metadata, _: Count.of(metadata.value))


def batches(items: Iterable[Item], size: Callable[[Item], int], limit: int) -> Iterator[list[Item]]:
    """Consecutive items whose sizes add up to less than the limit; one that does not alone is by itself."""
    own, total = list[Item](), 0
    for item in items:
        if own and total + size(item) >= limit:
            yield own
            own, total = [], 0
        own.append(item)
        total += size(item)
    if own:
        yield own
