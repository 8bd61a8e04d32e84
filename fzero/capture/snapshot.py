"""What containers held, to see at each call whether they still hold it."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.hooks import RemovableHandle

from fzero.capture.containers import Container

_MISSING = object()


class Snapshot:
    """What containers held, to be compared by identity: a few microseconds for ten modules.

    Args:
        vacant: a module's dicts of hooks that are empty; torch counts the hooks that are put into any.
    """

    __slots__ = (
        *("_dicts", "_hooks", "_keys", "_lengths", "_lists", "_names", "_ordered", "_others", "_owners", "_vacant"),
        "_values",
    )

    def __init__(self, containers: Sequence[Container], vacant: Sequence[object]) -> None:
        raw = [own for container in containers if (own := container.raw) is not None]
        self._dicts = [own for own in raw if isinstance(own, dict)]
        self._lists = [own for own in raw if not isinstance(own, dict)]
        self._others = [container for container in containers if container.raw is None]
        self._vacant, self._hooks = vacant, RemovableHandle.next_id
        self._lengths = self._count()
        self._owners, self._names = [], []
        for container in containers:
            if isinstance(container.raw, dict):
                self._names += container.found
                self._owners += [container.raw] * len(container.found)
        self._values = [*self._read()]
        # of what users fill the order counts too
        self._ordered = [c.of for c in containers if isinstance(c.raw, dict) and c.raw is c.of]
        self._keys = [*itertools.chain.from_iterable(map(dict.keys, self._ordered))]

    def _count(self) -> list[int]:
        return [*map(dict.__len__, self._dicts), *map(len, self._lists)]

    def _read(self) -> Iterator[Any]:
        """All values; not by iterating, which would touch what every module has and what is none of its content."""
        found = map(dict.get, self._owners, self._names, itertools.repeat(_MISSING))
        return itertools.chain(found, itertools.chain.from_iterable(self._lists))

    def holds(self) -> bool:
        """Whether everything is as it was."""
        return (
            (self._hooks == RemovableHandle.next_id or self._still_vacant())
            and self._count() == self._lengths
            and all(map(operator.is_, self._read(), self._values))
            and all(map(operator.is_, itertools.chain.from_iterable(self._ordered), self._keys))
            and all(container.differs(container.found) is None for container in self._others)
        )

    def _still_vacant(self) -> bool:
        self._hooks = RemovableHandle.next_id
        return not any(self._vacant)
