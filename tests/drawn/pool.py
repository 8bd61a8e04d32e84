"""Jobs in processes of their own, which may crash or hang: then the job is known, and the next one begins."""

from __future__ import annotations

import concurrent.futures
import itertools
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fzero.base.forking import forking_context


class Job(NamedTuple):
    """`call(*args)`, which must be picklable, and the seconds that it may take."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    seconds: float


@dataclass(frozen=True)
class Lost:
    """What comes back in a result's place: "crash", "hang", or "error:" with the traceback of the job itself."""

    why: str


def run_jobs(jobs: Iterator[Job], workers: int) -> Iterator[tuple[Job, Any]]:
    """(job, its result or `Lost`), in the order in which they are done; jobs are taken when a worker is free."""
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        under_way = {pool.submit(_result, job): job for job in itertools.islice(jobs, workers)}
        while under_way:
            for done in concurrent.futures.wait(under_way, return_when=concurrent.futures.FIRST_COMPLETED).done:
                yield under_way.pop(done), done.result()
                under_way |= {pool.submit(_result, job): job for job in itertools.islice(jobs, 1)}


def _result(job: Job) -> Any:
    context = forking_context("fzero.testing._ranks")
    ours, theirs = context.Pipe(False)
    process = context.Process(target=_work, args=(theirs, job))  # not a daemon: it may have processes of its own
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(job.seconds) else Lost("hang")
    except EOFError:
        return Lost("crash")
    finally:
        process.kill()
        process.join()
        ours.close()


def _work(pipe: Any, job: Job) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        result = job.call(*job.args)
    except Exception:
        result = Lost("error:\n" + traceback.format_exc())
    pipe.send(result)
