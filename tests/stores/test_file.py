"""A file is written and read while others are; what goes wrong is said, tried again, and loses nothing that is left."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import gc
import os
import random
import resource
import stat
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
from processes import run_forked

from fzero.comm.hazards import hazards
from fzero.stores import blocks
from fzero.stores.blocks import BLOCK
from fzero.stores.disk import Disk
from fzero.stores.file import File
from fzero.stores.folder import Folder, folder_of

Call = Callable[[int, Sequence[memoryview], int], int]
SIZE = 20 * BLOCK + 100  # several chunks, and a tail


class Gate:
    """Stands in for os.pwritev or os.preadv: holds calls back, or makes them fail."""

    def __init__(self, call: Call) -> None:
        self.call, self.open, self.errors, self.calls = call, threading.Event(), [], 0
        self.open.set()

    def __call__(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.calls += 1
        assert self.open.wait(60)
        if self.errors:
            raise OSError(self.errors.pop(), "said by the test")
        return self.call(descriptor, buffers, offset)


@contextlib.contextmanager
def gated(name: str) -> Iterator[Gate]:
    gate = Gate(getattr(os, name))
    with mock.patch.object(os, name, gate):
        yield gate
        gate.open.set()


@pytest.fixture
def writes() -> Iterator[Gate]:
    with gated("pwritev") as gate:
        yield gate


@pytest.fixture
def reads() -> Iterator[Gate]:
    with gated("preadv") as gate:
        yield gate


def some(seed: int, nbytes: int = SIZE) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def back(file: File) -> torch.Tensor:
    target = torch.empty(file.nbytes, dtype=torch.uint8)
    file.start_read(target)()
    return target


def state_files(folder: Folder) -> list[str]:
    return sorted(path.name for path in folder.path.iterdir() if path.name != "lock")


def until(true: Callable[[], bool]) -> None:
    """What workers do by themselves, they do soon."""
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


# ---- what goes well


def test_many_at_once_from_several_threads(folder: Folder, disk: Disk) -> None:
    def work(seed: int) -> None:
        rng = random.Random(seed)
        files: list[tuple[File, torch.Tensor]] = []
        for number in range(40):
            source = some(1000 * seed + number, rng.choice([1, BLOCK, SIZE]))
            files.append((folder.start_write(source, "x", disk), source.clone()))
            file, wanted = rng.choice(files)
            assert torch.equal(back(file), wanted)
            if len(files) > 8:
                files.pop(rng.randrange(8))
        for file, wanted in files:
            file.written()
            assert torch.equal(back(file), wanted)

    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        for done in [threads.submit(work, seed) for seed in range(6)]:
            done.result()
    gc.collect()
    until(lambda: state_files(folder) == [])  # one whose write was just beginning goes as that ends


def test_a_name_stands_for_a_whole_file(folder: Folder, disk: Disk, writes: Gate) -> None:
    writes.open.clear()
    file = folder.start_write(some(0), "x", disk)
    until(lambda: writes.calls > 0)
    assert state_files(folder) == ["0.state.part"] and not file.path.exists() and not file.on_disk
    assert stat.S_IMODE((folder.path / "0.state.part").stat().st_mode) == 0o600
    writes.open.set()
    file.written()
    assert state_files(folder) == ["0.state"] and file.on_disk and stat.S_IMODE(file.path.stat().st_mode) == 0o600


def test_a_read_does_not_wait_for_a_write(folder: Folder, disk: Disk, writes: Gate) -> None:
    writes.open.clear()
    source = some(0)
    file = folder.start_write(source, "x", disk)
    assert torch.equal(back(file), source) and not file.on_disk


def test_the_source_is_held_until_it_is_written(folder: Folder, disk: Disk, writes: Gate) -> None:
    writes.open.clear()
    source, wanted = some(0), some(0)
    file, held = folder.start_write(source, "x", disk), weakref.ref(source)
    del source
    gc.collect()
    assert held() is not None
    writes.open.set()
    file.written()
    assert held() is None and torch.equal(back(file), wanted)


def test_the_target_lives_until_nothing_is_written_to_it(folder: Folder, disk: Disk, reads: Gate) -> None:
    file = folder.start_write(some(0), "x", disk)
    file.written()
    reads.open.clear()
    target = torch.empty(SIZE, dtype=torch.uint8)
    held, wait = weakref.ref(target), file.start_read(target)
    del target, file
    assert held() is not None
    reads.open.set()
    wait()
    assert held() is None


def test_a_wait_may_be_called_often_and_from_anywhere(folder: Folder, disk: Disk, reads: Gate) -> None:
    source = some(0)
    file = folder.start_write(source, "x", disk)
    file.written()
    for errors in ([], [errno.EIO] * 99):
        reads.errors = errors
        target = torch.empty_like(source)
        with hazards(3):
            wait = file.start_read(target)
            with concurrent.futures.ThreadPoolExecutor(3) as threads:
                for done in [threads.submit(wait) for _ in range(5)]:
                    if errors:
                        with pytest.raises(RuntimeError, match="Reading x"):
                            done.result()
                    else:
                        done.result()
        assert errors or torch.equal(target, source)
        target.zero_()
        if not errors:
            wait()
            assert not target.any()  # it had arrived, and does not come again


def test_a_dropped_file_frees_the_disk(folder: Folder, disk: Disk, writes: Gate) -> None:
    file = folder.start_write(some(0), "x", disk)
    file.written()
    del file
    assert state_files(folder) == []
    writes.open.clear()
    source = some(1)
    before = writes.calls
    file, held = folder.start_write(source, "x", disk), weakref.ref(source)
    until(lambda: writes.calls > before)
    del file, source
    assert state_files(folder) == [] and held() is not None
    writes.open.set()
    until(lambda: held() is None)
    assert state_files(folder) == []
    assert writes.calls <= before + disk.threads  # what was left of it is not written: there are seven chunks


def test_a_file_that_is_dropped_while_it_is_read(folder: Folder, disk: Disk, reads: Gate) -> None:
    source = some(0)
    file = folder.start_write(source, "x", disk)
    file.written()
    reads.open.clear()
    target, other = torch.empty_like(source), torch.empty_like(source)
    wait = file.start_read(target)
    file.start_read(other)  # nobody waits for it
    del file
    reads.open.set()
    wait()
    assert torch.equal(target, source)
    del wait
    assert state_files(folder) == []


def test_writes_wait_for_room(folder: Folder, disk: Disk, writes: Gate) -> None:
    disk = Disk(disk.path, in_flight=2 * SIZE)
    writes.open.clear()
    files = [folder.start_write(some(number), "x", disk) for number in range(2)]
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        third = threads.submit(folder.start_write, some(2), "x", disk)
        assert not concurrent.futures.wait([third], timeout=0.2).done
        writes.open.set()
        files.append(third.result())
    large = some(3, 5 * SIZE)  # more than there is ever room for
    files.append(folder.start_write(large, "x", disk))
    for file in files:
        file.written()
    assert folder.shared.room.taken == 0


def test_room_is_given_back_whatever_happens(folder: Folder, disk: Disk, writes: Gate) -> None:
    writes.errors = [errno.EIO]
    failed = folder.start_write(some(0), "x", disk)
    until(lambda: not writes.errors)  # the error is this one's
    folder.start_write(some(1), "x", disk)  # and dropped
    with pytest.raises(OSError):
        failed.written()
    folder.start_write(some(2), "x", disk).written()
    until(lambda: folder.shared.room.taken == 0)  # the dropped one may end last


# ---- what cannot be written


def test_of_a_full_disk_a_state_is_told_once(folder: Folder, disk: Disk, writes: Gate) -> None:
    writes.errors = [errno.ENOSPC] * 999
    sources = [some(number) for number in range(3)]
    files = [folder.start_write(source, "x", disk) for source in sources]
    until(lambda: all(file._write.ended for file in files))
    with pytest.raises(OSError, match="said by the test"):
        back(files[0])
    for file, source in zip(files, sources, strict=True):
        assert torch.equal(back(file), source)
    writes.errors.clear()
    assert torch.equal(back(files[0]), sources[0]) and files[0].on_disk
    writes.errors = [errno.ENOSPC] * 999  # once more
    with pytest.raises(OSError, match="said by the test"):
        back(files[1])


def check_failed_write(file: File, wanted: torch.Tensor, number: int, again: Callable[[], None]) -> None:
    """Each wait tries again, and says it if that fails too, until `again` repairs it; of reads the first one."""
    for told in (False, True):
        with pytest.raises(OSError, match="moments of 'w'") as failed:
            file.written()
        assert failed.value.errno == number and not file.on_disk
        for words in (str(file.path), "failed at byte", f"of {SIZE}", f"{blocks.rounded(SIZE)} bytes are needed"):
            assert words in str(failed.value)
        assert "are free" in str(failed.value) and "make room" in str(failed.value)
        if told:
            assert torch.equal(back(file), wanted)
        else:
            with pytest.raises(OSError, match="moments of 'w'"):
                back(file)
        assert state_files_of(file) == [] and open_descriptors(file) == 0
    again()
    assert torch.equal(back(file), wanted)
    file.written()
    assert file.on_disk and torch.equal(back(file), wanted)


def open_descriptors(file: File) -> int:
    """Of this file, by any of its names."""
    links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum(str(file.path) in str(link) for link in links)


def state_files_of(file: File) -> list[Path]:
    return [path for path in file.path.parent.iterdir() if path.name != "lock"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_failed_write(folder: Folder, disk: Disk, writes: Gate, number: int) -> None:
    writes.errors = [number] * 99
    source = some(0)
    file = folder.start_write(source, "moments of 'w'", disk)
    check_failed_write(file, source.clone(), number, writes.errors.clear)


def test_a_full_disk_shows_before_anything_is_written(
    folder: Folder, disk: Disk, writes: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = [True]

    def reserve(descriptor: int, offset: int, nbytes: int) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    file = folder.start_write(some(0), "moments of 'w'", disk)
    with pytest.raises(OSError, match=rf"failed at byte 0 of {SIZE}: No space left"):
        file.written()
    assert not writes.calls
    check_failed_write(file, some(0), errno.ENOSPC, full.clear)


def test_a_filesystem_that_reserves_nothing(folder: Folder, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    def reserve(descriptor: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    file = folder.start_write(some(0), "x", disk)
    file.written()
    assert torch.equal(back(file), some(0)) and file.path.stat().st_size == blocks.rounded(SIZE)


def test_a_folder_that_is_gone(folder: Folder, disk: Disk) -> None:
    moved = folder.path.rename(folder.path.with_name("moved"))
    file = folder.start_write(some(0), "x", disk)
    with pytest.raises(FileNotFoundError, match="No such file"):
        file.written()
    moved.rename(folder.path)
    file.written()
    assert torch.equal(back(file), some(0))


def test_a_write_that_failed_holds_nothing_when_it_is_dropped(folder: Folder, disk: Disk, writes: Gate) -> None:
    writes.errors = [errno.EIO] * 9
    source = some(0)
    file, held = folder.start_write(source, "x", disk), weakref.ref(source)
    del source
    for _ in range(2):
        try:
            file.written()
        except OSError as error:
            assert error.errno == errno.EIO
        else:
            raise AssertionError
    assert held() is not None
    del file  # nor does anything go round in a circle
    assert held() is None and state_files(folder) == []


def test_the_system_limits_files(tmp_path: Path) -> None:
    """By RLIMIT_FSIZE, in a process of its own: what the system itself says, and that raising the limit is enough."""
    done = run_forked(
        "-c",
        textwrap.dedent(
            f"""
        import resource, torch
        from fzero.stores.disk import Disk
        from fzero.stores.folder import folder_of
        disk = Disk({str(tmp_path)!r})
        folder = folder_of(disk, lambda: "run")
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        source = torch.arange(1 << 19)
        file = folder.start_write(source, "params", disk)
        for _ in range(2):
            try:
                file.written()
            except OSError as error:
                assert error.errno == 27 and "File too large" in str(error), error
            else:
                raise AssertionError
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        file.written()
        file.start_read(target := torch.empty_like(source))()
        assert torch.equal(target, source)
        """
        ),
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def run_python(code: str, *before: str) -> None:
    command = [*before, sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_a_full_disk(tmp_path: Path) -> None:
    """A filesystem of 4 MiB: what does not fit is kept, and written when something else is dropped."""
    alone = ("unshare", "--user", "--map-root-user", "--mount")
    mounted = f"mount -t tmpfs -o size=4m none {tmp_path}"
    try:
        subprocess.run([*alone, "sh", "-c", mounted], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this machine lets nobody mount a filesystem")
    run_python(
        f"""
        import torch
        from fzero.stores.disk import Disk
        from fzero.stores.folder import folder_of
        disk = Disk({str(tmp_path)!r})
        folder = folder_of(disk, lambda: "run")
        source = torch.arange(1 << 18)
        files = [folder.start_write(source + number, "params", disk) for number in range(3)]
        failed = []
        for number, file in enumerate(files):
            try:
                file.written()
            except OSError as error:
                assert error.errno == 28 and "2097152 bytes are needed there" in str(error), error
                failed.append(number)
        assert len(failed) == 2, failed  # two do not fit beside the lock
        good = ({{0, 1, 2}} - set(failed)).pop()
        for number in failed:
            files[good] = file = None
            files[number].start_read(target := torch.empty_like(source))()
            assert torch.equal(target, source + number)
            good = number
        """,
        *alone,
        *("sh", "-c", f'{mounted} && exec "$@"', "sh"),
    )


# ---- what cannot be read


@pytest.fixture
def whole(folder: Folder, disk: Disk) -> File:
    file = folder.start_write(some(0), "moments of 'w'", disk)
    file.written()
    return file


def test_a_read_that_fails_once_is_tried_again(whole: File, reads: Gate) -> None:
    reads.errors = [errno.EIO]
    assert torch.equal(back(whole), some(0))


def test_a_read_that_fails_always(whole: File, reads: Gate) -> None:
    reads.errors = [errno.EIO] * 99
    with pytest.raises(RuntimeError, match="moments of 'w'") as failed:
        back(whole)
    for words in (str(whole.path), "failed at byte", f"of {SIZE}", "said by the test", "from a checkpoint"):
        assert words in str(failed.value)
    assert isinstance(failed.value.__cause__, OSError)
    reads.errors.clear()
    assert torch.equal(back(whole), some(0))  # the next read is one of its own


def test_after_a_failure_the_rest_is_left_out(folder: Folder, reads: Gate, tmp_path: Path) -> None:
    """Also by other threads than the one that failed."""
    file = folder.start_write(some(0, 50 * SIZE), "x", Disk(tmp_path, threads=2))
    file.written()
    call = reads.call

    def first_is_bad(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset == 0:
            raise OSError(errno.EIO, "said by the test")
        time.sleep(1e-3)
        return call(descriptor, buffers, offset)

    reads.call = first_is_bad
    with pytest.raises(RuntimeError, match="at byte 0"):
        back(file)
    assert reads.calls < 100  # of 351


def test_a_read_that_comes_back_short(whole: File, monkeypatch: pytest.MonkeyPatch) -> None:
    read, short = os.preadv, [True]
    monkeypatch.setattr(os, "preadv", lambda *given: 0 if short and short.pop() else read(*given))
    assert torch.equal(back(whole), some(0))


@pytest.mark.parametrize("direct", [None, False])
@pytest.mark.parametrize("length", [0, 100, BLOCK, 12 * BLOCK, SIZE - 1])
def test_a_file_that_was_cut_short(folder: Folder, disk: Disk, length: int, direct: bool | None) -> None:
    file = folder.start_write(some(0), "moments of 'w'", Disk(disk.path, direct=direct))
    file.written()
    os.truncate(file.path, length)
    with pytest.raises(RuntimeError, match=r"moments of 'w' from .* got \d+ of \d+ bytes: the file was cut short"):
        back(file)


def test_a_file_that_was_deleted(whole: File) -> None:
    whole.path.unlink()
    with pytest.raises(RuntimeError, match=rf"got 0 of {SIZE} bytes: the file is gone"):
        back(whole)


@pytest.mark.parametrize("place", [0, 3 * BLOCK, SIZE - 1])
def test_a_flipped_bit(folder: Folder, disk: Disk, place: int) -> None:
    verified = folder.start_write(some(0), "moments of 'w'", Disk(disk.path, verify=True))
    plain = folder.start_write(some(0), "x", disk)
    for file in (verified, plain):
        file.written()
        assert torch.equal(back(file), some(0))
        with open(file.path, "r+b") as bytes_:
            bytes_.seek(place)
            (byte,) = bytes_.read(1)
            bytes_.seek(place)
            bytes_.write(bytes([byte ^ 16]))
    chunk = place // blocks.CHUNK * blocks.CHUNK
    with pytest.raises(RuntimeError, match=rf"moments of 'w' from .* byte {chunk} of .* checksum differs"):
        back(verified)
    assert (back(plain) != some(0)).sum() == 1  # nobody looks


# ---- hazards


def test_hazards_show_a_read_that_is_not_waited_for(whole: File) -> None:
    with hazards(1):
        target = torch.zeros(SIZE, dtype=torch.uint8)
        wait = whole.start_read(target)
        assert (target == 255).all()
        wait()
        assert torch.equal(target, some(0))
    with pytest.raises(AssertionError, match="1 transfers were started"), hazards(1):
        whole.start_read(target)


def test_hazards_show_a_source_that_is_changed_too_early(folder: Folder, disk: Disk) -> None:
    def torn(waits: bool) -> int:
        files = []
        with hazards(1):
            for number in range(40):
                source = some(number, 100)
                file = folder.start_write(source, "x", disk)
                if waits:
                    file.written()
                source.zero_()
                files.append(file)
        for file in files:
            file.written()
        return sum(not torch.equal(back(file), some(number, 100)) for number, file in enumerate(files))

    assert torn(waits=False) > 10 and torn(waits=True) == 0


def test_a_write_may_outlive_hazards(folder: Folder, disk: Disk, writes: Gate) -> None:
    writes.open.clear()
    with hazards(1):
        file = folder.start_write(some(0), "x", disk)
        wait = file.start_read(target := torch.empty(SIZE, dtype=torch.uint8))
        wait()
        assert torch.equal(target, some(0))
    assert not file.on_disk
    writes.open.set()
    file.written()
    assert torch.equal(back(file), some(0))


def test_a_read_that_copies_the_source_is_waited_for(folder: Folder, disk: Disk) -> None:
    """A read that began while the write was pending takes what was written, though the source changes after it."""
    for seed in range(60):
        with hazards(seed):
            source = some(seed)
            file = folder.start_write(source, "x", disk)
            wait = file.start_read(target := torch.empty_like(source))
            file.written()
            source.zero_()
            wait()
            assert torch.equal(target, some(seed))


def test_folders_are_shared_whatever_the_options(folder: Folder, disk: Disk) -> None:
    assert folder_of(Disk(disk.path, direct=False, threads=1, verify=True), lambda: "other") is folder
