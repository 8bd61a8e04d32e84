"""Safetensors files that are read: all of one model, whoever saves over them meanwhile, or refused."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from compat.over import INDEX, NUMEL, SINGLE, by_us, exported, params, saved, several, step_of
from safetensors.torch import save_file

import fzero as fz
from fzero.checkpoint import fill
from fzero.compat import opened
from fzero.testing import run_ranks


def test_a_folder_without_an_index(tmp_path: Path) -> None:
    for name in "ab":
        save_file({name: torch.ones(3)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(FileNotFoundError, match=r"neither model.safetensors nor .*json.* as a list"):
        fz.load_safetensors(step_of(), tmp_path)
    both = [tmp_path / f"{name}.safetensors" for name in "ab"]
    assert list(fz.load_safetensors(step_of(), both).params) == ["a", "b"]


def test_an_index_of_what_is_not_there(tmp_path: Path) -> None:
    saved(tmp_path, 1, 1.0, several)
    index = json.loads((tmp_path / INDEX).read_text())
    places: dict[str, str] = index["weight_map"]

    def rewritten(new: Any) -> Any:
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": new}))
        return pytest.raises(fz.DamagedCheckpoint, match=INDEX)

    with rewritten({**places, "c": places["a"]}) as error:
        fz.load_safetensors(step_of(), tmp_path)
    assert "a tensor 'c' in model-00001-of-00002.safetensors, and it is not there" in str(error.value)
    with rewritten({**places, "a": places["b"], "b": places["a"]}) as error:
        fz.load_safetensors(step_of(), tmp_path / INDEX)
    assert "but " in str(error.value)
    with rewritten({**places, "a": 3}):
        fz.load_safetensors(step_of(), tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {**places, "a": "gone.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=r"gone.safetensors: got no such file"):
        fz.load_safetensors(step_of(), tmp_path)


@pytest.mark.parametrize("place", ["open", "read"])
def test_saved_over_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """One file, before it is opened and between two tensors."""
    saved(tmp_path, 1, 1.0, exported)
    own, name = (opened, "entries_of") if place == "open" else (opened.Opened, "read_into")
    real, calls = getattr(own, name), [0]

    def meanwhile(*given: Any) -> Any:
        calls[0] += 1
        if calls[0] == (1 if place == "open" else 2):
            saved(tmp_path, 1, 2.0, exported)
        return real(*given)

    monkeypatch.setattr(own, name, meanwhile)
    assert by_us(tmp_path) == 1.0 and by_us(tmp_path) == 2.0


@pytest.mark.parametrize("calls", [1, 2])
def test_one_of_several_files_that_becomes_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    saved(tmp_path, 1, 1.0, several)
    real, left = opened.entries_of, [calls]

    def meanwhile(*given: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            for name in "ab":
                path = json.loads((tmp_path / INDEX).read_text())["weight_map"][name]
                save_file({name: torch.full((NUMEL,), 2.0)}, tmp_path / "new")
                os.replace(tmp_path / "new", tmp_path / path)
        return real(*given)

    monkeypatch.setattr(opened, "entries_of", meanwhile)
    with pytest.raises(fz.DamagedCheckpoint, match="was written to while it was read"):
        by_us(tmp_path)
    assert by_us(tmp_path) == 2.0


def test_written_in_place_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(params(1.0), tmp_path / SINGLE)
    os.utime(tmp_path / SINGLE, (0, 0))
    real = fill._filled

    def meanwhile(*given: Any) -> Any:
        save_file(params(2.0), tmp_path / "new")
        (tmp_path / SINGLE).write_bytes((tmp_path / "new").read_bytes())
        return real(*given)

    monkeypatch.setattr(fill, "_filled", meanwhile)
    with pytest.raises(fz.DamagedCheckpoint, match=r"model.safetensors: was written to while it was read"):
        by_us(tmp_path)


def test_ranks_read_one_model(tmp_path: Path) -> None:
    """Also where each has a copy of the files."""
    for number, value in enumerate((1.0, 1.0, 2.0)):
        (tmp_path / str(number)).mkdir()
        tree = {"a": torch.ones(NUMEL), "b": torch.tensor([0.0] * 100 + [value])}
        save_file(tree, tmp_path / str(number) / SINGLE)

    def rank_main(rank: int) -> None:
        fz.load_safetensors(step_of(2), tmp_path / str(rank))
        with pytest.raises(ValueError, match=r"The files differ .*rank 0 has .model.safetensors: 'b' F32 .* checksum"):
            fz.load_safetensors(step_of(2), tmp_path / str(2 * rank))

    run_ranks(rank_main, 2)


def test_files_are_closed(tmp_path: Path) -> None:
    saved(tmp_path, 1, 1.0, several)
    count = lambda: len(os.listdir("/proc/self/fd"))
    begun = count()
    for like in (None, {"c": torch.ones(3)}):
        with contextlib.suppress(ValueError):
            fz.load_safetensors(step_of(), tmp_path, like=like)
        assert count() == begun
