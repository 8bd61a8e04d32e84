"""Values from one process's memory on a GPU to another's, by CUDA IPC: through a piece of it that both have mapped.

The owner copies into its piece and tells the reader, who copies out of it and says so: by turns, until all is there.
Nobody holds memory of the other's for longer than a copy takes, and both sides' allocators have all of the rest.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

PIECE = 256 << 20  # bytes that are copied at a time
_STEP = 2 << 20  # bytes in which the driver allocates: a smaller piece would lie in memory of others'
Hear = Callable[[], object]
_log = logging.getLogger("fzero.components")
_unable: set[str] = set()  # GPUs on which this process cannot map what others have


class Offer(NamedTuple):
    """What an owner says ahead of the first turn."""

    rows: Sequence[tuple[torch.dtype, tuple[int, ...]]]  # of each tensor
    handle: bytes  # CUDA's, of the piece
    nbytes: int  # of the piece


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_char * 64),)


@functools.cache
def _cuda() -> ctypes.CDLL:
    """CUDA's driver, which torch has loaded."""
    library, size, pointer = ctypes.CDLL("libcuda.so.1"), ctypes.c_size_t, ctypes.c_uint64
    library.cuMemAlloc_v2.argtypes = [ctypes.c_void_p, size]
    library.cuMemFree_v2.argtypes = [pointer]
    library.cuIpcGetMemHandle.argtypes = [ctypes.c_void_p, pointer]
    library.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, _Handle, ctypes.c_uint]
    library.cuIpcCloseMemHandle.argtypes = [pointer]
    return library


def _need(code: int, what: str) -> None:
    if code:
        raise OSError(f"{what} failed with CUDA's error {code}")


class _Memory:
    """Bytes at an address of a GPU, as torch takes them from others."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def name_of(device: torch.device) -> str:
    """What tells a GPU from all others; "" for the CPU, and for a GPU on which this process cannot map."""
    if device.type != "cuda":
        return ""
    name = _name(torch.cuda.current_device() if device.index is None else device.index)
    return "" if name in _unable else name


@functools.cache
def _name(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def lie_on(tensors: Sequence[torch.Tensor], name: str) -> bool:
    """Tells whether some tensors all lie on the GPU of this name."""
    return bool(name and tensors) and all(name_of(x.device) == name for x in tensors)


class Owner:
    """One connection's piece of GPU memory, from which the other side takes what it has asked for."""

    def __init__(self) -> None:
        self._device: torch.device | None = None
        self._address, self._nbytes, self._handle = 0, 0, b""

    def give(
        self, tensors: Sequence[torch.Tensor], send: Callable[[object], None], heard: Callable[[], object]
    ) -> bool:
        """Gives tensors of one GPU by turns.

        Args:
            heard: waits for what the reader says.

        Returns:
            Whether the reader has them: it may be unable to map, or there is no memory for a piece.
        """
        flat = [_bytes_of(x) for x in tensors]
        total = sum([x.numel() for x in flat])
        with torch.cuda.device(tensors[0].device):
            if not self._has(total, tensors[0].device):
                return False
            piece = torch.as_tensor(_Memory(self._address, self._nbytes), device=tensors[0].device)
            for start in range(0, max(total, 1), self._nbytes):
                for at, part in _parts(flat, start, start + self._nbytes):
                    piece[at : at + part.numel()].copy_(part)
                torch.cuda.current_stream().synchronize()
                rows = [(x.dtype, tuple(x.shape)) for x in tensors]
                send(("next",) if start else ("offer", (rows, self._handle, self._nbytes)))
                if heard() != "next":
                    return False
        return True

    def _has(self, total: int, device: torch.device) -> bool:
        """Makes sure of a piece, as large as what is given where that is less than a turn."""
        wanted = min(PIECE, max(1, -(-total // _STEP)) * _STEP)
        if self._device == device and self._nbytes >= wanted:
            return True
        self.close()
        torch.zeros(1, device=device)  # which makes CUDA's context this thread's
        address, handle = ctypes.c_uint64(), _Handle()
        try:
            _need(_cuda().cuMemAlloc_v2(ctypes.byref(address), wanted), "cuMemAlloc")
            self._device, self._address, self._nbytes = device, address.value, wanted
            _need(_cuda().cuIpcGetMemHandle(ctypes.byref(handle), self._address), "cuIpcGetMemHandle")
        except OSError as error:
            _log.warning("values go through the host's memory: %s", error)
            self.close()
            return False
        self._handle = ctypes.string_at(ctypes.byref(handle), 64)
        return True

    def close(self) -> None:
        """Gives the memory back."""
        if self._device is not None:
            with torch.cuda.device(self._device):
                torch.cuda.current_stream().synchronize()
                _cuda().cuMemFree_v2(self._address)
        self._device, self._address, self._nbytes, self._handle = None, 0, 0, b""


class Reader:
    """The other side of an owner's piece."""

    def __init__(self) -> None:
        self._device: torch.device | None = None
        self._handle, self._address = b"", 0

    def take(
        self, offer: Offer, device: torch.device, send: Callable[[object], None], heard: Hear
    ) -> list[torch.Tensor] | None:
        """Takes what is offered, into tensors of this process's own; None where it cannot map the piece."""
        with torch.cuda.device(device):
            if offer.handle != self._handle and not self._maps(offer, device):
                send("unable")
                return None
            piece = torch.as_tensor(_Memory(self._address, offer.nbytes), device=device)
            out = [torch.empty(shape, dtype=dtype, device=device) for dtype, shape in offer.rows]
            flat = [_bytes_of(x) for x in out]
            total = sum([x.numel() for x in flat])
            for start in range(0, max(total, 1), offer.nbytes):
                if start:
                    heard()
                for at, part in _parts(flat, start, start + offer.nbytes):
                    part.copy_(piece[at : at + part.numel()])
                torch.cuda.current_stream().synchronize()
                send("next")
        return out

    def _maps(self, offer: Offer, device: torch.device) -> bool:
        self.close()
        torch.zeros(1, device=device)  # which makes CUDA's context this thread's
        address, handle = ctypes.c_uint64(), _Handle.from_buffer_copy(offer.handle)
        try:
            _need(_cuda().cuIpcOpenMemHandle_v2(ctypes.byref(address), handle, 1), "cuIpcOpenMemHandle")
        except OSError as error:
            _log.warning("values of other processes on %s come through the host's memory: %s", device, error)
            _unable.add(_name(torch.cuda.current_device()))
            return False
        self._device, self._address, self._handle = device, address.value, offer.handle
        return True

    def close(self) -> None:
        """Lets go of the owner's memory."""
        if self._device is not None:
            with torch.cuda.device(self._device):
                _cuda().cuIpcCloseMemHandle(self._address)
        self._device, self._address, self._handle = None, 0, b""


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor as bytes: of a contiguous one its own memory."""
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _parts(flat: Sequence[torch.Tensor], start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
    """What of some bytes, one tensor behind the other, lies from `start` to `stop`, and where from `start` on."""
    at = 0
    for x in flat:
        low, high = max(start, at), min(stop, at + x.numel())
        if low < high:
            yield low - start, x[low - at : high - at]
        at += x.numel()
