"""What a power failure may leave of operations on a disk: all of it, for the tests of what is saved."""

from __future__ import annotations

import itertools
import os as real
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

LOST, HALF, WHOLE = 0, 1, 2


class Op(NamedTuple):
    """One operation. `file` is the number of a file or folder, which it keeps when it is renamed."""

    kind: str  # mkdir, create, write, truncate, sync, sync folder, rename, remove
    file: int
    path: str = ""
    other: str = ""
    offset: int = 0
    data: bytes = b""

    @property
    def folder(self) -> str:
        """Whose entries it changes."""
        return real.path.dirname(self.path)


class Disk(NamedTuple):
    """The names that there are, and the bytes of each file; a folder's are None."""

    names: dict[str, int]  # path -> number
    contents: dict[int, bytes | None]

    def files(self) -> dict[str, bytes | None]:
        """What can be reached from the top: path -> content."""
        out: dict[str, bytes | None] = {}
        for path in sorted(self.names):
            parent = real.path.dirname(path)
            if not parent or (parent in out and out[parent] is None):
                out[path] = self.contents[self.names[path]]
        return out


class Recorder:
    """Stands for `os` in a module that writes below a folder, and notes what changes it; paths are relative to it."""

    def __init__(self, top: str) -> None:
        self.top, self.ops = top, list[Op]()
        self._lock, self._numbers = threading.RLock(), itertools.count()
        self._inodes, self._open = dict[int, int](), dict[int, str]()
        self.before = Disk({}, {})
        for folder, _, names in real.walk(top):
            for path in (folder, *[real.path.join(folder, name) for name in names]):
                number = self._number(path)
                content = None if path == folder else Path(path).read_bytes()
                self.before.names[self._relative(path)] = number
                self.before.contents[number] = content

    def __getattr__(self, name: str) -> Any:
        return getattr(real, name)

    def _relative(self, path: str) -> str:
        return real.path.relpath(path, real.path.dirname(self.top))

    def _number(self, path: str) -> int:
        inode = real.stat(path).st_ino
        if inode not in self._inodes:
            self._inodes[inode] = next(self._numbers)
        return self._inodes[inode]

    def _note(self, kind: str, path: str, **more: Any) -> None:
        self.ops.append(Op(kind, self._number(path), self._relative(path), **more))

    def mkdir(self, path: str) -> None:
        with self._lock:
            real.mkdir(path)
            self._note("mkdir", path)

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        with self._lock:
            new = not real.path.lexists(path)
            descriptor = real.open(path, flags, mode)
            self._open[descriptor] = path
            if new or flags & real.O_TRUNC:
                self._note("create" if new else "truncate", path)
            return descriptor

    def close(self, descriptor: int) -> None:
        with self._lock:
            del self._open[descriptor]
            real.close(descriptor)

    def ftruncate(self, descriptor: int, size: int) -> None:
        assert size == 0
        with self._lock:
            real.ftruncate(descriptor, size)
            self._note("truncate", self._open[descriptor])

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        with self._lock:
            done = real.pwrite(descriptor, data, offset)
            self._note("write", self._open[descriptor], offset=offset, data=bytes(data[:done]))
            return done

    def fsync(self, descriptor: int) -> None:
        with self._lock:
            path = self._open[descriptor]
            self._note("sync folder" if real.path.isdir(path) else "sync", path)

    def rename(self, old: str, new: str) -> None:
        with self._lock:
            self._note("rename", old, other=self._relative(new))
            real.rename(old, new)

    def unlink(self, path: str) -> None:
        with self._lock:
            if real.path.lexists(path):
                self._note("remove", path)
                del self._inodes[real.stat(path).st_ino]
            real.unlink(path)


def crashes(before: Disk, ops: list[Op]) -> Iterator[dict[str, bytes | None]]:
    """All that may lie on the disk if the power goes after any of the operations, each once.

    What was not made durable got there, or was lost; a write also by half.
    """
    seen = set()
    for length in range(len(ops) + 1):
        done = ops[:length]
        loose = [i for i in range(length) if not _durable(done, i)]
        fates = [(LOST, HALF, WHOLE) if done[i].kind == "write" else (LOST, WHOLE) for i in loose]
        for fate in itertools.product(*fates):
            left = replayed(before, done, dict(zip(loose, fate, strict=True))).files()
            key = tuple(left.items())
            if key not in seen:
                seen.add(key)
                yield left


def _durable(done: list[Op], at: int) -> bool:
    """Whether what an operation changed was made durable after it: bytes of a file, or names in a folder."""
    op = done[at]
    if op.kind in ("write", "truncate"):
        return any(later.kind == "sync" and later.file == op.file for later in done[at:])
    if op.kind in ("sync", "sync folder"):
        return True
    return any(later.kind == "sync folder" and later.path == op.folder for later in done[at:])


def replayed(before: Disk, done: list[Op], fate: dict[int, int]) -> Disk:
    names, contents = dict(before.names), dict(before.contents)
    for i, op in enumerate(done):
        got = fate.get(i, WHOLE)
        if op.kind in ("mkdir", "create"):
            contents[op.file] = None if op.kind == "mkdir" else b""
        if got == LOST:
            continue
        if op.kind in ("mkdir", "create"):
            names[op.path] = op.file
        elif op.kind == "truncate":
            contents[op.file] = b""
        elif op.kind == "write":
            old, data = contents[op.file] or b"", op.data[: len(op.data) * got // WHOLE]
            old = old.ljust(op.offset, b"\0") if data else old
            contents[op.file] = old[: op.offset] + data + old[op.offset + len(data) :]
        elif op.kind == "rename":
            for path in [path for path in names if f"{path}/".startswith(f"{op.path}/")]:
                names[op.other + path[len(op.path) :]] = names.pop(path)
            names[op.other] = op.file
        elif op.kind == "remove":
            names.pop(op.path, None)
    return Disk(names, contents)


def build(left: dict[str, bytes | None], top: str) -> None:
    """Makes it below a folder."""
    for path, content in left.items():
        at = real.path.join(top, path)
        if content is None:
            real.mkdir(at)
        else:
            with open(at, "wb") as file:
                file.write(content)
