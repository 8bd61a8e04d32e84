"""A process has one folder for a path, which ends with its last file, with the process, and in no forked child."""

from __future__ import annotations

import concurrent.futures
import gc
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from nightly import at_length, in_turns

from fzero.comm import hazards
from fzero.stores.disk import Disk
from fzero.stores.file import File
from fzero.stores.folder import Folder, folder_of

START = """
import os, sys, threading, torch
from fzero.stores.disk import Disk
from fzero.stores.folder import folder_of
disk = Disk(sys.argv[1])
folder = folder_of(disk, lambda: "run")
"""


def run_python(path: Path, code: str, timeout: float = 60) -> str:
    command = [sys.executable, "-W", "error", "-c", START + textwrap.dedent(code), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


def test_there_is_one_for_a_path(tmp_path: Path) -> None:
    asked: list[int] = []

    def run() -> str:
        asked.append(1)
        return "run"

    (tmp_path / "link").symlink_to(tmp_path)
    folder = folder_of(Disk(tmp_path), run)
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        disks = [Disk(tmp_path / "link", threads=number) for number in range(1, 9)]
        assert all(one is folder for one in threads.map(lambda disk: folder_of(disk, run), disks))
    assert asked == [1] and folder_of(Disk(tmp_path / "other"), run) is not folder


def test_threads_that_come_at_once_get_the_same(tmp_path: Path) -> None:
    barrier = threading.Barrier(8)

    def get(_: int) -> Folder:
        barrier.wait()
        return folder_of(Disk(tmp_path), lambda: "run")

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        assert len(set(map(id, list(threads.map(get, range(8)))))) == 1


def test_it_lives_as_long_as_its_files(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    folder = folder_of(disk, lambda: "run")
    path = folder.path
    file = folder.start_write(torch.ones(9), "x", disk)
    del folder
    assert folder_of(disk, lambda: "other").path == path
    file.start_read(target := torch.zeros(9))()
    assert target.sum() == 9
    file.written()
    wait = file.start_read(target)
    del file
    wait()
    assert path.exists()
    del wait
    assert not path.exists() and tmp_path.exists()
    assert folder_of(disk, lambda: "other").path != path


def test_the_end_in_the_middle_of_transfers(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    for _ in range(20):
        folder = folder_of(disk, lambda: "run")
        for _ in range(8):
            folder.start_write(torch.ones(1 << 16), "x", disk)
        file = folder.start_write(torch.ones(1 << 16), "x", disk)
        del folder, file
        assert not list(tmp_path.iterdir())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fzero-disk")]


def test_the_end_on_one_of_its_own_threads(tmp_path: Path) -> None:
    """What a cycle holds may be collected anywhere."""
    disk = Disk(tmp_path)
    folder = folder_of(disk, lambda: "run")
    shared, path = folder.shared, folder.path
    cycle: list[object] = [folder]
    cycle.append(cycle)
    gc.disable()
    try:
        del folder, cycle
        shared.pool.submit(lambda: [gc.collect(), None][1], 1)
        shared.pool.submit(lambda: None, 1)
        for _ in range(6000):
            if not path.exists() and not any(t.name.startswith("fzero-disk") for t in threading.enumerate()):
                break
            threading.Event().wait(0.01)
        else:
            raise AssertionError("it has not ended")
    finally:
        gc.enable()


def test_nothing_leaks(tmp_path: Path) -> None:
    disk = Disk(tmp_path, verify=True)

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def round_() -> None:
        folder = folder_of(disk, lambda: "run")
        for number in range(12):
            file = folder.start_write(torch.ones(5000 * number), "x", disk)
            if number % 3:
                file.start_read(torch.zeros(5000 * number))
            if number % 4 == 2:
                file.written()
                file.start_read(torch.zeros(5000 * number))
                os.truncate(file.path, 0)
                file.start_read(torch.zeros(5000 * number))

    round_()
    gc.collect()
    open_, threads = descriptors(), set(threading.enumerate())
    for _ in range(30):
        round_()
    gc.collect()
    assert descriptors() == open_ and threads.issuperset(threading.enumerate()) and not list(tmp_path.iterdir())


def test_idle_threads_hold_nothing(folder: Folder, disk: Disk) -> None:
    """Neither a tensor nor a descriptor of the last transfer."""
    file = folder.start_write(torch.ones(1 << 16), "x", disk)
    file.written()
    target = torch.empty(1 << 16)
    before = sys.getrefcount(target)
    file.start_read(target)()
    assert sys.getrefcount(target) == before
    assert not [link for link in _links() if str(folder.path) in link and not link.endswith("lock")]


def _links() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # that of the listing itself
            continue
    return found


@in_turns(10, "interpreters of their own")
@pytest.mark.parametrize(
    "ending",
    ["", pytest.param("sys.exit(0)", marks=at_length), "for file in files: file.written()", "del folder, files"],
)
def test_the_interpreter_ends(tmp_path: Path, ending: str) -> None:
    (tmp_path / "mine").write_text("mine")
    run_python(
        tmp_path,
        f"""
        files = [folder.start_write(torch.ones(1 << 22), "x", disk) for _ in range(20)]
        {ending}
        """,
    )
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@in_turns(10, "interpreters of their own")
def test_the_interpreter_ends_while_another_thread_waits(tmp_path: Path) -> None:
    said = run_python(
        tmp_path,
        """
        import weakref
        def work():
            while True:
                file = folder.start_write(torch.ones(1 << 20), "x", disk)
                try:
                    file.written()
                    file.start_read(torch.ones(1 << 20))()
                except RuntimeError:  # the interpreter ends
                    return
        def join():
            for thread in threads:
                thread.join(30)
                print(thread.is_alive())
        threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
        del folder
        end = weakref.finalize(disk, join)  # the last ones are called first: after the folder's own end
        folder = folder_of(disk, lambda: "run")
        for thread in threads:
            thread.start()
        folder.start_write(torch.ones(1 << 22), "x", disk).written()
        """,
    )
    assert said == 3 * "False\n" and not list(tmp_path.iterdir())


@in_turns(10, "interpreters of their own")
def test_the_interpreter_ends_by_an_error(tmp_path: Path) -> None:
    code = START + "file = folder.start_write(torch.ones(1 << 22), 'x', disk)\nraise SystemExit(3)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code, str(tmp_path)], capture_output=True, timeout=60)
    assert done.returncode == 3 and not done.stderr and not list(tmp_path.iterdir())


@in_turns(10, "interpreters of their own")
def test_a_forked_child(tmp_path: Path) -> None:
    """It uses nothing of its parent's, removes nothing, has a folder of its own, and does not hold the lock."""
    said = run_python(
        tmp_path,
        """
        import fcntl, warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking where there are threads
        source = torch.arange(9000)
        file = folder.start_write(source, "x", disk)
        file.written()
        child = os.fork()
        if not child:
            write = lambda: folder.start_write(source, "x", disk)
            for forbidden in (file.written, lambda: file.start_read(source), write):
                try:
                    forbidden()
                except RuntimeError as error:
                    assert "was forked from" in str(error)
                else:
                    raise AssertionError
            path = folder.path
            own = folder_of(disk, lambda: "run")
            assert own is not folder and own.path != path
            one = own.start_write(source, "x", disk)
            one.written()
            del folder, file, write, forbidden
            assert len(os.listdir(path)) == 2
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        file.start_read(target := torch.empty_like(source))()
        assert torch.equal(target, source) and len(os.listdir(disk.path)) == 1
        until, parent_lives = os.pipe()
        if not os.fork():
            os.close(parent_lives)
            os.read(until, 1)
            os._exit(0)
        # the parent's lock ends with the parent's own, although a child lives
        lock = os.open(folder.path / "lock", os.O_RDWR)
        os.close(folder._claim._lock)
        for _ in range(1000):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                threading.Event().wait(0.01)
        else:
            raise AssertionError("a child holds the lock")
        print("free")
        folder._claim._lock = lock
        """,
    )
    assert said == "free\n" and not list(tmp_path.iterdir())


def write(folder: Folder, disk: Disk, value: int, over: File | None = None) -> File:
    return folder.start_write(torch.full((50_000,), value, dtype=torch.uint8), "x", disk, over)


def back(file: File) -> torch.Tensor:
    file.start_read(target := torch.empty(50_000, dtype=torch.uint8))()
    return target


def test_a_file_is_written_over(folder: Folder, disk: Disk) -> None:
    first = write(folder, disk, 1)
    first.written()
    place = first.path.stat().st_ino
    second = write(folder, disk, 2, over=first)
    second.written()
    assert second.path.stat().st_ino == place and (back(second) == 2).all()
    with pytest.raises(RuntimeError):
        back(first)
    del first
    gc.collect()
    assert len(os.listdir(folder.path)) == 2 and (back(second) == 2).all()
    del second
    gc.collect()
    assert os.listdir(folder.path) == ["lock"]


def test_a_file_that_is_not_whole_is_not_written_over(
    folder: Folder, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, write_bytes = threading.Event(), os.pwritev

    def wait(*args: Any) -> int:
        assert begun.wait(60)
        return write_bytes(*args)

    monkeypatch.setattr(os, "pwritev", wait)
    first = write(folder, disk, 1)
    second = write(folder, disk, 2, over=first)
    begun.set()
    second.written()
    assert (back(second) == 2).all()


def test_a_file_that_somebody_deletes_is_not_written_over(folder: Folder, disk: Disk) -> None:
    first = write(folder, disk, 1)
    first.written()
    first.path.unlink()
    assert (back(write(folder, disk, 2, over=first)) == 2).all()


def test_a_dropped_file_takes_what_it_was_to_be_written_over_along(
    folder: Folder, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = write(folder, disk, 1)
    first.written()
    monkeypatch.setattr(hazards, "departing", lambda start: None)  # it never begins
    second = write(folder, disk, 2, over=first)
    del first, second
    gc.collect()
    assert os.listdir(folder.path) == ["lock"]


def test_an_overwriting_that_fails_leaves_no_old_bytes(
    folder: Folder, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = write(folder, disk, 1)
    first.written()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", _full)
        second = write(folder, disk, 2, over=first)
        with pytest.raises(OSError, match="No space left"):
            second.written()
        assert os.listdir(folder.path) == ["lock"]
    assert (back(second) == 2).all()


def _full(*_: object) -> int:
    raise OSError(28, "No space left on device")
