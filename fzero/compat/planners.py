"""What torch's distributed checkpoints (DCP) need to know of flat slices: they are boxes of their leaves."""

from __future__ import annotations

import base64
import hashlib
import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from fzero.state.sliced import Sliced

T = TypeVar("T")
Make = Callable[[int, int], torch.Tensor]  # elements [start, stop) of a tensor, flat
_KNOWN = {  # of the pickle that its metadata is, which could otherwise run anything
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("collections", "OrderedDict"),
    *(("pathlib", name) for name in ("Path", "PosixPath", "PurePath", "PurePosixPath", "WindowsPath")),
    *(("pathlib._local", name) for name in ("Path", "PosixPath", "PurePath", "PurePosixPath", "WindowsPath")),
}


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[ChunkStorageMetadata]:
    """The boxes that the elements [start, stop) of a tensor are, row by row: at most two a dimension, less one.

    Example:
        >>> [(tuple(own.offsets), tuple(own.sizes)) for own in boxes((4, 3), 2, 10)]
        [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    """
    if start >= stop:
        return
    if not shape:
        yield ChunkStorageMetadata(torch.Size(()), torch.Size(()))
        return
    row = torch.Size(shape[1:]).numel()
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # within one row
        yield from _in_row(shape, last, start, stop)
        return
    yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        yield ChunkStorageMetadata(torch.Size((first, *[0] * (len(shape) - 1))), torch.Size((last - first, *shape[1:])))
    yield from _in_row(shape, last, last * row, stop)


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[ChunkStorageMetadata]:
    numel = torch.Size(shape[1:]).numel()
    for own in boxes(shape[1:], start - row * numel, stop - row * numel):
        yield ChunkStorageMetadata(torch.Size((row, *own.offsets)), torch.Size((1, *own.sizes)))


class Save(DefaultSavePlanner):
    """Plans what one rank writes.

    Args:
        pieces: the tensors' names and where each begins and stops in its tensor -> what makes the values, flat.
        known: the name of every tensor -> its shape, its dtype, and its keys in the nested state dict.
        slices: the names of tensors of which this rank has a slice -> how they are cut, and which slice; its pieces
            begin and stop there.
    """

    def __init__(
        self,
        pieces: Mapping[tuple[str, int, int], Make],
        known: Mapping[str, tuple[tuple[int, ...], torch.dtype, tuple[str, ...]]],
        slices: Mapping[str, tuple[Sliced, int]],
    ) -> None:
        super().__init__()
        self._known = known
        self._parts: dict[tuple[str, tuple[int, ...]], Callable[[], torch.Tensor]] = {}
        self._items: list[WriteItem] = []
        for (name, start, stop), make in pieces.items():
            shape, dtype, _ = known[name]
            cut, rank = slices.get(name, (None, 0))
            at = start
            for own in boxes(shape if cut is None else cut.shape(shape, rank), start, stop):
                end = at + own.sizes.numel()
                for place, box in _placed(own, cut, rank):
                    index = MetadataIndex(name, place.offsets)
                    data = TensorWriteData(place, TensorProperties(dtype=dtype), torch.Size(shape))
                    self._items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
                    self._parts[name, tuple(place.offsets)] = _part(make, at, end, own.sizes, box)
                at = end

    def create_local_plan(self) -> SavePlan:
        return SavePlan(self._items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        tensors = {
            name: TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [])
            for name, (shape, dtype, _) in self._known.items()
        }
        for plan in all_plans:
            for item in plan.items:
                assert item.tensor_data is not None
                tensors[item.index.fqn].chunks.append(item.tensor_data.chunk)
        keys = {name: keys for name, (_, _, keys) in self._known.items()}
        return all_plans, Metadata({**tensors}, planner_data=keys)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self._parts[write_item.index.fqn, tuple(write_item.index.offset or ())]()


def _placed(
    own: ChunkStorageMetadata, cut: Sliced | None, rank: int
) -> Iterator[tuple[ChunkStorageMetadata, tuple[int, int, int]]]:
    """The boxes of a tensor that a box of a slice of it is; with the dim, start and size of each in that box."""
    if cut is None:
        yield own, (0, 0, own.sizes[0] if own.sizes else 0)
        return
    dim, at = cut.dim, -own.offsets[cut.dim]  # where a piece begins in the box
    for start, size in cut.pieces[rank]:
        low, high = max(0, at), min(own.sizes[dim], at + size)
        if low < high:
            put = lambda old, new: torch.Size((*old[:dim], new, *old[dim + 1 :]))
            place = ChunkStorageMetadata(put(own.offsets, start + low - at), put(own.sizes, high - low))
            yield place, (dim, low, high - low)
        at += size


def _part(
    make: Callable[[int, int], torch.Tensor], start: int, stop: int, sizes: torch.Size, box: tuple[int, int, int]
) -> Callable[[], torch.Tensor]:
    def values() -> torch.Tensor:
        own = make(start, stop).view(sizes)
        # what is written is all of a tensor's memory
        return own if not sizes or box[2] == sizes[box[0]] else own.narrow(*box).clone()

    return values


class Load(DefaultLoadPlanner):
    """Fills the boxes of one slice, which are named by their offsets."""

    def __init__(self, targets: Mapping[torch.Size, torch.Tensor]) -> None:
        super().__init__()
        self._targets = targets

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._targets[index.offset or torch.Size(())]


class Reader(FileSystemReader):
    """Reads others' checkpoints, and nothing from their metadata but the classes that DCP itself writes there.

    Attributes:
        checksum: of the metadata that were read.
    """

    checksum = ""

    def read_checksum(self) -> str:
        """That of the metadata which lie there now."""
        return hashlib.sha256(self._text()).hexdigest()

    def _text(self) -> bytes:
        with open(f"{self.path}/.metadata", "rb") as file:
            return file.read()

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        text = self._text()
        self.checksum = hashlib.sha256(text).hexdigest()
        metadata = _Unpickler(io.BytesIO(text)).load()
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        own = module == "torch.distributed.checkpoint.metadata" and "." not in name
        if not (own or (module, name) in _KNOWN or (module == "torch" and name in _TORCH)):
            raise pickle.UnpicklingError(f"its metadata names {module}.{name}, which no checkpoint of torch has")
        return super().find_class(module, name)


_TORCH = {"Size", *(name for name, own in vars(torch).items() if isinstance(own, torch.dtype))}


def text_of(value: object) -> str:
    """What one rank tells the others of its plan."""
    return base64.b64encode(pickle.dumps(value)).decode()


def value_of(text: str, kind: type[T]) -> T:
    """What another rank of this run has told."""
    value = pickle.loads(base64.b64decode(text))
    assert isinstance(value, kind)
    return value
