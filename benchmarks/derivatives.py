"""Derivatives by inputs, by params and through the optimizer: which are exact by fzero, torch, FSDP2 and others.

    OMP_NUM_THREADS=1 python benchmarks/derivatives.py                       # all tables, ten minutes
    OMP_NUM_THREADS=1 python benchmarks/derivatives.py --cases maml5 lr --only "fzero ZeRO-3" FSDP2

Every case really runs, each in fresh processes (two gloo ranks, for what shards), and what comes out is held to plain
torch in one process, in float64: the largest difference over the largest entry, of each leaf. A cell says

    exact            at most 1e-10 apart; of DeepSpeed, whose ZeRO-3 refuses float64, at most 1e-4 in float32. Of the
                     last case also how many times the peak of live tensor bytes of 25 steps that of 100 is: 2 where it
                     grows as the square root of their number, 4 where it grows as their number
    (by hand)        this is of a way in which the user writes the update and averages gradients over ranks: the library
                     gives a forward pass, its optimizer takes no part; of DeepSpeed's params also all are whole
    (flushed)        this is of a loop that ends in one more backward, of zero times the model: without it the gradients
                     of what FSDP2 was told to keep whole stay on each rank
    wrong (apart)    another number, without a word; 1.0 are zeros; "none" where there is no gradient at all
    raises           an error
    hangs, dies      nothing within `--timeout` seconds, or the end of a process
    not expressible  there is no way to write it

FSDP2 and DeepSpeed have no derivatives through a step, torchopt and higher more than one way to write one. So a case is
written in several ways (`derivative_torch.py`, `derivative_ranks.py`, `derivative_libraries.py`); the cell says "exact"
if one of them is, else what they do, and above the tables stands every way. "torch" is one process, "DTensor" torch
alone on two ranks: a module without hooks, called with params that are cut over them. A way goes through the library's
own forward pass or its own update: who gathers all params, and goes on without the library, has plain torch.
What ranks find is averaged over them by hand, as users of FSDP2 and DeepSpeed do; of fzero only the values that are of
each rank's own loss, as its derivatives are said to be those of the mean loss already. The run fails if fzero is not
exact in every case.
"""

from __future__ import annotations

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
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import derivative_libraries as libraries
import derivative_ranks as ranked
import derivative_torch as by_torch
import results
from contenders import start
from derivative_cases import CASES, Case, Data, data_of, grad_by_autograd, reference
from derivative_verdicts import ABSENT, TOLERANCE, Verdict, dense, growth_of, held_to
from torch.utils._pytree import tree_leaves, tree_map

import fzero as fz

BEGINNING = 600.0  # seconds that a package may take before the first case, to be imported and to compile its operators
GRACE = 5.0  # seconds that the other ranks have, once one has raised
BY_HAND, FLUSHED = "by hand", "flushed"
BY_FUNC, BY_AUTOGRAD = "functional_call, torch.func", "functional_call, autograd"


# ---- who takes part


@dataclass(frozen=True)
class Way:
    """A way to write cases: `make(data)` has a method for each that it can write.

    Attributes:
        cases: that it is for; all by default.
        note: what the user does beside.
    """

    make: Callable[[Data], Any]
    cases: frozenset[str] = frozenset(CASES)
    note: str = ""


@dataclass(frozen=True)
class Contender:
    """A column of the table.

    Attributes:
        package: that must be installed.
        ways: by name.
        averages: its users average over ranks what they find.
        dtype: of params and data.
        begin: what the package does once, and not in a case.
    """

    package: str
    ranks: int
    ways: dict[str, Way]
    averages: bool = True
    dtype: torch.dtype = torch.float64
    begin: Callable[[], None] = lambda: None


def _fzero(shard: Callable[[fz.Step], fz.Step], ranks: int) -> Contender:
    return Contender("fzero", ranks, {"fzero": Way(functools.partial(ranked.Fzero, shard=shard))}, averages=False)


def _functional(make: Callable[..., Any]) -> dict[str, Way]:
    """A module under functional_call: autograd has no maps."""
    unmapped = frozenset(CASES) - {"models", "rates"}
    return {
        BY_FUNC: Way(functools.partial(make, grad=torch.func.grad), frozenset(CASES) - {"long"}, BY_HAND),
        BY_AUTOGRAD: Way(functools.partial(make, grad=grad_by_autograd), unmapped, BY_HAND),
    }


def _loop(prepare: Callable[..., Any]) -> dict[str, Way]:
    return {"its own loop": Way(functools.partial(by_torch.Loop, prepare=prepare))}


def _fsdp2() -> dict[str, Way]:
    kept = frozenset({"penalty", "flow", "score", "hvp"})
    return {
        **_loop(by_torch.fsdp2_prepared),
        "its own loop, params kept": Way(functools.partial(by_torch.Kept, flushed=False), kept | {"examples"}),
        "its own loop, params kept, flushed": Way(functools.partial(by_torch.Kept, flushed=True), kept, FLUSHED),
        **_functional(by_torch.fsdp2_functional),
    }


def _deepspeed(stage: int) -> Contender:
    loop = _loop(functools.partial(ranked.deepspeed_prepared, stage))
    ways = loop | _functional(functools.partial(ranked.deepspeed_functional, stage=stage))
    return Contender("deepspeed", 2, ways, dtype=torch.float32, begin=ranked.deepspeed_begun)


def _unsharded(step: fz.Step) -> fz.Step:
    return step


_functions = libraries.torchopt_functions
CONTENDERS: dict[str, Contender] = {
    "fzero": _fzero(_unsharded, 1),
    "fzero ZeRO-3": _fzero(fz.shard_zero3, 2),
    "torch": Contender("torch", 1, _loop(by_torch.torch_prepared) | _functional(by_torch.torch_functional)),
    "DTensor": Contender("torch", 2, _functional(by_torch.dtensor_functional), averages=False),
    "FSDP2": Contender("torch", 2, _fsdp2()),
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
            torch.distributed.barrier()  # nobody ends while others still connect
        made = contender.ways[way].make(data_of(rank, contender.ranks, contender.dtype))
        if not case.is_in(made):
            end.send(Verdict(ABSENT))
            os._exit(0)
        found = dense(case(made), contender.ranks > 1 and (contender.averages or case.own))
        verdict = held_to(found, want, TOLERANCE[contender.dtype])
        if verdict.word == "exact" and case.asked[0] == "long":
            verdict = dataclasses.replace(verdict, growth=growth_of(made))
    except Exception as error:
        verdict = Verdict("raises", text=f"{type(error).__name__}: {error}")
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
    contender.begin()
    results.put(None)
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
        results.get(timeout=BEGINNING)
        while (each := results.get(timeout=2 * timeout + GRACE)) is not None:
            key, way, verdict = each
            if verdict.word != ABSENT:
                found[key][way] = verdict
        process.join(timeout)
    finally:
        process.kill()
        process.join()
    return found


def cell(name: str, found: dict[str, Verdict]) -> str:
    """What the best way gives, or all that happens; of several wrong numbers the closest."""
    if not found:
        return ABSENT
    ways = sorted(found, key=lambda way: (*found[way].rank, CONTENDERS[name].ways[way].note))
    best, note = found[ways[0]], CONTENDERS[name].ways[ways[0]].note
    if best.word == "exact":
        return f"{best}{f' ({note})' if note else ''}"
    closest = {verdict.word: verdict for verdict in sorted(found.values(), key=lambda verdict: -verdict.apart)}
    return "; ".join(sorted(str(each) if word == "wrong" else word for word, each in closest.items()))


def tables_of(found: dict[str, dict[str, dict[str, Verdict]]], cases: Sequence[str]) -> list[results.Table]:
    """One for what derivatives are by or go through, with a column for each contender."""
    tables: dict[str, results.Table] = {}
    for key in cases:
        kind = CASES[key].kind
        table = tables.setdefault(kind, results.Table(*found, title=kind, show=False))
        table.row(CASES[key].title, *[cell(name, found[name][key]) for name in found])
    return list(tables.values())


def ways_of(name: str, found: dict[str, dict[str, Verdict]]) -> str:
    """Every way of a contender, those that end alike in one line."""
    alike: dict[tuple[str, str], list[str]] = {}
    for key, by_way in found.items():
        for way, verdict in by_way.items():
            first = " ".join(verdict.text.split())[:160] if verdict.word == "raises" else ""
            alike.setdefault((way, f"{verdict.word} {first}" if first else str(verdict)), []).append(key)
    return "\n".join(f"{name}, {way}: {said}: {', '.join(keys)}" for (way, said), keys in sorted(alike.items()))


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--only", nargs="*", choices=CONTENDERS, default=list(CONTENDERS), help="some contenders")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds of a case in one way; default 120")
    args = parser.parse_args()
    found, absent = {}, []
    for name in args.only:
        if not is_here(CONTENDERS[name]):
            absent.append(name)
            continue
        began = time.monotonic()
        found[name] = driven(name, args.cases, args.timeout)
        print(f"{ways_of(name, found[name])}\n{name}: {time.monotonic() - began:.0f} s\n", flush=True)
    for name in absent:
        print(f"{name}: not installed\n")
    tables = tables_of(found, args.cases)
    for table in tables:
        print(f"{results.markdown(table.rows, table.title)}\n")
    results.save(args, *tables)
    ours = [
        cell(name, verdicts) for name, each in found.items() if name.startswith("fzero") for verdicts in each.values()
    ]
    if not all(said.startswith("exact") and "but" not in said for said in ours):
        raise SystemExit("fzero is not exact in every case")


if __name__ == "__main__":
    main()
