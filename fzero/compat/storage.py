"""How torch's checkpoints reach the disk: files of names that none there has, then the metadata that name them."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
from collections.abc import Callable, Iterator

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import SavePlan

from fzero.checkpoint.files import Folder
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
        super().__init__(folder, single_file_per_rank=True, sync_files=False, thread_count=1)
        self._token = token
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
            self._files.folder.remove(name)


class _Durable(FileSystem):
    """A folder, of which torch sees no checkpoint that is there.

    Attributes:
        made: the names of the files with data.
    """

    def __init__(self, folder: str) -> None:
        self.folder, self._metadata, self.made = Folder(folder), io.BytesIO(), list[str]()

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if not os.fspath(path).endswith(".distcp"):
            yield self._metadata  # which `rename` puts into its place
            return
        self.made.append(os.path.basename(path))
        with self.folder.writing(self.made[-1], 0) as put:
            stream = _Stream(put)
            try:
                yield stream
                stream.drain()
            except Exception:
                if stream.error is not None:  # torch hides it behind one about its position
                    raise stream.error from None
                raise

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self.folder.replace(os.path.basename(new_path), self._metadata.getvalue())

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return False


class _Stream(io.BufferedIOBase):
    """What torch writes into a new file in many small pieces, and flushes and closes at any time."""

    def __init__(self, put: Callable[[memoryview], None]) -> None:
        self._put, self._buffer, self._at = put, bytearray(), 0
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def write(self, data: bytes) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._buffer += data
        self._at += len(data)
        if len(self._buffer) > _AT_ONCE:
            self.drain()
        return len(data)

    def drain(self) -> None:
        buffer, self._buffer = self._buffer, bytearray()
        try:
            self._put(memoryview(buffer))
        except OSError as error:
            self.error = error
            raise


def clear(folder: Folder, begun: bool) -> None:
    """Removes files with data that no metadata name: all of them once a save has ended.

    Args:
        begun: only those that `save_dcp` has left there.
    """
    try:
        known = {str(own.relative_path) for own in Reader(folder.path).read_metadata().storage_data.values()}
    except FileNotFoundError:
        known = set[str]()
    except Exception:  # others' metadata, of which nothing can be said
        return
    for name in folder.names():
        if (_OURS if begun else _ANY).fullmatch(name) and name not in known:
            folder.remove(name)
