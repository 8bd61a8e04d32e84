"""Safetensors files: which tensor lies where in those that are read, each opened once, and in those to be written."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fzero.checkpoint.chunks import bytes_of
from fzero.checkpoint.files import read_at
from fzero.checkpoint.manifest import CODES, DTYPES, DamagedCheckpoint, header_of

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
Tensor = tuple[str, torch.dtype, tuple[int, ...]]  # its name, dtype and shape
_LONGEST = 100_000_000  # bytes of a header, the format's own limit


class Entry(NamedTuple):
    """A tensor in a file; the dtype is the format's own word, the offset that of its bytes in the file."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def entries_of(path: str, descriptor: int) -> list[Entry]:
    """The tensors of an open file, in its order."""
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if size < 8 or length > min(size - 8, _LONGEST):
        raise DamagedCheckpoint(f"{path}: got no whole safetensors file: {size} bytes end within its header.")
    text = os.pread(descriptor, length, 8)
    try:
        said = json.loads(text)
        out = [_entry(path, name, tensor, 8 + length) for name, tensor in said.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{path}: got a header that is no safetensors file's: {error!r}.") from None
    end = 8 + length
    for own in sorted(out, key=lambda own: own.offset):
        dtype = DTYPES.get(own.dtype)
        expected = math.prod(own.shape) * dtype.itemsize if dtype is not None else own.nbytes
        if own.offset != end or own.nbytes != expected:
            raise DamagedCheckpoint(
                f"{path}: tensor {own.name!r} has bytes {own.offset} to {own.offset + own.nbytes}, expected {expected} "
                f"of them from {end} on."
            )
        end += own.nbytes
    if end != size:
        raise DamagedCheckpoint(f"{path}: got {size} bytes, expected {end}, where its last tensor ends.")
    return out


def _entry(path: str, name: str, tensor: dict[str, list[int]], start: int) -> Entry:
    begin, end = tensor["data_offsets"]
    return Entry(name, path, str(tensor["dtype"]), tuple(map(int, tensor["shape"])), start + begin, end - begin)


@dataclass(frozen=True)
class Planned:
    """A file to be written: its name in the folder, its header, its tensors, its size in bytes."""

    name: str
    header: bytes
    entries: tuple[Entry, ...]
    nbytes: int


def planned(folder: str, single: str | None, tensors: Sequence[Tensor], most: int) -> list[Planned]:
    """The files for some tensors, none much longer than `most` bytes.

    Args:
        single: the name of the one file; None in a folder that loaders of models read.
    """
    lots: list[list[Tensor]] = [[]]
    room = most
    for own in tensors:
        nbytes = math.prod(own[2]) * own[1].itemsize
        if single is None and lots[-1] and nbytes > room:
            lots.append([])
            room = most
        lots[-1].append(own)
        room -= nbytes
    names = [single or SINGLE]
    if len(lots) > 1:
        names = [f"model-{number:05d}-of-{len(lots):05d}.safetensors" for number in range(1, len(lots) + 1)]
    return [_planned(folder, name, lot) for name, lot in zip(names, lots, strict=True)]


def index_of(files: Sequence[Planned]) -> bytes:
    """The text of the index of several files."""
    total = sum(own.nbytes for file in files for own in file.entries)
    places = {own.name: file.name for file in files for own in file.entries}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()


def _planned(folder: str, name: str, tensors: Sequence[Tensor]) -> Planned:
    said: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset, places = 0, list[Entry]()
    # the format's own writer puts wide dtypes first, so that every tensor is aligned to its own
    for own, dtype, shape in sorted(tensors, key=lambda tensor: -tensor[1].itemsize):
        nbytes = math.prod(shape) * dtype.itemsize
        said[own] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        places.append(Entry(own, os.path.join(folder, name), CODES[dtype], shape, offset, nbytes))
        offset += nbytes
    header = header_of(said)
    moved = tuple(own._replace(offset=own.offset + len(header)) for own in places)
    return Planned(name, header, moved, len(header) + offset)


_SOME = 64  # bytes of a tensor that stand for it


class _File(NamedTuple):
    descriptor: int
    stat: os.stat_result


class Opened:
    """The files that some paths stand for, from `open` until `close`."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths, self._files = paths, dict[str, _File]()
        self.entries: dict[str, Entry] = {}  # the tensors by name, in the order of the files

    def open(self) -> None:
        """Opens all of them."""
        models = [_files_of(path) for path in self._paths]
        for path in [path for files, *_ in models for path in files]:
            self._open(path)
        found = {name: own.file for name, own in self.entries.items()}
        for index, name, path in [(index, *place) for _, index, places in models for place in places.items()]:
            if found.get(name) != path:
                where = f", but {found[name]} has it" if name in found else ""
                raise DamagedCheckpoint(
                    f"{index}: names a tensor {name!r} in {os.path.basename(path)}, and it is not there{where}. Bring "
                    "the files that belong to this index."
                )

    def _open(self, path: str) -> None:
        if path in self._files:
            raise ValueError(f"{path}: got the file twice, expected each once.")
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise FileNotFoundError(f"{path}: got no such file, expected a safetensors file.") from None
        self._files[path] = _File(descriptor, os.fstat(descriptor))
        try:
            own = entries_of(path, descriptor)
        except IsADirectoryError:
            raise DamagedCheckpoint(f"{path}: got a folder, expected a safetensors file.") from None
        for entry in own:
            if entry.name in self.entries:
                raise ValueError(
                    f"{path}: has a tensor {entry.name!r}, as {self.entries[entry.name].file} has; expected each in "
                    "one file. Give the files of one model."
                )
            self.entries[entry.name] = entry

    def said(self) -> str:
        """A text by which ranks see that they have opened one model, also where each node has a copy of the files.

        Neither inodes nor times are alike then, and all bytes are too many to compare: it is the headers and some of
        the bytes of each tensor, of which a training changes most.
        """
        lines = list[str]()
        for own in self.entries.values():
            descriptor = self._files[own.file].descriptor
            some = [os.pread(descriptor, min(_SOME, own.nbytes), own.offset + at) for at in _spots(own.nbytes)]
            content = hashlib.blake2b(b"".join(some), digest_size=8).hexdigest()
            words = f"{own.dtype} {own.shape} at {own.offset}"
            lines.append(f"{os.path.basename(own.file)}: {own.name!r} {words} with checksum {content}")
        return "\n".join(lines)

    def read_into(self, own: Entry, target: torch.Tensor, start: int) -> None:
        """Fills a flat tensor on the CPU with the bytes of one of the tensors, from a byte of it on."""
        view, offset = bytes_of(target), own.offset + start
        done = read_at(self._files[own.file].descriptor, offset, view)
        if done < len(view):
            raise DamagedCheckpoint(
                f"{own.file}: got {offset + done} bytes, expected {own.offset + own.nbytes}. Copy the file again."
            )

    def check(self) -> None:
        """Refuses what was read of files that somebody wrote into meanwhile, or of several if one is another one now.
        """
        for path, own in self._files.items():
            try:  # one file is what it is; of several, one may have been opened before a save and one after it
                now = os.stat(path) if len(self._files) > 1 else os.fstat(own.descriptor)
                same = os.path.samestat(now, own.stat)
            except OSError:
                now, same = own.stat, False
            if not same or (now.st_size, now.st_mtime_ns) != (own.stat.st_size, own.stat.st_mtime_ns):
                raise DamagedCheckpoint(f"{path}: was written to while it was read. Load it again once it is whole.")

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1].descriptor)
        self.entries = {}


def _spots(nbytes: int) -> tuple[int, ...]:
    """Where those bytes of a tensor begin that stand for it: at its start there may be what is never trained."""
    last = max(nbytes - _SOME, 0)
    return (0, last // 2, last) if last else (0,)


def _files_of(path: str) -> tuple[list[str], str, Mapping[str, str]]:
    """The files that a path stands for: a file itself, those that an index names, of a folder its one model.

    Returns:
        Their paths; and of an index its path, and tensors' names -> the paths of their files.
    """
    if os.path.isdir(path):
        single, index = os.path.join(path, SINGLE), os.path.join(path, INDEX)
        path = next(filter(os.path.exists, (single, index)), "")  # the first, as others' loaders prefer
        if not path:
            raise FileNotFoundError(
                f"{os.path.dirname(index)}: got a folder with neither {SINGLE} nor {INDEX}, expected one of them. "
                "Otherwise give the files as a list."
            )
    if not path.endswith(".json"):
        return [path], "", {}
    try:
        with open(path, encoding="utf-8") as file:
            said = json.load(file)["weight_map"]
        places = {name: os.path.join(os.path.dirname(path), own) for name, own in said.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{path}: got no index with a weight_map: {error!r}.") from None
    return [*dict.fromkeys(places.values())], path, places
