"""The manifest of a checkpoint: what it keeps and in which bytes of which files. It is written last, and names them.

That of several components says which checkpoints belong together.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch

from fzero.base import pytree
from fzero.checkpoint.files import NAME, is_url
from fzero.checkpoint.remote import folder_at
from fzero.state.sliced import Sliced

# 2 has no slices of leaves, 3 no complex tensors, 4 none in 8 bits and of whole numbers without a sign, 5 one number of
# updates for all leaves
FORMAT, VERSION, READ = "fzero checkpoint", 6, (2, 3, 4, 5, 6)
DTYPES = {  # as safetensors calls them
    **{"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    "BOOL": torch.bool,
}
TOGETHER = "components.json"
_BEGIN = b'{"sha256": "'
_UNREADABLE = (errno.EIO, errno.EISDIR, errno.ENOTDIR, errno.ELOOP)
CODES = {dtype: code for code, dtype in DTYPES.items()}
# of tensors that are in no tree
OF_TENSORS = {
    **DTYPES,
    **{"C32": torch.complex32, "C64": torch.complex64, "C128": torch.complex128},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E8M0": torch.float8_e8m0fnu},
    **{"F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F4_E2M1_X2": torch.float4_e2m1fn_x2},
    **{"U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64},
}
CODES_OF_TENSORS = {dtype: code for code, dtype in OF_TENSORS.items()}
_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes


def header_of(tensors: Mapping[str, object]) -> bytes:
    """What stands before the data in a safetensors file: what is said of its tensors, by their names."""
    text = json.dumps(tensors, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def as_filed(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as files have it: complex numbers as pairs, other dtypes that they do not name as whole numbers."""
    real = pytree.as_reals(tensor)
    return real if real.dtype in CODES else real.view(_NUMBERS[real.dtype.itemsize])


class DamagedCheckpoint(OSError):
    """A file of a checkpoint is missing, cut, changed, or belongs to another save. The message names it."""


class NoCheckpoint(FileNotFoundError):
    """A folder has no manifest."""


class Piece(NamedTuple):
    """A range of one leaf of one tree, in one part of its format; of a tensor that is no tree, all of it."""

    item: int  # which of the manifest's items
    leaf: int  # which of its leaves; 0 of a tensor
    part: int  # which part of the leaf's format
    # start, stop: in elements of the leaf, or of a slice of it, row by row
    start: int
    stop: int
    # offset, nbytes: where it lies in its file
    offset: int
    nbytes: int
    rank: int = 0  # which slice, of a leaf that is cut


@dataclass(frozen=True)
class File:
    """A file of the checkpoint."""

    name: str
    nbytes: int
    sha256: tuple[str, ...]  # of what stands before the first piece, then of every piece's chunks (`checkpoint/chunks`)
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Leaf:
    """A leaf of the params."""

    path: str  # dotted
    shape: tuple[int, ...]
    dtype: str  # its own
    row: str  # how it was kept, in words
    sliced: Sliced | None = None  # how it was cut over a tensor axis; None of a leaf that was whole


@dataclass(frozen=True)
class Kept:
    """An item of the state: a tree, a tensor, or a number."""

    name: str  # dotted: "params", "moments.mu", "extra.ema"
    kind: str  # "params", "signed", "nonnegative" or "values" of a tree; "tensor", "count" or "number"
    formats: dict[int, str]  # of a tree, leaf number -> the name of the format that it is stored in
    scale: float = 1.0  # what the values of a tree are multiplied by
    value: Any = None  # of a number; of a count what `Count.said` has; of a tensor its dtype and shape


@dataclass(frozen=True)
class Manifest:
    """All of a checkpoint but its tensors."""

    token: str  # of the save, in the names of its files
    # step, seed: of the state
    step: int
    seed: int
    # ranks, axis: over which it lay, in words
    ranks: int
    axis: str
    # name, kind and whether it is expendable, of each entry of `state.extra`
    extras: tuple[tuple[str, str, bool], ...]
    structure: object  # the containers of the params
    leaves: tuple[Leaf, ...]
    items: tuple[Kept, ...]
    files: tuple[File, ...]
    extra: object  # the caller's

    def text(self) -> bytes:
        """The file's content."""
        fields = {"format": FORMAT, "version": VERSION, **asdict(replace(self, extra=None)), "extra": self.extra}
        return sealed("checkpoint", fields)


@contextlib.contextmanager
def readable(path: str) -> Iterator[None]:
    """Around the reading of a file, which raises DamagedCheckpoint where it is no longer what was written."""
    try:
        yield
    except OSError as error:
        if error.errno not in _UNREADABLE:
            raise
        raise DamagedCheckpoint(f"{path}: cannot be read ({error.strerror}). Load an older checkpoint.") from error


def sealed(name: str, content: object) -> bytes:
    """A file's content, which begins with the checksum of all that follows."""
    body = f'"{name}": {json.dumps(content, separators=(",", ":"))}}}\n'.encode()
    return _head(body) + body


def _head(body: bytes) -> bytes:
    return _BEGIN + f'{hashlib.sha256(body).hexdigest()}",\n'.encode()


def _opened(folder: str, file: str, name: str) -> Any:
    """What was sealed in a file."""
    path = f"{folder}/{file}"
    with readable(path):
        text = folder_at(folder).read(file)
    line = text.find(b"\n") + 1
    if not line or text[:line] != _head(text[line:]):
        raise DamagedCheckpoint(
            f"{path}: got {len(text)} bytes that are not those that were written: their checksum differs. Load an "
            "older checkpoint."
        )
    return json.loads(text)[name]


def is_foreign(text: bytes) -> bool:
    """Whether no save has written this: not even one whose manifest is damaged."""
    return not _BEGIN.startswith(text[: len(_BEGIN)])


def read_manifest(folder: str) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        FileNotFoundError: there is no checkpoint.
        DamagedCheckpoint: it is not what was written.
        ValueError: it is of a newer version.
    """
    if not is_url(folder) and os.path.isfile(folder):
        raise NotADirectoryError(f"{folder}: got a file, expected the folder of a checkpoint, with its {NAME}.")
    try:
        fields = _opened(folder, NAME, "checkpoint")
    except FileNotFoundError:
        what = "is empty or holds no whole one" if folder_at(folder).exists() else "does not exist"
        raise NoCheckpoint(
            f"{folder}: got no checkpoint, the folder {what}; expected one that fz.save has written, with its {NAME}."
        ) from None
    if fields.pop("format") != FORMAT or fields.pop("version") not in READ:
        raise ValueError(
            f"{folder}/{NAME}: got a checkpoint of another version, expected version {VERSION}. Load it with the "
            "version of fzero that has written it, or a newer one."
        )
    return Manifest(
        **{
            **fields,
            "extras": tuple((name, kind, lost) for name, kind, lost in fields["extras"]),
            "leaves": tuple(
                Leaf(**{**leaf, "shape": tuple(leaf["shape"]), "sliced": _sliced(leaf.get("sliced"))})
                for leaf in fields["leaves"]
            ),
            "items": tuple(
                Kept(**{**item, "formats": {int(leaf): form for leaf, form in item["formats"].items()}})
                for item in fields["items"]
            ),
            "files": tuple(
                File(file["name"], file["nbytes"], tuple(file["sha256"]), tuple(Piece(*own) for own in file["pieces"]))
                for file in fields["files"]
            ),
        }
    )


def _sliced(said: tuple[int, list[list[list[int]]]] | None) -> Sliced | None:
    """A cut as JSON has it."""
    return None if said is None else Sliced(said[0], tuple(tuple((a, n) for a, n in own) for own in said[1]))


class Together(NamedTuple):
    """Which checkpoints of components belong together."""

    slot: str  # the subfolder that they are in, by their numbers
    tokens: list[str]  # of each of them
    extra: Any  # the caller's


def read_together(folder: str) -> Together | None:
    """What a folder's file says of its components; None where it has none."""
    try:
        return Together(*_opened(folder, TOGETHER, "components"))
    except FileNotFoundError:
        return None
