"""Draws programs until the time is over, on threads and real processes; says what became of them.

`make soak MINUTES=10 SEED=0`. Prints progress and, at the end or after Ctrl-C, tables by feature and by reason, with
the seeds of what went wrong, for `python -m drawn --seed N --shrink`. Exits with 1 if anything did: other numbers than
plain torch, errors that say nothing, hangs, crashes. Goes on where it stopped with SEED=.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Iterator

from drawn import examining
from drawn.counting import Report, Tally
from drawn.drawing import from_seed
from drawn.pool import Job, Lost, run_jobs
from drawn.verdicts import Verdict

BATCH = 20  # programs of one job on processes
EVERY = 10  # of how many batches one runs on processes


def jobs(start: int, programs: int | None, until: float) -> Iterator[Job]:
    """A batch on real processes, then programs on threads one by one, and again."""
    seed = start
    for number in itertools.count():
        for _ in range(BATCH):
            if time.monotonic() > until or (programs is not None and seed >= start + programs):
                return
            if number % EVERY == 0:
                yield Job(examining.on_processes, (range(seed, seed + BATCH),), 600.0)
                seed += BATCH
                break
            yield Job(examining.on_threads, (seed,), 120.0)
            seed += 1


def reports(job: Job, result: object) -> list[Report]:
    if isinstance(result, Lost):
        if result.why.startswith("error"):
            raise RuntimeError(f"{job}: {result.why}")
        seeds = job.args[0] if job.call is examining.on_processes else [job.args[0]]
        kind = "hang" if result.why == "hang" else "raw"
        verdict = Verdict(kind, f"the worker's {result.why}", f"one of seeds {list(seeds)}")
        return [Report(from_seed(seeds[0]), verdict)]
    return result if isinstance(result, list) else [result]  # type: ignore[list-item]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--programs", type=int, help="stop after so many")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 2)
    options = parser.parse_args()
    tally, started, said = Tally(), time.monotonic(), 0.0
    last = options.seed
    try:
        until = started + 60 * options.minutes
        for job, result in run_jobs(jobs(options.seed, options.programs, until), options.workers):
            for report in reports(job, result):
                tally.add(report)
                last = max(last, report.program.seed + 1)
                if report.verdict.bad:
                    print(
                        f"seed {report.program.seed} ({report.backend}): {report.verdict.kind}, {report.verdict.reason}"
                    )
            if time.monotonic() - said > 10:
                said = time.monotonic()
                rate = sum(tally.kinds.values()) / (said - started)
                print(f"{(said - started) / 60:5.1f} min, {rate:.1f} a second, {tally.summary()}", flush=True)
    except KeyboardInterrupt:
        print("stopped")
    print("\n" + tally.table())
    if tally.counted >= 2000 and tally.rare():
        print(f"in less than 5 % of the programs: {', '.join(tally.rare())}")
    print(f"\n{tally.summary()} in {(time.monotonic() - started) / 60:.1f} min; go on with SEED={last}")
    return int(tally.bad > 0)


if __name__ == "__main__":
    sys.exit(main())
