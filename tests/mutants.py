"""Breaks a line in turn, and looks whether some test turns red: `make mutants`, or `mutants.py --only 3 7`.

Each wait is left out, and what else was once missed by no test. What no test misses is what the next change may lose
without a word. Prints a line for each, and exits with 1 if one survives.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SCHEDULE, FAULTS, EXACT = "tests/engine/test_schedule.py", "tests/test_faults.py", "tests/test_exact.py"
ORDERS = (f"{SCHEDULE}::test_orders_that_change", SCHEDULE)
NOT_PULLED = (f"{SCHEDULE}::test_units_that_are_not_pulled_back", SCHEDULE)
TWICE = (f"{SCHEDULE}::test_a_unit_that_is_used_twice", SCHEDULE)
ON_PROCESSES = (f"{SCHEDULE}::test_orders_that_change_on_processes", EXACT)
BESIDE = ("tests/update/test_cpu_worker.py",)
HELD = (f"{FAULTS}::test_a_schedule_that_raises_at_a_later_group", FAULTS)
PULLBACKS = (f"{FAULTS}::test_a_pullback_that_raises", FAULTS)
IN_8_BITS = (f"{FAULTS}::test_8_bit_gathers_with_fewer_units_than_last_time", FAULTS)
ON_GLOO = (f"{EXACT}::test_on_gloo_processes", EXACT)
ELSEWHERE = ("tests/comm/test_same_host.py::test_one_of_another_machine",)
STEPS, FUNCTIONS = "tests/graph/test_jit_steps.py", "tests/graph/test_jit_functions.py"
MASKED = (f"{STEPS}::test_a_microbatch_of_weight_zero_whose_gradients_are_nan",)
DRAWING = (f"{STEPS}::test_a_backward_that_draws",)
AS_THEY_COME = ("tests/graph/test_jit_passes.py::test_a_fused_update_takes_each_gradient_as_it_comes",)
PLACES = (f"{FUNCTIONS}::test_states_of_two_components_in_other_places",)
AROUND = (f"{FUNCTIONS}::test_two_calls_of_a_step_with_something_else_around_them",)
SLOW = (f"{FUNCTIONS}::test_slow_weights_do_not_move_at_an_update_that_is_skipped",)
THIRDS = ("tests/transforms/test_fuse_update.py::test_thirds_that_16_bits_do_not_hold",)
HVP = ("tests/test_derivatives.py::test_hvp",)
OFFLOAD = "tests/transforms/test_offload.py"
AWAY = (f"{OFFLOAD}::test_the_bits_are_those_of_the_step_without_it",)
LOADS = ("tests/checkpoint/test_load.py::test_nothing_is_used_before_it_has_arrived",)
LEFT = (f"{OFFLOAD}::test_an_update_that_fails_leaves_nothing_on_its_way",)

STRAIGHT = "tests/engine/test_straight.py"
ALIVE = (f"{STRAIGHT}::test_which_params_are_there",)
PASSED_ON = (f"{STRAIGHT}::test_a_view_of_its_input",)
TWICE_DERIVED = (f"{STRAIGHT}::test_each_kind[derives_twice]",)
WRITES = (f"{STRAIGHT}::test_each_kind[writes]",)
USED_UP = (f"{STRAIGHT}::test_a_unit_that_was_used_up_within_the_function",)
NOTHING_LEFT = (f"{STRAIGHT}::test_nothing_is_left_of_a_call_without_the_collector",)
TOGETHER = ("tests/kernels/test_onepass.py::test_small_groups_together_have_the_bits_of_each_by_itself",)
BEFORE = ("tests/base/test_private.py::test_a_hook_before_others",)


class Mutant(NamedTuple):
    """A place, and what stands there instead.

    Attributes:
        which: of several places with this text.
        tests: that can find it, the one that does first.
    """

    file: str
    text: str
    instead: str
    which: int = 0
    tests: tuple[str, ...] = ORDERS


MUTANTS = [
    Mutant("engine/schedule.py", "        wait()\n        return full, True", "        return full, True"),
    Mutant("engine/schedule.py", "            wait()\n            hazards.poison", "            hazards.poison"),
    Mutant("engine/schedule.py", "*[wait for _, wait in ahead.values()]])", "])"),
    Mutant("engine/schedule.py", "finish_all([self.finish_reductions, *", "finish_all([*", tests=PULLBACKS),
    Mutant("engine/schedule.py", "*[op.forget_ahead for op in calls], ", "", tests=HELD),
    Mutant("engine/schedule.py", ", self._end_of_gathers])", "])", tests=PULLBACKS),
    Mutant("engine/schedule.py", "            end()\n        raise", "            pass\n        raise", tests=HELD),
    Mutant("engine/schedule.py", "        raise\n    end()\n", "        raise\n", tests=NOT_PULLED),
    Mutant("engine/gathered.py", "  self._arriving.pop(key)()\n", "  self._arriving.pop(key)\n", tests=HELD),
    Mutant("engine/gathered.py", "schedule.refill(key, full))()", "schedule.refill(key, full))"),
    Mutant("engine/delivery.py", "        self.schedule.finish_reductions()\n        assert", "        assert"),
    Mutant("engine/traversal.py", "        self.schedule.finish_reductions()\n", "", tests=TWICE),
    Mutant("update/update.py", "        finish_all([*ends, self._finish, ", "        finish_all([*ends, ", tests=HELD),
    Mutant("update/update.py", "self._finish()\n                if", "if", tests=(*BESIDE, *AWAY)),
    Mutant("update/update.py", "            self._catch_up()\n            with", "            with", tests=BESIDE),
    Mutant("engine/use.py", "        wait()\n        cut =", "        cut =", tests=IN_8_BITS),
    Mutant("comm/axis.py", "self.start_gather(full, shard, tag)()", "self.start_gather(full, shard, tag)", tests=HVP),
    Mutant("comm/axis.py", "            wait()\n            for group in", "            for group in"),
    Mutant("comm/axis.py", "        wait()\n        return out", "        return out", tests=ON_GLOO),
    Mutant("stores/memories.py", "(wait(), own)[1]", "own", tests=AWAY),
    Mutant("stores/memories.py", "(wait(), target)[1]", "target", tests=AWAY),
    Mutant("update/writing.py", "        finish_all(list(brought.values()))\n", "", tests=LEFT),
    Mutant("state/origin.py", "        self.origin.wait()\n        return tree", "        return tree", tests=LOADS),
    Mutant("state/origin.py", "        self.origin.wait()\n        there", "        there", tests=LOADS),
    Mutant(
        "checkpoint/read.py",
        "            self.wait()\n        return out",
        "            pass\n        return out",
        tests=LOADS,
    ),
    Mutant("comm/backend.py", "        arrived()\n        count", "        count", tests=ON_PROCESSES),
    Mutant("comm/backend.py", "work.wait()\n        works", "pass\n        works", tests=ELSEWHERE),
    Mutant("graph/run.py", "x.zero_() if traversal.mask.masked else x", "x", tests=MASKED),
    Mutant("graph/run.py", "        traversal.schedule.used.update(program.uses)\n", "", tests=AS_THEY_COME),
    Mutant("graph/program.py", "if seeds and region.draws[pulls] else None", "if seeds else None", tests=DRAWING),
    Mutant("graph/signatures.py", "leaf.signature, place, *others", "leaf.signature, *others", tests=PLACES),
    Mutant("graph/regions.py", "tuple(wanted), now\n", "tuple(wanted)\n", tests=AROUND),
    Mutant("update/differentiable.py", "if due is True else applied & due", "if due is True else due", tests=SLOW),
    Mutant("engine/straight.py", "            self._stays = not first_order()\n", "", tests=TWICE_DERIVED),
    Mutant("engine/straight.py", "            hooks.before(whole, self._enter)", "            pass", tests=WRITES),
    Mutant("engine/straight.py", "own in self._passes or not self._is_reached()", "own in self._passes", tests=ALIVE),
    Mutant("engine/straight.py", "            self.used = True\n", "            pass\n", tests=USED_UP),
    Mutant("engine/straight.py", "self._spec_out, self._eager, ", "self._spec_out, ", tests=NOTHING_LEFT),
    Mutant("engine/straight.py", "elif not (self._stays or self._passes):", "else:", tests=TWICE_DERIVED),
    Mutant("engine/straight.py", "        if not self._stays:\n", "        if True:\n", tests=TWICE_DERIVED),
    Mutant("engine/straight.py", "if y._base is whole:", "if False:", tests=PASSED_ON),
    Mutant("engine/straight.py", "        self._put_down()\n", "", tests=ALIVE),
    Mutant("engine/gathered.py", "        else:\n            self._empty()\n", "", tests=ALIVE),
    Mutant("base/hooks.py", "        held.clear()  #", "        #", tests=BEFORE),
    Mutant("kernels/onepass.py", "return piece.hyper, piece.kernel, piece.comp", "return piece.comp", tests=TOGETHER),
    Mutant("kernels/onepass.py", " or piece.counters.count or", " or", tests=TOGETHER),
    Mutant("base/pytree.py", "total + size(item) >= limit", "total >= limit", tests=TOGETHER),
    Mutant("update/fused.py", "state, grads, self.times)", "state, grads, 1.0)", tests=THIRDS),
]


def mutated(text: str, own: Mutant) -> str:
    parts = text.split(own.text)
    place = own.which + 1
    assert len(parts) > place, f"{own.text!r} is not there {place} times: bring tests/mutants.py up to date"
    return own.text.join(parts[:place]) + own.instead + own.text.join(parts[place:])


def survives(number: int, own: Mutant) -> bool:
    """Whether all tests pass with this one."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("fzero", "tests", "pyproject.toml", "examples", "benchmarks"):
            source = ROOT / name
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, Path(folder) / name)  # type: ignore[operator]
        target = Path(folder) / "fzero" / own.file
        target.write_text(mutated(target.read_text(), own))
        paths = os.pathsep.join([folder, str(Path(folder) / "tests")])
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout=120", *own.tests],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
    lines = done.stdout.splitlines()
    if done.returncode not in (0, 1) and not any("Timeout" in line for line in lines):  # no test was run, say
        raise RuntimeError(f"pytest exited with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    found = next((line for line in lines if line.startswith("FAILED")), lines[-1] if lines else "")
    word = "SURVIVES" if done.returncode == 0 else "found   "
    said = f"{number:2} {own.file}: {own.text.strip().splitlines()[0]}"
    print(f"{word} {time.monotonic() - started:5.0f} s  {said:<90}  {found[:140]}", flush=True)
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("--only", type=int, nargs="+", help="the numbers of the mutants", default=range(len(MUTANTS)))
    options = parser.parse_args()
    return int(any([survives(number, MUTANTS[number]) for number in options.only]))


if __name__ == "__main__":
    sys.exit(main())
