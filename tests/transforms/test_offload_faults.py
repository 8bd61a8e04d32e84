"""Disks that fail under whole steps: equal bits or an error that names what failed, and nothing half new or lost."""

from __future__ import annotations

import collections
import copy
import errno
import functools
import gc
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optree
import pytest
import torch

import fzero as fz
from fzero.state.sharded import trees_of
from fzero.stores.disk import Disk
from fzero.stores.on_disk import DiskBuffer
from fzero.testing import LiveBytes, assert_trees_equal, checked_collectives, run_ranks

CALLS = ("preadv", "pwritev", "posix_fallocate", "open", "rename")  # of the system, on files of state


class Faults:
    """Files of this process that fail: from now on, one call of a kind, or that one and all that follow."""

    def __init__(self) -> None:
        self.real: dict[str, Any] = {name: getattr(os, name) for name in CALLS}
        self._lock = threading.Lock()
        self.stop()

    def stop(self) -> None:
        self.calls: collections.Counter[str] = collections.Counter()
        self._bad: tuple[str, int, int, bool] = ("", 0, 0, False)

    def start(self, name: str, at: int, number: int, always: bool = True) -> None:
        self.stop()
        self._bad = name, at, number, always

    def call(self, name: str, *given: Any, **named: Any) -> Any:
        if name == "open" and not re.search(r"\.state(\.part)?$", str(given[0])):
            return self.real[name](*given, **named)
        bad, at, number, always = self._bad
        with self._lock:
            count = self.calls[name]
            self.calls[name] += 1
        if name == bad and (count == at or (always and count > at)):
            raise OSError(number, os.strerror(number))
        return self.real[name](*given, **named)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    found = Faults()
    for name in CALLS:
        monkeypatch.setattr(os, name, functools.partial(found.call, name))
    yield found
    found.stop()


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return fz.Disk(tmp_path, threads=1)


def model(width: int = 24) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / 5

    block = fz.unit(lambda p, x: torch.tanh(x @ p["w"]))

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return (functools.reduce(lambda x, q: block(q, x), p["blocks"], x) @ p["head"]).square().mean()

    return loss, {"blocks": [{"w": draw(width, width)} for _ in range(3)], "head": draw(width, 2)}


X = torch.ones(16, 24)
FUSED: dict[str, Callable[[Any], Any]] = {
    "plain": lambda step: step,
    "held": functools.partial(fz.fuse_update, norm="held"),
}


def steps(disk: Disk, fused: str, donate: bool = False) -> tuple[fz.Step, fz.Step]:
    """A step that has everything on a disk, and the same one in memory."""
    plain = FUSED[fused](fz.train_step(model()[0], fz.chain(fz.clip_by_global_norm(0.5), fz.adamw(1e-2))))
    away = fz.offload(plain, params=disk, grads=disk, moments=disk, activations=disk)
    return fz.donate(away) if donate else away, plain


def bits(state: fz.TrainState) -> Any:
    return fz.gather((state.params, state.moments)), state.step


@functools.cache
def wanted(fused: str) -> list[Any]:
    """The bits of an undisturbed run in memory, after each update."""
    _, plain = steps(fz.Disk("/tmp"), fused)
    state, out = plain.init(model()[1]), []
    for _ in range(4):
        out.append(bits(state))
        state, _ = plain(state, X)
    return out


def at_rest(state: fz.TrainState) -> fz.TrainState:
    """The state, all of which is written."""
    for tree in trees_of((state.params, state.moments)):
        for buffer in tree.entries.values():
            assert isinstance(buffer, DiskBuffer)
            buffer.file.written()
    return state


def begun(step: fz.Step) -> fz.TrainState:
    state, _ = step(step.init(model()[1]), X)
    return at_rest(state)


NAMED = re.compile(
    r"(Reading|Writing) the (params|grads|moments|activations|inputs) of unit '(blocks\.\d|\(root\))' (from|to) "
    r"\S+/\d+\.state failed at byte \d+ of \d+: "
)


def check_names(error: BaseException) -> None:
    assert isinstance(error, OSError | RuntimeError) and NAMED.search(str(error)), error
    assert "make room" in str(error) or "read anew" in str(error)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize(
    ("call", "number"),
    [("preadv", errno.EIO), ("pwritev", errno.ENOSPC), ("open", errno.EMFILE), ("rename", errno.EIO)],
)
def test_a_disk_that_fails_in_the_middle_of_a_step(
    disk: Disk, faults: Faults, call: str, number: int, fused: str, donate: bool
) -> None:
    """Somewhere in the forward, the pullback or the update: then it works again, and the step is taken once more."""
    step, want = steps(disk, fused, donate)[0], wanted(fused)
    state = begun(step)
    faults.stop()
    at_rest(step(state, X)[0])
    count, ends = faults.calls[call], set()
    assert count > 8
    if donate:
        state = begun(step)
    for at in (0, count // 3, 2 * count // 3, count - 2):
        faults.start(call, at, number)
        try:
            new, _ = step(state, X)
        except (OSError, RuntimeError) as error:
            check_names(error)
            faults.stop()
            dead = repr(state).startswith("TrainState(dead")
            ends.add("dead" if dead else "raised")
            if dead:  # only what was given away may be half new, and nobody gets at it
                assert donate and "leave fz.donate out" in "".join(error.__notes__)
                with pytest.raises(RuntimeError, match="This state was donated to update 2, which had begun with"):
                    step(state, X)
                state = begun(step)
                continue
            del error
        else:  # whose writes may fail yet
            ends.add("returned")
            failed = 0
            for _ in range(9):
                try:
                    at_rest(new)
                except OSError as error:
                    check_names(error)
                    failed += 1
            faults.stop()
            assert failed or call in ("preadv", "open")
            assert_trees_equal(bits(new), want[2])
            assert_trees_equal(bits(step(new, X)[0]), want[3])
            if donate:
                state = begun(step)
        if not donate:
            assert_trees_equal(bits(state), want[1])
            assert_trees_equal(bits(step(state, X)[0]), want[2])
    assert "raised" in ends and (donate or "dead" not in ends)


@pytest.mark.parametrize("fused", FUSED)
def test_a_read_that_fails_once_shows_nowhere(disk: Disk, faults: Faults, fused: str) -> None:
    step = steps(disk, fused)[0]
    state = begun(step)
    faults.stop()
    step(state, X)
    count = faults.calls["preadv"]
    for call in ("preadv", "open"):
        for at in range(0, count if call == "preadv" else 3, 4):
            if call == "open":  # the first ones read
                at //= 4
            faults.start(call, at, errno.EIO, always=False)
            assert_trees_equal(bits(step(state, X)[0]), wanted(fused)[2])


def test_a_full_disk_at_every_verb(disk: Disk, faults: Faults) -> None:
    """An error where the values are asked for, and all of them when there is room."""
    step, plain = steps(disk, "plain")
    faults.start("posix_fallocate", 0, errno.ENOSPC)
    state = step.init(model()[1])
    while not faults.calls["posix_fallocate"]:
        time.sleep(1e-3)
    with pytest.raises(OSError, match=r"Writing the params of .*bytes are needed there, \d+ are free") as failed:
        for _ in range(1000):  # until it is known
            step.forward(state, X)
            time.sleep(1e-3)
    check_names(failed.value)
    faults.stop()
    assert_trees_equal(bits(state), wanted("plain")[0])
    out, pullback = step.vjp(state, X)
    grads, _ = pullback(torch.ones_like(out))
    at_rest(state)
    faults.start("pwritev", 0, errno.ENOSPC)
    kept = step.add_grads(state, grads)
    moved = fz.convert(fz.convert(state, plain), step)
    faults.stop()
    states = [kept, step.add_grads(kept, grads), moved]
    for each, times in zip(states, (2, 3, 1), strict=True):
        got = fz.gather(step.update(each, grads)[0].moments[1].mu)
        want, pull = plain.vjp(reference := plain.init(model()[1]), X)
        given, _ = pull(torch.ones_like(want))
        for _ in range(times - 1):
            reference = plain.add_grads(reference, given)
        assert_trees_equal(got, fz.gather(plain.update(reference, given)[0].moments[1].mu))


def spoil(buffer: Any, how: str) -> None:
    path = buffer.file.path
    if how == "gone":
        path.unlink()
    elif how == "cut short":
        os.truncate(path, 100)
    else:
        with open(path, "r+b") as file:
            file.seek(777)
            byte = file.read(1)[0]
            file.seek(777)
            file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize(("how", "said"), [("gone", "is gone"), ("cut short", "cut short"), ("changed", "checksum")])
def test_files_that_others_touch(tmp_path: Path, how: str, said: str) -> None:
    """Named by every verb that reads them; other states are whole, and the step goes on from those."""
    step, plain = steps(fz.Disk(tmp_path, verify=True), "plain")
    first = begun(step)
    second, _ = step(first, X)
    out, pullback = step.vjp(at_rest(second), X)
    grads, _ = pullback(torch.ones_like(out))
    key = next(key for key in second.params.keys if key.unit == "blocks.1")
    kept = grads.entries[key]
    assert isinstance(kept, DiskBuffer)
    kept.file.written()
    reads = [
        ("grads", grads, lambda: step.update(second, grads)),
        ("grads", grads, lambda: step.add_grads(second, grads)),
        ("grads", grads, lambda: fz.global_norm(grads)),
        ("moments", second.moments[1].nu, lambda: step(second, X)),
        ("moments", second.moments[1].nu, lambda: optree.tree_leaves(second)),
        ("params", second.params, lambda: step(second, X)),
        ("params", second.params, lambda: step.forward(second, X)),
        ("params", second.params, lambda: fz.gather(second.params)),
        ("params", second.params, lambda: fz.convert(second, plain)),
        ("params", second.params, lambda: pickle.dumps(second.params.entries)),
    ]
    done: set[str] = set()
    for kind, tree, read in reads:
        if kind not in done:
            spoil(tree.entries[key], how)
            done.add(kind)
        with pytest.raises(RuntimeError, match=rf"Reading the {kind} of unit 'blocks\.1' from {tmp_path}.*{said}"):
            read()
        assert_trees_equal(bits(first), wanted("plain")[1])
    assert_trees_equal(bits(step(first, X)[0]), wanted("plain")[2])


def one_rank_fails(rank: int, folder: str, stage: int, fused: str, call: str) -> list[str]:
    """What each rank is told; afterwards both go on from the state that they had."""
    shard = {1: fz.shard_zero1, 3: fz.shard_zero3}[stage]
    step, plain = (shard(each) for each in steps(fz.Disk(folder, threads=1), fused))
    state, want = step.init(model()[1]), plain.init(model()[1])
    at_rest(state)
    told, faults = [], Faults()
    for name in CALLS:
        setattr(os, name, functools.partial(faults.call, name))
    try:
        faults.stop()
        at_rest(step(state, X)[0])
        count = faults.calls[call]
        for at in (0, count // 2, count - 3):
            if rank == 0:
                faults.start(call, at, errno.EIO)
            try:
                with checked_collectives():
                    new, _ = step(state, X)
                    fz.gather(new.params)
                    told.append("")
            except (OSError, RuntimeError) as error:
                told.append(f"{type(error).__name__}: {error}")
            faults.stop()
    finally:
        for name, real in faults.real.items():
            setattr(os, name, real)
    assert_trees_equal(bits(state), bits(want))
    assert_trees_equal(bits(step(state, X)[0]), bits(plain(want, X)[0]))
    return told


@pytest.mark.parametrize(("stage", "fused", "call"), [(1, "plain", "preadv"), (3, "held", "preadv")])
def test_another_ranks_disk_fails(tmp_path: Path, stage: int, fused: str, call: str) -> None:
    run = functools.partial(one_rank_fails, folder=str(tmp_path), stage=stage, fused=fused, call=call)
    began = time.monotonic()
    failed, other = run_ranks(run, 2, backend="processes", timeout=8)
    assert time.monotonic() - began < 7, "nobody waits for the timeout"
    for own, theirs in zip(failed, other, strict=True):
        assert NAMED.search(own)
        assert theirs.startswith("PeerStopped") and "rank 0 has failed with RuntimeError: Reading the" in theirs


def test_nothing_grows(disk: Disk) -> None:
    for fused in FUSED:
        counts = []
        step = steps(disk, fused)[0]
        with LiveBytes() as live:
            state = step.init(model()[1])
            for number in range(12):
                state, _ = step(state, X)
                if number in (3, 11):
                    at_rest(state)
                    gc.collect()
                    (folder,) = Path(disk.path).iterdir()
                    open_ = len(os.listdir("/proc/self/fd"))
                    counts.append((len(list(folder.iterdir())), open_, threading.active_count(), live.now()))
            assert counts[0] == counts[1] and counts[0][0] == 1 + 3 * 4
            assert live.now() < 4096, "all of it is in the files"
        del state
        gc.collect()
        assert not list(Path(disk.path).iterdir())


TRAINS = """
import sys, torch
from transforms.test_offload_faults import fz, model, steps, X
step = steps(fz.Disk(sys.argv[1]), "plain")[0]
state = step.init(model()[1])
print("begun", flush=True)
while True:
    state, _ = step(state, X)
"""


def test_a_run_that_is_killed_and_the_next_one(disk: Disk) -> None:
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    command = [sys.executable, "-c", TRAINS, disk.path]
    step = steps(disk, "plain")[0]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == "begun\n"
            with pytest.raises(RuntimeError, match=rf"in use by another run: process {other.pid} .*folder of its own"):
                step.init(model()[1])
        finally:
            other.send_signal(signal.SIGKILL)
    (left,) = Path(disk.path).iterdir()
    assert any(path.suffix in (".state", ".part") for path in left.iterdir())
    assert not [path for path in left.rglob("*") if path.stat().st_mode & 0o077]
    state = begun(step)
    assert not left.exists() and len(list(Path(disk.path).iterdir())) == 1
    assert_trees_equal(bits(state), wanted("plain")[1])


def test_a_forked_child_is_told(disk: Disk) -> None:
    step, plain = steps(disk, "plain")
    state = begun(step)
    uses: list[Callable[[], object]] = [
        lambda: step(state, X),
        lambda: fz.gather(state.params),
        lambda: fz.convert(state, plain),
        lambda: optree.tree_leaves(state),
        lambda: pickle.dumps(state.params.entries),
    ]
    mine, theirs = os.pipe()
    child = os.fork()
    if not child:
        said = 0
        for use in uses:
            try:
                use()
            except RuntimeError as error:
                said += "was forked from it. Use the state where it was made" in str(error)
        os.write(theirs, str(said).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(mine, 9) == str(len(uses)).encode()
    os.close(mine), os.close(theirs)
    assert_trees_equal(bits(state), wanted("plain")[1])
    assert_trees_equal(bits(step(state, X)[0]), wanted("plain")[2])


def test_copies_of_a_state_take_no_files_and_what_is_dropped_frees_them(disk: Disk) -> None:
    step = steps(disk, "plain")[0]
    first = begun(step)

    def files() -> int:
        gc.collect()
        return len(list(Path(disk.path).glob("*/*.state")))

    assert files() == 12
    same = copy.deepcopy(first)
    assert files() == 12
    second = at_rest(step(first, X)[0])
    assert files() == 24
    del first
    assert files() == 24, "the copy has them still"
    assert_trees_equal(bits(same), wanted("plain")[1])
    del same
    assert files() == 12
    again = pickle.loads(pickle.dumps((second.params.entries, second.moments[1].mu.entries)))
    assert all(isinstance(buffer, torch.Tensor) for entries in again for buffer in entries.values())
    assert_trees_equal(again[0], second.params.buffers)


def test_kinds_that_a_step_lacks_are_empty(disk: Disk) -> None:
    loss, params = model()
    sgd = fz.train_step(loss, fz.sgd(0.1))
    frozen = fz.freeze(fz.train_step(loss, fz.adamw(0.1)), "blocks.*")
    cases = [
        (sgd, {"moments": disk}),
        (frozen, {"params": disk, "grads": disk, "moments": disk}),
        (frozen, {"grads": disk, "moments": disk, "pattern": "blocks.*"}),
        (fz.fuse_update(sgd), {"grads": disk}),
        (fz.train_step(lambda p, x: (x @ p["head"]).sum(), fz.sgd(0.1)), {"activations": disk}),
    ]
    for plain, said in cases:
        step = fz.offload(plain, **said)  # type: ignore[arg-type]
        got, want = (each(each.init(params), X)[0] for each in (step, plain))
        assert_trees_equal(fz.gather((got.params, got.moments)), fz.gather((want.params, want.moments)))
    assert "moments 0 B" in str(fz.plan(fz.offload(sgd, moments=disk), params))


def test_what_makes_no_sense_says_so(disk: Disk, tmp_path: Path) -> None:
    loss, params = model()
    plain = fz.train_step(loss, fz.adamw(0.1))
    for ask in (fz.plan, lambda step, params: step.init(params)):
        with pytest.raises(
            ValueError, match=r"offload\(params=Disk\(.*the pattern 'block' matches no leaf. The leaves"
        ):
            ask(fz.offload(plain, params=disk, pattern="block"), params)
        twice = fz.offload(fz.offload(plain, moments=disk), moments="host", pattern="blocks.1.*")
        with pytest.raises(ValueError, match=r"'moments in' of leaf 'blocks.1.w' is set twice: by offload.*Keep one"):
            ask(twice, params)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(NotADirectoryError, match=r"fz.Disk: .*/file"):
        fz.Disk(tmp_path / "file")
    with pytest.raises(NotADirectoryError, match=r"fz.Disk: cannot make the folder .*/file/x .*may write to"):
        fz.Disk(tmp_path / "file" / "x")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(not os.access("/proc/self/fd", os.W_OK), reason="only root is told that it may write there")
def test_a_folder_that_takes_no_files() -> None:
    step = fz.offload(fz.train_step(model()[0], fz.adamw(0.1)), params=fz.Disk("/proc/self/fd"))
    with pytest.raises(
        OSError, match=r"fz.Disk: cannot make a folder in /proc/\S*fd \(.*\). Give one that takes files"
    ):
        step.init(model()[1])
