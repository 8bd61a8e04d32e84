"""Trees as values that can be sent and compared: containers and constants as bytes, leaves apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fzero.base import pytree
from fzero.base.arguments import named
from fzero.channels.vocabulary import KINDS, Kinds, Pickler, Unpickler
from fzero.table.module_params import ModuleParams


class Skeleton(NamedTuple):
    """A tree without its leaves: equal for trees of equal containers and constants."""

    data: bytes  # as a channel's vocabulary has it
    places: int  # how many leaves it has

    def __repr__(self) -> str:
        return repr(slots_of(self))


class Packed(NamedTuple):
    """A tree as its skeleton and its leaves, in the order in which the tree lists them."""

    skeleton: Skeleton
    leaves: list[Any]


class Slot:
    """What stands for a leaf of a tree, by its number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"leaf {self.number}"


def _params(pairs: Sequence[tuple[str, object]], frozen: tuple[str, ...], hints: Any) -> ModuleParams:
    params = ModuleParams(pairs, frozen=frozen)
    params.hints = hints
    return params


_KINDS: Kinds = {**KINDS, ModuleParams: (lambda own: (list(own.items()), own.frozen, own.hints), _params)}


class _TreePickler(Pickler):
    def __init__(self, tree: object, is_leaf: Callable[[object], bool], what: str) -> None:
        super().__init__(is_leaf, _KINDS)
        self._tree, self._what = tree, what
        self.fast = True  # without memory of what it has written: so equal trees have equal bytes

    def refused(self, value: object) -> TypeError:
        names, leaves, _ = pytree.named_leaves(self._tree)
        where = next((f" at {name!r}" for name, x in zip(names, leaves, strict=True) if name and x is value), "")
        return TypeError(
            f"{self._what}: got {named(value)}{where}, expected tensors, numbers, strings and None in dicts, lists, "
            "tuples and NamedTuples: a component on ranks of its own is sent nothing else."
        )


def packed(tree: object, is_leaf: Callable[[object], bool], what: str) -> Packed:
    """A tree taken apart."""
    pickler = _TreePickler(tree, is_leaf, what)
    data = pickler.dumped(tree)
    return Packed(Skeleton(data, len(pickler.leaves)), pickler.leaves)


def unpacked(skeleton: Skeleton, leaves: Sequence[object]) -> Any:
    """The tree again, with these leaves."""
    return Unpickler(skeleton.data, leaves, _KINDS).load()


def slots_of(skeleton: Skeleton) -> Any:
    """The tree with a slot in place of each leaf."""
    return unpacked(skeleton, [Slot(number) for number in range(skeleton.places)])


LEAF = packed(None, lambda _: False, "").skeleton
