"""DeepSpeed's folders: which files one has, and what it is of."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from fzero.checkpoint.manifest import DamagedCheckpoint
from fzero.compat.pickles import States

WHOLE = "mp_rank_00_model_states.pt"
_FILES = re.compile(r"((?:[a-z0-9]+_)?zero_pp_rank_)(\d+)(_mp_rank_00_(optim|model)_states\.pt)")
_OTHERS = {  # what else a folder may have -> what it is of then
    r".*mp_rank_(?!00_)\d+_.*": "tensor or pipeline parallelism",
    r"layer_\d+-.*": "pipeline parallelism",
    r"(layer_-?\d+_)?expert_\d+_.*|expp_rank_.*": "a mixture of experts",
    r"offloaded_tensors": "an optimizer that lies on NVMe",
    r"zero": "a universal checkpoint",
}
EXPORT = "Export the model from DeepSpeed as safetensors, and read that with fz.load_safetensors."
MIXED = "Files of different saves lie in one folder. Load another checkpoint, or take out what is not of this one."


def files_of(folder: str) -> tuple[list[str], list[str]]:
    """The files with the states of the optimizer, and of the model, by rank.

    Raises:
        FileNotFoundError: there is no checkpoint.
        DamagedCheckpoint: the file of a rank is missing.
        ValueError: it is of a kind that is not read, or its files are of different saves.
    """
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"{folder}: got no such folder, expected one of DeepSpeed's, of the tag.") from None
    for pattern, what in _OTHERS.items():
        if found := next((name for name in names if re.fullmatch(pattern, name)), None):
            raise ValueError(f"{folder}/{found}: is of {what}, expected ZeRO over data-parallel ranks alone. {EXPORT}")
    met: dict[str, dict[int, re.Match[str]]] = {"optim": {}, "model": {}}
    for match in filter(None, map(_FILES.fullmatch, names)):
        other = next(iter(met[match[4]].values()), match)
        if other[1] != match[1]:
            raise ValueError(f"{folder}: has {match[0]} and {other[0]}, expected one of them. {MIXED}")
        met[match[4]][int(match[2])] = match
    optim, parts = met.values()
    if WHOLE in names and parts:
        raise ValueError(f"{folder}: has {WHOLE} and {parts[min(parts)][0]}, expected one of them. {MIXED}")
    if WHOLE not in names and not parts:
        raise FileNotFoundError(
            f"{folder}: got no states of a model, expected {WHOLE} or zero_pp_rank_0_{WHOLE}, as DeepSpeed's "
            "save_checkpoint writes them."
        )
    for ranks in (optim, parts):
        for rank in range(max(ranks, default=-1)):
            if rank not in ranks:
                raise _lost(os.path.join(folder, ranks[max(ranks)][0]), rank, max(ranks) + 1)
    paths = lambda ranks: [os.path.join(folder, ranks[rank][0]) for rank in sorted(ranks)]
    return paths(optim), paths(parts) or [os.path.join(folder, WHOLE)]


def refuse_others(path: str, model: States) -> None:
    """Of kinds that the names of files do not show."""
    if model.get("mp_world_size", 1) != 1:
        raise ValueError(
            f"{path}: is one of {model['mp_world_size']} model-parallel ranks, expected the only one. {EXPORT}"
        )
    if model.get("ds_autoep_layers") or model.get("autoep_layers"):
        raise ValueError(f"{path}: is of a mixture of experts, expected ZeRO over data-parallel ranks alone. {EXPORT}")


def check_ranks(files: Sequence[str], ranks: int) -> None:
    """Refuses files that are not one of each rank."""
    if len(files) < ranks:
        raise _lost(files[0], len(files), ranks)
    if len(files) > ranks:
        raise ValueError(f"{files[ranks]}: got a file of one more rank, expected those of {ranks} ranks. {MIXED}")


def _lost(other: str, rank: int, ranks: int) -> DamagedCheckpoint:
    path = re.sub(r"pp_rank_\d+", f"pp_rank_{rank}", other)
    return DamagedCheckpoint(
        f"{path}: got no such file, expected one of each of {ranks} ranks. Bring it back, or load an older checkpoint."
    )
