"""Hazards make a race show: what is in flight reads as NaN, what is given back is poisoned, messages leave late.

A race is a read before an arrival, or a write before a departure. Alone on a machine both mostly go well. Inside
`hazards` neither can: what is received lies elsewhere until somebody waits for it, and what is sent leaves late.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from fzero.base import private
from fzero.base.context import during, variable

T = TypeVar("T")
_current: contextvars.ContextVar[Hazards | None] = variable("hazards", None)
DELAY = 2e-3  # seconds at most


class Hazards:
    """One rank's hazards: a source of delays, and the threads that messages leave from."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._random = random.Random(seed)
        self.threads = concurrent.futures.ThreadPoolExecutor(2, "fzero-hazards")
        self.in_flight = 0  # transfers that nobody has waited for

    def later(self, start: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Starts a transfer some time later, maybe after one that is started after it."""
        delay = self._random.random() * DELAY if self._random.random() < 0.5 else 0.0

        def late() -> T:
            time.sleep(delay)
            with torch.no_grad():  # a mode of the thread that it was started on
                return start()

        return self.threads.submit(late)


def current_seed() -> int | None:
    hazards = _current.get()
    return None if hazards is None else hazards.seed


def poison(tensor: torch.Tensor) -> bool:
    """Inside `hazards`, makes whatever reads a buffer that was given back read NaN; returns True if so."""
    if _current.get() is None:
        return False
    _fill(tensor)
    return True


def _fill(tensor: torch.Tensor) -> None:
    """Writes NaN, or the largest value of an integer, without autograd noticing."""
    with torch.no_grad(), private.preserve_version([tensor]):
        if tensor.dtype == torch.bool:
            tensor.fill_(True)
        else:
            inexact = tensor.is_floating_point() or tensor.is_complex()
            tensor.fill_(float("nan") if inexact else torch.iinfo(tensor.dtype).max)


def in_flight(
    target: torch.Tensor,
    source: torch.Tensor,
    start: Callable[[torch.Tensor, torch.Tensor], Callable[[], None]],
    late: bool,
) -> Callable[[], None]:
    """Begins a transfer by `start(target, source)`, shows it inside `hazards`, and delays it if it may be `late`."""
    plain = not (private.is_wrapper(source) or private.is_wrapper(target))
    if _current.get() is not None and plain and source.untyped_storage()._cdata == target.untyped_storage()._cdata:
        source = source.clone()  # its place in the target is about to be filled
    return arriving(target, lambda target: start(target, source), late)


def arriving(
    target: torch.Tensor, start: Callable[[torch.Tensor], Callable[[], None]], late: bool = True
) -> Callable[[], None]:
    """The same where the source is no tensor, but a file, say. The wait may be called again, and from any thread."""
    hazards = _current.get()
    if hazards is None:
        return start(target)
    hazards.in_flight += 1
    elsewhere = torch.empty_like(target)
    begun = hazards.later(lambda: start(elsewhere)) if late else None
    wait = start(elsewhere) if begun is None else lambda: begun.result()()
    _fill(target)
    lock, waited, arrived = threading.Lock(), False, False

    def finish() -> None:
        nonlocal waited, arrived
        with lock:
            if not waited:
                hazards.in_flight -= 1
                waited = True
            if arrived:
                return
            wait()
            with torch.no_grad(), private.preserve_version([target]):
                target.copy_(elsewhere)
            arrived = True

    return finish


def departing(start: Callable[[], None]) -> None:
    """Begins what nobody has to wait for: now, or inside `hazards` some time later."""
    hazards = _current.get()
    if hazards is None:
        start()
    else:
        hazards.later(start)


@contextlib.contextmanager
def hazards(seed: int | None = 0) -> Iterator[None]:
    """A context that makes races show as NaN. For tests, on threads, on processes and on one rank.

    - What is in flight reads as NaN until it is waited for.
    - What is given back (buffers of gathered params, of full cotangents) is filled with NaN.
    - On processes, messages leave late and out of order.
    - A transfer that nobody has waited for by the end raises AssertionError.

    Numbers do not change, unless something is read too early.

    Args:
        seed: of the delays. None switches hazards off inside others, for example to measure memory.

    Example:
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1))
        >>> with fz.testing.hazards(seed=1):
        ...     state, metrics = step(step.init({"w": torch.ones(2)}), torch.ones(2))
        >>> metrics["loss"]
        tensor(2.)
    """
    own = None if seed is None else Hazards(seed)
    try:
        with during(_current, own):
            yield
        assert own is None or not own.in_flight, f"{own.in_flight} transfers were started that nobody waited for"
    finally:
        if own is not None:
            own.threads.shutdown(wait=False)
