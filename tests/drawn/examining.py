"""What workers do: draw programs from seeds, run them, follow refusals to a remedy, and report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from drawn.counting import Report
from drawn.drawing import from_seed
from drawn.language import Program
from drawn.remedies import remedy
from drawn.running import run, run_on_processes
from drawn.verdicts import Verdict


def on_threads(seed: int) -> Report:
    program = from_seed(seed)
    verdict = run(program)
    return report(program, verdict, "threads")


def on_processes(seeds: Sequence[int]) -> list[Report]:
    """Programs of one number of ranks share a job."""
    worlds: dict[int, list[Program]] = defaultdict(list)
    for seed in seeds:
        program = from_seed(seed)
        worlds[program.world].append(program)
    out = []
    for world in sorted(worlds, reverse=True):  # the largest pool first: smaller jobs use a part of it
        verdicts = run_on_processes(worlds[world], world)
        out += [report(p, v, "processes") for p, v in zip(worlds[world], verdicts, strict=True)]
    return out


def report(program: Program, verdict: Verdict, backend: str) -> Report:
    remedied = verdict.kind == "refused" and remedy(program, verdict, run) is not None
    return Report(program, verdict, backend, remedied)
