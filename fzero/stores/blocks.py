"""Bytes between memory and a file, past the page cache (O_DIRECT): neither an odd address nor an odd length matters."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import mmap
import os
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch

from fzero.base import pages

BLOCK = 4096  # bytes, of which O_DIRECT wants multiples: in memory, in the file, and of the length
_DIRECT: int = getattr(os, "O_DIRECT", 0)  # not everywhere
_SECTOR = 512  # bytes, the least that O_DIRECT moves anywhere
CHUNK = 8 << 20  # bytes that travel by one call of the system

_Call = Callable[[int, list[memoryview], int], int]


class Handle(NamedTuple):
    """A descriptor, and whether what goes through it must come in blocks."""

    descriptor: int
    direct: bool


def takes_direct(folder: str) -> bool:
    """Tells whether a filesystem takes O_DIRECT, by a block that is written there: some refuse only that."""
    if not _DIRECT:
        return False
    path = os.path.join(folder, "0.state.part")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | _DIRECT, 0o600)
        try:
            os.pwritev(descriptor, [mmap.mmap(-1, BLOCK)], 0)
        finally:
            os.close(descriptor)
    except OSError as error:  # others say what they are when state is written
        return error.errno != errno.EINVAL
    finally:
        with contextlib.suppress(OSError):  # a call that is refused may have made it
            os.unlink(path)
    return True


def open_file(path: str, flags: int, direct: bool | None, taken: bool) -> Handle:
    """Opens a file; one that is made is this user's alone.

    Args:
        direct: as of `Disk`.
        taken: whether the filesystem takes O_DIRECT.

    Raises:
        OSError: it cannot be opened, or O_DIRECT is refused where it is required.
    """
    if direct and not taken:
        where = os.path.dirname(path)
        raise OSError(errno.EINVAL, f"the filesystem of {where} does not take O_DIRECT; leave out direct=True")
    direct = taken and direct is not False
    return Handle(os.open(path, flags | _DIRECT if direct else flags, 0o600), direct)


def aligned(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """An empty flat CPU tensor whose memory begins at a block, so that it travels without a copy in between.
    """
    if numel * dtype.itemsize >= pages.MAPPED:
        return pages.empty(numel, dtype, "cpu", mapped=True)
    whole = torch.empty(numel * dtype.itemsize + BLOCK, dtype=torch.uint8, device="cpu")
    return whole.narrow(0, -whole.data_ptr() % BLOCK, numel * dtype.itemsize).view(dtype)


def rounded(nbytes: int) -> int:
    """The bytes of whole blocks."""
    return math.ceil(nbytes / BLOCK) * BLOCK


class Memory:
    """The bytes of a contiguous CPU tensor, which they keep alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        assert tensor.is_contiguous() and tensor.device.type == "cpu", "only contiguous CPU tensors lie on a disk"
        assert not (tensor.is_conj() or tensor.is_neg()), "a conjugate is not what its memory says"
        self.tensor = tensor
        self.address = tensor.data_ptr()
        nbytes = tensor.numel() * tensor.element_size()
        self.bytes = memoryview((ctypes.c_char * nbytes).from_address(self.address)).cast("B")


class _Bounce(threading.local):
    """A thread's own chunk of memory that begins at a block: between a file and memory that does not."""

    def __init__(self) -> None:
        self.bytes = memoryview(mmap.mmap(-1, CHUNK))  # pages that are not touched take no memory
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))


_bounce = _Bounce()


def copy(target: int, source: int, nbytes: int) -> None:
    """Between two addresses; other threads run meanwhile."""
    ctypes.memmove(target, source, nbytes)


def write(handle: Handle, memory: Memory, begin: int, end: int) -> None:
    """Writes a chunk; the last block of the file is filled up with zeros where O_DIRECT wants a whole one.

    Raises:
        OSError: it could not be written.
    """
    straight, rest = _split(handle, memory, begin, end)
    done = _through(os.pwritev, handle, memory.bytes[begin : begin + straight], begin)
    if rest and done == straight:
        copy(_bounce.address, memory.address + begin + straight, rest)
        ctypes.memset(_bounce.address + rest, 0, rounded(rest) - rest)
        done += _through(os.pwritev, handle, _bounce.bytes[: rounded(rest)], begin + straight)
    if done < (wanted := straight + rounded(rest)):
        raise OSError(f"only {done} of {wanted} bytes were taken")


def read(handle: Handle, memory: Memory, begin: int, end: int) -> int:
    """Reads a chunk, and returns how many of its bytes the file has.

    Raises:
        OSError: it could not be read.
    """
    straight, rest = _split(handle, memory, begin, end)
    done = _through(os.preadv, handle, memory.bytes[begin : begin + straight], begin)
    if rest and done == straight:
        got = min(rest, _through(os.preadv, handle, _bounce.bytes[: rounded(rest)], begin + straight))
        copy(memory.address + begin + straight, _bounce.address, got)
        done += got
    return done


def _split(handle: Handle, memory: Memory, begin: int, end: int) -> tuple[int, int]:
    """How many bytes of a chunk go straight, and how many, behind them, by the bounce buffer."""
    length = end - begin
    if not handle.direct:
        return length, 0
    straight = length // BLOCK * BLOCK if memory.address % BLOCK == 0 else 0
    assert length - straight <= CHUNK
    return straight, length - straight


def _through(call: _Call, handle: Handle, buffer: memoryview, offset: int) -> int:
    """Calls until a buffer is through, or the file ends; returns how many bytes were moved."""
    done = 0
    while done < len(buffer) and (moved := call(handle.descriptor, [buffer[done:]], offset + done)):
        done += moved
        if handle.direct and done % _SECTOR:  # the file ends there
            break
    return done
