"""What a state keeps, item by item: its trees, tensors and numbers, by dotted names."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from fzero.base import pytree
from fzero.base.arguments import named
from fzero.state.sharded import is_item, is_sharded
from fzero.state.train_state import TrainState

CARRY = "carry"  # the entry of `state.extra` of which each rank has its own
NUMBERS = (bool, int, float, str, type(None))


class Item(NamedTuple):
    """One tree, tensor or number of a state, by its dotted name: "params", "moments.mu", "extra.ema"."""

    name: str
    value: Any

    @property
    def kind(self) -> str:
        """A tree's own kind; "tensor", "count" or "number"."""
        if is_sharded(self.value):
            return self.value.kind
        if isinstance(self.value, torch.Tensor):
            return "tensor"
        return "count" if isinstance(self.value, pytree.Count) else "number"


def items_of(state: TrainState) -> list[Item]:
    """Everything that a state keeps.

    Raises:
        TypeError: an entry of `state.extra` or of the moments is of another kind.
        ValueError: two of them have one name.
    """
    found = [Item("params", state.params)]
    found += [] if state.grads is None else [Item("grads", state.grads)]
    found += items_in("moments", state.moments)
    for name, value in state.extra.items():
        found += items_in(f"extra.{escaped(name)}", value)
    if twice := [name for name, count in collections.Counter(item.name for item in found).items() if count > 1]:
        raise ValueError(
            f"state.{twice[0]}: got two values of this name, expected one: keys of one dict such as 1 and '1' are the "
            "same there. Give one of them another key."
        )
    return found


def escaped(key: str) -> str:
    """A key as part of a dotted name, in which its own dots are no dots."""
    return key.replace("%", "%25").replace(".", "%2E")


def entry_of(item: str) -> str:
    """The entry of `state.extra` that an item belongs to: of "extra.ema.mean" it is "ema"."""
    return _unescaped(item.split(".")[1]) if item.startswith("extra.") else ""


def leaf_of(item: str) -> str:
    """The leaf that items of moments are of, by what their names begin with (`of_one_leaf`)."""
    return _unescaped(item.rpartition(".")[2])


def _unescaped(key: str) -> str:
    return key.replace("%2E", ".").replace("%25", "%")


def of_one_leaf(items: Iterable[str]) -> dict[str, str]:
    """Items of moments that are of one leaf alone (`WholeState.rest`) -> what their names begin with."""
    parts = {name: name.split(".") for name in items}
    places = {name: own.index("rest") + 2 for name, own in parts.items() if "rest" in own[:-1]}
    return {name: ".".join(parts[name][:place]) for name, place in places.items()}


def items_in(name: str, tree: object) -> list[Item]:
    """The items of the moments or of an entry of `state.extra`."""
    paths, nodes, _ = pytree.named_leaves(tree, is_item, escaped)
    items = [Item(f"{name}.{path}".removesuffix("."), node) for path, node in zip(paths, nodes, strict=True)]
    for item in items:
        if not (is_item(item.value) or isinstance(item.value, (torch.Tensor, *NUMBERS))):
            raise TypeError(
                f"state.{item.name}: got {named(item.value)}, expected a tensor, a number, a str or None: nothing else "
                "is kept in a checkpoint."
            )
    return items


def refilled(name: str, tree: object, value_of: Callable[[Item], object]) -> Any:
    """The moments or an entry of `state.extra` with other values in the same places."""
    _, spec = pytree.flatten(tree, is_leaf=is_item)
    return pytree.unflatten(spec, [value_of(item) for item in items_in(name, tree)])
