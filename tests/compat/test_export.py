"""Safetensors files that are saved over: after any crash and any error the old model or the new, whole."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path

import pytest
from compat.over import (
    INDEX,
    SINGLE,
    Failing,
    Save,
    before,
    by_us,
    exported,
    met,
    recorded,
    saved,
    several,
    value_of,
)
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


CASES = [
    *(("none", several, 1), ("none", exported, 1), ("one", several, 1), ("several", several, 1), ("loose", several, 1)),
    *(("several", exported, 2), ("renamed", several, 2), ("one", exported, 2), ("one", several, 2)),
]


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
    assert {*theirs} == {old if kind != "loose" else None, 2.0} and theirs[-1] == 2.0
    names = {*os.listdir(folder)} - {"a.safetensors"}
    assert names == {SINGLE} if save is exported else len(names) == 3 and INDEX in names


@in_turns(8)
@pytest.mark.parametrize(("kind", "save", "ranks"), [case for case in CASES if case != ("renamed", several, 2)])
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
        assert as_transformers(folder) in (old if kind != "loose" else None, 2.0)
        saved(folder, ranks, 3.0, several)
        assert by_us(folder) == as_transformers(folder) == 3.0
        assert len(os.listdir(folder)) == (4 if kind == "loose" else 3)
    assert told > tried / 2


def test_names_are_those_that_loaders_expect_where_nothing_lies_there(tmp_path: Path) -> None:
    plain = {INDEX, *(f"model-0000{number}-of-00002.safetensors" for number in (1, 2))}
    for number in range(3):
        saved(tmp_path, 1, float(number), several)
        assert ({*os.listdir(tmp_path)} == plain) == (number == 0) and len(os.listdir(tmp_path)) == 3
        assert by_us(tmp_path) == as_transformers(tmp_path) == number
