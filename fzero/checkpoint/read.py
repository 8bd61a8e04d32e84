"""Reading a checkpoint: any slice of any leaf, of which each chunk is held against its checksum before it is used."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch

from fzero.base import pytree
from fzero.checkpoint import chunks
from fzero.checkpoint.contents import Unnamed, built, format_named
from fzero.checkpoint.files import Folder
from fzero.checkpoint.fill import Files
from fzero.checkpoint.manifest import (
    DTYPES,
    OF_TENSORS,
    DamagedCheckpoint,
    File,
    Piece,
    as_filed,
    read_manifest,
    readable,
)
from fzero.checkpoint.remote import folder_at
from fzero.formats.formats import ALIGN, Format, entries, zeros
from fzero.state.sliced import Sliced
from fzero.table.rows import Leaf


class _Place(NamedTuple):
    """Where a piece lies: its file, and the number of its first checksum there."""

    piece: Piece
    file: File
    first: int


class Checkpoint(Files):
    """A checkpoint as the origin of a state; its tensors are read by threads of its own until `close`."""

    call, anew = "fz.load(path, step, lossy=True)", "fz.load(path, step, params_only=True)"

    def __init__(self, folder: str) -> None:
        self.place, self.manifest = folder, (manifest := read_manifest(folder))
        self.said, self.seed, self.extras = f"{folder} {manifest.token}", manifest.seed, manifest.extras
        self.kinds = {kept.name: kept.kind for kept in manifest.items}
        self._items = {kept.name: number for number, kept in enumerate(manifest.items)}
        self._leaves = {leaf.path: number for number, leaf in enumerate(manifest.leaves)}
        self._there, self._reading = folder_at(folder), list[Future[None]]()
        self._pool = ThreadPoolExecutor(chunks.workers() + 1, "fzero-load")  # one waits for the disk
        self._places: dict[tuple[int, int, int, int], list[_Place]] = {}
        for file in manifest.files:
            first = 1
            for piece in file.pieces:
                where = piece.item, piece.leaf, piece.part, piece.rank
                self._places.setdefault(where, []).append(_Place(piece, file, first))
                first += chunks.count(piece.nbytes)
        for found in self._places.values():
            found.sort(key=lambda own: own.piece.start)

    @property
    def leaves(self) -> list[Leaf]:
        return [(leaf.path, leaf.shape, DTYPES[leaf.dtype]) for leaf in self.manifest.leaves]

    def structure(self) -> pytree.Spec:
        try:
            return built(self.manifest.structure)
        except Unnamed as kind:
            raise ValueError(
                f"{self.place}: its params are in a container of kind {kind}, which no checkpoint can make. Say "
                "fz.load(path, step, like=params), with params of that kind as step.init takes them."
            ) from None

    def count(self, paths: Sequence[str]) -> int:
        return self.manifest.step

    def format(self, name: str, path: str) -> Format | None:
        if path not in self._leaves:
            return None
        kept = self.manifest.items[self._items[name]]
        stored = kept.formats.get(self._leaves[path])
        form = format_named(stored, kept.kind) if stored is not None else None
        if stored is not None and form is None:
            raise ValueError(
                f"{self.place}: leaf {path!r} of {name} is stored as {stored!r}, which this version of fzero does not "
                "know. Load it with the version that has written it."
            )
        return form

    def sliced(self, name: str, path: str) -> Sliced | None:
        return self.manifest.leaves[self._leaves[path]].sliced

    def read(
        self, name: str, path: str, start: int, stop: int, into: Sequence[torch.Tensor] | None, rank: int = 0
    ) -> Sequence[torch.Tensor]:
        form = self.format(name, path)
        assert form is not None
        out = zeros(form, -(-(stop - start) // ALIGN) * ALIGN, "cpu") if into is None else into
        for number, (part, target) in enumerate(zip(form.parts, out, strict=True)):
            for place in self._over(name, path, number, rank, start, stop):
                low, high = max(start, place.piece.start), min(stop, place.piece.stop)
                count, size = entries(form, part, high - low), part.dtype.itemsize
                at = (low - start) // part.every
                self._into(target[at : at + count], place, (low - place.piece.start) // part.every * size)
        if into is None:
            self.wait()
        return out

    def scale(self, name: str) -> float:
        return self.manifest.items[self._items[name]].scale

    def value(self, name: str) -> object:
        number = self._items[name]
        value = self.manifest.items[number].value
        if self.kinds[name] != "tensor":
            return pytree.Count.of(value) if self.kinds[name] == "count" else value
        code, shape = value
        out = torch.empty(shape, dtype=OF_TENSORS[code], device="cpu")
        as_filed(out).zero_()
        for place in self._places.get((number, 0, 0, 0), ()):
            self._into(as_filed(out).reshape(-1), place, 0)
        self.wait()
        return out

    def wait(self) -> None:
        reading, self._reading = self._reading, []
        for each in reading:
            each.result()

    def close(self) -> None:
        """Ends the threads, whatever they are at."""
        self._pool.shutdown(cancel_futures=True)

    def _over(self, name: str, path: str, part: int, rank: int, start: int, stop: int) -> list[_Place]:
        """The pieces that lie in a range."""
        found = self._places.get((self._items[name], self._leaves[path], part, rank), [])
        first = bisect.bisect_right(found, start, key=lambda own: own.piece.stop)
        last = bisect.bisect_left(found, stop, key=lambda own: own.piece.start)
        out, end = found[first:last], start
        for piece, _, _ in out:
            end = piece.stop if piece.start <= end else end
        if end < stop:
            raise DamagedCheckpoint(
                f"{self.place}: leaf {path!r} of {name} lacks elements {end} to {stop}. Load an older checkpoint."
            )
        return out

    def _into(self, target: torch.Tensor, place: _Place, begin: int) -> None:
        """Begins to fill a tensor with a piece's bytes from `begin` on."""
        view = memoryview(target.view(torch.uint8).numpy())  # type: ignore[arg-type]
        for number in range(begin // chunks.CHUNK, chunks.count(begin + len(view))):
            low, high = max(begin, number * chunks.CHUNK), min(begin + len(view), (number + 1) * chunks.CHUNK)
            job = self._pool.submit(self._chunk, view[low - begin : high - begin], place, number, low, high)
            self._reading.append(job)

    def _chunk(self, target: memoryview, place: _Place, number: int, low: int, high: int) -> None:
        """Fills memory with bytes [low, high) of a piece, which lie in one chunk of it."""
        piece, file, first = place
        start, stop = number * chunks.CHUNK, min((number + 1) * chunks.CHUNK, piece.nbytes)
        whole = target if (start, stop) == (low, high) else memoryview(bytearray(stop - start))
        self._read(file, piece.offset + start, whole, file.sha256[first + number])
        if whole is not target:
            target[:] = whole[low - start : high - start]

    def _read(self, file: File, offset: int, target: memoryview, sha256: str) -> None:
        with self._needed(file):
            got = self._there.read_into(file.name, offset, target)
        if got < len(target):
            raise self._cut(file, offset + got)
        if (own := chunks.digest(target)) != sha256:
            raise DamagedCheckpoint(
                f"{self.place}/{file.name}: bytes {offset} to {offset + len(target)} have SHA-256 {own[:12]}..., "
                f"expected {sha256[:12]}...: they have changed since they were saved. Load an older checkpoint."
            )

    @contextlib.contextmanager
    def _needed(self, file: File) -> Iterator[None]:
        path = f"{self.place}/{file.name}"
        try:
            with readable(path):
                yield
        except FileNotFoundError:
            raise DamagedCheckpoint(
                f"{path}: got no such file, which the checkpoint names. Bring it back, or load an older checkpoint. If "
                "another run has saved there meanwhile, load again."
            ) from None

    def _cut(self, file: File, got: int) -> DamagedCheckpoint:
        return DamagedCheckpoint(
            f"{self.place}/{file.name}: got {got} bytes, expected {file.nbytes}. Load an older checkpoint."
        )

    def check(self, number: int, count: int) -> None:
        for file in self.manifest.files[number::count]:  # their sizes, and what stands before the data
            header = min([piece.offset for piece in file.pieces], default=file.nbytes)
            self._read(file, 0, memoryview(bytearray(header)), file.sha256[0])
            with self._needed(file):
                size = self._there.size(file.name)
            if size != file.nbytes:
                raise self._cut(file, size)


def is_whole(folder: Folder) -> bool:
    """Whether a checkpoint has its manifest and files of the right sizes; their bytes are not looked at."""
    try:
        files = read_manifest(folder.path).files
        return all(folder.size(file.name) == file.nbytes for file in files)
    except (OSError, ValueError):
        return False
