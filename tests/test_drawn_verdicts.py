"""What the verdicts over drawn programs rest on: that other numbers, raw errors, hangs and crashes are seen as such."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import drawn
import pytest
import torch
from drawn.language import Action, Program, Statement
from drawn.pool import Job, Lost, run_jobs
from drawn.remedies import remedy
from drawn.running import run
from drawn.sharded import TRANSFORMS, Sharded
from drawn.shrinking import shrunk
from drawn.verdicts import Verdict, difference

PROGRAM = Program(
    seed=3,
    statements=(Statement("a root leaf in the middle"), Statement("a leaf in two calls")),
    world=2,
    actions=(Action("step", (1, 0, 0, 0)), Action("twice"), Action("forward")),
)


def patched(monkeypatch: pytest.MonkeyPatch, change: Callable[[Sharded, Any], Any]) -> None:
    """What every rank's forward passes through."""
    forward = Sharded.forward

    def other(self: Sharded, state: Any, call: int) -> None:
        forward(self, state, call)
        change(self, state)

    monkeypatch.setattr(Sharded, "forward", other)


def test_another_number_on_one_rank_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(self: Sharded, state: Any) -> None:
        if self.rank == 1:
            label, value = self.seen[-2]
            self.seen[-2] = (label, value + 1e-8)

    patched(monkeypatch, change)
    verdict = run(PROGRAM)
    assert (verdict.kind, verdict.reason) == ("silent", "outputs of forward")
    assert verdict.detail.startswith("rank 1: outputs of forward: observation")


def misused(self: Sharded, state: Any) -> None:
    self._step.update(state, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "kind", "reason"),
    [
        (lambda self, state: None, "equal", ""),
        (lambda self, state: torch.ones(2) @ torch.ones(3), "raw", "RuntimeError"),
        (lambda self, state: None if self.rank else misused(self, state), "raw", "on some ranks only"),
        (misused, "refused", ""),  # it says what to do, on every rank
        (lambda self, state: time.sleep(3), "hang", ""),
    ],
    ids=["equal", "raw", "on one rank", "refused", "hang"],
)
def test_what_a_forward_does_is_seen(change: Any, kind: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patched(monkeypatch, change)
    verdict = run(PROGRAM, timeout=1.0 if kind == "hang" else 30.0)
    assert verdict.kind == kind and verdict.reason.startswith(reason), verdict


def test_what_plain_torch_refuses_is_not_counted() -> None:
    program = PROGRAM.replace(statements=(Statement("in-place on a leaf", (3, 0, 0, 0)),) * 1)
    sin = Statement("a root leaf in the middle", (0, 0, 0, 0))  # keeps the leaf for its derivative
    assert run(program.replace(statements=(sin, *program.statements), actions=(Action("vjp"),))).kind == "uncounted"


def test_a_program_with_several_causes_is_remedied_one_after_the_other() -> None:
    def fake(program: Program) -> Verdict:
        if not all(statement.remedied for statement in program.statements[:2]):
            return Verdict("refused", "one", "Write it in another way.")
        if program.units != ("emb",):
            return Verdict("refused", "two", "Say other units.")
        return Verdict("refused", "three", "Leave out remat.") if "remat" in program.transforms else Verdict("equal")

    names = ("a class attribute", "a dataclass output", "a leaf behind detach")
    program = Program(statements=tuple(map(Statement, names)), transforms=("donate", "remat"))
    found = remedy(program, fake(program), fake)
    assert found and (found.units, found.transforms) == (("emb",), ("donate",))
    assert all(statement.remedied for statement in found.statements)
    assert remedy(program, fake(program), lambda program: Verdict("refused", "four", "units, remat")) is None


def test_the_smallest_program_that_shows_it() -> None:
    program = drawn.from_seed(5)
    name = program.statements[-1].feature
    small = shrunk(program, lambda candidate: any(s.feature == name for s in candidate.statements))
    assert [s.feature for s in small.statements] == [name]
    assert (small.world, small.transforms, len(small.actions), small.units) == (1, (), 1, None)


def test_differences_name_their_place() -> None:
    one, other = {"a": torch.ones(2), "b": [3]}, {"a": torch.ones(2), "b": [4]}
    assert difference([("outputs", one)], [("outputs", one)]) is None
    assert difference([("outputs", one)], [("outputs", other)]) == "outputs: observation 0, leaf 1: 3, expected 4"
    assert "saw 0 things, expected 1" in str(difference([], [("outputs", one)]))
    assert "shape" in str(difference([("grads", torch.ones(2))], [("grads", torch.ones(3))]))


def test_workers_that_crash_or_hang_are_known() -> None:
    jobs = [Job(os._exit, (1,), 60.0), Job(time.sleep, (60,), 1.0), Job(abs, (-3,), 60.0), Job(int, ("x",), 60.0)]
    found = dict(run_jobs(iter(jobs), 2))
    assert found[jobs[0]] == Lost("crash") and found[jobs[1]] == Lost("hang") and found[jobs[2]] == 3
    assert found[jobs[3]].why.startswith("error")


def test_transforms_can_all_be_drawn() -> None:
    drawn_ones = {name for seed in range(400) for name in drawn.from_seed(seed).transforms}
    assert drawn_ones == {*TRANSFORMS, "freeze"}
