"""One-pass CPU kernels: the C++ of `fzero/kernels/source.py`, compiled once, and called on flat buffers.

torch.compile does the same on CUDA. On CPU its loops over 8- and 16-bit integers are not vectorised, and it splits the
update into several passes: measured at 24 ns an element where these take 0.7 (`benchmarks/update.py`).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import functools
import hashlib
import itertools
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fzero.base.context import variable
from fzero.formats.bits import Counters
from fzero.formats.formats import Format
from fzero.kernels.head import N
from fzero.kernels.source import TYPES, source_of

_log = logging.getLogger(__name__)
_building = threading.Lock()
threads = variable("kernel_threads", 0)  # that a kernel may take, 0 for as many as torch does
_told: set[str] = set()
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_NO_ROOT = 65534  # root's number in a user namespace that has none for it
_SLOWER = (  # `benchmarks/update.py --eager`
    "Large buffers are updated in several passes of torch's meanwhile: 10 to 50 times slower, to the same bits."
)


def compiler() -> tuple[str, ...] | None:
    """The command of the C++ compiler: CXX as a shell splits it, or g++; None where there is none."""
    try:
        program, *options = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    except ValueError:  # a quotation without its end
        return None
    path = shutil.which(program)
    return None if path is None else (path, *options)


def _function(source: str) -> Any:
    """The compiled function; None where it cannot be built, which is told once."""
    with _building:  # ranks that are threads wait for the one that builds
        return _built(source)


@functools.cache
def _built(source: str) -> Any:
    command = compiler()
    if command is None:
        if _first("no compiler"):  # logged, as a warning may be an error: this is no mistake of the program's
            said = os.environ.get("CXX", "")
            _log.warning("fzero found no C++ compiler (CXX=%r). %s Install g++, or set CXX to one.", said, _SLOWER)
        return None
    try:
        return _library(source, [*command, *flags()]).kernel
    except subprocess.CalledProcessError as error:
        words = error.stderr.decode(errors="replace").strip()[:2000]
        why = f"It ended with status {error.returncode} and said:\n{words}"
    except OSError as error:
        why = f"Starting it, or loading what it built, failed: {error}."
    if _first("failed build"):
        warnings.warn(
            f"fzero could not build a kernel with `{shlex.join(command)}`. {why}\n{_SLOWER} Set CXX to the command of "
            "a C++ compiler that takes g++'s options.",
            UserWarning,
            stacklevel=2,
        )
    return None


def _first(what: str) -> bool:
    """Tells whether this process is told so for the first time."""
    fresh = what not in _told
    _told.add(what)
    return fresh


def _library(source: str, command: Sequence[str]) -> ctypes.CDLL:
    """The compiled source, from this user's cache, or built in a folder of its own where there can be none.

    Raises:
        CalledProcessError, OSError: it cannot be built or loaded.
    """
    key = hashlib.sha256("\n".join([source, *command, _machine()]).encode()).hexdigest()[:24]
    try:
        kept = folder() / f"{key}.so"
        with contextlib.suppress(OSError):  # there is none, or a torn one
            return ctypes.CDLL(str(kept))
        with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
            compiled(source, command, Path(scratch)).replace(kept)  # so that many ranks may build at once
        return ctypes.CDLL(str(kept))
    except (OSError, subprocess.CalledProcessError) as error:
        why = error  # no home, one that is full or read only or that others can write to
    with tempfile.TemporaryDirectory(dir=_closed(Path(tempfile.gettempdir()))) as scratch:
        library = ctypes.CDLL(str(compiled(source, command, Path(scratch))))  # once loaded it needs no file
    if _first("no cache"):
        _log.warning("fzero cannot keep its kernels, so every process builds them anew: %s", why)
    return library


def folder() -> Path:
    """`fzero/kernels` in this user's cache folder (XDG_CACHE_HOME, or ~/.cache), made where it is missing.

    Raises:
        OSError: it cannot be made, or others could write to it: what is loaded from there runs as this user.
    """
    said = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(said) if os.path.isabs(said) else Path.home() / ".cache"  # the standard ignores a relative one
    except RuntimeError as error:
        raise FileNotFoundError(f"this user has no home folder ({error})") from None
    path = _closed(base / "fzero" / "kernels")
    if path.stat().st_mode & _OTHERS:
        raise PermissionError(f"others can write to {path}; `chmod go-w {path}`")
    return path


def _closed(path: Path) -> Path:
    """A folder, made where it is missing, to which nobody but this user and root can put another."""
    path = Path(os.path.realpath(path))
    for at in (*reversed(path.parents), path):
        at.mkdir(0o700, exist_ok=True)
        about = at.stat()
        if about.st_uid not in (os.geteuid(), 0, _NO_ROOT):
            raise PermissionError(f"{at} belongs to user {about.st_uid}, expected this user or root")
        if about.st_mode & _OTHERS and not about.st_mode & stat.S_ISVTX:  # unlike /tmp
            raise PermissionError(f"others can write to {at}; `chmod go-w {at}`")
    return path


def compiled(source: str, command: Sequence[str], scratch: Path) -> Path:
    """A library in the scratch folder, where the compiler has its own temporaries as well."""
    text, library = scratch / "kernel.cpp", scratch / "kernel.so"
    text.write_text(source)
    subprocess.run(
        [*command, str(text), "-o", str(library)],
        check=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={**os.environ, "TMPDIR": str(scratch)},
    )
    with open(library, "rb") as file:
        os.fsync(file.fileno())  # or its name may outlive its content
    return library


def flags() -> list[str]:
    """The options for a compiler after its own, none of which may change a number."""
    flags = ["-O3", "-march=native", "-fno-fast-math", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
    # the order of instructions, which is worth a tenth
    flags += ["-fopenmp-simd", "-shared", "-fPIC", "-fschedule-insns", "-fsched-pressure"]
    if platform.machine() == "x86_64":
        flags.append("-mprefer-vector-width=512")
    return flags


@functools.cache
def _machine() -> str:
    """The facts that -march=native and the loader depend on, as machines may share a home."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    known = next((line for line in lines if line.startswith(("flags", "Features"))), platform.node())
    return f"{known} {platform.libc_ver()}"


@functools.cache
def carries(formats: tuple[Format, ...], grad: torch.dtype) -> bool:
    """Tells whether kernels have all these types."""
    return {grad, *(part.dtype for form in formats for part in form.parts)} <= TYPES.keys()


@functools.cache
def kernel(
    formula: Callable[..., Sequence[torch.Tensor]],
    formats: tuple[Format, ...],
    grad: torch.dtype,
    hypers: int,
) -> Callable[..., None] | None:
    """`run(parts, grads, counters, hyper)` on flat CPU buffers of whole blocks of 64; None where it cannot be made."""
    made = carries(formats, grad)
    function = _function(source_of(formula, formats, grad, hypers)) if made else None
    if function is None:
        return None
    every = [part.every for form in formats for part in form.parts] + [1]

    def run(parts: Sequence[torch.Tensor], grads: torch.Tensor, counters: Counters, hyper: torch.Tensor) -> None:
        tensors, runs = [*parts, grads], counters.table
        ranges = _split(grads.numel(), threads.get() or torch.get_num_threads())

        def part_of(start: int, stop: int) -> None:
            places = [t.data_ptr() + start // e * t.element_size() for t, e in zip(tensors, every, strict=True)]
            places = [*map(ctypes.c_void_p, [*places, runs.data_ptr()]), ctypes.c_int64(start // N)]
            function(ctypes.c_int64(stop - start), *places, ctypes.c_void_p(hyper.data_ptr()))

        if len(ranges) == 1:
            part_of(*ranges[0])
        elif ranges:
            with concurrent.futures.ThreadPoolExecutor(len(ranges)) as pool:
                list(pool.map(part_of, *zip(*ranges, strict=True)))

    return run


def _split(numel: int, threads: int) -> list[tuple[int, int]]:
    """(start, stop) of about equal parts, multiples of N."""
    blocks = numel // N
    threads = max(1, min(threads, blocks // 1024))
    bounds = [blocks * i // threads * N for i in range(threads + 1)]
    return [(a, b) for a, b in itertools.pairwise(bounds) if b > a]
