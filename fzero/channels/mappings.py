"""Anonymous files in memory that two processes map: no name, so that the kernel takes them back whoever dies.

mmap.mmap would keep a descriptor open for each of them, of which a process may have only so many (Python 3.13 can leave
it out); the system's own call does not.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import sys
import weakref

import torch

from fzero.channels.errors import BadMessage

PAGE = 4096  # bytes ahead of the data: the first one says who has the segment
AVAILABLE = sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")

_libc = ctypes.CDLL(None, use_errno=True) if AVAILABLE else None
if _libc is not None:
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    _libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Mapping:
    """A page and `capacity` bytes behind it, mapped as long as this object or an array of it lives."""

    def __init__(self, descriptor: int, capacity: int) -> None:
        assert _libc is not None
        length = PAGE + capacity
        address = _libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), f"a segment of {length} bytes could not be mapped")
        self.capacity, self._address = capacity, address
        self._owner = ctypes.c_ubyte.from_address(address)
        weakref.finalize(self, _libc.munmap, address, length).atexit = False

    @property
    def state(self) -> int:
        """The first byte, which both sides read and write."""
        return self._owner.value

    @state.setter
    def state(self, value: int) -> None:
        self._owner.value = value

    def array(self, nbytes: int) -> ctypes.Array[ctypes.c_char]:
        """The first bytes of the data; a tensor made of it keeps it alive, so that its end is the end of their use."""
        array = (ctypes.c_char * nbytes).from_address(self._address + PAGE)
        array.mapping = self  # type: ignore[attr-defined]
        return array

    def bytes(self, nbytes: int) -> torch.Tensor:
        """The first bytes of the data."""
        return torch.frombuffer(self.array(nbytes), dtype=torch.uint8)

    def empty(self) -> None:
        """Gives the pages of the data back to the system, also where the other side has them mapped."""
        assert _libc is not None
        _libc.madvise(self._address + PAGE, self.capacity, 9)  # MADV_REMOVE


def create(capacity: int) -> tuple[Mapping, int]:
    """A segment of this capacity, and its descriptor, which the caller closes.

    Raises:
        OSError: there is no memory, or no descriptor, for it.
    """
    descriptor = os.memfd_create("fzero", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, PAGE + capacity)
        # a file that shrinks would kill who reads it
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        os.posix_fallocate(descriptor, 0, PAGE + capacity)  # fails where a later write would kill
        return Mapping(descriptor, capacity), descriptor
    except BaseException:
        os.close(descriptor)
        raise


def adopt(descriptor: int) -> Mapping:
    """A segment that another process has made.

    Raises:
        BadMessage: it is none.
    """
    with contextlib.suppress(OSError):
        size = os.fstat(descriptor).st_size
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK and size > PAGE:
            return Mapping(descriptor, size - PAGE)
    raise BadMessage("a descriptor came that is no shared segment, or it could not be mapped")
