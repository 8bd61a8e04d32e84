"""fz.save, fz.save_async and fz.Checkpoints: what is refused, what is damaged, and what goes on meanwhile."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import random
import shutil
import threading
import time
import weakref
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lasting_saves import grown, saving
from nightly import in_turns

import fzero as fz
from fzero.checkpoint import chunks, files, manifest
from fzero.testing import assert_trees_equal, run_ranks


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (p["w"] * x).sum() + p["v"].square().sum()


def params() -> dict[str, torch.Tensor]:
    return {"w": torch.linspace(-1.0, 1.0, 5), "v": torch.linspace(0.1, 3.0, 70)}


def step_of(ranks: int = 1, policy: fz.Policy | None = None, lr: float = 0.1) -> fz.Step:
    step = fz.train_step(loss, fz.adamw(lr), policy)
    return fz.shard_zero3(step) if ranks > 1 else step


def trained(step: fz.Step, count: int = 1) -> fz.TrainState:
    state = step.init(params())
    for _ in range(count):
        state, _ = step(state, torch.ones(5))
    return state


def save_it(folder: Path, ranks: int = 1, count: int = 1) -> None:
    run_ranks(lambda rank: fz.save(folder, trained(step_of(ranks), count), {"count": count}), ranks)


# ---- damage


DAMAGES = ("flip", "cut", "empty", "gone", "swap", "long")


@in_turns(2)
@pytest.mark.parametrize("ranks", [1, 2])
def test_whatever_is_damaged_is_found_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    monkeypatch.setattr(chunks, "CHUNK", 100)
    folder, other, bad = tmp_path / "it", tmp_path / "other", tmp_path / "bad"
    save_it(folder, ranks)
    save_it(other, ranks, count=2)
    draw = random.Random(ranks)
    for name, how in itertools.product(sorted(os.listdir(folder)), DAMAGES):
        for _ in range(20 if how == "flip" else 1):
            shutil.rmtree(bad, ignore_errors=True)
            shutil.copytree(folder, bad)
            file, data = bad / name, bytearray((bad / name).read_bytes())
            if how == "flip":
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            elif how == "cut":
                del data[draw.randrange(1, len(data)) :]
            elif how == "empty":
                data.clear()
            elif how == "long":
                data += b"\0"
            elif how == "swap":
                suffix = name.split(".")[0]
                data = bytearray(next(path for path in other.iterdir() if path.name.startswith(suffix)).read_bytes())
            file.unlink() if how == "gone" else file.write_bytes(data)

            def rank_main(rank: int) -> None:
                with pytest.raises((fz.DamagedCheckpoint, FileNotFoundError)) as info:
                    fz.load(bad, step_of(ranks))
                swapped = name == "manifest.json" and how == "swap"  # whole, of files that are not there
                assert name in str(info.value) or swapped, str(info.value)
                assert isinstance(info.value, fz.DamagedCheckpoint) or (name, how) == ("manifest.json", "gone")

            run_ranks(rank_main, ranks)


def test_numbers_that_grow_longer(tmp_path: Path) -> None:
    fz.Checkpoints(tmp_path, keep=2).save(trained(step_of()))
    os.rename(tmp_path / "000001-update-1", tmp_path / "999998-update-1")
    for count in range(3):
        (tmp_path / f"{999999 + 2 * count:06d}-update-0").mkdir()  # a save that never ended
        kept = fz.Checkpoints(tmp_path, keep=2)
        kept.save(trained(step_of(), count))
    assert sorted(os.listdir(tmp_path)) == ["1000002-update-1", "1000004-update-2"]
    found = kept.restore(step_of())
    assert found is not None and found[0].step == 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_newest_whole_one_is_restored(tmp_path: Path, ranks: int) -> None:
    def rank_main(rank: int) -> None:
        step, kept = step_of(ranks), fz.Checkpoints(tmp_path / "run", keep=2)
        assert kept.restore(step) is None
        state = step.init(params())
        for seen in range(1, 5):
            state, _ = step(state, torch.ones(5))
            kept.save(state, {"seen": seen})
        if rank == 0:
            assert sorted(os.listdir(kept.folder)) == ["000003-update-3", "000004-update-4"]
        found = kept.restore(step)
        assert found is not None and (found[0].step, found[1]) == (4, {"seen": 4})

    run_ranks(rank_main, ranks)
    newest = tmp_path / "run" / "000004-update-4"
    data = next(path for path in newest.iterdir() if path.suffix == ".safetensors")
    data.write_bytes(data.read_bytes()[:-1])

    def again(rank: int) -> None:
        step, kept = step_of(ranks), fz.Checkpoints(tmp_path / "run", keep=2)
        found = kept.restore(step)
        assert found is not None and found[1] == {"seen": 3}

    with pytest.warns(UserWarning, match=f"000003-update-3 is restored.*{data.name}"):
        run_ranks(again, ranks)
    (tmp_path / "run" / "000003-update-3" / "manifest.json").unlink()

    def never(rank: int) -> None:
        with pytest.raises(fz.DamagedCheckpoint, match="none of 2 checkpoints is whole"):
            fz.Checkpoints(tmp_path / "run").restore(step_of(ranks))

    run_ranks(never, ranks)


def test_a_state_gone_back_to_is_saved_as_the_newest(tmp_path: Path) -> None:
    step, kept = step_of(), fz.Checkpoints(tmp_path)
    old = trained(step, 1)
    kept.save(trained(step, 5))
    kept.save(old)
    found = kept.restore(step)
    assert found is not None and found[0].step == 1


# ---- in the background


def slowly(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """A write that begins, and goes on when it is told to."""
    begun, go, write = threading.Event(), threading.Event(), files.write

    def slow(descriptor: int, data: memoryview, offset: int) -> None:
        begun.set()
        assert go.wait(30)
        write(descriptor, data, offset)

    monkeypatch.setattr(files, "write", slow)
    return begun, go


def test_nothing_of_the_state_is_held_after_it(tmp_path: Path) -> None:
    step = step_of()
    state = trained(step)
    seen = [weakref.ref(buffer) for buffer in state.params.entries.values()]
    fz.save_async(tmp_path, state).wait()
    del state
    assert not any(ref() is not None for ref in seen)


@pytest.mark.parametrize("told", [False, True])
def test_a_failed_save_holds_nothing_of_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: bool) -> None:
    def full(descriptor: int, data: memoryview, offset: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write", full)
    state = trained(step_of())
    seen = [weakref.ref(buffer) for buffer in state.params.entries.values()]
    saving = fz.save_async(tmp_path, state)
    if told:
        with pytest.raises(OSError, match="No space left"):
            saving.wait()
    else:
        while not saving.done:
            time.sleep(0.01)
    del state
    assert not any(ref() is not None for ref in seen)
    with contextlib.suppress(OSError):
        saving.wait()


def test_a_hashing_thread_that_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error, and no thread is left that waits for work."""
    before = set(threading.enumerate())

    class Short(threading.Thread):
        made = 0

        def start(self) -> None:
            Short.made += 1
            if Short.made == 2:
                raise RuntimeError("can't start new thread")
            super().start()

    monkeypatch.setattr(chunks.threading, "Thread", Short)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        list(chunks.hashed([memoryview(bytes(100))], lambda piece: None, workers=2))
    assert before.issuperset(threading.enumerate())


def test_what_fails_in_the_background_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, fails = files.write, [True]

    def full(descriptor: int, data: memoryview, offset: int) -> None:
        if fails[0]:
            raise OSError(28, "No space left on device")
        write(descriptor, data, offset)

    def rank_main(rank: int) -> None:
        step = step_of(2)
        fz.save(tmp_path, trained(step), {"old": True})
        barrier.wait(30)
        monkeypatch.setattr(files, "write", full)
        saving = fz.save_async(tmp_path, trained(step, 2))
        with pytest.raises(OSError, match="No space left"):
            saving.wait()
        fz.save_async(tmp_path, trained(step, 2))
        with pytest.raises(OSError, match=rf"the save before this one has failed.*{tmp_path}: .*No space left"):
            fz.save(tmp_path, trained(step, 2))
        assert fz.load(tmp_path, step).step == 1 and fz.load_extra(tmp_path) == {"old": True}
        barrier.wait(30)
        fails[0] = False
        fz.save(tmp_path, trained(step, 3))
        assert fz.load(tmp_path, step).step == 3

    barrier = threading.Barrier(2)
    run_ranks(rank_main, 2)
    assert len(os.listdir(tmp_path)) == 3


@in_turns(2)
@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_grows(tmp_path: Path, ranks: int) -> None:
    """In processes that do nothing else: what is counted is all that a process has.

    Resident memory is judged by `make lasting`, over thousands of saves: in forty it follows what malloc keeps.
    """
    for found in run_ranks(functools.partial(saving, str(tmp_path), 40, ranks), ranks, backend="processes"):
        assert set(grown(found[1:])) <= {"resident MB"}, found  # the first look comes before three are kept


# ---- what is refused


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        ({"seen": (1, 2)}, r"extra: got {'seen': \(1, 2\)}, which JSON gives back as {'seen': \[1, 2\]}"),
        ({1: 2}, "got {1: 2}, which JSON gives back as {'1': 2}"),
        ([np.float64(0.5)], r"got \[np.float64\(0.5\)\], which JSON gives back as \[0.5\]"),
        ([torch.ones(2)], r"extra: got .*Tensor is not JSON serializable"),
        ({"a": {"b": {2}}}, r".*\(Object of type set is not JSON serializable"),
    ],
)
def test_extra_is_json(tmp_path: Path, extra: Any, match: str) -> None:
    with pytest.raises(TypeError, match=match):
        fz.save(tmp_path, trained(step_of()), extra)


def test_ranks_that_save_different_things(tmp_path: Path) -> None:
    def rank_main(rank: int) -> None:
        state = trained(step_of(2))
        with pytest.raises(ValueError, match=r"The saves differ .*rank 1 has .path"):
            fz.save(tmp_path / str(rank), state)
        with pytest.raises(ValueError, match=r"rank 1 has .extra 1."):
            fz.save(tmp_path, state, rank)

    run_ranks(rank_main, 2)


def saves_of_two_components(rank: int, folder: str) -> list[str]:
    """What each kind of save says where the ranks give it states whose tables and counts are alike."""
    states, said = [step_of(2).init(params()) for _ in range(2)], []
    for save in (fz.save, fz.save_safetensors, fz.compat.save_dcp):
        with fz.testing.checked_collectives(False), pytest.raises(ValueError) as caught:
            save(f"{folder}/{save.__name__}", states[rank])
        said.append(str(caught.value))
    return said


def test_states_of_two_components_are_no_one_state(tmp_path: Path) -> None:
    fn = functools.partial(saves_of_two_components, folder=str(tmp_path))
    for first, *others in run_ranks(fn, 2, backend="processes"):
        assert "rank 0 has \"component 'loss' [" in first
        assert all("Call" in said and "on every rank" in said for said in others)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_second_writer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = trained(step_of())
    begun, go = slowly(monkeypatch)
    saving = fz.save_async(tmp_path, state)
    assert begun.wait(30)
    with pytest.raises(BlockingIOError, match="another run is saving there"):
        with files.Folder(str(tmp_path)).only_writer():
            pass
    go.set()
    saving.wait()


@pytest.mark.parametrize(
    ("job", "error", "match"),
    [
        (lambda p, s: fz.load(p / "none", step_of()), FileNotFoundError, "the folder does not exist"),
        (lambda p, s: fz.load(p, step_of()), FileNotFoundError, "holds no whole one"),
        (lambda p, s: fz.load_extra(p), FileNotFoundError, "manifest.json"),
        (lambda p, s: fz.save("", s), ValueError, "expected the path of a folder"),
        (lambda p, s: fz.save(3, s), TypeError, "expected the path of a folder"),  # pyright: ignore
        (lambda p, s: fz.save(p, s, [1 << 20000]), ValueError, r"Exceeds the limit \(4300 digits\)"),
        (lambda p, s: fz.save(Path("s3://bucket/run"), s), ValueError, "expected a URL as a str"),
        (lambda p, s: fz.save(p, s.params), TypeError, "expected what step.init"),
        (lambda p, s: fz.load(p, s), TypeError, "expected a step"),
        (lambda p, s: fz.Checkpoints(p, keep=0), ValueError, "at least 1"),
        (lambda p, s: fz.save(__file__, s), OSError, "not a folder"),
    ],
)
def test_bad_input(tmp_path: Path, job: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        job(tmp_path, trained(step_of()))


def test_other_leaves_and_optimizers(tmp_path: Path) -> None:
    fz.save(tmp_path, trained(step_of(), 2))
    with pytest.raises(ValueError, match="another optimizer"):
        fz.load(tmp_path, fz.train_step(loss, fz.lion(0.1)))
    new = fz.load(tmp_path, fz.train_step(loss, fz.lion(0.1)), params_only=True)
    assert new.step == 0 and torch.equal(new.params["w"], trained(step_of(), 2).params["w"])
    small = step_of(policy=fz.Policy.compact24())
    with pytest.raises(ValueError, match=r"the params of leaf '.' are stored as fp32, and would be rounded to bf16"):
        fz.load(tmp_path, small)
    fz.load(tmp_path, small, lossy=True)
    like = {"w": torch.zeros(5), "v": torch.full((7,), 2.0), "x": torch.ones(3)}
    with pytest.raises(ValueError, match=r"leaf 'v': got shape \(70,\) there, expected shape \(7,\)"):
        fz.load(tmp_path, step_of(), like=like)
    with pytest.warns(UserWarning, match="leaf 'x': got none there"):
        mixed = fz.load(tmp_path, step_of(), like=like, lenient=True)
    full = trained(step_of(), 2)
    assert torch.equal(mixed.params["w"], full.params["w"]) and torch.equal(mixed.params["v"], like["v"])
    assert torch.equal(mixed.moments.mu["w"], full.moments.mu["w"]) and not mixed.moments.mu["x"].any()
    only = fz.load(tmp_path, step_of(), like={**params(), "v": torch.zeros(70)}, pattern="w")
    assert torch.equal(only.params["w"], full.params["w"]) and not only.params["v"].any()
    with pytest.raises(ValueError, match="no like="):
        fz.load(tmp_path, step_of(), pattern="w")
    with pytest.raises(ValueError, match="matches no leaf"):
        fz.load(tmp_path, step_of(), like=params(), pattern="y*")


def test_what_begins_as_params_and_goes_on_as_values(tmp_path: Path) -> None:
    """An average of params whose first value is the params themselves, which are stored in 24 bits."""
    mean = lambda average, params, applied: average.map(lambda a, p: (a + p) / 2, params)
    step = step_of(policy=fz.Policy.compact24()).with_state(fz.Extra("ema", "ema()", lambda params: params, mean))
    for updates in range(2):
        state = trained(step, updates)
        fz.save(tmp_path, state)
        for again in (fz.load(tmp_path, step), fz.convert(state, step)):
            assert_trees_equal(fz.gather(again.extra["ema"]), fz.gather(state.extra["ema"]))
            after = [step(x, torch.ones(5))[0].extra["ema"] for x in (again, state)]
            assert_trees_equal(*map(fz.gather, after))


def test_containers(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2).requires_grad_(False), torch.nn.Linear(2, 1))
    _, module = fz.functional(net)
    ones = torch.ones
    trees = [
        {"b": [ones(1), (ones(2), {"0": ones(3)})], "a": OrderedDict(z=ones(1), y=ones(2))},
        {1: torch.ones(2), 0: torch.ones(1)},
        module,
        {"m": module, "x": torch.ones(1)},
    ]
    step = fz.train_step(lambda p, x: x.sum(), fz.sgd(0.1))
    for number, tree in enumerate(trees):
        state = step.init(tree)
        fz.save(tmp_path / str(number), state)
        again = fz.load(tmp_path / str(number), step)
        assert again.params.structure == state.params.structure
        assert_trees_equal(fz.gather(again.params), fz.gather(state.params))
        assert [row.frozen for row in again.layout.rows] == [row.frozen for row in state.layout.rows]
    pair = namedtuple("pair", "a b")(torch.ones(1), torch.ones(2))
    fz.save(tmp_path / "pair", step.init(pair))
    with pytest.raises(ValueError, match=r"container of kind .*pair, which no checkpoint can make"):
        fz.load(tmp_path / "pair", step)
    assert fz.gather(fz.load(tmp_path / "pair", step, like=pair).params) is not None


def test_it_is_a_safetensors_file(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    state = trained(step_of())
    fz.save(tmp_path, state)
    file = next(path for path in tmp_path.iterdir() if path.suffix == ".safetensors")
    tensors = load_file(file)
    assert torch.equal(tensors["params/w[0:5]"], state.params["w"])
    assert json.loads((tmp_path / "manifest.json").read_text())["checkpoint"]["step"] == 1


def test_what_only_one_rank_holds_is_refused(tmp_path: Path) -> None:
    """Of a tensor that is in no tree rank 0's is kept, so all must be the same."""

    def rank_main(rank: int) -> None:
        own = fz.Extra("own", "own()", lambda params: torch.tensor(rank / 2), lambda value, params, applied: value)
        state = step_of(2).with_state(own).init(params())
        with pytest.raises(OSError, match=r"the ranks hold different values of state.extra.own: rank 0 has tensor"):
            fz.save(tmp_path, state)

    run_ranks(rank_main, 2)
    assert os.listdir(tmp_path) == ["saving"]


@pytest.mark.parametrize(
    ("field", "other"), [('"version":6', '"version":9'), ("fzero checkpoint", "another program's")]
)
def test_a_checkpoint_of_another_version(tmp_path: Path, field: str, other: str) -> None:
    fz.save(tmp_path, trained(step_of()))
    path = tmp_path / "manifest.json"
    body = path.read_text().split("\n", 1)[1].replace(field, other).encode()
    path.write_bytes(manifest._head(body) + body)
    with pytest.raises(ValueError, match="got a checkpoint of another version"):
        fz.load(tmp_path, step_of())


def test_kept_grads_have_their_scale_to_the_bit(tmp_path: Path) -> None:
    step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.adamw(0.1))
    step = fz.loss_scale(step, 49.0)
    state = step.init({"w": torch.ones(3, dtype=torch.float64)})
    loss, pullback = step.vjp(state, torch.ones(3, dtype=torch.float64))
    state = step.add_grads(state, pullback(torch.ones_like(loss))[0])
    fz.save(tmp_path, state)
    again = fz.load(tmp_path, step).grads
    assert again is not None and state.grads is not None and again.scale == state.grads.scale
