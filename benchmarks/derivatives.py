"""Derivatives of training steps and maps over them: which are exact by fzero, FSDP2, DeepSpeed, torchopt and higher.

    OMP_NUM_THREADS=1 python benchmarks/derivatives.py                       # the whole table, some minutes
    OMP_NUM_THREADS=1 python benchmarks/derivatives.py --cases maml5 lr --only "fzero ZeRO-3" FSDP2

Every case really runs, each in fresh processes (two gloo ranks, for what shards), and what comes out is held to plain
torch in one process, in float64: the largest difference over the largest entry, of each leaf. A cell says

    exact            at most 1e-10 apart. Of the last case also by how much its peak of live tensor bytes grows from 25
                     to 100 steps: twice, if it grows as the square root
    wrong (apart)    another number, without a word; 1.0 are zeros; "none" where there is no gradient at all
    raises           an error
    hangs, dies      nothing within `--timeout` seconds, or the end of a process
    not expressible  there is no way to write it

FSDP2 and DeepSpeed have no derivatives through a step, torchopt and higher more than one way to write one. So a case is
written in several ways (those of `derivative_ranks.py` and `derivative_libraries.py`); the cell says "exact" if one of
them is, else what each of them does, and below the table stands every way. A way goes through the library's own
forward pass or its own update: who gathers all params, and goes on without the library, has plain torch.
What ranks find is averaged over them by hand, as users of FSDP2 and DeepSpeed do; of fzero only the values that are of
each rank's own loss (case.own), as its derivatives are said to be those of the mean loss already.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import derivative_libraries as libraries
import derivative_ranks as ranked
from contenders import start
from derivative_cases import CASES, LONGEST, Case, Data, data_of, grad_by_autograd, reference
from torch.utils._pytree import tree_leaves, tree_map

import fzero as fz

TOLERANCE = 1e-10
PART = LONGEST // 4  # the fewer steps whose memory that of LONGEST is held to
LINEAR = 3.0  # memory that grows more than this, for four times as many steps, does not grow as the square root
GRACE = 5.0  # seconds that the other ranks have, once one has raised
ABSENT = "not expressible"
BY_FUNC, BY_AUTOGRAD = "functional_call, torch.func", "functional_call, autograd"


# ---- who takes part


@dataclass(frozen=True)
class Way:
    """A way to write cases: `make(data)` has a method for each that it can write.

    Attributes:
        cases: that it is for; all by default.
    """

    make: Callable[[Data], Any]
    cases: frozenset[str] = frozenset(CASES)


@dataclass(frozen=True)
class Contender:
    """A column of the table.

    Attributes:
        package: that must be installed.
        ways: by name.
        averages: its users average over ranks what they find.
    """

    package: str
    ranks: int
    ways: dict[str, Way]
    averages: bool = True


def _fzero(shard: Callable[[fz.Step], fz.Step], ranks: int) -> Contender:
    return Contender("fzero", ranks, {"fzero": Way(functools.partial(ranked.Fzero, shard=shard))}, averages=False)


def _functional(make: Callable[..., Any]) -> dict[str, Way]:
    """A module under functional_call: autograd has no maps."""
    unmapped = frozenset(CASES) - {"models", "rates"}
    return {
        BY_FUNC: Way(functools.partial(make, grad=torch.func.grad), frozenset(CASES) - {"long"}),
        BY_AUTOGRAD: Way(functools.partial(make, grad=grad_by_autograd), unmapped),
    }


def _loop(prepare: Callable[..., Any]) -> dict[str, Way]:
    return {"its own loop": Way(functools.partial(ranked.Loop, prepare=prepare))}


def _deepspeed(stage: int) -> Contender:
    loop = _loop(functools.partial(ranked.deepspeed_prepared, stage))
    return Contender("deepspeed", 2, loop | _functional(functools.partial(ranked.deepspeed_functional, stage=stage)))


def _unsharded(step: fz.Step) -> fz.Step:
    return step


_functions = libraries.torchopt_functions
CONTENDERS: dict[str, Contender] = {
    "fzero": _fzero(_unsharded, 1),
    "fzero ZeRO-3": _fzero(fz.shard_zero3, 2),
    "FSDP2": Contender("torch", 2, _loop(ranked.fsdp2_prepared) | _functional(ranked.fsdp2_functional)),
    "DeepSpeed ZeRO-1": _deepspeed(1),
    "DeepSpeed ZeRO-3": _deepspeed(3),
    "torchopt": Contender(
        "torchopt",
        1,
        {
            "functions": Way(functools.partial(_functions, grad=torch.func.grad)),
            "functions, rate as a schedule": Way(
                functools.partial(_functions, grad=torch.func.grad, scheduled=True), frozenset({"rates"})
            ),
            "functions, torch.utils.checkpoint": Way(
                functools.partial(_functions, grad=grad_by_autograd), frozenset({"long"})
            ),
            "MetaSGD, MetaAdamW": Way(functools.partial(libraries.Unrolled, begun=libraries.torchopt_begun)),
        },
    ),
    "higher": Contender("higher", 1, {"innerloop": Way(libraries.Higher)}),
}


def is_here(contender: Contender) -> bool:
    return importlib.util.find_spec(contender.package) is not None


# ---- one case in one way


@dataclass(frozen=True)
class Verdict:
    """What was seen of a case.

    Attributes:
        word: "exact", "wrong", "raises", "hangs", "dies".
        apart: the relative error, where there is a result.
        text: an error's, or what more there is to say.
        growth: of memory, from PART to LONGEST steps; 0 where it was not counted.
    """

    word: str
    apart: float = 0.0
    text: str = ""
    growth: float = 0.0

    def __str__(self) -> str:
        if self.word == "exact":
            return self.word + (f", memory x{self.growth:.1f}" if self.growth else "")
        if self.word == "wrong":
            return f"wrong ({self.text or f'{self.apart:.2g}'})"
        return f"{self.word} {self.text.partition(':')[0]}".strip()

    @property
    def rank(self) -> tuple[bool, float]:
        """The best comes first."""
        return self.word != "exact", self.growth


def dense(tree: Any, averages: bool) -> list[torch.Tensor | None]:
    """The leaves as full tensors of this process; their means over ranks, where these are taken."""
    out: list[torch.Tensor | None] = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            leaf = (leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf).detach().clone()
            if averages:
                dist.all_reduce(leaf)
                leaf = leaf / dist.get_world_size()
        out.append(leaf)
    return out


def held_to(found: Sequence[torch.Tensor | None], want: Sequence[torch.Tensor]) -> Verdict:
    if len(found) != len(want):
        return Verdict("wrong", 1.0, f"{len(found)} tensors of {len(want)}")
    whole, apart = max(b.abs().max().item() for b in want), 0.0
    for a, b in zip(found, want, strict=True):
        if a is not None and a.shape != b.shape:
            return Verdict("wrong", 1.0, f"shape {tuple(a.shape)}, not {tuple(b.shape)}")
        difference = (b if a is None else a.double() - b).abs().max().item()
        apart = max(apart, difference / (b.abs().max().item() or whole))
    if apart <= TOLERANCE:
        return Verdict("exact", apart)
    return Verdict("wrong", apart, "none" if all(a is None for a in found) else "")


def growth_of(way: Any) -> float:
    """How many times the peak of live bytes of a quarter of the steps that of all of them is."""
    peaks = []
    for steps in (PART, PART, LONGEST):  # the first allocates what stays
        live = fz.testing.LiveBytes()
        with live:
            way.long(steps)
        peaks.append(live.peak)
    return peaks[2] / peaks[1]


def on_rank(rank: int, contender: Contender, way: str, case: Case, store: str, end: Any) -> None:
    """Sends the verdict of this rank, and ends the process as it stands, whatever was left under way."""
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # peers log
        os.dup2(silent, stream)
    warnings.simplefilter("ignore")
    try:
        want = tree_leaves(tree_map(torch.Tensor.detach, case(reference())))
        if contender.ranks > 1:
            start(rank, contender.ranks, store, "cpu")
        made = contender.ways[way].make(data_of(rank, contender.ranks))
        if not case.is_in(made):
            end.send(Verdict(ABSENT))
            os._exit(0)
        found = dense(case(made), contender.ranks > 1 and (contender.averages or case.own))
        verdict = held_to(found, want)
        if verdict.word == "exact" and case.asked[0] == "long":
            verdict = dataclasses.replace(verdict, growth=growth_of(made))
    except Exception as error:
        verdict = Verdict("raises", text=f"{type(error).__name__}: {error}", apart=0.0)
        if os.environ.get("DERIVATIVES_TRACES"):
            Path(os.environ["DERIVATIVES_TRACES"]).open("a").write(traceback.format_exc() + "\n")
    end.send(verdict)
    end.close()
    os._exit(0)


def seen(contender: Contender, way: str, case: Case, timeout: float) -> Verdict:
    """The verdict of all ranks: the first error, or the largest difference."""
    context = multiprocessing.get_context("fork")  # of a process that has imported all, and computed nothing
    with tempfile.TemporaryDirectory() as folder:
        ends, processes = [], []
        for rank in range(contender.ranks):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (rank, contender, way, case, f"file://{folder}/store", theirs)
            processes.append(context.Process(target=on_rank, args=arguments))
            processes[-1].start()
            theirs.close()
            ends.append(ours)
        found = list(_received(ends, timeout))
        for process in processes:
            process.kill()
            process.join()
    for word in ("raises", "dies", "hangs"):
        for verdict in found:
            if verdict.word == word:
                return verdict
    return max(found, key=lambda verdict: verdict.apart)


def _received(ends: list[Any], timeout: float) -> Iterator[Verdict]:
    until, waiting = time.monotonic() + timeout, list(ends)
    while waiting:
        ready = multiprocessing.connection.wait(waiting, max(0.0, until - time.monotonic()))
        if not ready:
            yield Verdict("hangs")
            return
        for end in ready:
            waiting.remove(end)
            try:
                verdict = end.recv()  # type: ignore[union-attr]
            except EOFError:
                verdict = Verdict("dies")
            if verdict.word in ("raises", "dies"):
                until = min(until, time.monotonic() + GRACE)
            yield verdict


# ---- the table


def drive(name: str, cases: list[str], timeout: float, results: Any) -> None:
    """All cases of one contender, whose package is imported once."""
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silent, stream)
    warnings.simplefilter("ignore")
    contender = CONTENDERS[name]
    for package in (contender.package, "torch._dynamo"):  # torch.func's first pullback would import it in every process
        importlib.import_module(package)
    for key in cases:
        for way, said in contender.ways.items():
            if key in said.cases:
                results.put((key, way, seen(contender, way, CASES[key], timeout)))
    results.put(None)


def driven(name: str, cases: list[str], timeout: float) -> dict[str, dict[str, Verdict]]:
    """Case -> way -> verdict."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=drive, args=(name, cases, timeout, results))
    process.start()
    found: dict[str, dict[str, Verdict]] = {key: {} for key in cases}
    try:
        # a case has as many seconds as its ways have, and its package must be imported
        patience = 120 + 2 * timeout
        while (each := results.get(timeout=patience)) is not None:
            key, way, verdict = each
            if verdict.word != ABSENT:
                found[key][way] = verdict
        process.join(patience)
    finally:
        process.kill()
        process.join()
    return found


def cell(found: dict[str, Verdict]) -> str:
    if not found:
        return ABSENT
    best = min(found.values(), key=lambda verdict: verdict.rank)
    if best.word == "exact":
        return str(best)
    return "; ".join(dict.fromkeys(str(verdict) for verdict in found.values()))


def table(found: dict[str, dict[str, dict[str, Verdict]]], cases: Sequence[str]) -> str:
    """Markdown, a column for each contender."""
    lines = ["| | " + " | ".join(found) + " |", "|---" * (len(found) + 1) + "|"]
    for key in cases:
        lines.append(f"| {CASES[key].title} | " + " | ".join(cell(each[key]) for each in found.values()) + " |")
    return "\n".join(lines)


def ways_of(name: str, found: dict[str, dict[str, Verdict]]) -> str:
    """Every way of a contender, those that end alike in one line."""
    alike: dict[tuple[str, str], list[str]] = {}
    for key, by_way in found.items():
        for way, verdict in by_way.items():
            first = " ".join(verdict.text.split())[:160] if verdict.word == "raises" else ""
            alike.setdefault((way, f"{verdict.word} {first}" if first else str(verdict)), []).append(key)
    return "\n".join(f"{name}, {way}: {said}: {', '.join(keys)}" for (way, said), keys in sorted(alike.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--only", nargs="*", choices=CONTENDERS, default=list(CONTENDERS), help="some contenders")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds of a case in one way; default 60")
    args = parser.parse_args()
    found, absent = {}, []
    for name in args.only:
        if not is_here(CONTENDERS[name]):
            absent.append(name)
            continue
        began = time.monotonic()
        found[name] = driven(name, args.cases, args.timeout)
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    print(table(found, args.cases))
    for name in absent:
        print(f"\n{name}: not installed")
    for name, each in found.items():
        print(f"\n{ways_of(name, each)}")


if __name__ == "__main__":
    main()
