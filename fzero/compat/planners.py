"""What torch's distributed checkpoints (DCP) are told: whole tensors to write, and rows of one to read."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Iterator, Mapping

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

_KNOWN = {  # of the pickle that its metadata is, which could otherwise run anything
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("collections", "OrderedDict"),
    *(("pathlib", name) for name in ("Path", "PosixPath", "PurePath", "PurePosixPath", "WindowsPath")),
    *(("pathlib._local", name) for name in ("Path", "PosixPath", "PurePath", "PurePosixPath", "WindowsPath")),
}


class Save(DefaultSavePlanner):
    """Plans to write whole tensors.

    Args:
        known: the names of the tensors -> their shapes and dtypes.
        tensors: with their names, in this order.
    """

    def __init__(
        self, known: Mapping[str, tuple[tuple[int, ...], torch.dtype]], tensors: Iterator[tuple[str, torch.Tensor]]
    ) -> None:
        super().__init__()
        self._known, self._tensors = known, tensors

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, (shape, dtype) in self._known.items():
            size, start = torch.Size(shape), torch.Size([0] * len(shape))
            data = TensorWriteData(ChunkStorageMetadata(start, size), TensorProperties(dtype=dtype), size)
            items.append(WriteItem(MetadataIndex(name, start), WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        name, tensor = next(self._tensors)
        assert name == write_item.index.fqn
        return tensor


class Load(DefaultLoadPlanner):
    """Fills one tensor."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self._target = target

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._target


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
