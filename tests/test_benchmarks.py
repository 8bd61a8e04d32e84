"""The benchmarks run, and compare what computes the same: two of them in every run, all of them nightly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from nightly import at_length
from processes import FORKING

FOLDER = Path(__file__).parent.parent / "benchmarks"
TINY = "--width 16 --heads 2 --batch 2 --context 8 --steps 1 --warmup 1".split()


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, *FORKING, str(FOLDER / script), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_step() -> None:
    out = run("step.py", *TINY, "--blocks", "2", "--no-memory", "--only", "DDP", "fzero ZeRO-2", "fzero ZeRO-3")
    assert "losses agree" in out
    assert "fzero ZeRO-2 of DDP" in out


@at_length
def test_overhead() -> None:
    assert "a unit adds" in run("overhead.py", *TINY, "--blocks", "2")


@at_length
def test_update() -> None:
    small = *"--log2 16 --only compact16".split(), "bf16, nearest"
    assert "compiled by" in run("update.py", *small) and "no C++ compiler" in run("update.py", "--eager", *small)


@at_length
def test_muon() -> None:
    out = run("muon.py", *"--width 16 --heads 2 --blocks 1 --batch 2 --context 8 --rounds 1 --steps 1".split())
    assert "muon / (adamw + alone)" in out


@at_length
def test_channels() -> None:
    out = run("channels.py", *"--mib 1 --rounds 1 --trips 10".split())
    assert "round trip by a unix socket" in out and "round trip by TCP" in out


@at_length
def test_disk(tmp_path: Path) -> None:
    out = run("disk.py", str(tmp_path), *"--mib 8 --tensors 4 --in-flight 2 --turns 1 --verify".split())
    assert "write again" in out and "read, not aligned" in out and not list(tmp_path.iterdir())


@at_length
def test_offload(tmp_path: Path) -> None:
    out = run(
        "offload.py", *TINY, *"--blocks 1 --rounds 1 --only compact16 --no-memory --folder".split(), str(tmp_path)
    )
    assert "losses agree" in out and "compact16, all away" in out and not list(tmp_path.iterdir())


@at_length
def test_remote() -> None:
    out = run("remote.py", *"--calls 5 --rounds 2 --mib 1".split())
    assert "processes" in out and "share" in out


@at_length
def test_node() -> None:
    assert "direct" in run("node.py", "--rounds", "5")


@at_length
def test_ensemble() -> None:
    out = run("ensemble.py", *"--members 3 --width 8 --layers 2 --batch 4 --rounds 2 --steps 1 --warmup 0".split())
    assert "all end with the same params" in out and "vmap, rates" in out


@at_length
def test_axes() -> None:
    peers = ("torch TP", "torch TP, sequence", "fzero TP", "fzero TP, pure", "fzero TP, sequence", "fzero ZeRO-3")
    sizes = "--width 32 --heads 2 --kv-heads 2 --vocabulary 16 --blocks 1 --batch 2 --context 8 --rounds 1 --steps 1"
    out = run("axes.py", *sizes.split(), "--regimes", "float32", "--only", *peers)
    assert "losses agree" in out and "fzero TP / torch TP " in out and "would not run" not in out


def test_pipeline() -> None:
    sizes = "--width 16 --heads 2 --blocks 4 --rows 1 --context 8 --microbatches 4 --rounds 1 --steps 1 --warmup 0"
    out = run("pipeline.py", *sizes.split(), "--regimes", "float32", "--schedules", "zero bubble")
    assert "zero bubble" in out and "did not run" not in out


@at_length
def test_derivatives() -> None:
    out = run("derivatives.py", *"--cases lr models --only fzero".split(), "fzero ZeRO-3", "FSDP2")
    rows = [line.split(" | ") for line in out.splitlines() if line.startswith("| ")]
    assert [row[1:3] for row in rows] == [["fzero", "fzero ZeRO-3"], ["exact", "exact"], ["exact", "exact"]]
    assert not any("exact" in row[3] for row in rows[1:])


@at_length
def test_derivatives_of_all() -> None:
    out = run("derivatives.py", "--only", "fzero", "fzero ZeRO-3")
    assert out.count("| exact") == 28


@at_length
def test_axes_lengths(tmp_path: Path) -> None:
    out = run("axes.py", *"--lengths --longest 64 --degrees 1 2 --out".split(), str(tmp_path / "activations.png"))
    assert out.count("of ideal") == 4 and (tmp_path / "activations.png").stat().st_size
