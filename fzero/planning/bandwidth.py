"""fz.measure_bandwidth: how fast bytes go between the device, the host and a disk, on this machine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from fzero.base.arguments import need_int, need_number, wrong
from fzero.stores.disk import Disk
from fzero.stores.memories import DiskBuffer

_PIECES = 8  # that the bytes are moved in: one travels while the next one begins


@dataclass(frozen=True)
class Bandwidth:
    """How fast bytes move between memories, in bytes per second. Measure it with `fz.measure_bandwidth`.

    Args:
        host_read: from the host's memory to the device.
        host_write: from the device to the host's memory.
        disk_read: from files to the host's memory; None without a disk.
        disk_write: from the host's memory to files; None without a disk.

    Raises:
        TypeError: not a number.
        ValueError: not positive.

    Example:
        >>> fz.Bandwidth(host_read=25e9, host_write=25e9, disk_read=3e9).disk_read
        3000000000.0
    """

    host_read: float
    host_write: float
    disk_read: float | None = None
    disk_write: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            given = getattr(self, field.name)
            if given is None and field.name.startswith("disk"):
                continue
            value = float(need_number(given, "Bandwidth", field.name, "a number of bytes per second"))
            if not 0.0 < value < math.inf:
                raise ValueError(
                    f"Bandwidth: got {field.name}={value}, expected a positive number of bytes per second."
                )

    def __str__(self) -> str:
        said = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return ", ".join(f"{name} {value / 1e9:.2f} GB/s" for name, value in said if value is not None)


def need_bandwidth(bandwidth: object, who: str) -> None:
    if not isinstance(bandwidth, Bandwidth):
        raise wrong(who, "bandwidth", bandwidth, "an fz.Bandwidth, such as fz.measure_bandwidth() returns")


def measure_bandwidth(
    disk: Disk | None = None, device: str | torch.device = "cpu", nbytes: int = 256 << 20
) -> Bandwidth:
    """Measures how fast this machine moves bytes between device, host and disk. It takes a second or two.

    Bytes move as in a step: to a device from page-locked memory, to a disk by its own threads. On the CPU, "device" and
    "host" are one memory. A filesystem in memory, such as /tmp often is, measures that memory.

    Args:
        disk: a disk to measure too. Its test files are removed.
        device: the device that computes.
        nbytes: bytes to move each way. The device and the host need an eighth of them, the disk all of them.

    Returns:
        The rates, for `plan.seconds` and `fz.fits`.

    Raises:
        OSError: the disk has no room for `nbytes`.

    Example:
        >>> fz.measure_bandwidth(nbytes=1 << 20).host_read > 0
        True
    """
    if disk is not None and not isinstance(disk, Disk):
        raise wrong("measure_bandwidth", "disk", disk, "an fz.Disk(path) or None")
    if not isinstance(device, (str, torch.device)):
        raise wrong("measure_bandwidth", "device", device, "a device, such as 'cuda' or 'cpu'")
    size = max(1, need_int(nbytes, "measure_bandwidth", "nbytes", "a number of bytes", least=1) // _PIECES)
    try:
        there = torch.ones(size, dtype=torch.uint8, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:  # so torch says "no CUDA", and "too large"
        raise _unusable(device, size, str(error).partition("\n")[0]) from None
    if there.is_meta:
        raise _unusable(device, size, "nothing lies there")
    here = torch.ones(size, dtype=torch.uint8, device="cpu", pin_memory=there.device.type == "cuda")

    def copies(target: torch.Tensor, source: torch.Tensor) -> None:
        for _ in range(_PIECES):
            target.copy_(source, non_blocking=True)
        if there.device.type == "cuda":
            torch.cuda.synchronize(there.device)

    copies(there, here)  # warms up
    read, write = _rate(size, lambda: copies(there, here)), _rate(size, lambda: copies(here, there))
    return Bandwidth(read, write, *(_of_files(disk, size) if disk else ()))


def _unusable(device: str | torch.device, size: int, why: str) -> ValueError:
    return ValueError(
        f"measure_bandwidth: got device={str(device)!r}, expected one with room for {size} bytes, such as 'cuda' "
        f"({why})."
    )


def _of_files(disk: Disk, size: int) -> tuple[float, float]:
    """Bytes per second read from files, and written to them."""
    source, cpu = torch.ones(size, dtype=torch.uint8, device="cpu"), torch.device("cpu")
    buffers: list[DiskBuffer] = []

    def write(count: int) -> None:
        buffers[:] = [DiskBuffer.of(source, disk, cpu, "what measure_bandwidth writes") for _ in range(count)]
        for buffer in buffers:
            buffer.file.written()

    def read() -> None:
        waits: list[Callable[[], object]] = []
        for buffer in buffers:
            waits.append(buffer.start_open(False))
            if len(waits) > 1:  # two at a time, as of a step's units
                waits.pop(0)()
        for wait in waits:
            wait()

    write(1)  # makes the folder and its threads
    written = _rate(size, lambda: write(_PIECES))
    return _rate(size, read), written


def _rate(size: int, move: Callable[[], object]) -> float:
    """Bytes per second of what moves all pieces of a size."""
    begun = time.perf_counter()
    move()
    return size * _PIECES / max(time.perf_counter() - begun, 1e-9)
