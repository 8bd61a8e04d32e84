"""Tensors as bytes of files, and the checksums of these by chunks: whoever reads a slice checks just its chunks."""

from __future__ import annotations

import collections
import hashlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future

import torch

CHUNK = 4 << 20  # bytes of a piece that have one checksum; its last chunk may be shorter
_MOST = 4  # threads: more than a disk needs
_CHUNKS = 8  # of an accelerator's tensor that are copied at once


def workers() -> int:
    """How many threads make checksums."""
    return min(_MOST, torch.get_num_threads())


def count(nbytes: int) -> int:
    """The number of a piece's chunks."""
    return -(-nbytes // CHUNK)


def digest(data: memoryview | bytes | bytearray) -> str:
    return hashlib.sha256(data).hexdigest()


def hashed(pieces: Iterable[memoryview], put: Callable[[memoryview], None], workers: int) -> Iterator[str]:
    """The checksum of each chunk of each piece, in order, made by some threads; it is written meanwhile."""
    under, jobs = collections.deque[Future[str]](), queue.SimpleQueue[tuple[memoryview, Future[str]] | None]()
    # threads of its own: an executor refuses jobs once the interpreter waits for the save to end
    threads = [threading.Thread(target=_digests, args=(jobs,), name="fzero-save") for _ in range(workers)]
    begun = list[threading.Thread]()
    try:
        for thread in threads:
            thread.start()
            begun.append(thread)
        for piece in pieces:
            for start in range(0, len(piece), CHUNK):
                chunk = piece[start : start + CHUNK]
                under.append(Future())
                jobs.put((chunk, under[-1]))
                put(chunk)
                if len(under) > len(threads):
                    yield under.popleft().result()
        while under:
            yield under.popleft().result()
    finally:
        for _ in begun:
            jobs.put(None)
        for thread in begun:
            thread.join()


def _digests(jobs: queue.SimpleQueue[tuple[memoryview, Future[str]] | None]) -> None:
    """What a thread does until it is told to end."""
    while (job := jobs.get()) is not None:
        chunk, done = job
        done.set_result(digest(chunk))
        del job, chunk  # the state's memory


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in memory that a file can be written from."""
    return tensor.detach().cpu().contiguous()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a flat tensor on the CPU."""
    return memoryview(tensor.resolve_neg().view(torch.uint8).numpy())  # type: ignore[arg-type]


def staged(tensors: Iterator[torch.Tensor], ready: torch.Event | None) -> Iterator[torch.Tensor]:
    """Flat tensors in the host's memory; those of an accelerator are copied on a stream that no step waits for."""
    for tensor in tensors:
        if tensor.device.type == "cpu":
            yield tensor.contiguous()
            continue
        stream = torch.Stream(tensor.device)
        if ready is not None:
            stream.wait_event(ready)
        for piece in tensor.split(_CHUNKS * CHUNK // tensor.itemsize):
            with stream:
                host = piece.cpu()  # waits for the copy
            yield host
