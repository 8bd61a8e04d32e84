"""Disks that fail under whole steps: equal bits or an error that names what failed, and nothing half new or lost."""

from __future__ import annotations

import errno
import functools
import gc
import os
import pickle
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from failing import CALLS, FUSED, Faults, X, at_rest, begun, bits, model, steps, wanted
from nightly import NIGHTLY, by_turns, in_turns

import fzero as fz
from fzero.base import pytree
from fzero.stores.disk import Disk
from fzero.stores.memories import DiskBuffer
from fzero.stores.pool import Pool
from fzero.testing import assert_trees_equal, checked_collectives, run_ranks


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


NAMED = re.compile(
    r"(Reading|Writing) the (params|grads|moments|activations|inputs) of unit '(blocks\.\d|\(root\))' (from|to) "
    r"\S+/\d+\.state failed at byte \d+ of \d+: "
)


def check_names(error: BaseException) -> None:
    assert isinstance(error, OSError | RuntimeError) and NAMED.search(str(error)), error
    assert "make room" in str(error) or "read anew" in str(error)


@in_turns(5)
@pytest.mark.parametrize(
    ("fault", "fused"),
    by_turns(
        [
            ("preadv", errno.EIO, False),
            ("pwritev", errno.ENOSPC, True),
            ("pwritev", errno.ENOSPC, False),
            ("preadv", errno.EIO, True),
            ("open", errno.EMFILE, True),
            ("rename", errno.EIO, False),
        ],
        FUSED,
    ),
)
def test_a_disk_that_fails_in_the_middle_of_a_step(
    disk: Disk, faults: Faults, fault: tuple[str, int, bool], fused: str
) -> None:
    """Somewhere in the forward, the pullback or the update: then it works again, and the step is taken once more."""
    call, number, donate = fault
    step, want = steps(disk, fused, donate)[0], wanted(fused)
    state = begun(step)
    faults.stop()
    at_rest(step(state, X)[0])
    count, ends = faults.calls[call], set()
    assert count > 8
    for at in (0, count // 3, 2 * count // 3, count - 2):
        if donate:
            state = begun(step)
        faults.start(call, at, number)
        try:
            new, _ = step(state, X)
        except (OSError, RuntimeError) as error:
            check_names(error)
            faults.stop()
            ends.add("raised")
            if repr(state).startswith("TrainState(dead"):  # what was given away may be half new: nobody gets at it
                assert donate and "leave fz.donate out" in "".join(error.__notes__)
                with pytest.raises(RuntimeError, match="This state was donated to update 2, which had begun with"):
                    step(state, X)
                ends.add("dead")
                continue
        else:  # whose writes may fail yet
            for _ in range(3):
                try:
                    at_rest(new)
                except OSError as error:
                    check_names(error)
                    ends.add("raised later")
            faults.stop()
            assert_trees_equal(bits(new), want[2])
            assert_trees_equal(bits(step(new, X)[0]), want[3])
            if donate:
                continue
        assert_trees_equal(bits(state), want[1])
        assert_trees_equal(bits(step(state, X)[0]), want[2])
    # what cannot be written stays in memory: whoever overwrites a state is told of it before, or afterwards
    known = "raised" in ends or (donate and call == "pwritev")  # a write may fail too late for this step
    assert known and ((donate and call != "pwritev") or "dead" not in ends)
    assert "raised later" in ends or call in ("preadv", "open")


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
    at_rest(state, grads)
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
    key = next(key for key in second.params.groups if key.unit == "blocks.1")
    kept = grads.entries[key]
    assert isinstance(kept, DiskBuffer)
    kept.file.written()
    reads = [
        ("grads", grads, lambda: step.update(second, grads)),
        ("grads", grads, lambda: step.add_grads(second, grads)),
        ("grads", grads, lambda: fz.global_norm(grads)),
        ("moments", second.moments[1].nu, lambda: step(second, X)),
        ("moments", second.moments[1].nu, lambda: pytree.leaves(second)),
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


@pytest.mark.parametrize("fuse", [None, "held", "auto"])
def test_a_donated_state_outlives_a_full_disk(disk: Disk, faults: Faults, fuse: str | None) -> None:
    """Whoever would overwrite it is told first, once; after that it is all in memory, and written as there is room."""
    plain = fz.train_step(model()[0], fz.adamw(1e-2))
    step = fz.donate(fz.offload(fz.fuse_update(plain, norm=fuse) if fuse else plain, moments=disk))
    state, want = begun(step), begun(plain)
    faults.start("pwritev", 0, errno.ENOSPC)
    state, _ = step(state, X)
    want, _ = plain(want, X)
    with pytest.raises(OSError, match="No space left"):
        at_rest(state)
    with pytest.raises(OSError, match=r"Writing the moments of unit .*No space left"):
        step(state, X)
    for full in (True, False):
        faults.stop() if not full else None
        state, _ = step(state, X)
        want, _ = plain(want, X)
    assert_trees_equal(bits(at_rest(state)), bits(want))


@pytest.mark.parametrize("fuse", [None, "held", "auto"])
@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_donated_state_outlives_a_read_that_fails_before_anything_is_written(
    disk: Disk, faults: Faults, call: str, fuse: str | None
) -> None:
    plain = fz.train_step(model()[0], fz.adamw(1e-2))
    step = fz.donate(fz.offload(fz.fuse_update(plain, norm=fuse) if fuse else plain, moments=disk))
    state, want = begun(step), begun(plain)
    state, want = at_rest(step(state, X)[0]), plain(want, X)[0]
    faults.start(call, 0, errno.EMFILE)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"Reading the moments of unit .* is read anew"):
            step(state, X)
    faults.stop()
    assert_trees_equal(bits(step(state, X)[0]), bits(plain(want, X)[0]))


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_what_no_thread_can_write_is_told_once_and_read_from_memory(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    step, _ = steps(disk, "plain")
    with monkeypatch.context() as patch:
        patch.setattr(Pool, "submit", lambda *_: (_ for _ in ()).throw(error))
        state = step.init(model()[1])
        with pytest.raises(RuntimeError, match=r"are kept in memory"):
            fz.gather(state.params)
        assert_trees_equal(bits(state), wanted("plain")[0])
        assert_trees_equal(bits(step(state, X)[0]), wanted("plain")[1])
    assert_trees_equal(bits(step(state, X)[0]), wanted("plain")[1])


@in_turns(3)
@pytest.mark.parametrize("fuse", [None, "held", "auto"])
def test_a_step_that_cannot_read_leaves_nothing(tmp_path: Path, fuse: str | None) -> None:
    """Neither in frames that lead back to themselves, nor in what torch keeps of a backward that has failed."""
    disk, (apply, params) = fz.Disk(tmp_path, threads=1), model()
    step = fz.offload(fz.train_step(apply, fz.adamw(1e-2)), params=disk, grads=disk, moments=disk, activations=disk)
    step = fz.fuse_update(step, norm=fuse) if fuse else step
    raised, count = set[str](), len(list((at_rest(first := step.init(params)) and tmp_path).glob("*/*.state")))
    del first
    for number in range(0, count, 1 if NIGHTLY else 2):
        state = begun(step)
        os.truncate(sorted(tmp_path.glob("*/*.state"))[number], 0)
        with pytest.raises(RuntimeError, match="cut short") as failed:
            step(state, X)
        raised.add(str(failed.value)[:18])
        del state, failed
        gc.collect()
        assert not list(tmp_path.glob("*/*.state"))
    assert raised == {"Reading the params", "Reading the moment"}


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


def _nothing(rank: int) -> None:
    pass


@in_turns(2)
@pytest.mark.parametrize(("stage", "fused", "call"), [(1, "plain", "preadv"), (3, "held", "preadv")])
def test_another_ranks_disk_fails(tmp_path: Path, stage: int, fused: str, call: str) -> None:
    run = functools.partial(one_rank_fails, folder=str(tmp_path), stage=stage, fused=fused, call=call)
    run_ranks(_nothing, 2, backend="processes")  # how long they take to start is not counted
    began = time.monotonic()
    failed, other = run_ranks(run, 2, backend="processes", timeout=60)
    assert time.monotonic() - began < 50, "nobody waits for the timeout"
    for own, theirs in zip(failed, other, strict=True):
        assert NAMED.search(own)
        assert theirs.startswith("PeerStopped") and "rank 0 has failed with RuntimeError: Reading the" in theirs


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_function_that_catches_everything_does_not_go_on(where: str, stage: int, disk: Disk, faults: Faults) -> None:
    """A disk's error is no business of the function's own `except`, which would go on without the values."""

    away: dict[str, Any] = {"activations" if where == "inside" else "params": disk}

    def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ p["w"])

    def tried(p: Any, x: torch.Tensor) -> torch.Tensor:
        try:
            return layer(p, x)
        except Exception:
            return x

    def state_of(step: fz.Step) -> fz.TrainState:
        return step.init({"blocks": model()[1]["blocks"][:1]})  # nothing else is on its way

    block = fz.unit(tried if where == "inside" else layer)

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        for q in p["blocks"]:
            try:
                x = block(q, x)
            except Exception:
                x = x * 2
        return x.square().mean()

    def rank_main(rank: int) -> None:
        plain = fz.train_step(loss, fz.sgd(0.1))
        plain = fz.shard_zero3(plain) if stage else plain
        step = fz.offload(plain, **away)
        state = at_rest(state_of(step))
        want = plain(state_of(plain), X)[1]["grad_norm"]
        calls = [("pwritev", errno.ENOSPC), ("open", errno.EMFILE)] if where == "inside" else [("preadv", errno.EIO)]
        for name, number in calls:
            faults.start(name, 0, number)
            with pytest.raises((OSError, RuntimeError), match=r"(Reading|Writing) the (params|activations) of unit"):
                for _ in range(200):  # until a write is known to have failed
                    assert step(state, X)[1]["grad_norm"] == want
            faults.stop()
        assert step(state, X)[1]["grad_norm"] == want

    run_ranks(rank_main, 1)


def test_a_folder_that_is_gone_is_said_past_an_except(tmp_path: Path) -> None:
    def tried(p: Any, x: torch.Tensor) -> torch.Tensor:
        try:
            return torch.tanh(x @ p["w"])
        except Exception:
            return x

    block, disk = fz.unit(tried), fz.Disk(tmp_path / "disk")
    (tmp_path / "disk").rmdir()
    (tmp_path / "disk").touch()
    step = fz.offload(fz.train_step(lambda p, x: block(p["blocks"][0], x).sum(), fz.sgd(0.1)), activations=disk)
    state = step.init({"blocks": model()[1]["blocks"][:1]})
    with pytest.raises(NotADirectoryError, match=r"fz\.Disk: .*/disk is not a folder\. Give the path of a folder"):
        for _ in range(2):  # the first run keeps what it saves
            step(state, X)
