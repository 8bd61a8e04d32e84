"""What is written is read again, whatever the dtype, the length, the address and the way."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fzero.stores import blocks
from fzero.stores.blocks import BLOCK, aligned
from fzero.stores.disk import Disk
from fzero.stores.folder import Folder, folder_of

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
    *(torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int64, torch.bool),
]
FOLDERS = [tempfile.gettempdir(), *(["/dev/shm"] if os.access("/dev/shm", os.W_OK) else [])]


@pytest.fixture(scope="module", params=FOLDERS)
def place(request: pytest.FixtureRequest) -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir=request.param) as path:
        yield path


def some(nbytes: int, seed: int, begin: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Random bytes, `begin` elements behind the beginning of a block."""
    size = dtype.itemsize
    tensor = aligned(nbytes // size + begin, dtype)[begin:]
    generator = torch.Generator().manual_seed(seed)
    bits(tensor).random_(0, 2 if dtype == torch.bool else 256, generator=generator)
    return tensor


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


@given(
    numel=st.one_of(st.integers(0, 40), st.integers(0, 60_000), st.sampled_from([BLOCK, 3 * BLOCK, 9 * BLOCK])),
    dtype=st.sampled_from(DTYPES),
    begins=st.tuples(st.sampled_from([0, 0, 1, 7]), st.sampled_from([0, 0, 1, 7])),
    direct=st.sampled_from([None, False]),
    threads=st.integers(1, 5),
    verify=st.booleans(),
    early=st.booleans(),
    seed=st.integers(0, 99),
)
def test_round_trip(
    place: str,
    numel: int,
    dtype: torch.dtype,
    begins: tuple[int, int],
    direct: bool | None,
    threads: int,
    verify: bool,
    early: bool,
    seed: int,
) -> None:
    disk = Disk(place, direct, threads, verify)
    folder = folder_of(disk, lambda: "tests")
    source = some(numel * dtype.itemsize, seed, begins[0], dtype)
    wanted = source.clone()
    target = aligned(numel + begins[1] + 1, dtype)[begins[1] :]
    bits(target).fill_(111)
    file = folder.start_write(source, "random bytes", disk)
    if not early:
        file.written()
        bits(source).zero_()
        assert file.path.stat().st_size == blocks.rounded(source.nbytes)
    file.start_read(target[:numel])()
    assert torch.equal(bits(target[:numel]), bits(wanted))
    assert (bits(target[numel:]) == 111).all()  # and nothing behind it
    file.written()
    assert file.nbytes == wanted.nbytes and file.on_disk


@pytest.mark.parametrize("dtype", DTYPES)
def test_aligned(dtype: torch.dtype) -> None:
    for numel in (0, 1, 1000):
        tensor = aligned(numel, dtype)
        assert tensor.shape == (numel,) and tensor.dtype == dtype and not tensor.data_ptr() % BLOCK


def test_bytes_go_past_the_page_cache(folder: Folder, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies at a block goes straight, but for the last block; the rest goes by the bounce buffer."""
    write, copies, direct = os.pwritev, [], []

    def pwritev(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        direct.append(bool(os.O_DIRECT & fcntl.fcntl(descriptor, fcntl.F_GETFL)))
        return write(descriptor, buffers, offset)

    plain_copy = blocks.copy

    def copy(target: int, source: int, nbytes: int) -> None:
        copies.append(nbytes)
        plain_copy(target, source, nbytes)

    monkeypatch.setattr(os, "pwritev", pwritev)
    monkeypatch.setattr(blocks, "copy", copy)
    folder.start_write(aligned(3 * BLOCK + 5, torch.uint8).zero_(), "x", disk).written()
    assert all(direct) and copies == [5]
    folder.start_write(some(BLOCK + 5, 0, 1), "x", disk).written()
    assert all(direct) and copies == [5, BLOCK + 5]
    direct.clear()
    folder.start_write(some(BLOCK + 5, 0, 1), "x", Disk(disk.path, direct=False)).written()
    assert direct == [False] and len(copies) == 2


def test_nothing_else_than_the_tensor_is_in_a_file(folder: Folder, disk: Disk) -> None:
    """Neither what was written before it from the same thread."""
    one = Disk(disk.path, threads=1)
    folder.start_write(some(3 * BLOCK, 0, 1), "x", one).written()
    file = folder.start_write(some(100, 0, 1), "x", one)
    file.written()
    assert file.path.read_bytes() == some(100, 0, 1).numpy().tobytes() + bytes(BLOCK - 100)


@pytest.mark.parametrize("where", ["open", "first"])
def test_a_filesystem_that_refuses_direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """It is asked once per folder; where O_DIRECT is required that is an error."""
    plain_open, plain_write, refused = os.open, os.pwritev, []

    def open_(path: str, flags: int, mode: int = 0o777, **options: int) -> int:
        if flags & os.O_DIRECT and where == "open":
            refused.append(path)
            if flags & os.O_CREAT:  # some systems make it nevertheless
                os.close(plain_open(path, flags & ~os.O_DIRECT, mode))
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain_open(path, flags, mode, **options)

    def pwritev(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT and where == "first":
            refused.append("")
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain_write(descriptor, buffers, offset)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "pwritev", pwritev)
    folder = folder_of(Disk(tmp_path), lambda: "tests")
    required = folder.start_write(torch.ones(5), "moments of 'w'", Disk(tmp_path, direct=True))
    with pytest.raises(OSError, match=r"moments of 'w'.*does not take O_DIRECT; leave out direct=True"):
        required.written()
    one = Disk(tmp_path, threads=1)
    for number in range(3):
        source = some(10 * BLOCK + 3, number, 1)
        file = folder.start_write(source, "x", one)
        file.written()
        target = torch.empty_like(source)
        file.start_read(target)()
        assert torch.equal(target, source)
    assert len(refused) == 1


@given(st.integers(1, 40_000), st.integers(1, 9), st.sampled_from([0, 1]), st.sampled_from([None, False]))
def test_calls_that_move_less_than_they_were_given(numel: int, step: int, begin: int, direct: bool | None) -> None:
    """Of O_DIRECT, which the test stands in for, whole sectors."""
    write, read = os.pwritev, os.preadv
    nbytes = 512 * step if direct is None else 1 + 997 * step

    def less(call: Callable[..., int], descriptor: int, buffers: list[memoryview], offset: int) -> int:
        other = os.open(f"/proc/self/fd/{descriptor}", fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE)
        try:
            return call(other, [buffers[0][:nbytes]], offset)
        finally:
            os.close(other)

    with tempfile.TemporaryDirectory() as path, pytest.MonkeyPatch.context() as patch:
        disk = Disk(path, direct, threads=2)
        folder = folder_of(disk, lambda: "tests")
        patch.setattr(os, "pwritev", lambda file, buffers, offset: less(write, file, buffers, offset))
        patch.setattr(os, "preadv", lambda file, buffers, offset: less(read, file, buffers, offset))
        source = some(numel, step, begin)
        file = folder.start_write(source, "x", disk)
        file.written()
        target = torch.empty_like(source)
        file.start_read(target)()
        assert torch.equal(target, source)
        del file, folder


def test_a_chunk_as_large_as_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "CHUNK", 8 << 20)
    disk = Disk(tmp_path, verify=True)
    source = some((20 << 20) + 77, 0, 1)
    file = folder_of(disk, lambda: "tests").start_write(source, "x", disk)
    file.written()
    for target in (torch.empty_like(source), aligned(source.numel(), torch.uint8)):
        file.start_read(target)()
        assert torch.equal(target, source)


def test_a_worker_outlives_a_lack_of_memory(folder: Folder, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    source = torch.arange(BLOCK + 5, dtype=torch.uint8)[1:]  # which goes through a worker's own memory

    def refuse(*_: object) -> object:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(blocks.mmap, "mmap", refuse)
        file = folder.start_write(source, "x", Disk(disk.path, in_flight=1))
        with pytest.raises(OSError, match="Cannot allocate memory"):
            file.written()
    file.written()
    file.start_read(target := torch.empty_like(source))()
    assert torch.equal(target, source)
