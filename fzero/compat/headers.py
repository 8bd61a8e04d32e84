"""Safetensors files as bytes: which tensor lies where, so that any slice of one is read or written alone."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

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
    """The tensors of an open file, in its order.

    Raises:
        DamagedCheckpoint: it is no whole safetensors file.
    """
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
