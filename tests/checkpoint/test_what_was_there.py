"""What lay there before, and what is no checkpoint: it stays, and nothing begins anew in its place."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import pytest
import torch

import fzero as fz
from fzero.testing import run_ranks

STEP = fz.train_step(lambda p, x: sum((leaf * x).sum() for leaf in p.values()), fz.adamw(0.1))


def state_of() -> fz.TrainState:
    return STEP(STEP.init({"a": torch.ones(3), "ab": torch.ones(2)}), torch.ones(()))[0]


SAVES = [fz.save, fz.save_safetensors, fz.compat.save_dcp]


@pytest.mark.parametrize(("save", "name"), [*((save, "saving") for save in SAVES), (fz.save, "manifest.json")])
@pytest.mark.parametrize("content", [b"notes of mine", b"\0\0\0x"])
@pytest.mark.filterwarnings("ignore")  # torch's own, of dcp without a process group
def test_a_file_of_somebody_else(tmp_path: Path, save: Any, name: str, content: bytes) -> None:
    """A name that saves need is not taken."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(OSError, match=f"{name}: got a file that no save has"):
        save(tmp_path, state_of())
    assert (tmp_path / name).read_bytes() == content


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("content", [b"", b"pro", b"process 7 on", b"\0" * 20])
@pytest.mark.filterwarnings("ignore")
def test_a_lock_that_a_crash_has_cut(tmp_path: Path, save: Any, content: bytes) -> None:
    (tmp_path / "saving").write_bytes(content)
    save(tmp_path, state_of())
    assert not (tmp_path / "saving").exists()


@pytest.mark.parametrize("kind", ["file", "link", "checkpoint"])
def test_no_folder_of_checkpoints(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "it"
    if kind == "file":
        folder.write_text("notes")
    elif kind == "link":
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        fz.save(folder, state_of())
    with pytest.raises(ValueError if kind == "checkpoint" else NotADirectoryError, match="expected a folder"):
        fz.Checkpoints(folder).restore(STEP)
    assert fz.Checkpoints(tmp_path / "new").restore(STEP) is None


def test_a_cache_in_front(tmp_path: Path) -> None:
    for scheme in ("simplecache", "filecache", "blockcache"):
        with pytest.raises(ValueError, match="got a cache"):
            fz.save(f"{scheme}::memory://{tmp_path}", state_of())


@pytest.mark.parametrize(
    "extra", [collections.Counter("aab"), collections.OrderedDict(a=1), {"a": [collections.Counter()]}]
)
def test_dicts_that_json_would_make_plain(tmp_path: Path, extra: Any) -> None:
    with pytest.raises(TypeError, match=r"Counter.*which JSON gives back as|OrderedDict.*which JSON gives back as"):
        fz.save(tmp_path / "it", state_of(), extra=extra)


def test_an_extra_that_holds_itself(tmp_path: Path) -> None:
    extra: dict[str, Any] = {}
    extra["it"] = extra
    with pytest.raises(ValueError, match="Circular reference"):
        fz.save(tmp_path / "it", state_of(), extra=extra)


def test_a_leaf_whose_optimizer_is_another_now(tmp_path: Path) -> None:
    """Of the same patterns in another order: its moments would begin anew, with the old number of updates."""
    steps = [
        fz.train_step(
            lambda p, x: sum((leaf * x).sum() for leaf in p.values()), fz.partition(dict.fromkeys(order, own))
        )
        for own in [fz.adamw(0.1)]
        for order in (("a*", "*b", "*"), ("*b", "a*", "*"))
    ]
    params = {"a": torch.ones(3), "ab": torch.ones(2), "b": torch.ones(1), "c": torch.ones(1)}
    state, _ = steps[0](steps[0].init(params), torch.ones(()))
    fz.save(tmp_path / "it", state)
    for move in (lambda: fz.load(tmp_path / "it", steps[1]), lambda: fz.convert(state, steps[1])):
        with pytest.raises(ValueError, match=r"leaf 'ab' has its moments in state.moments"):
            move()
    assert fz.load(tmp_path / "it", steps[1], params_only=True).step == 0
    kept = fz.load(tmp_path / "it", steps[1], like=params, pattern="a")  # of which the others are not read
    assert [*kept.params] == [*params]


def test_a_tensor_with_the_negative_bit(tmp_path: Path) -> None:
    x = torch._neg_view(torch.ones(3))
    assert x.is_neg()
    fz.save_safetensors(tmp_path, state_of(), also={"mask": x})
    from safetensors.torch import load_file

    assert load_file(tmp_path / "model.safetensors")["mask"].tolist() == [-1.0] * 3


def _saves_twice(folder: str) -> None:
    """Two runs on each rank, which take turns."""
    step = fz.shard_zero1(fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1)))
    state = step.init({"w": torch.ones(3)})
    first, second = fz.Checkpoints(folder, keep=1), fz.Checkpoints(folder, keep=1)
    first.save(state)
    second.save(state)  # which goes on from what it finds
    with pytest.raises(FileExistsError, match=r"000002-update-0, which another run"):
        first.save(state)
    second.save(state, extra="kept")
    found = first.restore(step)
    assert found is not None and found[1] == "kept"
    first.save(state)


@pytest.mark.parametrize("world", [1, 2])
def test_two_runs_in_one_folder(tmp_path: Path, world: int) -> None:
    """Each would remove the other's: the one that did not expect it is told, and may go on from what is there."""
    run_ranks(lambda rank: _saves_twice(str(tmp_path / "run")), world, backend="threads")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["000004-update-0"]


@pytest.mark.parametrize("times", range(5))
def test_going_back_while_a_save_is_under_way(tmp_path: Path, times: int) -> None:
    step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.adamw(0.1))
    state, kept = step.init({"w": torch.ones(3)}), fz.Checkpoints(tmp_path)
    kept.save(state)
    saving = kept.save_async(step(state, torch.ones(3))[0])
    assert kept.restore(step) is not None  # which finds that one, or does not yet
    saving.wait()
    kept.save(state)


def test_two_runs_that_save_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have looked before one of them wrote: the later one does not write over what the other has just saved."""
    first, second = fz.Checkpoints(tmp_path), fz.Checkpoints(tmp_path)
    assert first.restore(STEP) is second.restore(STEP) is None
    monkeypatch.setattr(second, "_names", list)  # what it saw then
    first.save(state_of(), extra="of the first")
    with pytest.raises(FileExistsError, match="000001-update-1: another run has saved there at the same time"):
        second.save(state_of(), extra="of the second")
    found = first.restore(STEP)
    assert found is not None and found[1] == "of the first"
