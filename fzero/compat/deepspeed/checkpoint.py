"""fz.compat.load_deepspeed: DeepSpeed's ZeRO checkpoints, of any number of ranks, read slice by slice."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from fzero.base import pytree
from fzero.base.arguments import need_bool, need_str
from fzero.checkpoint.files import folder_of
from fzero.checkpoint.fill import Wanted, loaded
from fzero.compat.partitions import Spread, saved
from fzero.compat.pickles import verify
from fzero.compat.trees import Names, Others, by_path, need_names, one_count, paths_of
from fzero.state.train_state import TrainState
from fzero.table.spec import Spec, need_step

_WHO = "fz.compat.load_deepspeed"


def load_deepspeed(
    path: str | os.PathLike[str],
    step: Spec,
    *,
    like: object = None,
    tag: str | None = None,
    names: Names | None = None,
    optim: bool = True,
    pattern: str = "*",
    lossy: bool = False,
    lenient: bool = False,
    seed: int = 0,
) -> TrainState:
    """Loads a checkpoint of DeepSpeed, from ZeRO stage 1, 2 or 3 and any number of ranks, as a state.

    All ranks call it, and each reads its own slices. Params are the float32 masters; params that were not trained are
    as in the model. Moments and the number of updates go on. Learning rates and schedules are those of `step`, a loss
    scale begins anew, and buffers are not read.

    The files are pickles. They are read with `weights_only=True`, with stand-ins for DeepSpeed's own classes; any other
    class is refused. The CRC-32 of each file is checked.

    Args:
        path: the folder that `save_checkpoint` was given.
        step: has the optimizer of the checkpoint; any optimizer with `optim=False`.
        like: a tree of params as for `init`, such as that of `fz.functional(module)`. Its paths are the names. Its
            tensors may be on the meta device. A tied param may have any of its names there. By default the params are
            `{name: tensor}`.
        tag: of the checkpoint. None takes the one in the file `latest`.
        names: a function of a leaf's path in `like` that gives its name in the trained module.
        optim: read the moments. False begins them anew, which stage 0 needs.
        pattern: which leaves are read (fnmatch over dotted paths). The others come from `like`.
        lossy: allow rounding to what the step stores. By default that is an error.
        lenient: a leaf of `like` that has another shape in the files, or is missing, keeps its value, with a warning.
            What only the files have is left out.
        seed: of the state, as for `step.init`.

    Returns:
        The state.

    Raises:
        FileNotFoundError: there is no checkpoint.
        DamagedCheckpoint: a file is missing, cut or changed. It is named, on every rank.
        ValueError: leaves, shapes or the optimizer differ, or a value would be rounded or lost. Also for files of
            different saves, files of tensor or pipeline parallelism, experts or NVMe, and classes that are refused.

    Example:
        >>> import tempfile
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.adamw(0.1))
        >>> model = {"module": {"w": torch.ones(3)}, "buffer_names": [], "param_shapes": None, "optimizer": None}
        >>> with tempfile.TemporaryDirectory() as folder:  # what stage 0 leaves of a run without an optimizer
        ...     path = f"{folder}/mp_rank_00_model_states.pt"
        ...     torch.save({**model, "global_steps": 0, "skipped_steps": 0}, path)
        ...     fz.gather(fz.compat.load_deepspeed(folder, step, tag=".", optim=False).params)["w"]
        tensor([1., 1., 1.])
    """
    need_step(step, "compat.load_deepspeed")

    def asked() -> Wanted:
        need_str(tag, _WHO, "tag", "the name of a checkpoint in the folder, or None", or_none=True)
        need_names(names, like, _WHO)
        need_bool(optim, _WHO, "optim")
        return Wanted(_WHO, folder_of(path, "compat.load_deepspeed"), like, pattern, lossy, lenient, seed)

    return loaded(step, asked, lambda wanted, _: _Reading(wanted.place, tag, like, names), lambda: not optim)[0]


def _tagged(folder: str, tag: str | None) -> str:
    """The folder of a tag."""
    if tag is not None:
        return os.path.join(folder, tag)
    latest = os.path.join(folder, "latest")
    try:
        with open(latest, encoding="utf-8") as file:
            return os.path.join(folder, file.read().strip())
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"{latest}: got no such file. Give the folder that save_checkpoint was given, or tag=, the name of a "
            "folder in it."
        ) from None


class _Reading(Others[Spread]):
    """A checkpoint of DeepSpeed as the origin of a state."""

    call, anew, without = f"{_WHO}(path, step, lossy=True)", f"{_WHO}(path, step, optim=False)", "optim=False"

    def __init__(self, place: str, tag: str | None, like: object, names: Names | None) -> None:
        self.place, self.kinds, self._saved = place, {"params": "params"}, saved(_tagged(place, tag))
        own = self._saved
        self.said = "\n".join([place, *[f"{os.path.basename(file)} {text}" for file, text in own.files.items()]])
        if like is None:
            self._names = {path: path for path in pytree.named_leaves(dict.fromkeys(own.params, 0))[0]}
        else:
            asked = paths_of(_WHO, like, names)
            ties = {other: name for other, name in own.shared.items() if other in asked and name in own.params}
            kept = [name for name in own.params if name in asked or name not in ties.values()]
            self._names = by_path(asked, kept)
            self._names |= {asked[other]: name for other, name in ties.items() if other not in own.params}
        self.params = {path: own.params[name] for path, name in self._names.items()}
        self.moments = {
            word: {path: found[name] for path, name in self._names.items() if name in found}
            for word, found in own.moments.items()
        }

    def form(self, tensor: Spread) -> tuple[tuple[int, ...], torch.dtype]:
        return tensor.shape, tensor.parts[0].dtype

    def fill(self, tensor: Spread, start: int, stop: int, out: torch.Tensor) -> None:
        tensor.read(start, stop, out)

    def check(self, number: int, count: int) -> None:
        for file in [*self._saved.files][number::count]:
            verify(file)

    def lacks(self) -> str:
        why = "" if self._saved.masters else " of ZeRO stage 0, where they have no names"
        return f"got a checkpoint{why} without moments, expected some. Say optim=False to begin them anew."

    def count(self, paths: Sequence[str]) -> int:
        """How many updates the moments have seen; where they do not count, how many there were."""
        counts = {path: self._saved.counts.get(self._names[path]) for path in paths}
        known = {path: count for path, count in counts.items() if count is not None}
        self._count = one_count(self.place, known, self._saved.updates, "optim=False")
        return self._count

    def value(self, name: str) -> object:
        return self._count if name.rpartition(".")[2] == "count" else None
