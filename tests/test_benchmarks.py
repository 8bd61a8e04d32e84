"""The benchmarks run, and compare what computes the same: one of them in every run, all of them nightly."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nightly import at_length, in_turns
from processes import run_forked

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
import results

FOLDER = results.ROOT / "benchmarks"
TINY = "--width 16 --heads 2 --batch 2 --context 8 --steps 1 --warmup 1".split()


def run(script: str, *arguments: str) -> str:
    done = run_forked(str(FOLDER / script), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@in_turns(5, "examples as programs")
def test_step() -> None:
    out = run("step.py", *TINY, "--blocks", "2", "--no-memory", "--only", "DDP", "fzero ZeRO-2", "fzero ZeRO-3")
    assert "losses agree" in out
    assert "fzero ZeRO-2 of DDP" in out


@in_turns(10, "interpreters of their own")
def test_resident(tmp_path: Path) -> None:
    # not forked from the tests' process, whose pages a rank would have to make its own
    command = [sys.executable, str(FOLDER / "resident.py"), str(tmp_path), *"--batch 1 --context 16".split()]
    out = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=-1, text=True, check=True).stdout
    grown = [float(line.split()[-1]) for line in out.splitlines() if "after step" in line]
    assert len(grown) == 3 and grown[-1] <= 0.25, "memory that is freed goes back"


AXES = "--width 32 --heads 2 --kv-heads 2 --vocabulary 16 --blocks 1 --batch 2 --context 8 --rounds 1 --steps 1".split()
AXES += ["--regimes", "float32", "--only", "torch TP", "torch TP, sequence", "fzero TP", "fzero TP, pure"]
AXES += ["fzero TP, sequence", "fzero ZeRO-3"]
SMALL = "--width 16 --heads 2"
# a command, {folder} a new one -> what it prints
AT_LENGTH: Sequence[tuple[Sequence[str], Sequence[str]]] = [
    (["overhead.py", *TINY, "--blocks", "2"], ["a unit adds"]),
    ([*"update.py --log2 16 --only compact16".split(), "bf16, nearest"], ["compiled by"]),
    ([*"update.py --eager --log2 16 --only compact16".split(), "bf16, nearest"], ["no C++ compiler"]),
    (f"muon.py {SMALL} --blocks 1 --batch 2 --context 8 --rounds 1 --steps 1".split(), ["muon / (adamw + alone)"]),
    ("channels.py --mib 1 --rounds 1 --trips 10".split(), ["round trip by a unix socket", "round trip by TCP"]),
    (
        "disk.py {folder} --mib 8 --tensors 4 --in-flight 2 --turns 1 --verify".split(),
        ["write again", "read, not aligned"],
    ),
    (
        ["offload.py", *TINY, *"--blocks 1 --rounds 1 --only compact16 --no-memory --folder {folder}".split()],
        ["losses agree", "compact16, all away"],
    ),
    ("remote.py --calls 5 --rounds 2 --mib 1".split(), ["processes", "share"]),
    ("node.py --rounds 5".split(), ["direct"]),
    ("stream.py --units 2 --side 16 --rounds 1".split(), ["fz.stream, kept / fz.gather, kept"]),
    (
        "ensemble.py --members 3 --width 8 --layers 2 --batch 4 --rounds 2 --steps 1 --warmup 0".split(),
        ["all end with the same params", "vmap, rates"],
    ),
    (["axes.py", *AXES], ["losses agree", "fzero TP / torch TP "]),
    (
        [
            *f"pipeline.py {SMALL} --blocks 4 --rows 1 --context 8 --microbatches 4 --rounds 1 --steps 1".split(),
            *"--warmup 0 --regimes float32 --schedules".split(),
            "zero bubble",
        ],
        ["zero bubble"],
    ),
]


@at_length
@pytest.mark.parametrize(("command", "said"), AT_LENGTH, ids=[command[0] for command, _ in AT_LENGTH])
def test_it_runs(command: Sequence[str], said: Sequence[str], tmp_path: Path) -> None:
    out = run(*[word.replace("{folder}", str(tmp_path)) for word in command])
    assert all(phrase in out for phrase in said) and not re.search("would not run|did not run", out), out
    assert not list(tmp_path.iterdir())


@at_length
def test_derivatives() -> None:
    out = run("derivatives.py", *"--cases lr models --only fzero".split(), "fzero ZeRO-3", "FSDP2")
    rows = [line.split(" | ") for line in out.splitlines() if line.startswith("| ")]
    assert [row[1:3] for row in rows] == [["fzero", "fzero ZeRO-3"], ["exact", "exact"], ["exact", "exact"]]
    assert not any("exact" in row[3] for row in rows[1:])


@at_length
def test_derivatives_of_all() -> None:
    out = run("derivatives.py", "--only", "fzero", "fzero ZeRO-3")
    assert out.count("| exact") == 38


@at_length
def test_axes_lengths(tmp_path: Path) -> None:
    out = run("axes.py", *"--lengths --longest 64 --degrees 1 2 --out".split(), str(tmp_path / "activations.png"))
    assert out.count("of ideal") == 4 and (tmp_path / "activations.png").stat().st_size


# ---- tables in files, and on the page


def files() -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in results.RESULTS.glob("*.json")}


def test_the_page_shows_every_file() -> None:
    page = results.PAGE.read_text()
    assert results.filled(page) == page, "run: python benchmarks/results.py"
    assert sorted(results.MARKED.findall(page)) == sorted(files())
    for name, found in files().items():
        assert {*found} == {"command", "machine", "date", "commit", "settings", "tables"}, name
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"]) and re.fullmatch(r"[0-9a-f]{7,}", found["commit"]), name


@at_length
def test_every_command_is_taken_by_its_script() -> None:
    """All in one process, each as far as its arguments, with the text of --help."""
    code = """
        import argparse, json, os, runpy, shlex, sys

        class Parsed(Exception):
            pass

        def parse_args(self, *args, **kwargs):
            parse(self, *args, **kwargs)
            self.format_help()
            raise Parsed

        parse, argparse.ArgumentParser.parse_args = argparse.ArgumentParser.parse_args, parse_args
        for command in json.loads(sys.argv[1]):
            words = shlex.split(command)
            sys.argv = words[words.index("python") + 1 :] + ["--save"]
            sys.path.insert(0, os.path.dirname(sys.argv[0]))
            try:
                runpy.run_path(sys.argv[0], run_name="__main__")
            except Parsed:
                print(command)
            sys.path.pop(0)
    """
    commands = [found["command"] for found in files().values()]
    command = [sys.executable, "-c", textwrap.dedent(code), json.dumps(commands)]
    done = subprocess.run(command, cwd=results.ROOT, capture_output=True, text=True, timeout=250)
    assert done.stdout.splitlines() == commands, done.stderr


FLOATS = st.sampled_from([math.nan, -math.inf]) | st.floats(-1e6, 1e6).map(lambda x: float(f"{x:.6g}"))


@given(st.lists(st.none() | st.text("ab") | st.integers() | FLOATS))
def test_cells_are_rounded(cells: list[Any]) -> None:
    for cell, text in zip(cells, results.shown(cells), strict=True):
        if isinstance(cell, float) and not math.isfinite(cell):
            assert text == str(cell)
        elif isinstance(cell, float):
            assert float(text.replace(",", "")) == pytest.approx(cell, rel=0.05, abs=1e-12)
        else:
            assert text == ("" if cell is None else cell if isinstance(cell, str) else f"{cell:,}")


@pytest.mark.parametrize("name", ["a/b", "a.b", ""])
def test_a_name_that_no_page_can_have_is_refused_before_the_run(name: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        results.parser("What it does.").parse_args(["--save", name])
    assert "expected letters, digits" in capsys.readouterr().err


def test_a_run_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- results: mine -->\n<!-- end -->\nbehind\n")
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(results, "PAGE", page)
    script = str(FOLDER / "step.py")
    monkeypatch.setattr(sys, "argv", [script, "--batch", "1", "--save=mine", "--only", "FSDP2", "two words"])
    parser = results.parser("What it does.")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--only", nargs="*")
    table = results.Table("median ms", "ratio", "never", show=False)
    table.row("one", 1234.56789, 0.5)
    table.row("other", "not run")
    results.save(parser.parse_args(["--batch", "1"]), table)
    assert [*tmp_path.iterdir()] == [page]
    results.save(parser.parse_args(), table, results.Table("none", show=False))
    found = json.loads((tmp_path / "mine.json").read_text())
    assert found["command"].endswith("python benchmarks/step.py --batch 1 --only FSDP2 'two words'")
    assert found["settings"] == {"batch": 1, "only": ["FSDP2", "two words"]} and "torch" in found["machine"]
    (kept,) = found["tables"]
    assert kept["rows"]["one"] == {"median ms": 1234.57, "ratio": 0.5, "never": None}
    text = page.read_text()
    assert "| one | 1,235 | 0.5 |\n| other | not run |  |\n" in text and "never" not in text and "behind" in text
    assert results.filled(text) == text


def test_the_readme_has_the_numbers_of_the_file() -> None:
    section = re.search(r"^## How fast\?\n(.*?)(?=^## |\Z)", (results.ROOT / "README.md").read_text(), re.M | re.S)
    if section is None:
        pytest.skip("README has no section 'How fast?'")
    lines = [line.strip().strip("|").split("|") for line in section[1].splitlines() if line.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in line] for line in lines]
    kept = files()["step"]["tables"][0]["rows"]
    columns = {"no communication": "of alone", "FSDP2": "of FSDP2", "live MB": "live MB at peak"}
    chosen = [next(column for word, column in columns.items() if word in said) for said in header[1:]]
    shown = {
        column: dict(zip(kept, results.shown([row[column] for row in kept.values()]), strict=True)) for column in chosen
    }
    assert len(rows) >= 5 and len(chosen) == 3
    for name, *cells in rows:
        assert cells == [shown[column][name] for column in chosen], name
