"""`python -m fzero`: versions, devices, the compiler, kernels, and what to try if something is missing."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

import fzero as fz
from fzero.kernels import build
from fzero.state.speed import slowdown

# extra -> what wants it, and the packages that it brings
EXTRAS = {
    "examples": ("examples, pictures and progress bars", ("safetensors", "matplotlib", "tqdm")),
    "hf": ("models of Hugging Face, and LoRA", ("transformers", "peft")),
    "ray": ("fz.remote(on='ray')", ("ray",)),
    "bench": ("the benchmarks", ("deepspeed",)),
}



def main() -> None:
    """Prints the report."""
    tries: list[str] = []
    print(f"fzero {fz.__version__} in {Path(fz.__file__).parent}")
    print(f"versions: Python {platform.python_version()}, {', '.join(map(_version, ('torch', 'optree', 'numpy')))}")
    cpu = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores"
    print(f"CPU: {cpu}, {torch.get_num_threads()} threads")
    times = ", ".join([f"{str(dtype)[6:]} {slowdown(dtype):.1f}" for dtype in (torch.bfloat16, torch.float16)])
    print(f"a matmul on the CPU takes, as many times as in float32: {times}")
    print(f"devices: {_devices(tries)}")
    print(f"C++ compiler: {_compiler(tries)}")
    print(f"kernels: {_kernels(tries)}")
    found = {name: _version(name) for _, names in EXTRAS.values() for name in names}
    print(f"optional packages: {', '.join(found.values())}")
    for extra, (use, names) in EXTRAS.items():
        if missing := [name for name in names if found[name].endswith("missing")]:
            tries.append(f"For {use}: pip install {' '.join(missing)}, or in a clone '.[{extra}]'.")
    print("\n".join(["to try:", *[f"- {line}" for line in tries]] if tries else ["nothing is missing"]))


def _version(name: str) -> str:
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{name} missing"


def _devices(tries: list[str]) -> str:
    if torch.cuda.is_available():
        found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return ", ".join(f"cuda:{i} ({at.name}, {at.total_memory / 2**30:.0f} GiB)" for i, at in enumerate(found))
    if torch.version.cuda is not None:
        tries.append(f"torch is built for CUDA {torch.version.cuda} and finds no device. If there is one: nvidia-smi.")
    elif shutil.which("nvidia-smi"):
        tries.append("This torch is for CPUs, and the machine has a driver for CUDA devices: pip install torch.")
    return "cpu alone"


def _compiler(tries: list[str]) -> str:
    """Where it is, and whether it builds a library that this process loads."""
    if (command := build.compiler()) is None:
        tries.append("Install g++, or set CXX to a C++ compiler. Without one updates of large buffers take longer.")
        return f"none (CXX={os.environ.get('CXX', '')!r})"
    source = 'extern "C" int kernel() { return 0; }'
    try:
        with tempfile.TemporaryDirectory() as folder:
            ctypes.CDLL(str(build.compiled(source, [*command, *build.flags()], Path(folder))))
    except (OSError, subprocess.CalledProcessError) as error:
        tries.append("Set CXX to a C++ compiler that takes g++'s options. Until then updates take longer.")
        return f"{' '.join(command)}, which fails: {(getattr(error, 'stderr', b'') or b'').decode() or error}".strip()
    return f"{' '.join(command)}, which works"


def _kernels(tries: list[str]) -> str:
    try:
        folder = build.folder()
    except OSError as error:
        tries.append("Set XDG_CACHE_HOME to a folder that only you can write to: kernels are then kept.")
        return f"not kept: {error}"
    sizes = [path.stat().st_size for path in folder.glob("*.so")]
    return f"{len(sizes)} in {folder} ({sum(sizes) / 2**20:.1f} MiB)"


if __name__ == "__main__":
    main()
