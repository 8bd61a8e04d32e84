"""Runs are kept apart, ranks of one run meet, what killed ones leave is removed, and nothing else is."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from nightly import in_turns

from fzero.stores import claim
from fzero.stores.folder import Folder

# writes again and again until it is told to end by a line
HOLDER = """
import sys, threading, torch
from fzero.stores.disk import Disk
from fzero.stores.folder import folder_of
path, run = sys.argv[1:]
folder = folder_of(Disk(path), lambda: run)
source = torch.ones(1 << 22)
file = folder.start_write(source, "ones", Disk(path))
file.written()
ended = threading.Event()
def write():
    while not ended.wait(0.01):
        folder.start_write(source, "ones", Disk(path))
thread = threading.Thread(target=write)
thread.start()
print(folder.path, flush=True)
sys.stdin.readline()
ended.set()
thread.join()
"""
Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a process that holds the folder for a run; its first line is its subfolder."""
    started: list[subprocess.Popen[str]] = []

    def start(run: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", HOLDER, str(tmp_path), run],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def said_by(process: subprocess.Popen[str]) -> Path:
    assert process.stdout is not None
    return Path(process.stdout.readline().strip())


@in_turns(10, "interpreters of their own")
def test_another_run_is_refused_while_it_lives(tmp_path: Path, start: Start) -> None:
    process = start("theirs")
    subfolder = said_by(process)
    with pytest.raises(RuntimeError, match="in use by another run") as refused:
        Folder(str(tmp_path), "ours")
    for words in (str(process.pid), socket.gethostname(), str(tmp_path), subfolder.name, "since 2", "wait until"):
        assert words in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == [subfolder.name]  # nothing of ours, and theirs is whole
    assert len(list(subfolder.iterdir())) > 1
    process.communicate("\n", timeout=60)
    assert process.returncode == 0 and not list(tmp_path.iterdir())
    Folder(str(tmp_path), "ours")


@in_turns(10, "interpreters of their own")
def test_ranks_of_one_run_meet(tmp_path: Path, start: Start) -> None:
    process = start("one run")
    theirs = said_by(process)
    folder = Folder(str(tmp_path), "one run")
    assert sorted(tmp_path.iterdir()) == sorted([theirs, folder.path])
    assert f"one_run-{os.getpid()}-" in folder.path.name
    del folder
    assert list(tmp_path.iterdir()) == [theirs]


@in_turns(10, "interpreters of their own")
def test_what_a_killed_run_leaves_is_removed_and_nothing_else(tmp_path: Path, start: Start) -> None:
    first, second = start("same"), start("same")
    killed, also = said_by(first), said_by(second)
    for process in (first, second):
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert killed.exists() and len(list(killed.iterdir())) > 1
    kept = [
        also / "notes.txt",
        tmp_path / "0.state",
        tmp_path / "lock",
        tmp_path / "fzero-mine" / "1.state",
        tmp_path / "fzero-mine-1-00000000" / "1.state",  # a name of ours, but nothing that we make: it has no lock
    ]
    for path in kept:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    (tmp_path / "fzero-file-1-00000000").write_text("mine")
    (tmp_path / "fzero-link-1-00000000").symlink_to(also)
    folder = Folder(str(tmp_path), "next")
    assert not killed.exists() and [path.name for path in also.iterdir()] == ["notes.txt"]
    assert all(path.read_text() == "mine" for path in kept)
    assert (tmp_path / "fzero-file-1-00000000").read_text() == "mine"
    del folder
    assert all(path.read_text() == "mine" for path in kept)


def test_a_link_leads_nowhere(tmp_path: Path) -> None:
    """Nobody makes us remove what lies elsewhere."""
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (tmp_path / "disk").mkdir()
    for name in ("lock", "1.state"):
        (elsewhere / name).write_text("mine")
    (tmp_path / "disk" / "fzero-link-1-00000000").symlink_to(elsewhere)
    Folder(str(tmp_path / "disk"), "run")
    assert sorted(path.name for path in elsewhere.iterdir()) == ["1.state", "lock"]


def test_what_a_process_killed_at_its_first_step_leaves(tmp_path: Path) -> None:
    (tmp_path / "fzero-run-1-00000000").mkdir()
    folder = Folder(str(tmp_path), "run")
    assert list(tmp_path.iterdir()) == [folder.path]


def test_files_are_this_users_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        folder = Folder(str(tmp_path), "run")
    finally:
        os.umask(old)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder.path / "lock").stat().st_mode) == 0o600


@pytest.mark.parametrize("said", ["", "{", '{"run": 1}', "[]"])
def test_a_holder_that_does_not_say_who_it_is(tmp_path: Path, said: str) -> None:
    path = tmp_path / "fzero-run-1-00000000"
    path.mkdir()
    (path / "lock").write_text(said)
    with open(path / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RuntimeError, match="does not say which"):
            Folder(str(tmp_path), "run")


def test_the_door_is_held_for_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "PATIENCE", 0.1)
    door = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(door, fcntl.LOCK_EX)
    try:
        with pytest.raises(TimeoutError, match="another process has been looking"):
            Folder(str(tmp_path), "run")
    finally:
        os.close(door)
    Folder(str(tmp_path), "run")


def test_a_filesystem_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match=r"has no locks .*local disk"):
        Folder(str(tmp_path), "run")
    assert not list(tmp_path.iterdir())


@in_turns(10, "interpreters of their own")
def test_many_come_in_at_once(tmp_path: Path, start: Start) -> None:
    processes = [start("same") for _ in range(3)]
    assert len({said_by(process) for process in processes}) == 3 == len(list(tmp_path.iterdir()))
    for process in processes:
        process.communicate("\n", timeout=60)
    assert not list(tmp_path.iterdir())
