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
_PART = re.compile(r".*-of-0*([2-9]|1\d)\d*\.safetensors")  # of several files


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
        FileNotFoundError: a folder has none, or several and no index.
        DamagedCheckpoint: an index that cannot be read.
    """
    if os.path.isdir(path):
        index = os.path.join(path, INDEX)
        if os.path.exists(os.path.join(path, SINGLE)):  # as others' loaders prefer
            return Model([os.path.join(path, SINGLE)], "", {})
        if os.path.exists(index):
            return _indexed(index)
        return Model([os.path.join(path, _only(path))], "", {})
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


def _only(folder: str) -> str:
    """The name of a folder's one file."""
    there = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
    names = [name for name in there if not NAMED.fullmatch(name)]  # the rest is of saves that never ended
    if len(names) != 1 or _PART.fullmatch(names[0]):
        raise FileNotFoundError(
            f"{folder}: got {' and '.join(there[:2]) or 'a folder without safetensors files'} and no {INDEX}, expected "
            f"one file, such as {SINGLE}, or several and an index that names them. Otherwise give the files as a list."
        )
    return names[0]


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
