"""run_ranks: a function on every rank, on threads or on gloo processes that are reused; fake_mesh: one rank for all."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import datetime
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist

from fzero.base import private, thread_state
from fzero.base.arguments import need_int, need_number, need_str, wrong
from fzero.base.forking import forking_context, loaded, pickled, startable
from fzero.comm import hazards, worlds
from fzero.comm.backend import Mesh
from fzero.comm.divergence import PeerStopped, checked_collectives
from fzero.purity.strict import is_strict, strict
from fzero.table.needs import is_component

T = TypeVar("T")


class RankError(RuntimeError):
    """A rank of `run_ranks` failed.

    On threads `__cause__` is its exception, with the traceback. On processes the message holds the traceback.
    """


def run_ranks(
    fn: Callable[[int], T],
    world_size: int,
    *,
    backend: str = "threads",
    timeout: float = 60.0,
    checked: bool = True,
) -> list[T]:
    """Runs a function on every rank of a process group, in this process or in several. No `torchrun` is needed.

    Inside `fz.testing.hazards(seed)` every rank has hazards too, and inside `fz.testing.strict()` its runs are proven.

    Args:
        fn: called as `fn(rank)`. With "processes" it must be picklable, so define it at the top of a module.
        world_size: number of ranks.
        backend: "threads" takes threads of this process, which is fast. "processes" takes gloo processes, which stay
            for the next call and have the caller's warning filters of Python's own categories.
        timeout: seconds for all ranks together, and for any one collective.
        checked: run inside `fz.testing.checked_collectives()`.

    Returns:
        The results, in rank order.

    Raises:
        RankError: a rank raised. The others are stopped at once.

    Example:
        >>> fz.testing.run_ranks(lambda rank: torch.distributed.get_rank() * 10, 2)
        [0, 10]
    """
    need_int(world_size, "run_ranks", "world_size", "a number of ranks", least=1)
    need_number(timeout, "run_ranks", "timeout", "a number of seconds")
    if not timeout > 0:
        raise ValueError(f"run_ranks: got timeout={timeout}, expected a positive number of seconds.")
    if not callable(fn) or is_component(fn):
        raise wrong("run_ranks", "fn", fn, "a function fn(rank)")
    around = _Around(checked, hazards.current_seed(), is_strict())
    if backend == "threads":
        return _on_threads(fn, world_size, timeout, around)
    if backend == "processes":
        return _pool(world_size).run(fn, world_size, timeout, around)
    raise ValueError(f"run_ranks: got backend={backend!r}, expected 'threads' or 'processes'.")


class _Around(NamedTuple):
    """Contexts that every rank runs in, with delays of its own."""

    checked: bool
    seed: int | None
    strict: bool

    @contextlib.contextmanager
    def of(self, rank: int) -> Iterator[None]:
        late = contextlib.nullcontext() if self.seed is None else hazards.hazards(1000 * self.seed + rank)
        with checked_collectives(self.checked), strict(self.strict), late:
            yield


@contextlib.contextmanager
def _threaded_world() -> Iterator[Callable[[object], None]]:
    """Inside, every thread may start a process group of its own with backend "threaded"; yields `fail(error)`."""
    from torch.testing._internal.distributed import multi_threaded_pg as pg  # which makes the backend known

    worlds.install()
    pg.ProcessLocalGroup.reset()
    try:

        def fail(error: object) -> None:
            while True:
                try:  # it walks through a dict to which other ranks may just add a collective
                    return pg.ProcessLocalGroup.exception_handle(error)
                except RuntimeError:
                    continue

        yield fail
    finally:
        pg.ProcessLocalGroup.reset()
        worlds.uninstall()


@contextlib.contextmanager
def _hooks_kept() -> Iterator[None]:
    """Each group that begins wraps sys.excepthook once more, and none that ends takes its own away."""
    before = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = before


@contextlib.contextmanager
def fake_mesh(axes: Mapping[str, int], rank: int = 0) -> Iterator[Mesh]:
    """A context with a mesh of any number of ranks in one process. Shapes are right; values and messages are not.

    It runs on torch's fake process group. Use it for `fz.plan`, `fz.parallel.check` and shapes.

    Args:
        axes: name -> number of ranks, the slowest axis first. Thousands of ranks are fine.
        rank: the rank that runs, among all of them.

    Raises:
        RuntimeError: there is a process group already.

    Example:
        >>> with fz.testing.fake_mesh({"dp": 64, "tp": 8}, rank=9) as mesh:
        ...     ax = fz.parallel.axis(mesh, "tp")
        ...     fz.parallel.gather(torch.ones(2), ax, 0).shape, ax.rank
        (torch.Size([16]), 1)
    """
    from torch.testing._internal.distributed import fake_pg  # which makes the backend known

    if not isinstance(axes, Mapping) or not axes:
        raise wrong("testing.fake_mesh", "axes", axes, "a dict of names of axes to numbers of ranks")
    for name, size in axes.items():
        need_str(name, "testing.fake_mesh", "axes", "names of axes for its keys")
        need_int(size, "testing.fake_mesh", f"axes[{name!r}]", "a number of ranks", least=1)
    count = math.prod(axes.values())
    if need_int(rank, "testing.fake_mesh", "rank", "one of the ranks", least=0) >= count:
        raise ValueError(f"testing.fake_mesh: got rank={rank}, expected one of {count} ranks, from 0 to {count - 1}.")
    if dist.is_initialized():
        raise RuntimeError(
            "testing.fake_mesh: there is a process group already. Use fake_mesh outside of run_ranks and torchrun. "
            "Inside of them use torch.distributed.init_device_mesh."
        )
    with _hooks_kept():
        dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=rank, world_size=count)
        try:
            yield dist.init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        finally:
            dist.destroy_process_group()


def _on_threads(fn: Callable[[int], object], world_size: int, timeout: float, around: _Around) -> list[Any]:
    results: list[object] = [None] * world_size
    errors: list[tuple[int, BaseException]] = []
    thread_state.prepare_for_fakes()
    with _hooks_kept(), private.shared_forward_mode(), _threaded_world() as fail:
        store, over = dist.HashStore(), threading.Event()

        def rank_main(rank: int) -> None:
            try:
                with worlds.own_world():
                    dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
                    try:
                        with around.of(rank):
                            results[rank] = fn(rank)
                    finally:
                        if not over.is_set():
                            dist.destroy_process_group()
            except BaseException as error:
                # otherwise another rank failed, and this one was waiting for it
                if not over.is_set() and not (errors and isinstance(error, SystemExit)):
                    errors.append((rank, error))
                    fail((type(error), error, error.__traceback__))

        threads = [
            threading.Thread(target=contextvars.copy_context().run, args=(rank_main, rank), daemon=True)
            for rank in range(world_size)
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(timeout)
            hung = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
            if hung and not errors:
                error = TimeoutError(f"ranks {hung} did not finish within {timeout} seconds")
                errors.append((hung[0], error))
                fail((TimeoutError, error, None))
        finally:
            over.set()
            _stop(threads)
    if errors:
        rank, error = min(errors, key=lambda pair: isinstance(pair[1], PeerStopped))
        text = "".join(traceback.format_exception_only(error))  # the traceback is that of `__cause__`
        raise RankError(f"rank {rank} of {world_size} failed:\n{text}") from error
    return results


def _stop(threads: Sequence[threading.Thread]) -> None:
    """Ends what is still alive as soon as it runs Python again: its collectives would be part of the next run's."""
    alive = [thread for thread in threads if thread.is_alive()]
    for thread in alive:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
    for thread in alive:  # those that wait for others are told, and go at once
        thread.join(0.2)


_PROCESSES = "run_ranks(backend='processes')"
_DIED = (
    "the process died. If it did so at once: it imports the program, which may call run_ranks under "
    "`if __name__ == '__main__':` alone."
)
_VICTIM = (PeerStopped.__name__, "Connection closed by peer", "Connection reset by peer")  # of another's failure


class _Pool:
    """Processes that wait for work. A failed rank ends the pool; the next call starts another."""

    def __init__(self, size: int) -> None:
        context = forking_context(__name__)
        self.size, self.processes, self.pipes = size, [], []
        saved = dict(os.environ)
        os.environ["OMP_NUM_THREADS"] = "1"
        try:
            for _ in range(size):
                ours, theirs = context.Pipe()
                process = context.Process(target=_worker, args=(theirs,), daemon=True)
                with startable():
                    process.start()
                theirs.close()
                self.processes.append(process)
                self.pipes.append(ours)
        finally:
            del os.environ["OMP_NUM_THREADS"]
            os.environ.update(saved)

    def lives(self) -> bool:
        """Whether all of its processes wait: somebody may have killed one."""
        return bool(self.processes) and all(process.is_alive() for process in self.processes)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []

    def run(self, fn: Callable[[int], object], world_size: int, timeout: float, around: _Around) -> list[Any]:
        job = pickled(fn, _PROCESSES)
        try:
            return self._run(job, world_size, timeout, around)
        except BaseException:  # also an interrupt: what they would still answer is of this run, not of the next
            self.close()
            raise

    def _run(self, job: bytes, world_size: int, timeout: float, around: _Around) -> list[Any]:
        filters = [each for each in warnings.filters if each[2].__module__ == "builtins"]  # others it may not know
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(world_size):
                store = os.path.join(folder, "store")
                with contextlib.suppress(OSError):  # of a process that has died, as is said below
                    self.pipes[rank].send((job, rank, world_size, store, timeout, around, filters, sys.path))
            results: list[object] = [None] * world_size
            failed: list[tuple[int, str]] = []
            waiting = {self.pipes[rank]: rank for rank in range(world_size)}
            while waiting:
                patience = 2.0 if failed else timeout + 30  # who lost a connection to one that failed says so first
                ready = multiprocessing.connection.wait(list(waiting), patience)
                if not ready:
                    failed = failed or [(next(iter(waiting.values())), f"no answer in {patience} seconds")]
                    break
                for pipe in ready:
                    rank = waiting.pop(pipe)  # type: ignore[arg-type]
                    answer: Any = _DIED
                    good = False
                    with contextlib.suppress(EOFError, OSError):
                        good, answer = pipe.recv()  # type: ignore[union-attr]
                    if good:
                        results[rank] = pickle.loads(answer)
                    else:
                        failed.append((rank, answer))
            if failed:
                rank, answer = min(failed, key=lambda pair: any(words in pair[1] for words in _VICTIM))
                raise RankError(f"rank {rank} of {world_size} failed:\n{answer}")
        return results


_pools: list[_Pool] = []


def _pool(size: int) -> _Pool:
    while _pools and (_pools[0].size < size or not _pools[0].lives()):
        _pools.pop().close()
    if not _pools:
        _pools.append(_Pool(size))
    return _pools[0]


def _worker(pipe: multiprocessing.connection.Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            job, rank, world_size, store, timeout, around, filters, sys.path[:] = pipe.recv()
        except (EOFError, KeyboardInterrupt):  # a Ctrl-C while it waits is its caller's
            return
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world_size),
                rank=rank,
                world_size=world_size,
                timeout=datetime.timedelta(seconds=timeout),
            )
            try:
                with warnings.catch_warnings(), around.of(rank):
                    warnings.resetwarnings()
                    cast("list[object]", warnings.filters).extend(filters)
                    answer = (True, pickle.dumps(loaded(job, _PROCESSES, "backend='threads'")(rank)))
                with contextlib.suppress(RuntimeError):  # fn may have broken the group and have caught that
                    dist.barrier()
            finally:
                dist.destroy_process_group()
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)
