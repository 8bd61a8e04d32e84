"""Kills a run of examples/train_lm.py again and again, resumes it, and says what was lost: `make killing KILLS=200`.

One rank, all of them, the launcher, or it and a rank are killed at a random moment, half of the times inside a save, or
the run is asked to stop. After each it goes on from the newest checkpoint, which is at least the last that was whole
before; losses are to the bit those of a run that was left alone, and so are the weights at the end. No process or
semaphore stays behind, and no file of a save that never ended. Exits with 1 at the first thing that is otherwise.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from forked import Run, Still, adopt

import fzero as fz
from fzero.checkpoint.files import LOCK

OPTIONS = (
    "--width 32 --blocks 1 --heads 2 --context 16 --batch 2 --eval-every 5 --eval-batches 1 --sample-bytes 4 "
    "--warmup 4 --steps 30 --save-every 2 --dtype fp32"
).split()
KEEP, OPERATIONS = 3, 120  # checkpoints; operations on the disk, among which one is drawn
SOON, LONGEST = 20.0, 120.0  # seconds within which all has ended after a kill; that a whole run may take
KINDS = ["one", "one", "one", "all", "all", "two", "launcher", "SIGTERM", "SIGINT"]
MEANWHILE = 8  # updates between the newest checkpoint, as somebody asks for an end, and that end


@dataclasses.dataclass
class Left:
    """What lies in the folder of a run.

    Attributes:
        newest: the name of the newest checkpoint that is whole, its losses and held-out losses.
        number: of it.
        entries: how many subfolders there are.
    """

    newest: str = ""
    number: int = 0
    train: list[float] = dataclasses.field(default_factory=list)
    held_out: list[list[float]] = dataclasses.field(default_factory=list)
    entries: int = 0

    @staticmethod
    def of(out: Path) -> Left:
        folder = out / "checkpoints"
        names = sorted(os.listdir(folder)) if folder.exists() else []
        for name in reversed(names):
            try:
                extra = fz.load_extra(folder / name)
            except FileNotFoundError:  # a save that never ended, or one that is being removed
                continue
            return Left(name, int(name.split("-")[0]), extra["train"], extra["held out"], len(names))
        return Left(entries=len(names))


class Wrong(AssertionError):
    """Something is not as it should be."""


def need(holds: bool, what: str) -> None:
    if not holds:
        raise Wrong(what)


class Killing:
    """Runs on one number of ranks, each in a folder until it has ended well, and then in a new one."""

    def __init__(self, ranks: int, top: Path, draw: random.Random, kinds: list[str]) -> None:
        self.ranks, self.draw, self.kinds = ranks, draw, kinds
        self.out, self.log = top / "out", top / "log"
        self.left, self.longest = Left(), dict[str, float]()
        started = time.monotonic()
        run = self._run(top / "whole")
        self._ends(run, LONGEST)
        need(run.status == 0, "a run that was left alone has failed")
        self.seconds = time.monotonic() - started
        self.whole = Left.of(top / "whole")
        self.weights = (top / "whole" / "weights.safetensors").read_bytes()

    def _run(self, out: Path, still: Still | None = None) -> Run:
        return Run([*OPTIONS, "--ranks", str(self.ranks), "--out", str(out), "--resume"], self.log, still)

    def once(self) -> str:
        """One run and what becomes of it, in words; "" where it ended well before its moment came."""
        kind = self.draw.choice(self.kinds)
        kind = "all" if self.ranks == 1 and kind in ("one", "two", "launcher") else kind
        still, moment = None, self.draw.uniform(0, self.seconds)
        if kind in ("one", "two", "all") and self.draw.random() < 0.5:
            still = Still(self.draw.randrange(self.ranks), self.draw.randint(1, OPERATIONS))
        run = self._run(self.out, still)
        try:
            before = self._wait(run, moment, still)
            if run.status is None:
                self._send(run, kind, still)
                self.longest[kind] = max(self.longest.get(kind, 0.0), self._ends(run, SOON))
            else:
                kind = ""
                need(run.status == 0, f"a run that was left alone ended with {run.status}")
            self._check(run, kind, before)
        finally:
            run.close()
        return kind + (" inside a save" if kind and still else "")

    def _wait(self, run: Run, moment: float, still: Still | None) -> Left:
        """Waits for the moment; what was whole just before it."""
        started = time.monotonic()
        while not run.over():
            passed = time.monotonic() - started
            need(passed < LONGEST, f"nothing has ended it within {LONGEST} s")
            if len(run.ranks) == self.ranks and (run.still if still else passed > moment):
                break
            run.look(0.002)
        return Left.of(self.out)

    def _send(self, run: Run, kind: str, still: Still | None) -> None:
        if kind == "one":
            run.send(signal.SIGKILL, [run.ranks[still.rank if still else self.draw.randrange(self.ranks)]])
        elif kind == "all":
            run.send(signal.SIGKILL, [*run.ranks.values(), run.pid])
        elif kind == "two":
            rank = still.rank if still else self.draw.randrange(self.ranks)
            run.send(signal.SIGKILL, [run.pid, run.ranks[rank]])
        elif kind == "launcher":
            run.send(signal.SIGKILL, [run.pid])
        elif kind == "SIGTERM":
            run.send(signal.SIGTERM, [run.pid])
        else:  # as a terminal does
            run.send(signal.SIGINT, list({*run.ranks.values(), run.pid}))

    def _ends(self, run: Run, within: float) -> float:
        """Waits until nothing is left of a run; the seconds that it took."""
        started = time.monotonic()
        while not run.over():
            passed = time.monotonic() - started
            need(passed < within, f"after {within} s there is still {run.processes()}")
            run.look(0.01)
        need(not run.semaphores(), f"shared memory is left: {run.semaphores()}")
        return time.monotonic() - started

    def _check(self, run: Run, kind: str, before: Left) -> None:
        """Holds what a run has left against what there was before it, before its end, and in a run left alone."""
        log, start, left, whole = self.log.read_text(errors="replace"), self.left, Left.of(self.out), self.whole
        self.left = left
        if went_on := re.search(r"going on after update (\d+)", log):
            need(int(went_on[1]) == len(start.train), f"it went on after {went_on[1]}, not {start.newest}")
        need(not start.newest or "a new run begins" not in log, f"{start.newest} is lost: it began anew")
        for earlier in (start, before):
            need(left.number >= earlier.number, f"{earlier.newest} was whole, and now it is {left.newest}")
            need(len(left.train) >= len(earlier.train), f"{earlier.newest} had come further than {left.newest}")
        need(left.train == whole.train[: len(left.train)], f"{left.newest}: other losses than those of a whole run")
        held_out = whole.held_out[: len(left.held_out)]
        need(left.held_out == held_out, f"{left.newest}: other held-out losses than those of a whole run")
        need(not left.newest or left.newest.endswith(f"-{len(left.train)}"), f"{left.newest}: {len(left.train)} losses")
        # the second of two saves begins once the first has tidied
        most = KEEP + 2 if left.number >= start.number + 2 else start.entries + 2
        need(left.entries <= most, f"{left.entries} checkpoints lie there, expected at most {most}")
        ended = "A completion in" in log
        if kind == "one":
            told = run.status != 0 and "signal SIGKILL" in log
            need(told or ended, "the launcher does not say that a rank was killed")
        elif kind in ("SIGTERM", "SIGINT", "launcher"):
            need("stopped after" in log or ended, f"{kind}: it did not end well")
            need(kind == "launcher" or run.status == 0, f"{kind}: it ended with {run.status}")
            taken = len(left.train) - len(before.train)
            need(taken <= MEANWHILE, f"{kind}: it has taken {taken} updates since then")
        if ended:
            self._check_end(left.number > start.number)

    def _check_end(self, saved: bool) -> None:
        """Of a run that has ended well, and where it has saved once more has tidied; the next one is a new one."""
        need((self.out / "weights.safetensors").read_bytes() == self.weights, "other weights than those of a whole run")
        names = os.listdir(self.out / "checkpoints")
        need(len(names) == KEEP or not saved, f"at the end there are {sorted(names)}")
        for name in names if saved else ():
            found = os.listdir(self.out / "checkpoints" / name)
            need(len(set(found) - {LOCK}) == self.ranks + 1, f"{name} holds {sorted(found)}")
        shutil.rmtree(self.out)
        self.left = Left()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 1, 3])
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=sorted(set(KINDS)))
    args = parser.parse_args()
    adopt()
    counts, started, said, done = collections.Counter[str](), time.monotonic(), 0.0, 0
    with tempfile.TemporaryDirectory() as top:
        tempfile.tempdir = top  # a launcher that is killed cannot take the ranks' meeting place away
        killings = []
        for ranks in args.ranks:
            (Path(top) / str(ranks)).mkdir()
            killings.append(Killing(ranks, Path(top) / str(ranks), random.Random(f"{args.seed} {ranks}"), args.kinds))
        while done < args.kills:
            for own in killings:
                try:
                    became = own.once()
                except Wrong as error:
                    print(f"{own.ranks} ranks, after {done} kills of seed {args.seed}: {error}", flush=True)
                    print(own.log.read_text(errors="replace")[-4000:])
                    return 1
                done += bool(became)
                counts[f"{own.ranks} ranks: {became or 'ended well'}"] += 1
            if time.monotonic() - said > 30:
                said = time.monotonic()
                print(f"{said - started:5.0f} s: {done} kills", flush=True)
    for what, count in sorted(counts.items()):
        print(f"{count:5d}  {what}")
    for own in killings:
        took = ", ".join(f"{kind} {seconds:.1f} s" for kind, seconds in sorted(own.longest.items()))
        print(f"{own.ranks} ranks: all had ended at the latest after {took}")
    print(f"{done} kills in {time.monotonic() - started:.0f} s: nothing lost, nothing left behind")
    return 0


if __name__ == "__main__":
    sys.exit(main())
