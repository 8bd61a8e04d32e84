"""Kills ranks of components at random moments, and says what was lost: `make killing-components KILLS=100`.

Two components on processes train as one (a model with ZeRO on two ranks, and a head), with a checkpoint after each
update. In each update a rank of one of them is killed (SIGKILL), at a random moment of a call, a save or a load. Each
time the error names the component and the rank within the time-out, the other one lives on with its values, the dead
one is made anew from its last checkpoint, and the batch is replayed. In the end the weights have the bits of a run that
was left alone; no process, segment of shared memory or file descriptor stays behind. Exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import optree
import remote_builds as builds
import torch

import fzero as fz

TIMEOUT = 30.0  # seconds
BUILDS: dict[str, Any] = {"vision": functools.partial(builds.built, stage=3), "text": builds.built_head}
RANKS = {"vision": 2, "text": 1}


class Killer:
    """Kills one rank of what lives, some time after it is told to.

    Attributes:
        victims: (component, rank) of those that were killed.
    """

    def __init__(self, seed: int, longest: float) -> None:
        self._random, self._longest = random.Random(seed), longest
        self.victims: list[tuple[str, int]] = []
        self._timer: threading.Timer | None = None

    def begin(self, living: dict[str, Any]) -> None:
        which = self._random.choice(sorted(living))
        rank = self._random.randrange(RANKS[which])
        pid = living[which].group.links[rank]._process.pid
        self._timer = threading.Timer(self._random.random() * self._longest, self._kill, (which, rank, pid))
        self._timer.start()

    def _kill(self, which: str, rank: int, pid: int) -> None:
        self.victims.append((which, rank))
        os.kill(pid, signal.SIGKILL)

    def wait(self) -> None:
        if self._timer is not None:
            self._timer.join()


def begun(which: str) -> Any:
    return fz.remote(BUILDS[which], RANKS[which], name=which, timeout=TIMEOUT)


def trained(steps: int, folder: Path, killer: Killer | None) -> tuple[Any, int, float]:
    """The weights after some updates, how many deaths there were, and the longest time until one was told."""
    images = torch.randn(steps, 5, 3, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    tokens = torch.randint(0, 4, (steps, 5), generator=torch.Generator().manual_seed(7))
    living = {which: begun(which) for which in BUILDS}
    states = {which: living[which].init() for which in BUILDS}
    for which in BUILDS:
        fz.save(folder / f"{which}0", states[which])
    step, deaths, longest, pending = 0, 0, 0.0, False
    kills = steps if killer is not None else 0
    while step < steps or deaths < kills:
        began = time.monotonic()
        try:
            if killer is not None and not pending and deaths < kills:
                killer.begin(living)
                pending = True
            number = min(step, steps - 1)
            emb, pull_v = living["vision"].vjp(states["vision"], images[number], ("rows",))
            loss, pull_t = living["text"].vjp(states["text"], tokens[number], emb)
            g_t, (_, ct) = pull_t(torch.ones_like(loss))
            g_v, _ = pull_v(ct)
            norm = fz.global_norm(g_v, g_t)
            new = {
                "vision": living["vision"].update(states["vision"], g_v, grad_norm=norm)[0],
                "text": living["text"].update(states["text"], g_t, grad_norm=norm)[0],
            }
            if step < steps:  # otherwise it only waits for the last deaths
                for which, state in new.items():
                    fz.save(folder / f"{which}{step + 1}", state)
                states, step = new, step + 1
            else:
                fz.fetch(fz.global_norm(*(state.params for state in new.values())))
        except fz.ComponentDied as error:
            assert killer is not None, error
            killer.wait()
            which, rank = killer.victims[deaths]
            longest = max(longest, time.monotonic() - began)
            said = (error.component, error.rank, error.cause)
            assert said == (which, rank, "was killed by SIGKILL"), f"{said}, expected {which, rank}"
            deaths, pending = deaths + 1, False
            pids = [link._process.pid for link in living[which].group.links]
            living[which].close()
            assert not [pid for pid in pids if is_alive(pid)], "a process is left"
            living[which] = begun(which)
            states[which] = fz.load(folder / f"{which}{step}", living[which])
            fz.fetch(fz.global_norm(*(state.params for state in states.values())))  # the other's values are good
    out = fz.gather(tuple(states[which].params for which in BUILDS))
    for component in living.values():
        component.close()
    return out, deaths, longest


def is_alive(pid: int) -> bool:
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return False
        except OSError:
            return False
        time.sleep(0.01)
    return True


def left() -> tuple[set[str], int]:
    gc.collect()
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}, len(os.listdir("/proc/self/fd"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="default 20")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.mkdir(f"{folder}/a")
        os.mkdir(f"{folder}/b")
        begin = time.monotonic()
        expected, _, _ = trained(args.kills, Path(folder, "a"), None)
        each = (time.monotonic() - begin) / args.kills
        shared, descriptors = left()
        killer = Killer(args.seed, 2 * each)
        got, deaths, longest = trained(args.kills, Path(folder, "b"), killer)
    time.sleep(1.0)
    more, now = left()
    same = all(torch.equal(a, b) for a, b in zip(optree.tree_leaves(expected), optree.tree_leaves(got), strict=True))
    print(
        f"{deaths} ranks killed, each named within {longest:.1f} s; bits of the undisturbed run: {same}; "
        f"descriptors {descriptors} -> {now}; left in /dev/shm: {sorted(more - shared)}"
    )
    if deaths != args.kills or not same or more - shared or now > descriptors + 2:
        sys.exit(1)


if __name__ == "__main__":
    main()
