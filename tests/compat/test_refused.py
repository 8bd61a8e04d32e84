"""What others' files cannot hold, and what fails as they are written: refused by name, on every rank."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from compat.over import exported, params, saved, step_of, value_of
from nightly import in_turns

import fzero as fz
from fzero.testing import assert_trees_equal, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of dcp without a process group
META, TOKEN = torch.device("meta"), "0123456789ab"


@pytest.mark.parametrize("name", ["__metadata__", "\ud800"])
def test_a_name_that_the_format_cannot_have(tmp_path: Path, name: str) -> None:
    step = fz.train_step(lambda p, x: (p[name] * x).sum(), fz.sgd(0.1))
    state = step.init({name: torch.ones(3)})
    with pytest.raises(ValueError, match="got a tensor named"):
        fz.save_safetensors(tmp_path, state)
    fz.save_safetensors(tmp_path, state, names=lambda path: "w")
    with pytest.raises(ValueError, match="got a tensor named"):
        fz.save_safetensors(tmp_path, step_of().init(params(1.0)), also={name: torch.ones(1)})
    assert list(fz.load_safetensors(step_of(), tmp_path).params) == ["w"]  # what lay there still does


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16, torch.float8_e4m3fn])
def test_a_dtype_that_the_format_lacks(tmp_path: Path, dtype: torch.dtype) -> None:
    state = step_of().init(params(1.0))
    with pytest.raises(TypeError, match=rf"tensor 'mask' is {dtype}, expected one of float64"):
        fz.save_safetensors(tmp_path, state, also={"mask": torch.ones(2).to(dtype)})
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_disk_that_is_full(tmp_path: Path, ranks: int) -> None:
    """The file is named on every rank, and nothing is left of it, nor of a save that was killed before."""
    saved(tmp_path, ranks, 1.0, exported)
    there, before = {*os.listdir(tmp_path)}, resource.getrlimit(resource.RLIMIT_FSIZE)
    (tmp_path / f".model.safetensors.{TOKEN}").touch()

    def rank_main(rank: int) -> Any:
        step = step_of(ranks)
        state = step.init({"a": torch.ones(40_000), "b": torch.ones(8)})
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
        with pytest.raises(OSError, match=r"File too large.*model.safetensors"):
            exported(tmp_path, state)
        return value_of(fz.gather(fz.load_safetensors(step, tmp_path).params))

    try:
        assert run_ranks(rank_main, ranks) == [1.0] * ranks
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert {*os.listdir(tmp_path)} == there


@pytest.mark.parametrize("save", [exported, fz.compat.save_dcp])
def test_the_meta_device(tmp_path: Path, save: Any) -> None:
    """Values that are read are not lost there; what has a device of its own is read as anywhere."""
    load: Any = (lambda *x, **own: fz.load_safetensors(x[1], x[0], **own)) if save is exported else fz.compat.load_dcp
    step = step_of()
    state = step.init(params(2.0))
    with META:
        save(tmp_path, state)
    like = {name: leaf.to(META) for name, leaf in params(0.0).items()}
    for own in (None, like):
        with META, pytest.raises(ValueError, match=r"the meta device as the default.*Call it outside"):
            load(tmp_path, step, like=own)
        assert value_of(fz.gather(load(tmp_path, step, like=own).params)) == 2.0
    own = params(0.0)
    with META:
        found = load(tmp_path, step, like=own)
    assert value_of(fz.gather(found.params)) == 2.0


def test_a_partition_in_a_checkpoint_of_torch(tmp_path: Path) -> None:
    """Each member counts the same updates, and has the moments of its leaves."""
    members = {"a": fz.adamw(0.1), "b": fz.sgd(0.2, momentum=0.9)}

    def rank_main(rank: int) -> None:
        loss = lambda p, x: (p["a"] * x).sum() + p["b"].square().sum()
        step = fz.shard_zero3(fz.train_step(loss, fz.partition(members)))
        state = step.init(params(1.0))
        for _ in range(3):
            state, _ = step(state, torch.ones(()))
        fz.compat.save_dcp(tmp_path, state)
        again = fz.compat.load_dcp(tmp_path, step)
        assert again.step == 3
        for one, other in ((state, again), (step(state, torch.ones(()))[0], step(again, torch.ones(()))[0])):
            assert_trees_equal(fz.gather(one.params), fz.gather(other.params))
            assert_trees_equal(fz.gather(one.moments), fz.gather(other.moments))

    run_ranks(rank_main, 2)


RUNS: dict[str, Any] = {
    "load": lambda folder, step, own: fz.load(folder / "own", step, **own),
    "load_dcp": lambda folder, step, own: fz.compat.load_dcp(folder / "dcp", step, **own),
    "load_safetensors": lambda folder, step, own: fz.load_safetensors(step, folder / "model", **own),
    "load_deepspeed": lambda folder, step, own: fz.compat.load_deepspeed(folder, step, **own),
    "save_dcp": lambda folder, step, own: fz.compat.save_dcp(folder / "new", step.init(params(1.0)), **own),
    "save_safetensors": lambda folder, step, own: fz.save_safetensors(folder / "new", step.init(params(1.0)), **own),
}
WRONG = {
    "load": {"pattern": 1, "lossy": 0, "lenient": 1, "params_only": None},
    "load_dcp": {"pattern": 1, "lossy": 0, "lenient": 1, "seed": "a", "model": None, "optim": 2},
    "load_safetensors": {"pattern": 1, "lossy": 0, "lenient": 1, "seed": "a", "names": 1},
    "load_deepspeed": {"pattern": 1, "lossy": 0, "lenient": 1, "seed": "a", "names": 1, "tag": 3, "optim": None},
    "save_dcp": {"model": None, "optim": 2},
    "save_safetensors": {"names": 1, "also": [], "dtype": torch.int8, "shard_bytes": 0},
}


@in_turns(5)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("who", "argument"), [(who, argument) for who, own in WRONG.items() for argument in own])
def test_an_argument_that_is_wrong_on_one_rank(tmp_path: Path, who: str, argument: str, rank: int) -> None:
    """Every rank learns of it at once, by the argument's name, and goes on."""

    def rank_main(me: int) -> None:
        step = step_of(2)
        fz.save(tmp_path / "own", step.init(params(1.0)))
        with pytest.raises((TypeError, ValueError), match=rf"{'' if me == rank else f'rank {rank}: '}fz.*{argument}"):
            RUNS[who](tmp_path, step, {argument: WRONG[who][argument]} if me == rank else {})
        fz.load(tmp_path / "own", step)

    run_ranks(rank_main, 2)
    assert not (tmp_path / "new").exists()
