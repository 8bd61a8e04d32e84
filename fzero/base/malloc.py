"""What malloc does with memory that is freed."""

from __future__ import annotations

import ctypes
import warnings

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
