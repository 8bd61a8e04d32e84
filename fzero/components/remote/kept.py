"""What is kept of the calls of each kind: of the last ones only, as there may be a kind for each number of a step."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")
MOST = 1024


class Kept(Generic[K, V]):
    """Values by name, of the names that were asked for last.

    Args:
        most: how many.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._values: OrderedDict[K, V] = OrderedDict()

    def get(self, name: K) -> V | None:
        value = self._values.get(name)
        if value is not None:
            self._values.move_to_end(name)
        return value

    def put(self, name: K, value: V) -> None:
        self._values[name] = value
        while len(self._values) > self._most:
            self._values.popitem(last=False)

    def drop(self, name: K) -> None:
        self._values.pop(name, None)

    def __len__(self) -> int:
        return len(self._values)
