"""A folder behind a URL, such as s3://bucket/run, in any filesystem that fsspec knows.

Of such a filesystem nothing is asked but that a file appears whole as its writer closes it, or is not named before, and
that a file takes another's place at once. None can be locked: a writer leaves its mark and looks at the end whether it
is still the last to have begun.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from fzero.checkpoint.files import LOCK, NAME, Folder, is_url, not_ours

_BLOCK, _BLOCKS = 16 << 20, 8000  # bytes that are sent at once; of an upload to S3, which takes 10,000
_OURS = re.compile(rb"([0-9a-f]{12})?")  # a token, or the mark of what is being removed


class Remote(Folder):
    """A folder in a filesystem of fsspec."""

    guarded = False

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs
            from fsspec.implementations.cached import CachingFileSystem
        except ImportError:
            raise ImportError(f"{url}: fsspec is not installed. Install it, or give a local path.") from None
        self.path = url
        try:
            fs, root = url_to_fs(url)
        except Exception as error:
            kind = ImportError if isinstance(error, ImportError) else ValueError
            raise kind(f"{url}: fsspec has no filesystem for it: {error}. Give another path.") from error
        if isinstance(fs, CachingFileSystem):
            raise ValueError(f"{url}: got a cache, which may answer with older files. Give the URL behind it.")
        self._fs: Any = fs
        self._root = str(root)

    def _at(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}" if name else self._root

    def child(self, name: str) -> Remote:
        return Remote(f"{self.path}/{name}")

    @contextlib.contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Whatever fails inside is an OSError that names the file."""
        try:
            yield
        except OSError as error:
            if self.path in str(error):
                raise
            at = f"{self.path}/{name}" if name else self.path
            kind = type(error) if type(error) in (FileNotFoundError, PermissionError) else OSError
            raise kind(f"{at}: {error or type(error).__name__}") from error
        except Exception as error:  # of the libraries behind fsspec
            raise OSError(f"{self.path}/{name}: {type(error).__name__}: {error}") from error

    def make(self) -> None:
        with self._named(""):
            self._fs.makedirs(self._root, exist_ok=True)

    def names(self) -> list[str]:
        return [name for name, _ in self._listed()]

    def folders(self) -> list[str]:
        return [name for name, kind in self._listed() if kind != "file"]

    def _listed(self) -> list[tuple[str, str]]:
        """What lies in it, each by its name and kind."""
        with self._named(""), contextlib.suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            found = [(own["name"].rstrip("/"), own["type"]) for own in self._fs.ls(self._root, detail=True)]
            return [(path.rpartition("/")[2], kind) for path, kind in found if path != self._root.rstrip("/")]
        return []

    def exists(self, name: str = "") -> bool:
        with self._named(name):
            self._fs.invalidate_cache()
            return self._fs.exists(self._at(name))

    def size(self, name: str) -> int:
        with self._named(name):
            self._fs.invalidate_cache()
            return self._fs.size(self._at(name))

    def read(self, name: str) -> bytes:
        with self._named(name):
            return self._fs.cat_file(self._at(name))

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        with self._named(name):
            data = self._fs.cat_file(self._at(name), start=offset, end=offset + len(target))
        target[: len(data)] = data
        return len(data)

    @contextlib.contextmanager
    def writing(self, name: str, nbytes: int) -> Iterator[Callable[[memoryview], None]]:
        with self._named(name):
            file = self._fs.open(self._at(name), "wb", block_size=max(_BLOCK, nbytes // _BLOCKS))

        def put(data: memoryview) -> None:
            with self._named(name):
                file.write(data)

        try:
            yield put
        except BaseException:
            with contextlib.suppress(Exception):  # what is there of it is named by no manifest
                file.close()
            raise
        with self._named(name):
            file.close()

    def replace(self, name: str, content: bytes) -> None:
        new = self._at(f"{name}.{uuid.uuid4().hex[:12]}.new")  # another run may be at it, too
        with self._named(name):
            self._fs.pipe_file(new, content)
            self._fs.mv(new, self._at(name))

    def remove(self, name: str) -> None:
        with self._named(name), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._at(name))

    @contextlib.contextmanager
    def only_writer(self, token: str = "") -> Iterator[Callable[[], None]]:
        def mine() -> bool:
            with contextlib.suppress(FileNotFoundError):  # who began later has ended
                return self.read(LOCK) == token.encode()
            return False

        def still() -> None:
            if not mine():
                raise BlockingIOError(
                    f"{self.path}: another run has begun to save there meanwhile. Save into a folder of your own."
                )

        with contextlib.suppress(FileNotFoundError):
            if not _OURS.fullmatch(self.read(LOCK)):
                raise not_ours(f"{self.path}/{LOCK}")
        with self._named(LOCK):
            self._fs.pipe_file(self._at(LOCK), token.encode())
        yield still
        if mine():
            self.remove(LOCK)

    def discard(self, name: str) -> None:
        own = self.child(name)
        with own._named(""):
            self._fs.pipe_file(own._at(LOCK), b"")  # with it and without a manifest it is no checkpoint
            for each in (NAME, *(each for each in own.names() if each != LOCK), LOCK):
                own.remove(each)
            with contextlib.suppress(FileNotFoundError, NotImplementedError):
                self._fs.rm(own._root, recursive=True)  # where folders are there without files

    def tidy(self) -> None:
        pass


def folder_at(path: str) -> Folder:
    """The folder of a path."""
    return Remote(path) if is_url(path) else Folder(path)
