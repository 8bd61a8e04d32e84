"""One-pass CPU kernels: the C++ of `fzero/_source.py`, compiled once, and called on flat buffers.

torch.compile does the same on CUDA. On CPU its loops over 8- and 16-bit integers are not vectorised, and it splits the
update into several passes: measured at 24 ns an element where these take 0.7 (`benchmarks/update.py`).
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import hashlib
import itertools
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fzero._formats import Format
from fzero._rounding import Counters
from fzero._source import TYPES, N, source_of


@functools.cache
def compiler() -> str | None:
    """The C++ compiler, or None."""
    return shutil.which(os.environ.get("CXX", "g++"))


@functools.cache
def _built(source: str) -> Any:
    """The compiled function, from a cache of this user's on disk; None where the compiler fails."""
    path = compiler()
    if path is None:
        return None
    flags = ["-O3", "-march=native", "-fopenmp-simd", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
    flags += ["-shared", "-fPIC", "-fschedule-insns"]
    if platform.machine() == "x86_64":
        flags.append("-mprefer-vector-width=512")
    # the order of instructions, which is worth a tenth: of the models tried the best for vectors of 512 bits on AMD's
    # Zen 4 too, which g++ 12 does not know
    flags.append("-mtune=icelake-server" if "avx512bw" in _machine() else "-fsched-pressure")
    key = hashlib.sha256("\n".join([source, path, *flags, _machine()]).encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / f"fzero-kernels-{os.getuid()}"
    library = folder / f"{key}.so"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():  # somebody else's, whose code is not to be run
            return None
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:  # many ranks build at once: renaming is atomic
                text, made = Path(scratch) / "kernel.cpp", Path(scratch) / "kernel.so"
                text.write_text(source)
                subprocess.run([path, *flags, str(text), "-o", str(made)], check=True, capture_output=True)
                made.rename(library)
        return ctypes.CDLL(str(library)).kernel
    except (OSError, subprocess.CalledProcessError):
        return None


@functools.cache
def _machine() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith("flags")), "")


def carries(formats: Sequence[Format], grad: torch.dtype) -> bool:
    """Whether kernels have all these types."""
    return {grad, *(part.dtype for form in formats for part in form.parts)} <= TYPES.keys()


@functools.cache
def kernel(formula: Callable[..., Sequence[Any]], formats: tuple[Format, ...], grad: torch.dtype, hypers: int) -> Any:
    """`run(parts, grads, counters, hyper)` on flat CPU buffers of whole blocks of 64; None where it cannot be made."""
    function = _built(source_of(formula, formats, grad, hypers)) if carries(formats, grad) else None
    if function is None:
        return None
    every = [part.every for form in formats for part in form.parts] + [1]

    def run(parts: Sequence[torch.Tensor], grads: torch.Tensor, counters: Counters, hyper: torch.Tensor) -> None:
        tensors, runs = [*parts, grads], counters.table

        def part_of(start: int, stop: int) -> None:
            places = [t.data_ptr() + start // e * t.element_size() for t, e in zip(tensors, every, strict=True)]
            places = [*map(ctypes.c_void_p, [*places, runs.data_ptr()]), ctypes.c_int64(start // N)]
            function(ctypes.c_int64(stop - start), *places, ctypes.c_void_p(hyper.data_ptr()))

        ranges = _split(grads.numel(), torch.get_num_threads())
        if len(ranges) == 1:
            part_of(*ranges[0])
        elif ranges:
            with concurrent.futures.ThreadPoolExecutor(len(ranges)) as pool:
                list(pool.map(lambda cut: part_of(*cut), ranges))

    return run


def _split(numel: int, threads: int) -> list[tuple[int, int]]:
    """(start, stop) of about equal parts, multiples of N."""
    blocks = numel // N
    threads = max(1, min(threads, blocks // 1024))
    bounds = [blocks * i // threads * N for i in range(threads + 1)]
    return [(a, b) for a, b in itertools.pairwise(bounds) if b > a]
