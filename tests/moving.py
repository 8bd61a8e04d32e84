"""Counts what goes to and from other memories while steps run, and how much lies there at most."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from fzero.stores.away import Away, Wait
from fzero.stores.file import File
from fzero.stores.memories import DiskBuffer, HostBuffer


class Counts:
    """Bytes of all ranks: by (memory, direction), those that lie in each memory, and the most that did."""

    def __init__(self) -> None:
        self.moved: Counter[tuple[str, int]] = Counter()
        self.there: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self._holders: Counter[int] = Counter()
        self._given: set[int] = set()
        self._lock = threading.RLock()  # a buffer may be collected anywhere

    def clear(self) -> None:
        """Begins anew with what lies there now."""
        with self._lock:
            self.moved.clear()
            self.most = Counter(self.there)

    def of(self, memory: str, ranks: int = 1) -> tuple[int, int]:
        """What a rank moved on average: to the device, and from it."""
        both = self.moved[memory, 0], self.moved[memory, 1]
        assert not any(each % ranks for each in both)
        return both[0] // ranks, both[1] // ranks

    def add(self, memory: str, direction: int, nbytes: int) -> None:
        with self._lock:
            self.moved[memory, direction] += nbytes

    def given(self, place: int, nbytes: int) -> None:
        """Notes that a file is another's now."""
        self.lies("disk", place, nbytes, -1)
        self._given.add(place)

    def gone(self, memory: str, place: int, nbytes: int) -> None:
        """Notes that a buffer is gone."""
        if memory == "disk" and place in self._given:
            self._given.discard(place)
        else:
            self.lies(memory, place, nbytes, -1)

    def lies(self, memory: str, place: int, nbytes: int, more: int) -> None:
        """Notes that a buffer with a place in a memory was made, or is gone: several may have one."""
        with self._lock:
            if more > 0:
                self.there[memory] += 0 if self._holders[place] else nbytes
            self._holders[place] += more
            if more < 0:
                self.there[memory] -= 0 if self._holders[place] else nbytes
            self.most[memory] = max(self.most[memory], self.there[memory])


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """Every buffer that is read, opened or made inside is counted: those of the disk whenever they are opened."""
    counts = Counts()
    plain = {kind: (kind._start_read, kind.of) for kind in (HostBuffer, DiskBuffer)}
    host_again, disk_open, give = HostBuffer.again, DiskBuffer._start_open, File.give_away

    def begun(kind: type[HostBuffer | DiskBuffer]) -> Any:
        begin: Callable[..., None] = kind.__init__

        def init(self: HostBuffer | DiskBuffer, *args: Any) -> None:
            begin(self, *args)
            place = self.tensor.data_ptr() if isinstance(self, HostBuffer) else id(self.file)
            counts.lies(_memory_of(self), place, self.nbytes, 1)
            weakref.finalize(self, counts.gone, _memory_of(self), place, self.nbytes)

        return init

    def read(self: Any, target: torch.Tensor | None) -> Wait:
        counts.add(_memory_of(self), 0, self.nbytes)
        return plain[type(self)][0](self, target)

    def opened(self: DiskBuffer, takes: bool) -> Wait:
        counts.add("disk", 0, self.nbytes)
        return disk_open(self, takes)

    def made(kind: type[HostBuffer | DiskBuffer]) -> Any:
        def of(tensor: torch.Tensor, *rest: Any) -> Away:
            counts.add("host" if kind is HostBuffer else "disk", 1, tensor.numel() * tensor.element_size())
            return plain[kind][1](tensor, *rest)

        return staticmethod(of)

    def again(self: HostBuffer, tensor: torch.Tensor, opened: bool, takes: bool) -> HostBuffer:
        counts.add("host", 1, 0 if opened else self.nbytes)
        return host_again(self, tensor, opened, takes)

    def give_away(self: File) -> str | None:
        path = give(self)
        if path is not None:
            counts.given(id(self), self.nbytes)
        return path

    with contextlib.ExitStack() as stack:
        patches: list[tuple[Any, str, Any]] = [(HostBuffer, "again", again), (DiskBuffer, "_start_open", opened)]
        patches.append((File, "give_away", give_away))
        for kind in plain:
            patches += [(kind, "_start_read", read), (kind, "of", made(kind)), (kind, "__init__", begun(kind))]
        for of, name, value in patches:
            stack.enter_context(mock.patch.object(of, name, value))
        yield counts


def _memory_of(buffer: Away) -> str:
    return "host" if isinstance(buffer, HostBuffer) else "disk"
