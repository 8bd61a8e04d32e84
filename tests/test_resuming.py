"""examples/train_lm.py as it is resumed on other ranks and thrown off course: the data that it sees, and its bits."""

from __future__ import annotations

import argparse
import importlib
import itertools
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dispositions import as_in_a_terminal
from nightly import NIGHTLY, in_turns
from processes import EXAMPLES
from safetensors.torch import load_file

import fzero as fz
from fzero.testing import assert_trees_close, assert_trees_equal, run_ranks

KILLING = Path(__file__).parent / "killing.py"
TINY = (
    "--width 32 --blocks 1 --heads 2 --context 16 --eval-every 100 --eval-batches 1 --sample-bytes 1 --warmup 1 "
    "--dtype fp32 --save-every 10"
).split()


class Demo:
    """The example, on ranks that are threads, over a text of its own.

    Attributes:
        batches: the examples of every batch that has been drawn, in order, over all ranks.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(EXAMPLES)
        self.module = importlib.import_module("train_lm")
        text = torch.randint(97, 123, (5000,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
        monkeypatch.setattr(self.module, "standard_library", lambda: (text, text[:500]))
        monkeypatch.setattr(self.module, "draw_losses", lambda *_: None)
        self.batch_at, self.batches, self._lock = self.module.batch_at, list[list[int]](), threading.Lock()
        self.change: Callable[[int, Any], Any] = lambda first, batch: batch
        self.bad: Callable[[Any], Any] = lambda batch: tuple(97 + 0 * part for part in batch)
        self.jump: Callable[[int], int] = lambda first: first  # from the examples that a run asks for to those it gets
        self.now = threading.local()
        monkeypatch.setattr(self.module, "batch_at", self._batch_at)

    def _batch_at(self, text: torch.Tensor, first: int, args: argparse.Namespace, device: torch.device) -> Any:
        first = self.now.first = self.jump(first)
        with self._lock:
            self.batches.append(list(range(first, first + args.batch)))
        return self.change(first, self.batch_at(text, first, args, device))

    def run(self, out: Path, ranks: int, *options: str, steps: int = 1000) -> dict[str, Any]:
        """Trains until it ends or has gone on for some steps; what its newest checkpoint says."""

        def rank_main(rank: int) -> None:
            count = itertools.count()
            args = self.module.options([*TINY, "--ranks", str(ranks), "--out", str(out), *options])
            self.module.train(rank, ranks, args, lambda: next(count) >= steps)

        run_ranks(rank_main, ranks)
        return fz.load_extra(max((out / "checkpoints").iterdir(), key=lambda path: path.name))


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Demo:
    return Demo(monkeypatch)


# ---- data


def test_examples_are_the_same_however_they_are_divided(demo: Demo) -> None:
    text = torch.randint(256, (3000,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)

    def examples(first: int, *batches: int) -> torch.Tensor:
        found = []
        for batch in batches:
            args = argparse.Namespace(seed=3, context=8, batch=batch)
            found.append(torch.cat(demo.batch_at(text, first, args, torch.device("cpu"))))
            tokens, targets = found[-1].chunk(2)
            assert torch.equal(tokens[:, 1:], targets[:, :-1])
            found[-1] = tokens
            first += batch
        return torch.cat(found)

    for first in (0, 1, 255, 2**31 - 3, 2**32 - 3, 2**53 - 3):
        whole = examples(first, 12)
        assert len({tuple(row) for row in whole.tolist()}) == 12
        for parts in ([1] * 12, [5, 4, 3], [2, 6, 4], [11, 1]):
            assert torch.equal(examples(first, *parts), whole)


@in_turns(5, "examples as programs")
def test_another_number_of_ranks_sees_the_data_that_comes_next(demo: Demo, tmp_path: Path) -> None:
    """None twice and none left out; and where the whole batch is as large, with the losses that it would have had."""
    whole = demo.run(tmp_path / "whole", 2, "--batch", "6", "--steps", "10")
    assert sorted(itertools.chain(*demo.batches)) == list(range(10 * 12))
    demo.batches.clear()
    out, per_step = tmp_path / "out", []
    parts = ((2, 6, 2), (3, 4, 3), (1, 12, 1), (2, 6, 1), (1, 5, 1), (3, 2, 1), (2, 6, 1))  # ranks, batch, steps
    for ranks, batch, steps in parts:
        given = ("--resume",) if per_step else ("--steps", "10")
        extra = demo.run(out, ranks, "--batch", str(batch), *given, steps=steps)
        per_step += [ranks * batch] * steps
        assert extra["seen"] == sum(per_step) and len(extra["train"]) == len(per_step)
    seen = iter(demo.batches)
    for ranks, batch, steps in parts:
        for _ in range(steps):
            own = sorted(itertools.chain(*(next(seen) for _ in range(ranks))))
            assert len(own) == ranks * batch and own[-1] - own[0] == len(own) - 1
    assert sorted(itertools.chain(*demo.batches)) == list(range(sum(per_step)))
    assert_trees_close(torch.tensor(extra["train"][:7]), torch.tensor(whole["train"][:7]), rtol=1e-5)


# ---- rollback


FIT = ("--rollback", "--batch", "2", "--lr", "0.02", "--steps", "20")
BAD = range(4 * 14, 4 * 15)  # the examples of a step


def check_as_if_it_had_not_been(demo: Demo, tmp_path: Path, skipped: int, stops: list[int]) -> None:
    """A run, stopped and resumed, comes to the bits of one that never saw the bad batch and those that went with it."""
    demo.change = lambda first, batch: demo.bad(batch) if first in BAD else tuple(97 + 0 * part for part in batch)
    out, plain = tmp_path / "out", tmp_path / "plain"
    for steps in (*stops, 1000):
        extra = demo.run(out, 2, *FIT, "--resume", steps=steps)
    seen = sorted(itertools.chain(*demo.batches))
    assert sorted({*seen}) == list(range(4 * (20 + skipped)))
    again = 4 * demo.module.GIVES_UP * len(stops)  # a resumed run begins at what the one before could go back to
    assert len(seen) - len({*seen}) <= again, "each is seen once"
    demo.jump = lambda first: first + 4 * skipped * (first >= BAD.start)
    expected = demo.run(plain, 2, *FIT)
    assert extra["train"] == expected["train"] and len(extra["train"]) == 20
    assert extra["seen"] == expected["seen"] + 4 * skipped
    assert_trees_equal(*(load_file(path / "weights.safetensors") for path in (out, plain)))


@in_turns(5, "examples as programs")
def test_a_batch_that_raises_the_loss_is_as_if_it_had_not_been(
    demo: Demo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo.bad = lambda batch: batch  # many letters, where all others have only one
    check_as_if_it_had_not_been(demo, tmp_path, 1, stops=[14, 1])
    assert "after update 14: back to update 14, and past this batch" in capsys.readouterr().out


@pytest.mark.parametrize("lr", [-1.0, float("inf")] if NIGHTLY else [float("inf")])
@in_turns(5, "examples as programs")
def test_an_update_that_raises_the_loss_of_the_next_batches_is_taken_back(
    demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lr: float
) -> None:
    """The batch itself has a low loss; the two after it show what it did."""
    real = fz.warmup_cosine

    def schedule(*given: Any, **named: Any) -> Any:
        usual = real(*given, **named)
        return lambda count: lr if demo.now.first in BAD else usual(count)

    monkeypatch.setattr(demo.module.fz, "warmup_cosine", schedule)
    check_as_if_it_had_not_been(demo, tmp_path, 3, stops=[])
    said = capsys.readouterr().out
    assert "after update 15: back to update 15" in said and "after update 15: back to update 14" in said


def test_a_loss_that_stays_high_ends_the_run(demo: Demo, tmp_path: Path) -> None:
    demo.change = lambda first, batch: batch if first >= BAD.start else tuple(97 + 0 * part for part in batch)
    with pytest.raises(fz.testing.RankError, match="10 batches in a row raised the loss"):
        demo.run(tmp_path, 2, *FIT)
    newest = max((tmp_path / "checkpoints").iterdir(), key=lambda path: path.name)
    assert newest.name.endswith("-update-10")


# ---- starting again


def test_a_run_goes_on_with_its_options_and_no_other_begins_in_its_folder(
    demo: Demo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--out", str(tmp_path / "out"))
    demo.run(tmp_path / "out", 1, "--batch", "3", "--steps", "2", "--resume")
    assert f"nothing to go on from in {tmp_path / 'out' / 'checkpoints'}: a new run begins" in capsys.readouterr().out
    args = demo.module.options([*out, "--resume", "--lr", "0.5"])
    assert (args.width, args.batch, args.steps, args.dtype, args.lr) == (32, 3, 2, "fp32", 0.5)
    demo.run(tmp_path / "out", 1, "--batch", "3", "--resume")
    assert "going on after update 2 of 2, which was the last; --steps takes more" in capsys.readouterr().out
    for given, said in (
        (["--steps", "9"], f"--out {tmp_path / 'out'} holds a run: --resume goes on with it"),
        (["--resume", "--width", "64"], "--width 64, but the run in --out"),
        (["--resume", "--seed", "1"], "--seed 1, but the run in --out"),
        (["--out", __file__], f"--out {__file__} cannot be written to"),
    ):
        with pytest.raises(SystemExit) as info:
            demo.module.options([*out, *given])
        assert info.value.code == 2 and said in capsys.readouterr().err


@in_turns(10, "interpreters of their own")
def test_a_run_that_is_killed_or_asked_to_stop_loses_nothing() -> None:
    """On two ranks that are processes; more of them with `make killing`."""
    kinds = ("--kinds", "one", "all", "SIGTERM", "SIGINT")
    options = ("--kills", "4" if NIGHTLY else "2", "--ranks", "2", "--seed", "1", *kinds)
    with as_in_a_terminal():
        done = subprocess.run([sys.executable, str(KILLING), *options], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "nothing lost" in done.stdout, done.stdout + done.stderr
