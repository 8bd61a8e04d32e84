"""Memory of the host's: new one for flat buffers, in large pages, and what malloc keeps of it.

With pages of 4 KiB the processor spends up to a tenth of a product of few rows on finding those of the weights, and the
system one fault on each page of a new buffer. It is asked for pages of 2 MiB, which it gives where it has them (Linux:
"madvise" or "always" in /sys/kernel/mm/transparent_hugepage/enabled).
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
import warnings
from collections.abc import Callable

import torch

from fzero.base import private

PAGE = 1 << 21
LEAST = 2 * PAGE  # bytes, from which one page is whole wherever the buffer begins
MAPPED = 1 << 20  # bytes, from which memory may be mapped
_HUGEPAGE = 14  # MADV_HUGEPAGE
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}

# an operator, as modes look for new memory (fz.testing.LiveBytes), and fake tensors have none
_library = torch.library.Library("fzero", "FRAGMENT")
_library.define("mapped(int nbytes) -> Tensor")


def empty(numel: int, dtype: torch.dtype, device: torch.device | str, mapped: bool = False) -> torch.Tensor:
    """A flat tensor, not filled.

    Args:
        mapped: if it is large and on the host, take its memory straight from the system, which has all of it back when
            the tensor dies: malloc keeps pieces of what is freed. It begins at a page, and cannot be resized.
    """
    if mapped and numel * dtype.itemsize >= MAPPED and torch.device(device).type == "cpu":
        return in_large_pages(torch.ops.fzero.mapped(numel * dtype.itemsize).view(dtype))
    return in_large_pages(torch.empty(numel, dtype=dtype, device=device))


def zeros(numel: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """A flat tensor of zeros."""
    large = numel * dtype.itemsize >= LEAST
    return empty(numel, dtype, device).zero_() if large else torch.zeros(numel, dtype=dtype, device=device)


def copied(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A new tensor of one's values, dense, in a dtype."""
    return in_large_pages(torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)).copy_(x)


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x.to(dtype)`."""
    if x.dtype == dtype or x.requires_grad or private.is_wrapped(x):
        return x.to(dtype)
    return copied(x, dtype)


def _mapped(nbytes: int) -> torch.Tensor:
    try:
        memory = mmap.mmap(-1, nbytes, **_PRIVATE)
    except OSError as error:
        raise MemoryError(f"could not map {nbytes} bytes of the host's memory ({error})") from error
    return torch.frombuffer(memory, dtype=torch.uint8)


_library.impl("mapped", _mapped, "BackendSelect")
_new = functools.partial(torch.empty, dtype=torch.uint8, device="cpu")
torch.library.register_fake("fzero::mapped", _new, lib=_library)


def in_large_pages(x: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory is new, for which the system is asked for large pages."""
    if x.nbytes >= LEAST and x.device.type == "cpu" and not private.is_fake(x):
        begin = -(-x.data_ptr() // PAGE) * PAGE
        size = (x.data_ptr() + x.nbytes) // PAGE * PAGE - begin
        _advise()(begin, size, _HUGEPAGE)  # which may say no: then it has none, and all is as ever
    return x


@functools.cache
def _advise() -> Callable[[int, int, int], int]:
    if not sys.platform.startswith("linux"):
        return lambda *_: 0
    advise = ctypes.CDLL(None).madvise
    advise.argtypes, advise.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return advise


# ---- what malloc does with memory that is freed

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of glibc's malloc.h


def keep_memory() -> None:
    """Has this process keep the host's memory that tensors free, for the tensors of the next step.

    Otherwise large blocks go back to the system, which gives them out again as pages of zeros: up to a tenth of a step
    on CPUs. The process then stays as large as it ever was, and may grow by pieces that fit nothing. Call it once,
    before the first step. It is for training on CPUs with memory to spare; torch keeps memory of GPUs by itself.

    It tells the malloc of glibc. Without glibc it does nothing, and warns. If another malloc is preloaded (jemalloc,
    tcmalloc), it has no effect.

    Source: mallopt(3), M_TRIM_THRESHOLD and M_MMAP_MAX.

    Example:
        >>> fz.keep_memory()
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        warnings.warn("keep_memory: this process has no glibc, whose malloc it would tell.", stacklevel=2)
        return
    library.mallopt(_TRIM_THRESHOLD, -1)  # never give back what lies at the end
    library.mallopt(_MMAP_MAX, 0)  # nor map a block by itself, which goes back when it is freed
