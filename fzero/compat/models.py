"""The safetensors files of a model: those that a path stands for, and whether all of them are there."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from fzero.checkpoint.manifest import DamagedCheckpoint
from fzero.compat.headers import INDEX, SINGLE

NAMED = re.compile(r"model-[0-9a-f]{12}-\d+-of-\d+\.safetensors")  # by save_safetensors: of an index, or of none
_OF = re.compile(r"(.*?)(\d+)-of-(\d+)\.safetensors")


class Model(NamedTuple):
    """What a path stands for.

    Attributes:
        files: their paths.
        index: the path of the index that names them; "" where none does.
        places: of an index, the name of each tensor and the path of its file.
    """

    files: list[str]
    index: str
    places: Mapping[str, str]


def model_of(path: str) -> Model:
    """The files of a model: of a file itself, of an index those that it names, of a folder its one model.

    Raises:
        FileNotFoundError: a folder has none, or of files that are numbered not all.
        DamagedCheckpoint: an index that cannot be read.
        ValueError: a folder has files of more than one model.
    """
    if os.path.isdir(path):
        index = os.path.join(path, INDEX)
        if os.path.exists(os.path.join(path, SINGLE)):  # as others' loaders prefer
            return Model([os.path.join(path, SINGLE)], "", {})
        if os.path.exists(index):
            return _indexed(index)
        return Model([os.path.join(path, name) for name in _without_index(path)], "", {})
    return _indexed(path) if path.endswith(".json") else Model([path], "", {})


def _indexed(path: str) -> Model:
    try:
        with open(path, encoding="utf-8") as file:
            said = json.load(file)["weight_map"]
        folder = os.path.dirname(path)
        places = {name: os.path.join(folder, own) for name, own in said.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{path}: got no index with a weight_map: {error!r}.") from None
    return Model([*dict.fromkeys(places.values())], path, places)


def _without_index(folder: str) -> list[str]:
    """The names of a folder's files where nothing but they themselves says which there should be."""
    there = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
    names = [name for name in there if not NAMED.fullmatch(name)]  # the rest is of saves that never ended
    if not names:
        instead = f"only {there[0]} and no {INDEX} that names it" if there else "a folder without safetensors files"
        raise FileNotFoundError(f"{folder}: got {instead}, expected some, such as {SINGLE}.")
    sets: dict[tuple[str, int], dict[int, str]] = {}
    for match in filter(None, map(_OF.fullmatch, names)):
        sets.setdefault((match[1], int(match[3])), {})[int(match[2])] = match[0]
    for (prefix, count), own in sets.items():
        if other := next((name for name in names if name not in own.values()), None):
            raise ValueError(
                f"{folder}: got files {prefix}...-of-{count:05d}.safetensors beside {other} and no {INDEX}, expected "
                "those of one model. Give the files of one as a list."
            )
        first = 0 if 0 in own else 1
        lost = [number for number in range(first, first + count) if number not in own]
        if lost or len(own) > count:
            path = os.path.join(folder, f"{prefix}{(lost or [count])[0]:05d}-of-{count:05d}.safetensors")
            more = f" (and {len(lost) - 1} more)" if lost[1:] else ""
            raise FileNotFoundError(
                f"{path}: got no such file{more}, expected all {count} of this model, of which {len(own)} are there. "
                "Bring it back, or give the files that are to be read as a list."
            )
    return names


def check_index(model: Model, found: Mapping[str, str]) -> None:
    """Refuses an index that names a tensor which its file does not have.

    Args:
        found: the name of each tensor that is there -> the path of its file.
    """
    for name, path in model.places.items():
        if found.get(name) != path:
            where = f", but {found[name]} has it" if name in found else ""
            raise DamagedCheckpoint(
                f"{model.index}: names a tensor {name!r} in {os.path.basename(path)}, and it is not there{where}. "
                "Bring the files that belong to this index."
            )
