"""What is kept of the calls of each kind: of the last ones only, as there may be a kind for each number of a step."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Kept(OrderedDict[K, V]):
    """Values of the `most` names that were set, or got by `get`, last."""

    most = 1024

    def get(self, name: K, default: Any = None) -> V | Any:
        if name in self:
            self.move_to_end(name)
        return super().get(name, default)

    def __setitem__(self, name: K, value: V) -> None:
        super().__setitem__(name, value)
        while len(self) > self.most:
            self.popitem(last=False)
