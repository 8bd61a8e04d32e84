"""Shows one program and runs it: `python -m drawn --seed 7 [--shrink] [--processes]`."""

from __future__ import annotations

import argparse
import sys

import torch

import drawn
from drawn import running
from drawn.language import Action, Program, Statement
from drawn.remedies import remedy
from drawn.shrinking import shrunk


def main() -> int:
    parser = argparse.ArgumentParser(prog="drawn", description=__doc__)
    parser.add_argument("--seed", type=int, help="of the program")
    parser.add_argument("--program", help="the program itself, as it is printed: Program(...)")
    parser.add_argument("--shrink", action="store_true", help="look for the smallest program with the same verdict")
    parser.add_argument("--processes", action="store_true", help="real gloo processes instead of threads")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.program:
        program = eval(options.program, {"Program": Program, "Statement": Statement, "Action": Action})
    else:
        program = drawn.from_seed(options.seed or 0)

    def run(program: Program) -> running.Verdict:
        return running.run_on_processes([program], program.world)[0] if options.processes else running.run(program)

    verdict = run(program)
    if options.shrink and verdict.kind not in ("equal", "uncounted"):
        program = shrunk(
            program, lambda smaller: (run(smaller).kind, run(smaller).reason) == (verdict.kind, verdict.reason)
        )
        verdict = run(program)
    print(drawn.listing(program))
    print(f"# {program!r}")
    print(f"== {verdict.kind}: {verdict.reason}\n{verdict.detail}")
    if verdict.kind == "refused":
        print(f"== equal as {remedy(program, verdict, run)!r}")
    return int(verdict.bad)


if __name__ == "__main__":
    sys.exit(main())
