"""How torch's checkpoints reach the disk: files of names that none there has, then the metadata that name them."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
from collections.abc import Iterator

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import SavePlan

from fzero.checkpoint import files
from fzero.compat.planners import Reader

_AT_ONCE = 1 << 20  # bytes that are written at a time; torch.save writes many small pieces
_OURS = re.compile(r"__\d+_[0-9a-f]{12}_\d+\.distcp")
_ANY = re.compile(r"__\d+_([0-9a-f]{12}_)?\d+\.distcp|__\d+\.metadata|\.metadata\.(tmp|new)")


class Writer(FileSystemWriter):
    """Torch's writer, but that nothing it does touches what lies there before the metadata take their place.

    Args:
        token: in the names of this save's files.
    """

    def __init__(self, folder: str, token: str) -> None:
        # its own way to make files durable is for those of the system, and for all of them where it finds no other
        super().__init__(folder, single_file_per_rank=True, sync_files=False, thread_count=1)
        self._folder, self._token = folder, token
        self.fs = self._files = _Durable(folder)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        out = []
        for plan in super().prepare_global_plan(plans):
            named = dataclasses.replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{self._token}_")
            out.append(dataclasses.replace(plan, storage_data=named))
        return out

    def drop(self) -> None:
        """Removes what this rank has written, of a save that has failed."""
        for name in self._files.made:
            files.Local(self._folder).remove(name)


class _Durable(FileSystem):
    """A folder, of which torch sees no checkpoint that is there.

    Attributes:
        made: the names of the files with data.
    """

    def __init__(self, folder: str) -> None:
        self._folder, self._metadata, self.made = folder, io.BytesIO(), list[str]()

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if not os.fspath(path).endswith(".distcp"):
            yield self._metadata  # which `rename` puts into its place
            return
        descriptor = files.create(os.fspath(path))
        self.made.append(os.path.basename(path))
        stream = _Stream(descriptor)
        try:
            with files.naming(os.fspath(path)):
                yield stream
                stream.finish()
            files.sync_folder(self._folder)
        finally:
            os.close(descriptor)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        files.replace_file(self._folder, os.path.basename(new_path), self._metadata.getvalue())

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return False

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        pass

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        pass


class _Stream(io.BufferedIOBase):
    """A new file that is written from its begin to its end.

    What fails is raised by the next `tell`, and until then what is written goes nowhere: torch's own writer would hide
    it behind an error about its position.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._at, self._buffer = descriptor, 0, bytearray()
        self._error: OSError | None = None

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        if self._error is not None:
            raise self._error
        return self._at + len(self._buffer)

    def write(self, data: bytes | bytearray | memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        view = memoryview(data).cast("B")
        if len(self._buffer) + len(view) > _AT_ONCE:
            self._drain()
        if len(view) > _AT_ONCE:
            self._put(view)
        else:
            self._buffer += view
        return len(view)

    def _drain(self) -> None:
        buffer, self._buffer = self._buffer, bytearray()
        self._put(memoryview(buffer))

    def _put(self, view: memoryview) -> None:
        if self._error is None:
            try:
                files.write(self._descriptor, view, self._at)
            except OSError as error:
                self._error = error
        self._at += len(view)

    def finish(self) -> None:
        """Makes it durable."""
        self._drain()
        self.tell()
        files.sync(self._descriptor)


def clear(folder: str, begun: bool) -> None:
    """Removes files with data that no metadata name: all of them once a save has ended.

    Args:
        begun: only those that `save_dcp` has left there.
    """
    there = files.Local(folder)
    try:
        known = {str(own.relative_path) for own in Reader(folder).read_metadata().storage_data.values()}
    except FileNotFoundError:
        known = set[str]()
    except Exception:  # others' metadata, of which nothing can be said
        return
    for name in there.names():
        if (_OURS if begun else _ANY).fullmatch(name) and name not in known:
            there.remove(name)
