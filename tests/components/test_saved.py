"""Checkpoints of pipelines: all components or none, by any number of places."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nightly import in_turns
from torch.distributed.device_mesh import init_device_mesh

import fzero as fz
from fzero.components import parts
from fzero.testing import run_ranks

X = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)


def stage(params: Any, h: torch.Tensor) -> torch.Tensor:
    return torch.tanh(h @ params["w"])


def head(params: Any, h: torch.Tensor) -> torch.Tensor:
    return (h @ params["w"]).square().mean()


def pipe_of(**more: Any) -> fz.Pipeline:
    steps = [fz.train_step(fn, fz.adamw(0.1)) for fn in (stage, stage, head)]
    return fz.pipeline(steps, fz.schedules.one_f_one_b(3, 2), **more)


def params() -> list[Any]:
    return [{"w": torch.eye(3, dtype=torch.float64) * (1 + i)} for i in range(3)]


def trained(pipe: fz.Pipeline, state: fz.PipelineState, steps: int) -> fz.PipelineState:
    for _ in range(steps):
        state, _ = pipe(state, X)
    return state


def assert_same(got: fz.PipelineState, want: fz.PipelineState) -> None:
    for own, other in zip(got, want, strict=True):
        fz.testing.assert_trees_close(fz.gather(own.params), fz.gather(other.params), rtol=0, atol=0)
        fz.testing.assert_trees_close(fz.gather(own.moments), fz.gather(other.moments), rtol=0, atol=0)
        assert own.step == other.step and own.seed == other.seed


def test_there_and_back(tmp_path: Path) -> None:
    pipe = pipe_of()
    state = trained(pipe, pipe.init(params(), seed=3), 2)
    for extra in ({"seen": 1}, {"seen": 2}, None):
        state = trained(pipe, state, 1)
        fz.save(tmp_path / "run", state, extra)
        again = fz.load(tmp_path / "run", pipe_of())
        assert_same(again, state)
        assert fz.load_extra(tmp_path / "run") == extra
        assert_same(trained(pipe, again, 2), trained(pipe, state, 2))
    assert len(list((tmp_path / "run").iterdir())) == 2  # one slot, and the file that names it


def test_what_is_not_whole_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, folder = pipe_of(), tmp_path / "run"
    first = trained(pipe, pipe.init(params()), 1)
    fz.save(folder, first, {"seen": 1})
    second = trained(pipe, first, 1)
    save, count = parts.save, [0]

    def fails(*arguments: Any) -> None:
        count[0] += 1
        if count[0] == 3:
            raise OSError("the disk is full")
        save(*arguments)

    monkeypatch.setattr(parts, "save", fails)
    with pytest.raises(OSError, match="the disk is full"):
        fz.save(folder, second, {"seen": 2})
    assert_same(fz.load(folder, pipe), first)
    assert fz.load_extra(folder) == {"seen": 1}
    fz.save(folder, second, {"seen": 2})
    assert_same(fz.load(folder, pipe), second)
    name = json.loads((folder / "components.json").read_text())["components"][0]
    shutil.copytree(folder / name / "0", tmp_path / "other")
    fz.save(folder / name / "0", trained(pipe, second, 1)[0])
    with pytest.raises(fz.DamagedCheckpoint, match="another checkpoint than the one that belongs to"):
        fz.load(folder, pipe)
    text = (folder / "components.json").read_bytes()
    (folder / "components.json").write_bytes(text.replace(b'"seen":2', b'"seen":3'))
    with pytest.raises(fz.DamagedCheckpoint, match="checksum differs"):
        fz.load_extra(folder)


def test_refusals(tmp_path: Path) -> None:
    pipe = pipe_of()
    state = pipe.init(params())
    with pytest.raises(FileNotFoundError, match="got no checkpoint of a pipeline"):
        fz.load(tmp_path, pipe)
    with pytest.raises(TypeError, match=r"extra: got tensor.*not JSON serializable"):
        fz.save(tmp_path, state, torch.ones(()))
    fz.save(tmp_path, state)
    two = fz.pipeline(pipe.steps[1:], fz.schedules.gpipe(2, 2))
    with pytest.raises(ValueError, match="a checkpoint of 3 components, expected one of 2"):
        fz.load(tmp_path, two)
    with pytest.raises(TypeError, match="expected a list of 3 trees"):
        fz.load(tmp_path, pipe, like=params()[0])


def over_places(rank: int, folder: str, dp: int) -> None:
    """Saved and loaded by other places than those that trained; each rank has its own components."""
    whole = pipe_of()
    mesh = init_device_mesh("cpu", (3, dp), mesh_dim_names=("pp", "dp"))
    shard = (lambda step: fz.shard_zero3(step, mesh=mesh, axis="dp")) if dp > 1 else lambda step: step
    pipe = fz.pipeline([shard(step) for step in whole.steps], whole.schedule, groups=mesh["pp"])
    expected = trained(whole, whole.init(params()), 2)
    state = trained(pipe, pipe.init(params()), 2)
    fz.save(f"{folder}/run", state, {"seen": 2})
    assert fz.load_extra(f"{folder}/run") == {"seen": 2}
    again = fz.load(f"{folder}/run", pipe)
    fz.testing.assert_trees_close(
        fz.gather(trained(pipe, again, 1)[rank // dp].params),
        fz.gather(trained(whole, expected, 1)[rank // dp].params),
        rtol=1e-12,
    )
    one = fz.load(f"{folder}/run", whole)
    assert one.step == 2
    # the norm is over all places, whoever asks
    _, pullback = pipe.vjp(again, X)
    _, pull = whole.vjp(expected, X)
    one = torch.ones((), dtype=torch.float64)
    fz.testing.assert_trees_close(fz.global_norm(pullback(one)[0]), fz.global_norm(pull(one)[0]), rtol=1e-12)
    dist.barrier()
    with pytest.raises(OSError, match=r"is not a folder|Not a directory|got a file"):
        fz.save(__file__, state)


@in_turns(2)
@pytest.mark.parametrize("dp", [1, 2])
def test_over_places(tmp_path: Path, dp: int) -> None:
    case = functools.partial(over_places, folder=str(tmp_path), dp=dp)
    run_ranks(case, 3 * dp, backend="processes", timeout=30)
