"""Safetensors files that are saved over: after any crash and any error the old model or the new, whole, or refused."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path

import pytest
from compat.over import INDEX, SINGLE, Failing, Save, before, by_us, exported, met, recorded, saved, several, value_of
from nightly import NIGHTLY, in_turns
from safetensors.torch import load_file

from fzero.checkpoint import files
from fzero.compat import export


def as_transformers(folder: Path) -> float | None:
    """As others' loaders choose: the one file, or what the index names."""
    if (folder / SINGLE).exists():
        return value_of(load_file(folder / SINGLE))
    if not (folder / INDEX).exists():
        return None
    places = json.loads((folder / INDEX).read_text())["weight_map"]
    tree = {name: x for own in {*places.values()} for name, x in load_file(folder / own).items()}
    assert tree.keys() == places.keys()
    return value_of(tree)


CASES = [("none", several, 1), ("none", exported, 1), ("one", exported, 1), ("one", exported, 2), ("none", several, 2)]


@in_turns(2)
@pytest.mark.parametrize(("kind", "save", "ranks"), CASES)
def test_every_crash_of_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, save: Save, ranks: int
) -> None:
    folder = tmp_path / "it"
    before(folder, kind, ranks)
    recorder = recorded(monkeypatch, folder, lambda: saved(folder, ranks, 2.0, save))
    old = None if kind == "none" else 1.0
    loads = lambda top: (as_transformers(top), by_us(top))
    found = met(recorder, tmp_path / "again", loads)
    theirs, ours = zip(*found, strict=True)
    assert {*ours} == {old, 2.0} and ours[0] == old and ours[-1] == 2.0
    assert {*theirs} == {old, 2.0} and theirs[-1] == 2.0
    names = {*os.listdir(folder)}
    assert names == {SINGLE} if save is exported else len(names) == 3 and INDEX in names


@in_turns(5)
@pytest.mark.parametrize(("kind", "save", "ranks"), CASES)
def test_any_operation_of_an_export_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, save: Save, ranks: int
) -> None:
    tried, told = 0, 0
    before(tmp_path / "before", kind, ranks)
    for at in itertools.count(1, 1 if NIGHTLY else 2):
        tried += 1
        folder = Path(shutil.copytree(tmp_path / "before", tmp_path / str(at)))
        failing = Failing(at)
        with monkeypatch.context() as patch:
            for module in (files, export):
                patch.setattr(module, "os", failing)
            said = saved(folder, ranks, 2.0, save)
        assert all("Input/output error" in each for each in said) or not any(said)
        told += any(said)
        if failing.count < at:
            break
        old = None if kind == "none" else 1.0
        found = by_us(folder)
        assert found in (old, 2.0) if any(said) else found == 2.0
        assert as_transformers(folder) in (old, 2.0)
        if save is exported or found is None:
            saved(folder, ranks, 3.0, save)
            assert by_us(folder) == as_transformers(folder) == 3.0
            assert len(os.listdir(folder)) == (1 if save is exported else 3)
    assert told > tried / 2


@pytest.mark.parametrize(("first", "then"), [(exported, several), (several, several), (several, exported)])
def test_a_model_of_several_files_is_not_saved_over(tmp_path: Path, first: Save, then: Save) -> None:
    saved(tmp_path, 2, 1.0, first)
    there = {*os.listdir(tmp_path)}
    said = saved(tmp_path, 2, 2.0, then)
    assert all("expected a folder without a model" in each for each in said), said
    assert {*os.listdir(tmp_path)} == there and by_us(tmp_path) == as_transformers(tmp_path) == 1.0
