"""Checkpoints behind a URL: the same bits, and the same promises, on a filesystem of fsspec."""

from __future__ import annotations

import importlib.util
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from nightly import in_turns

import fzero as fz
from fzero.checkpoint import remote
from fzero.checkpoint.files import LOCK, NAME, Folder
from fzero.checkpoint.remote import Remote
from fzero.testing import assert_trees_equal, run_ranks

_numbers = itertools.count()


@pytest.fixture
def url() -> Iterator[str]:
    own = f"memory://fzero/{next(_numbers)}"
    yield own
    fsspec.filesystem("memory").store.clear()


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (p["w"] * x).sum() + p["v"].square().sum()


def step_of(ranks: int = 1) -> fz.Step:
    step = fz.train_step(loss, fz.adamw(0.1), fz.Policy.compact24())
    return fz.shard_zero3(step) if ranks > 1 else step


def trained(ranks: int, count: int) -> fz.TrainState:
    state = step_of(ranks).init({"w": torch.linspace(-1.0, 1.0, 5), "v": torch.linspace(0.1, 3.0, 70)})
    for _ in range(count):
        state, _ = step_of(ranks)(state, torch.ones(5))
    return state


def values(state: fz.TrainState) -> Any:
    return fz.gather({"params": state.params, "moments": state.moments})


def names(url: str) -> list[str]:
    return sorted(path.rpartition("/")[2] for path in fsspec.filesystem("memory").find(url))


@pytest.mark.parametrize(("ranks", "others"), [(1, 3), (3, 2)])
def test_the_same_bits_over_any_ranks(url: str, ranks: int, others: int) -> None:
    def saved(rank: int) -> Any:
        state = trained(ranks, 2)
        saving = fz.save_async(f"{url}/", state, {"seen": 2})
        saving.wait()
        assert saving.path == url
        return values(state)

    def loaded(rank: int) -> Any:
        return values(fz.load(url, step_of(others)))

    before = run_ranks(saved, ranks)[0]
    assert_trees_equal(run_ranks(loaded, others)[0], before)
    assert fz.load_extra(url) == {"seen": 2}
    assert len(names(url)) == ranks + 1 and NAME in names(url)


def test_the_last_few(url: str) -> None:
    kept = fz.Checkpoints(url, keep=2)
    assert kept.restore(step_of()) is None
    for count in range(1, 5):
        kept.save_async(trained(1, count), {"seen": count}).wait()
    assert {path.split("/")[3] for path in fsspec.filesystem("memory").find(url)} == {
        "000003-update-3",
        "000004-update-4",
    }
    memory = fsspec.filesystem("memory")
    file = next(path for path in memory.find(f"{url}/000004-update-4") if path.endswith("safetensors"))
    content = bytearray(memory.cat_file(file))
    content[-1] ^= 1
    memory.pipe_file(file, bytes(content))
    with pytest.warns(UserWarning, match="000003-update-3 is restored, as newer ones are damaged.*000004-update-4"):
        found = kept.restore(step_of())
    assert found is not None and found[1] == {"seen": 3}
    memory.rm(file)
    with pytest.raises(fz.DamagedCheckpoint, match="no such file"):
        fz.load(f"{url}/000004-update-4", step_of())


class Failing:
    """Stands for a filesystem of which one operation fails, or all from one on, as in a process that was killed."""

    def __init__(self, real: Any, at: int, dies: bool) -> None:
        self.real, self.at, self.dies, self.count = real, at, dies, 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(self.real, name)
        return self.counted(real) if callable(real) and name != "invalidate_cache" else real

    def counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            if real.__name__ == "close":  # which a finalizer calls again
                real.__self__.close = lambda: None
            self.count += 1
            if self.count == self.at or (self.dies and self.count > self.at):
                raise ConnectionResetError("the connection was reset")
            out = real(*given, **more)
            if real.__name__ == "open":
                out.write, out.close = self.counted(out.write), self.counted(out.close)
            return out

        return call


@in_turns(2)
@pytest.mark.parametrize("dies", [False, True])
def test_any_operation_that_fails(url: str, monkeypatch: pytest.MonkeyPatch, dies: bool) -> None:
    told = 0
    for at in itertools.count(1):
        own = f"{url}-{at}"
        fz.save(own, trained(1, 1))
        failing = Failing(fsspec.filesystem("memory"), at, dies)
        with monkeypatch.context() as patch:
            init = Remote.__init__

            def instead(self: Remote, url: str, init: Any = init, failing: Any = failing) -> None:
                init(self, url)
                self._fs = failing

            patch.setattr(remote.Remote, "__init__", instead)
            try:
                fz.save(own, trained(1, 2))
            except OSError as error:
                assert own in str(error) and "connection was reset" in str(error)
                told += 1
        if failing.count < at:
            break
        assert fz.load(own, step_of()).step in (1, 2)
        fz.save(own, trained(1, 3))
        assert fz.load(own, step_of()).step == 3
        assert len(names(own)) <= 4  # what a failed save has left may be another run's
    assert told > at / 2


def test_a_second_writer(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever began last is whole, and the other is told."""
    begun, go, read = threading.Event(), threading.Event(), Remote.writing

    def slowly(self: Remote, name: str, nbytes: int) -> Any:
        if not begun.is_set():
            begun.set()
            go.wait(30)
        return read(self, name, nbytes)

    monkeypatch.setattr(Remote, "writing", slowly)
    saving = fz.save_async(url, trained(1, 1))
    assert begun.wait(30)
    second = threading.Thread(target=lambda: fz.save(url, trained(1, 2)))  # as another process would
    with monkeypatch.context() as patch:
        patch.setattr("fzero.checkpoint.save._last", {})
        second.start()
        second.join(30)
    go.set()
    with pytest.raises(BlockingIOError, match="another run"):
        saving.wait()
    assert fz.load(url, step_of()).step == 2 and len(names(url)) == 2


@pytest.mark.parametrize("url", ["nosuch://x/y", "s3://bucket/run"])
def test_a_filesystem_that_is_not_there(url: str) -> None:
    if url.startswith("s3") and importlib.util.find_spec("s3fs"):
        pytest.skip("it is there")

    def rank_main(rank: int) -> None:
        state = trained(2, 0)
        for job in (
            lambda: fz.save(url, state),
            lambda: fz.load(url, step_of(2)),
            lambda: fz.Checkpoints(url),
            lambda: fz.load_extra(url),
        ):
            with pytest.raises((ImportError, ValueError), match=f"{url}: fsspec has no filesystem for it"):
                job()

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("kind", ["local", "file", "memory"])
def test_what_a_folder_does(tmp_path: Path, url: str, kind: str) -> None:
    path = str(tmp_path / "a" / "b")
    places: dict[str, Callable[[], Folder]] = {
        "local": lambda: Folder(path),
        "file": lambda: Remote(f"file://{path}"),
        "memory": lambda: Remote(f"{url}/b"),
    }
    folder = places[kind]()
    assert folder.names() == [] and not folder.exists("x")
    folder.make()
    with folder.writing("x", 6) as put:
        put(memoryview(b"abc"))
        put(memoryview(b"def"))
    assert (folder.names(), folder.size("x"), folder.read("x")) == (["x"], 6, b"abcdef")
    target = bytearray(4)
    assert folder.read_into("x", 1, memoryview(target)) == 4 and target == b"bcde"
    assert folder.read_into("x", 4, memoryview(target)) == 2
    folder.replace("x", b"new")
    assert (folder.names(), folder.read("x")) == (["x"], b"new")
    with folder.only_writer("token") as still:
        still()
        assert LOCK in folder.names()
    folder.remove("x")
    folder.remove("x")
    assert folder.names() == []
    for job in (
        lambda: folder.read("y"),
        lambda: folder.size("y"),
        lambda: folder.read_into("y", 0, memoryview(target)),
    ):
        with pytest.raises(FileNotFoundError, match="y"):
            job()
    inner = folder.child("c")
    inner.make()
    inner.replace(NAME, b"{}")
    folder.discard("c")
    folder.tidy()
    assert "c" not in folder.names() and not places[kind]().child("c").names()


def test_a_file_of_somebody_else_where_the_mark_goes_is_refused_and_stays(url: str) -> None:
    fsspec.filesystem("memory").pipe_file(f"{url}/{LOCK}", b"the saving of energy")
    with pytest.raises(FileExistsError, match=rf"{url}/{LOCK}: got a file that no save has written"):
        fz.save(url, trained(1, 0))
    assert names(url) == [LOCK]
    for left in (b"", b"0123456789ab"):  # of a run that was killed
        fsspec.filesystem("memory").pipe_file(f"{url}/{LOCK}", left)
        fz.save(url, trained(1, 0))
