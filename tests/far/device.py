"""Builds and loads the device, for the whole of this process."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

NAME = "far"
SOURCE = Path(__file__).parent / "device.cpp"


def compiler() -> str | None:
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def built() -> Path:
    """The library, which one machine compiles once for a version of torch."""
    known = hashlib.sha256(SOURCE.read_bytes() + f"{torch.__version__} {sys.version}".encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"fzero-far-{os.getuid()}-{known}.so"
    if not library.exists():
        part = library.with_suffix(f".{os.getpid()}")
        include = [f"-I{path}" for path in cpp_extension.include_paths()]
        link = [f"-L{cpp_extension.TORCH_LIB_PATH}", "-lc10", "-ltorch_cpu", "-ltorch"]
        flags = [
            "-std=c++20",
            "-O1",
            "-shared",
            "-fPIC",
            "-w",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        ]
        subprocess.run([str(compiler()), *flags, *include, str(SOURCE), *link, "-o", str(part)], check=True)
        part.rename(library)
    return library


@functools.cache
def load() -> ctypes.CDLL:
    """Makes "far" a device of torch."""
    library = ctypes.CDLL(str(built()))
    for name in ("far_live", "far_up", "far_down"):
        getattr(library, name).restype = ctypes.c_int64
    torch.utils.rename_privateuse1_backend(NAME)
    library.far_start()
    module: Any = types.ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = module.synchronize = lambda *_: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.device = lambda _: contextlib.nullcontext()
    torch._register_device_module(NAME, module)
    return library
