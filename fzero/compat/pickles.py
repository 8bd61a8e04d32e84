"""Files of torch.save that others have written: unpickled with `weights_only=True`, and nothing in them is run."""

from __future__ import annotations

import os
import pickle
import re
import threading
import typing
import zipfile
import zlib
from collections.abc import Sequence

import torch

from fzero.checkpoint.chunks import CHUNK
from fzero.checkpoint.manifest import DamagedCheckpoint

States = dict[str, typing.Any]  # what a file says may be anything
_door = threading.Lock()  # torch's list of what may be unpickled is the process's, and ranks may be threads
_OLD = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # how files of torch before 1.6 begin


class Inert:
    """What stands in for a class of others: it takes what it is given, and keeps and does nothing."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


class Number(int):
    """What stands in for an enumeration of numbers."""


def unpickled(path: str, inert: Sequence[str], numbers: Sequence[str]) -> States:
    """The dict that `torch.save` has put into a file; its tensors are mapped, so that only what is read of them is.

    Args:
        inert: the classes, by their full names, that an `Inert` stands in for.
        numbers: those that a `Number` does.

    Raises:
        DamagedCheckpoint: the file is cut, or what it says of its tensors has changed.
        ValueError: it names a class or function that is neither torch's own nor one of these. It was not run.
    """
    _check(path, tensors=False)
    try:
        with (
            _door,
            torch.serialization.safe_globals(
                [*((Inert, name) for name in inert), *((Number, name) for name in numbers)]
            ),
        ):
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        if found is None:
            raise DamagedCheckpoint(f"{path}: cannot be unpickled: {_last(error)}. Load an older checkpoint.") from None
        raise ValueError(
            f"{path}: got a pickle that names {found[1]}, and only tensors, numbers and the writer's own classes are "
            "unpickled. It was not run. If you trust the file, allow the class by torch.serialization.safe_globals "
            "around this call; otherwise do not load it."
        ) from None
    except Exception as error:
        raise DamagedCheckpoint(f"{path}: cannot be unpickled: {error!r}. Load an older checkpoint.") from None
    if not isinstance(found, dict):
        raise DamagedCheckpoint(f"{path}: got a {type(found).__name__}, expected a dict. Load another checkpoint.")
    return found


def fingerprint(path: str) -> str:
    """What differs between files that differ, as far as their own checksums do."""
    said = [(own.filename, own.file_size, own.CRC) for own in _records(path)]
    return f"{zlib.crc32(repr(said).encode()):08x}"


def verify(path: str) -> None:
    """Holds all of a file against its own checksums, where it has some."""
    _check(path, tensors=True)


def _check(path: str, tensors: bool) -> None:
    wanted = [
        own for own in _records(path) if own.CRC and (tensors or "/data/" not in own.filename)
    ]  # 0: none was kept
    try:
        with zipfile.ZipFile(path) as file:
            for own in wanted:
                with file.open(own) as record:
                    while record.read(CHUNK):
                        pass
    except Exception as error:  # a changed byte of the zip file itself may end in any
        raise DamagedCheckpoint(
            f"{path}: got {error}: its bytes have changed since they were saved. Load an older checkpoint."
        ) from None


def _records(path: str) -> list[zipfile.ZipInfo]:
    try:
        file = open(path, "rb")
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path}: got no such file. Bring it back, or load an older checkpoint.") from None
    with file:
        if file.read(len(_OLD)) == _OLD:
            raise ValueError(
                f"{path}: got a file in torch's old format, of which no slice can be read alone; expected a zip file. "
                "Save it again with checkpoint_serialization true in DeepSpeed's configuration."
            )
        try:
            with zipfile.ZipFile(file) as records:
                found = records.infolist()
        except Exception as error:
            raise DamagedCheckpoint(
                f"{path}: got {os.fstat(file.fileno()).st_size} bytes that are no whole file of torch.save ({error}): "
                "it was cut, or is another one. Load an older checkpoint."
            ) from None
    if any(own.compress_type != zipfile.ZIP_STORED for own in found):
        raise ValueError(f"{path}: got compressed tensors, expected them as torch.save writes them. Save it again.")
    return found


def _last(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
