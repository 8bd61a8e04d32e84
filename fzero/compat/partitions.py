"""DeepSpeed's folders: which files one has, and where in them the elements of every leaf lie."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from fzero.checkpoint.manifest import DamagedCheckpoint
from fzero.compat.pickles import States, fingerprint, unpickled

_WHOLE = "mp_rank_00_model_states.pt"
_FILES = re.compile(r"((?:[a-z0-9]+_)?zero_pp_rank_)(\d+)(_mp_rank_00_(optim|model)_states\.pt)")
_OTHERS = {  # what else a folder may have -> what it is of then
    r".*mp_rank_(?!00_)\d+_.*": "tensor or pipeline parallelism",
    r"layer_\d+-.*": "pipeline parallelism",
    r"(layer_-?\d+_)?expert_\d+_.*|expp_rank_.*": "a mixture of experts",
    r"offloaded_tensors": "an optimizer that lies on NVMe",
    r"zero": "a universal checkpoint",
}
_EXPORT = "Export the model from DeepSpeed as safetensors, and read that with fz.load_safetensors."
_MIXED = "Files of different saves lie in one folder. Load another checkpoint, or take out what is not of this one."
_INERT = (  # what 0.19 writes of its own; nothing of them is needed
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
_NUMBERS = ("deepspeed.runtime.zero.config.ZeroStageEnum",)


class Spread(NamedTuple):
    """The elements of a leaf: e is in part (first + e) // size, where it is element base + (first + e) % size."""

    shape: tuple[int, ...]
    parts: Sequence[torch.Tensor]
    first: int
    size: int
    base: int

    def read(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Fills a flat tensor with elements [start, stop)."""
        at = start
        while at < stop:
            number, low = divmod(self.first + at, self.size)
            count = min(stop - at, self.size - low)
            out[at - start : at - start + count].copy_(self.parts[number][self.base + low : self.base + low + count])
            at += count


@dataclass(frozen=True)
class Saved:
    """What a folder has."""

    files: Mapping[str, str]  # their paths, and what is the same for all who see the same bytes
    updates: int  # how many the run has applied
    shared: Mapping[str, str]  # other names of tied params -> the names that they are saved under
    masters: bool  # whether the optimizer's states are those of named params
    # their values, in the order of the files: masters of those that are trained, of others what the model computes with
    params: dict[str, Spread] = field(default_factory=dict)
    # what the optimizer calls them (`exp_avg`) -> the values, by the names of params
    moments: dict[str, dict[str, Spread]] = field(default_factory=dict)
    # how many updates the moments of a param have seen, where the optimizer counts them
    counts: dict[str, int] = field(default_factory=dict)


def saved(folder: str) -> Saved:
    """Looks into the files of a folder; their values stay there until they are read.

    Raises:
        FileNotFoundError: it has no checkpoint.
        DamagedCheckpoint: a file is missing, cut or not what DeepSpeed writes.
        ValueError: it is of a kind that is not read; its files are of different saves; a pickle names more than it may.
    """
    optim, models = _files_of(folder)
    files = {path: fingerprint(path) for path in (*optim, *models)}
    states = [_states(path) for path in models]
    with _as_written(models[0]):
        model = states[0]
        _refuse_others(models[0], model)
        groups, shared = model["param_shapes"], dict(model.get("shared_params") or {})
        updates = int(model["global_steps"]) - int(model["skipped_steps"])
        out = Saved(files, updates, shared if groups is not None else _ties(model["module"]), groups is not None)
        if groups is None:
            _unsharded(out, models[0], model)
    if groups is not None:
        if not optim:
            raise DamagedCheckpoint(
                f"{folder}: got no *_optim_states.pt, expected one of each rank, where ZeRO keeps the masters. Bring "
                "them back, or load an older checkpoint."
            )
        _trained(out, optim, groups)
        if os.path.basename(models[0]) != _WHOLE:
            _check_ranks(models, len(optim))
        _frozen(out, models, states)
    return out


def _states(path: str) -> States:
    return unpickled(path, _INERT, _NUMBERS)


@contextlib.contextmanager
def _as_written(path: str) -> Iterator[None]:
    """Around what looks into a file that may be anybody's."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise DamagedCheckpoint(
            f"{path}: got no states as DeepSpeed writes them: {error!r}. Load another checkpoint."
        ) from error


def _trained(out: Saved, files: Sequence[str], groups: Sequence[States]) -> None:
    """The masters and moments, which every rank has its slices of."""
    states, ranks = list[States](), 0
    for path in files:
        with _as_written(path):
            own = _states(path)["optimizer_state_dict"]
            count = own["partition_count"]
            count = max(count) if isinstance(count, list) else int(count)
            if states and count != ranks:
                raise ValueError(f"{path}: is one of {count} ranks' files, expected one of {ranks}. {_MIXED}")
            ranks = count
            states.append(own)
    _check_ranks(files, ranks)
    for number, shapes in enumerate(groups):
        masters, moments, counts, sizes = [], [], [], []
        for path, own in zip(files, states, strict=True):
            with _as_written(path):
                values = own["fp32_flat_groups" if "fp32_flat_groups" in own else "single_partition_of_fp32_groups"]
                masters.append(_flat(values[number]))
                moment, count = _of_group(own, number)
                moments.append(moment)
                counts.append(count)
                # stages 1 and 2 cut the padding off; what sums bf16 gradients in float32 does not, nor does it say so
                cut = own["group_paddings"][number] if own.get("zero_stage", 3) < 3 else 0
                sizes.append(masters[-1].numel() + cut)
        with _as_written(files[0]):
            leaves = _places(states[0], number, shapes, sizes[0], len(files))
        _check_group(files, number, masters, moments, sizes, counts, leaves)
        for name, (shape, first, size, base) in leaves.items():
            out.params[name] = Spread(shape, masters, first, size, base)
            for word in moments[0]:
                parts = [own[word] for own in moments]
                out.moments.setdefault(word, {})[name] = Spread(shape, parts, first, size, base)
            if counts[0] is not None:
                out.counts[name] = counts[0]


Place = tuple[tuple[int, ...], int, int, int]  # of a leaf: its shape, then first, size and base of its Spread


def _places(own: States, number: int, shapes: States, size: int, ranks: int) -> dict[str, Place]:
    """Where the leaves of a group lie: at stage 3 each is divided by itself, at others the vector of all of them."""
    paddings, at = own.get("param_alignment_paddings"), 0
    out = dict[str, Place]()
    for index, (name, shape) in enumerate(shapes.items()):
        numel, known = math.prod(shape), tuple(map(int, shape))
        if "fp32_flat_groups" in own:
            share = -(-numel // ranks)
            out[name] = known, 0, max(share, 1), at
            at += share
        else:
            out[name] = known, at, max(size, 1), 0
            at += numel + (0 if paddings is None else paddings[number][index])
    return out


def _of_group(own: States, number: int) -> tuple[dict[str, torch.Tensor], int | None]:
    """The moments of a group in one file, and how many updates they have seen."""
    base = own["optimizer_state_dict" if "fp32_flat_groups" in own else "base_optimizer_state"]
    unused = set[str]()
    if isinstance(base, list):  # an elastic checkpoint
        state, count = base[number], own.get("base_optimizer_state_step")
    else:
        group, key = [(group, key) for group in base["param_groups"] for key in group["params"]][number]
        state, count = base["state"].get(key, {}), group.get("step")
        unused = {"exp_avg_sq"} if "eps" not in group else unused  # which DeepSpeed's Lion on the CPU has beside
    count = state.get("step", count)
    moments = {word: value for word, value in state.items() if isinstance(value, torch.Tensor) and value.dim()}
    return (
        {word: _flat(value) for word, value in moments.items() if word not in unused},
        None if count is None else int(count),
    )


def _check_group(
    files: Sequence[str],
    number: int,
    masters: Sequence[torch.Tensor],
    moments: Sequence[Mapping[str, torch.Tensor]],
    sizes: Sequence[int],
    counts: Sequence[int | None],
    leaves: Mapping[str, Place],
) -> None:
    """Refuses files that are not of one save, or too short for the leaves."""
    ends = [(math.prod(shape), first, size, base) for shape, first, size, base in leaves.values()]
    for rank, path in enumerate(files):
        what = f"{path}: group {number} of the params"
        if sizes[rank] != sizes[0] or counts[rank] != counts[0] or moments[rank].keys() != moments[0].keys():
            raise ValueError(
                f"{what} has {sizes[rank]} elements, {counts[rank]} updates and {', '.join(moments[rank])}; expected "
                f"{sizes[0]}, {counts[0]} and {', '.join(moments[0])}, as in {files[0]}. {_MIXED}"
            )
        need = max(
            (base + min(max(first + numel - rank * size, 0), size) for numel, first, size, base in ends if numel),
            default=0,
        )
        for word, part in {"float32 values": masters[rank], **moments[rank]}.items():
            like = masters[0] if part is masters[rank] else moments[0][word]
            if part.numel() < need or part.dtype != like.dtype:
                raise DamagedCheckpoint(
                    f"{what} has {part.numel()} {word} in {part.dtype}, expected at least {need} in {like.dtype}. Load "
                    "another checkpoint."
                )


def _frozen(out: Saved, files: Sequence[str], states: Sequence[States]) -> None:
    """What is not trained: at stage 3 every rank has its slices, at stage 1 it is in the model alone."""
    with _as_written(files[0]):
        shapes = states[0].get("frozen_param_shapes")
    if shapes is None:
        if os.path.basename(files[0]) != _WHOLE:
            return
        with _as_written(files[0]):
            _of_model(out, states[0])
        return
    for name, shape in shapes.items():
        parts = []
        for path, own in zip(files, states, strict=True):
            with _as_written(path):
                parts.append(_flat(own["frozen_param_fragments"][name]))
        share = max(-(-math.prod(shape) // len(files)), 1)
        for path, part in zip(files, parts, strict=True):
            if part.numel() * len(files) < math.prod(shape) or part.dtype != parts[0].dtype:
                raise DamagedCheckpoint(
                    f"{path}: leaf {name!r} has {part.numel()} elements in {part.dtype}, expected {share} in "
                    f"{parts[0].dtype}. Load another checkpoint."
                )
        out.params[name] = Spread(tuple(map(int, shape)), parts, 0, share, 0)


def _unsharded(out: Saved, path: str, model: States) -> None:
    """Stage 0, where the model is whole."""
    optimizer = model["optimizer"] or {}
    if "fp32_groups_flat" in optimizer or "fp32_groups" in optimizer:
        raise ValueError(
            f"{path}: is of ZeRO stage 0 in low precision, whose float32 masters have no names; expected stage 1, 2 or "
            f"3. {_EXPORT}"
        )
    _of_model(out, model)


def _of_model(out: Saved, model: States) -> None:
    """Params that the model's own state dict has whole, and nothing else."""
    others = {*model["buffer_names"], *out.shared, *out.params}
    for name, value in model["module"].items():
        if name not in others and isinstance(value, torch.Tensor) and value.is_floating_point():
            out.params[name] = Spread(tuple(value.shape), [_flat(value)], 0, max(value.numel(), 1), 0)


def _ties(module: States) -> dict[str, str]:
    """Names that stand for the memory of another one."""
    met, out = dict[object, str](), dict[str, str]()
    for name, value in module.items():
        if isinstance(value, torch.Tensor) and value.numel():
            first = met.setdefault((value.data_ptr(), value.shape, value.stride()), name)
            if first != name:
                out[name] = first
    return out


def _flat(value: torch.Tensor) -> torch.Tensor:
    return value.detach().reshape(-1)


# ---- the files of a folder


def _files_of(folder: str) -> tuple[list[str], list[str]]:
    """The files with the states of the optimizer, and of the model, by rank."""
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"{folder}: got no such folder, expected one of DeepSpeed's, of the tag.") from None
    for pattern, what in _OTHERS.items():
        if found := next((name for name in names if re.fullmatch(pattern, name)), None):
            raise ValueError(f"{folder}/{found}: is of {what}, expected ZeRO over data-parallel ranks alone. {_EXPORT}")
    met: dict[str, dict[int, re.Match[str]]] = {"optim": {}, "model": {}}
    for match in filter(None, map(_FILES.fullmatch, names)):
        other = next(iter(met[match[4]].values()), match)
        if other[1] != match[1]:
            raise ValueError(f"{folder}: has {match[0]} and {other[0]}, expected one of them. {_MIXED}")
        met[match[4]][int(match[2])] = match
    optim, parts = met.values()
    if _WHOLE in names and parts:
        raise ValueError(f"{folder}: has {_WHOLE} and {parts[min(parts)][0]}, expected one of them. {_MIXED}")
    if _WHOLE not in names and not parts:
        raise FileNotFoundError(
            f"{folder}: got no states of a model, expected {_WHOLE} or zero_pp_rank_0_{_WHOLE}, as DeepSpeed's "
            "save_checkpoint writes them."
        )
    for ranks in (optim, parts):
        for rank in range(max(ranks, default=-1)):
            if rank not in ranks:
                raise _lost(os.path.join(folder, ranks[max(ranks)][0]), rank, max(ranks) + 1)
    paths = lambda ranks: [os.path.join(folder, ranks[rank][0]) for rank in sorted(ranks)]
    return paths(optim), paths(parts) or [os.path.join(folder, _WHOLE)]


def _refuse_others(path: str, model: States) -> None:
    """Of kinds that the names of files do not show."""
    if model.get("mp_world_size", 1) != 1:
        raise ValueError(
            f"{path}: is one of {model['mp_world_size']} model-parallel ranks, expected the only one. {_EXPORT}"
        )
    if model.get("ds_autoep_layers") or model.get("autoep_layers"):
        raise ValueError(f"{path}: is of a mixture of experts, expected ZeRO over data-parallel ranks alone. {_EXPORT}")


def _check_ranks(files: Sequence[str], ranks: int) -> None:
    """Refuses files that are not one of each rank."""
    if len(files) < ranks:
        raise _lost(files[0], len(files), ranks)
    if len(files) > ranks:
        raise ValueError(f"{files[ranks]}: got a file of one more rank, expected those of {ranks} ranks. {_MIXED}")


def _lost(other: str, rank: int, ranks: int) -> DamagedCheckpoint:
    path = re.sub(r"pp_rank_\d+", f"pp_rank_{rank}", other)
    return DamagedCheckpoint(
        f"{path}: got no such file, expected one of each of {ranks} ranks. Bring it back, or load an older checkpoint."
    )
