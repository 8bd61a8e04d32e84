"""State on a disk over a process's life: nothing grows, copies, forks, and offloads of nothing."""

from __future__ import annotations

import copy
import functools
import gc
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from failing import FUSED, X, at_rest, begun, bits, model, steps, wanted
from lasting import lasting
from nightly import in_turns

import fzero as fz
from fzero.base import pytree
from fzero.stores.disk import Disk
from fzero.testing import LiveBytes, assert_trees_equal


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return fz.Disk(tmp_path, threads=1)


def test_nothing_grows(disk: Disk) -> None:
    for fused in FUSED:
        first, last = lasting(disk, fused, 12, [4, 12])
        assert {**first, "resident MB": 0} == {**last, "resident MB": 0}
        assert first["files"] == 1 + 3 * 4
        assert last["live MB"] < 4096 / 2**20, "all of it is in the files"
        gc.collect()
        assert not list(Path(disk.path).iterdir())


LAYER = fz.unit(lambda p, x: x + torch.tanh(x @ p["w"]))


def deep(params: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in params["layers"]:
        x = LAYER(layer, x)
    return x.square().mean()


@in_turns(2)
@pytest.mark.parametrize("fused", FUSED)
def test_a_state_eight_times_as_large_as_what_is_in_memory(tmp_path: Path, fused: str) -> None:
    width, units = 256, 24
    disk = fz.Disk(tmp_path, in_flight=4 * width * width)
    made = [functools.partial(torch.full, (width, width), 1e-3 * number) for number in range(units)]
    away: dict[str, Any] = dict.fromkeys(("params", "grads", "moments", "activations"), disk)
    step = fz.train_step(deep, fz.chain(fz.clip_by_global_norm(1.0), fz.adamw(1e-3)))
    step = fz.donate(fz.remat(fz.offload(FUSED[fused](step), **away)))
    params = {"layers": [{"w": make} for make in made]}
    plan = fz.plan(step, params)
    with LiveBytes() as live:
        state = step.init(params)
        assert 8 * live.peak <= plan.disk
        for _ in range(3):
            live.reset_peak()
            state, _ = step(state, torch.ones(4, width))
            assert live.peak <= plan.peak["device"] + disk.in_flight + units * 4 * 4 * width  # and what units are given
            assert 8 * live.peak <= plan.disk
            at_rest(state)
            assert live.now() < 4096


def test_a_forked_child_is_told(disk: Disk) -> None:
    step, plain = steps(disk, "plain")
    state = begun(step)
    uses: list[Callable[[], object]] = [
        lambda: step(state, X),
        lambda: fz.gather(state.params),
        lambda: fz.convert(state, plain),
        lambda: pytree.leaves(state),
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
    os.close(mine)
    os.close(theirs)
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


@pytest.mark.skipif(not os.access("/proc/self/fd", os.W_OK), reason="only root is told that it may write there")
def test_a_folder_that_takes_no_files() -> None:
    step = fz.offload(fz.train_step(model()[0], fz.adamw(0.1)), params=fz.Disk("/proc/self/fd"))
    with pytest.raises(
        OSError, match=r"fz.Disk: cannot make a folder with files in /proc/\S*fd \(.*\). Give one that takes"
    ):
        step.init(model()[1])
