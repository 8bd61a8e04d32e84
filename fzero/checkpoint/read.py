"""Reading a checkpoint: its files held against their checksums, and any slice of any leaf from them."""

from __future__ import annotations

import bisect
import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from fzero.checkpoint.contents import format_named
from fzero.checkpoint.files import CHUNK
from fzero.checkpoint.manifest import DTYPES, DamagedCheckpoint, File, Manifest, Piece
from fzero.formats.formats import ALIGN, Format, entries, zeros


class Reader:
    """The tensors of one checkpoint."""

    def __init__(self, folder: str, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._pieces: dict[tuple[int, int, int], list[tuple[Piece, File]]] = {}
        for file in manifest.files:
            for piece in file.pieces:
                self._pieces.setdefault((piece.item, piece.leaf, piece.part), []).append((piece, file))
        for found in self._pieces.values():
            found.sort(key=lambda pair: pair[0].start)
        self._items = {kept.name: number for number, kept in enumerate(manifest.items)}

    def number(self, name: str) -> int:
        """The number of an item."""
        return self._items[name]

    def format(self, item: int, leaf: int) -> Format | None:
        """What a leaf of a tree is stored as; None where the tree does not have it."""
        kept, path = self.manifest.items[item], self.manifest.leaves[leaf].path
        name = kept.formats.get(leaf)
        form = format_named(name, kept.kind) if name is not None else None
        if name is not None and form is None:
            raise ValueError(
                f"{self.folder}: leaf {path!r} of {kept.name} is stored as {name!r}, which this version of fzero does "
                "not know. Load it with the version that has written it."
            )
        return form

    def read(
        self, item: int, leaf: int, start: int, stop: int, form: Format, into: Sequence[torch.Tensor] | None = None
    ) -> Sequence[torch.Tensor]:
        """The parts of elements [start, stop) of a leaf.

        Args:
            start: a multiple of 64.
            into: for the parts; new ones, of a multiple of 64 elements, by default.

        Raises:
            DamagedCheckpoint: they are not there, and in which file.
        """
        out = zeros(form, -(-(stop - start) // ALIGN) * ALIGN, "cpu") if into is None else into
        for number, (part, target) in enumerate(zip(form.parts, out, strict=True)):
            for piece, file in self._over(item, leaf, number, start, stop):
                low, high = max(start, piece.start), min(stop, piece.stop)
                count, size = entries(form, part, high - low), part.dtype.itemsize
                at = (low - start) // part.every
                self._into(target[at : at + count], file, piece.offset + (low - piece.start) // part.every * size)
        return out

    def tensor(self, item: int) -> torch.Tensor:
        """A tensor that is in no tree."""
        code, shape = self.manifest.items[item].value
        out = torch.zeros(shape, dtype=DTYPES[code], device="cpu")
        for piece, file in self._pieces.get((item, 0, 0), ()):
            self._into(out.reshape(-1), file, piece.offset)
        return out

    def _over(self, item: int, leaf: int, part: int, start: int, stop: int) -> list[tuple[Piece, File]]:
        """The pieces that lie in a range."""
        found = self._pieces.get((item, leaf, part), [])
        first = bisect.bisect_right(found, start, key=lambda pair: pair[0].stop)
        last = bisect.bisect_left(found, stop, key=lambda pair: pair[0].start)
        own, end = found[first:last], start
        for piece, _ in own:
            end = piece.stop if piece.start <= end else end
        if end < stop:
            kept, path = self.manifest.items[item], self.manifest.leaves[leaf].path
            raise DamagedCheckpoint(
                f"{self.folder}: leaf {path!r} of {kept.name} lacks elements {end} to {stop}. Load an older checkpoint."
            )
        return own

    def _into(self, target: torch.Tensor, file: File, offset: int) -> None:
        read_into(os.path.join(self.folder, file.name), target, offset, file.nbytes)

    def verify(self, rank: int, ranks: int) -> None:
        """Holds this rank's share of the files against their sizes and checksums.

        Raises:
            DamagedCheckpoint: one is not what was written.
        """
        for file in self.manifest.files[rank::ranks]:
            path = os.path.join(self.folder, file.name)
            descriptor = _open(path)
            try:
                if os.fstat(descriptor).st_size != file.nbytes:
                    raise _cut(path, file.nbytes, os.fstat(descriptor).st_size)
                got = _digest(descriptor, file.nbytes)
            finally:
                os.close(descriptor)
            if got != file.sha256:
                raise DamagedCheckpoint(
                    f"{path}: got SHA-256 {got[:12]}..., expected {file.sha256[:12]}...: its bytes have changed since "
                    "they were saved. Load an older checkpoint."
                )


def read_into(path: str, target: torch.Tensor, offset: int, expected: int) -> None:
    """Fills a tensor on the CPU with the bytes of a file from an offset on.

    Raises:
        DamagedCheckpoint: the file ends before, or is not there; it should have `expected` bytes.
    """
    view = memoryview(target.view(torch.uint8).numpy())  # type: ignore[arg-type]
    descriptor = _open(path)
    try:
        while view:
            done = os.preadv(descriptor, [view[: 1 << 30]], offset)
            if not done:
                raise _cut(path, expected, offset)
            view, offset = view[done:], offset + done
    finally:
        os.close(descriptor)


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise DamagedCheckpoint(
            f"{path}: got no such file, which the checkpoint names. Bring it back, or load an older checkpoint."
        ) from None


def _cut(path: str, expected: int, got: int) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"{path}: got {got} bytes, expected {expected}. Load an older checkpoint.")


def _digest(descriptor: int, nbytes: int) -> str:
    """The SHA-256 of a file, the next bytes read while some are hashed."""
    digest, buffers = hashlib.sha256(), [bytearray(min(CHUNK, nbytes)) for _ in range(2)]

    def read(number: int) -> memoryview:
        view, done = memoryview(buffers[number % 2]), 0
        while got := os.preadv(descriptor, [view[done:]], number * CHUNK + done):
            done += got
        return view[:done]

    with ThreadPoolExecutor(1, "fzero-load") as reader:
        reading = reader.submit(read, 0)
        for number in range(-(-nbytes // CHUNK)):
            chunk = reading.result()
            reading = reader.submit(read, number + 1)
            digest.update(chunk)
    return digest.hexdigest()
