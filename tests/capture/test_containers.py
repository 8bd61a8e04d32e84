"""Every kind of mutable object is read, seen changed, and written back."""

from __future__ import annotations

import array
import collections
import functools
import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import fzero as fz
from fzero.capture.contents import containers_of
from fzero.testing import run_ranks


class Slotted:
    __slots__ = ("__hidden", "shown")

    def __init__(self) -> None:
        self.shown, self.__hidden = 1, 2


def with_default(x: int = 1) -> int:
    return x


class Items(collections.UserDict):  # type: ignore[type-arg]
    pass


class Makes(collections.OrderedDict):  # type: ignore[type-arg]
    """Makes what is asked for, as transformers' table of activations does."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


class Counts(dict):  # type: ignore[type-arg]
    """Counts what is asked for."""

    asked = 0

    def __getitem__(self, key: str) -> Any:
        type(self).asked += 1
        return super().__getitem__(key)

    def __iter__(self) -> Any:
        type(self).asked += 1
        return super().__iter__()


# what is made, and what changes it
KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "dict": (lambda: {"a": 1, "b": 2}, lambda x: x.pop("a")),
    "the order of a dict": (lambda: {"a": 1, "b": 2}, lambda x: x.update(a=x.pop("a"))),
    "OrderedDict": (lambda: collections.OrderedDict(a=1, b=2), lambda x: x.move_to_end("a")),
    "list": (lambda: [1, 2], lambda x: x.append(3)),
    "deque": (lambda: collections.deque([1, 2], maxlen=2), lambda x: x.append(3)),
    "set": (lambda: {1, 2}, lambda x: x.add(3)),
    "bytearray": (lambda: bytearray(b"ab"), lambda x: x.extend(b"c")),
    "array": (lambda: array.array("i", [1, 2]), lambda x: x.append(3)),
    "StringIO": (lambda: io.StringIO("ab"), lambda x: x.write("c")),
    "BytesIO": (lambda: io.BytesIO(b"ab"), lambda x: x.seek(1)),
    "numpy": (lambda: np.arange(3.0), lambda x: x.__setitem__(0, 5)),
    "numpy of objects": (lambda: np.array([None, 1], dtype=object), lambda x: x.__setitem__(0, "a")),
    "attributes": (lambda: SimpleNamespace(a=1), lambda x: setattr(x, "b", 2)),
    "slots": (Slotted, lambda x: delattr(x, "_Slotted__hidden")),
    "UserDict": (lambda: Items(a=1), lambda x: x.clear()),
    "an error": (lambda: ValueError("a"), lambda x: setattr(x, "args", ("b",))),
    "a default": (lambda: with_default, lambda x: setattr(x, "__defaults__", (2,))),
    "a partial": (lambda: functools.partial(with_default, x=1), lambda x: x.keywords.update(x=2)),
    "a module": (lambda: torch.nn.Linear(1, 1), lambda x: setattr(x, "note", 1)),
}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_what_changed_is_seen_and_put_back(kind: str) -> None:
    make, change = KINDS[kind]
    value = make()
    containers = containers_of(value)
    if kind == "UserDict":  # whose items lie in an attribute of its own
        containers += containers_of(value.data)
    assert containers and all(container.differs(container.found) is None for container in containers)
    change(value)
    changed = [container for container in containers if container.differs(container.found) is not None]
    assert changed
    for container in changed:
        container.put(container.found)
    assert all(container.differs(container.found) is None for container in containers)


def test_a_variable_that_two_functions_share() -> None:
    count = [0]
    total = 0

    def add() -> None:
        nonlocal total
        total += len(count)

    containers = containers_of(add)
    add()
    (cell,) = [container for container in containers if container.differs(container.found) is not None]
    cell.put(cell.found)
    assert total == 0


def test_a_dict_with_an_access_of_its_own_is_not_asked() -> None:
    makes, counts = Makes(a=list, b=dict), Counts(a=1)
    makes.move_to_end("a")
    for value, content in ((makes, {"b": dict, "a": list}), (counts, {"a": 1})):
        (container,) = [own for own in containers_of(value) if own.of is value and own.found.keys() == value.keys()]
        assert list(container.read().items()) == list(content.items()) and container.differs(content) is None
    assert Counts.asked == 0


def unasked() -> Any:
    raise AssertionError("nobody has asked for this")


MAKES = Makes(other=unasked, double=lambda: lambda x: 2 * x)


def test_a_unit_that_reaches_one_makes_only_what_it_asks_for() -> None:
    @fz.unit
    def block(p: Any, x: torch.Tensor) -> torch.Tensor:
        return MAKES["double"](p["w"] * x)

    step = fz.shard_zero3(fz.train_step(lambda p, x: block(p["blocks"][0], x).sum(), fz.sgd(0.1)))

    def rank_main(rank: int) -> torch.Tensor:
        state, _ = step(step.init({"blocks": [{"w": torch.ones(2)}]}), torch.ones(2))
        return fz.gather(state.params)["blocks"][0]["w"]

    for found in run_ranks(rank_main, 2):
        assert found.tolist() == pytest.approx([0.8, 0.8])
