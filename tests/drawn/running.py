"""Runs programs: in plain torch first, then in fzero on ranks that are threads or processes, and gives the verdict."""

from __future__ import annotations

import datetime
import functools
import linecache
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch.distributed as dist

import fzero as fz
from drawn.actions import act
from drawn.language import Action, Program
from drawn.plain import Plain
from drawn.sharded import Sharded
from drawn.verdicts import Failure, Verdict, difference, failure, is_finite, of_failures
from drawn.write import written
from fzero.testing import RankError, run_ranks

Seen = list[tuple[str, Any]]
RANKED = (
    "outputs",
    "aux",
    "input cotangents",
    "per-example grads",
)  # labels of what differs between ranks, as they begin
PATIENCE = 3.0  # seconds that a failed rank gives the others to come to an end by themselves


@dataclass
class Wanted:
    """What the plain run saw: of which actions, and what."""

    program: Program  # with the actions that plain torch accepts
    seen: Seen = field(default_factory=list)
    cotangents: list[dict[int, Any]] = field(default_factory=list)
    refused: str = ""  # by plain torch, where it accepts nothing

    def of_rank(self, rank: int) -> Seen:
        return [(label, value[rank] if label.startswith(RANKED) else value) for label, value in self.seen]


def compiled(program: Program) -> tuple[CodeType, bool]:
    text, counted = written(program)
    name = f"<drawn program {program.seed}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    return compile(text, name, "exec"), counted


def run_plain(program: Program) -> Wanted:
    """The plain run. Actions that plain torch refuses are left out: they leave no trace in modules that keep state."""
    code, counted = compiled(program)
    refused: list[tuple[int, str]] = []
    while True:
        actions = [(i, a) for i, a in enumerate(program.actions) if i not in dict(refused)]
        if not actions:
            return Wanted(program, refused=refused[0][1])
        plain = Plain(program, code, counted)
        stopped = _acted(plain, actions)
        if stopped is not None:
            refused.append(stopped)
        else:
            kept = tuple(a if (i, a) in actions else Action("none") for i, a in enumerate(program.actions))
            return Wanted(program.replace(actions=kept), plain.seen, plain.cotangents)


def _acted(plain: Plain, actions: Sequence[tuple[int, Action]]) -> tuple[int, str] | None:
    """Runs the actions; the first that plain torch refuses, and why."""
    state: Any = plain.start
    for index, action in actions:
        before = len(plain.seen)
        try:
            state = act(plain, action, state, index)
        except Exception as error:  # whatever plain torch says
            return index, f"{type(error).__name__}: {error}"
        if not is_finite([value for _, value in plain.seen[before:]]):
            return index, "not finite"
    return None


def run_sharded(wanted: Wanted, code: CodeType, counted: bool, rank: int) -> Seen:
    """fzero's run on one rank; what it saw."""
    program = wanted.program
    with fz.testing.hazards(seed=program.seed):
        sharded = Sharded(program, code, counted, rank, wanted.cotangents[rank])
        state: Any = sharded.start
        sharded.start = None
        for index, action in enumerate(program.actions):
            if action.verb != "none":
                state = act(sharded, action, state, index)
    return sharded.seen


def judged(wanted: Wanted, results: Sequence[Seen | Failure | None]) -> Verdict:
    """The verdict over what all ranks saw."""
    failures = [r if isinstance(r, Failure) else None for r in results]
    if any(failures):
        return of_failures(failures)
    if any(r is None for r in results):
        return Verdict("hang", "no answer", f"ranks {[i for i, r in enumerate(results) if r is None]} did not answer")
    for rank, seen in enumerate(results):
        assert isinstance(seen, list)
        found = difference(seen, wanted.of_rank(rank))
        if found:
            return Verdict("silent", found.split(":")[0], f"rank {rank}: {found}")
    return Verdict("equal")


# ---- threads


def run_on_threads(wanted: Wanted, timeout: float = 30.0) -> Verdict:
    program = wanted.program
    code, counted = compiled(program)
    results: list[Seen | Failure | None] = [None] * program.world
    ended = threading.Condition()

    def rank_main(rank: int) -> None:
        try:
            with fz.testing.checked_collectives():
                results[rank] = run_sharded(wanted, code, counted, rank)
        except BaseException as error:
            results[rank] = failure(error)
            if isinstance(error, SystemExit):
                raise
        with ended:  # a rank that failed stays until the others have seen it: they are stopped where they have not
            ended.notify_all()
            if isinstance(results[rank], Failure):
                ended.wait_for(lambda: all(r is not None for r in results), PATIENCE)
        if isinstance(results[rank], Failure) and any(r is None for r in results):
            raise RuntimeError("stop the others")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run_ranks(rank_main, program.world, timeout=timeout, checked=False)
        except RankError as error:
            if isinstance(error.__cause__, TimeoutError):
                return Verdict("hang", "time-out on threads", str(error))
    return judged(wanted, results)


def run(program: Program, timeout: float = 30.0) -> Verdict:
    """Plain torch, then fzero on threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = run_plain(program)
    if wanted.refused:
        return Verdict("uncounted", wanted.refused.split("\n")[0][:100], wanted.refused)
    return run_on_threads(wanted, timeout)


# ---- processes


def run_on_processes(programs: Sequence[Program], world: int, timeout: float = 30.0) -> list[Verdict]:
    """All of them, each with `world` ranks, in one job on real processes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = [run_plain(program) for program in programs]
    out = [Verdict("uncounted", w.refused[:100], w.refused) if w.refused else None for w in wanted]
    todo = [i for i, verdict in enumerate(out) if verdict is None]
    while todo:
        job = functools.partial(_on_process, [wanted[i] for i in todo], world, timeout)
        try:
            results = run_ranks(job, world, backend="processes", checked=False, timeout=timeout * len(todo))
        except RankError as error:  # a rank died or hung: its program is the first that some rank did not finish
            results, text = [], str(error)
        done = len(results[0]) if results else 0
        for place in range(done):
            out[todo[place]] = judged(wanted[todo[place]], [results[rank][place] for rank in range(world)])
        if not done:
            if len(todo) == 1:
                out[todo[0]], done = Verdict("hang", "a process died or hung", text), 1
            else:  # each by itself
                return [verdict or run_on_processes([programs[i]], world, timeout)[0] for i, verdict in enumerate(out)]
        todo = todo[done:]
    return [verdict for verdict in out if verdict is not None]


def _on_process(wanted: Sequence[Wanted], world: int, timeout: float, rank: int) -> list[Seen | Failure]:
    """On each rank. After a failure on any rank the process group is made anew, as messages may be left in it."""
    warnings.simplefilter("ignore")
    store: Any = dist.distributed_c10d._get_default_store()
    out: list[Seen | Failure] = []
    for number, one in enumerate(wanted):
        code, counted = compiled(one.program)
        try:
            with fz.testing.checked_collectives():
                result: Seen | Failure = run_sharded(one, code, counted, rank)
        except Exception as error:
            result = failure(error)
        out.append(result)
        store.set(f"drawn/{number}/{rank}", b"1" if isinstance(result, Failure) else b"0")
        keys = [f"drawn/{number}/{other}" for other in range(world)]
        until = time.monotonic() + timeout
        while not store.check(keys):
            if time.monotonic() > until:
                raise TimeoutError(f"program {one.program.seed}: other ranks did not come to an end")
            time.sleep(0.0005)
        if any(store.get(key) == b"1" for key in keys):
            dist.destroy_process_group()
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(f"after {number}", store),
                rank=rank,
                world_size=world,
                timeout=datetime.timedelta(seconds=timeout),
            )
    return out
