"""fz.compat.load_deepspeed: DeepSpeed's ZeRO checkpoints, of any number of ranks, read slice by slice."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from fzero.base import private, pytree
from fzero.base.arguments import need_bool, need_int, need_str
from fzero.base.interrupts import as_found
from fzero.checkpoint.choice import Wanted, choose
from fzero.checkpoint.everyone import Everyone
from fzero.checkpoint.files import folder_of
from fzero.checkpoint.fill import agreed, filled
from fzero.compat.names import Names, by_path, need_names, paths_of
from fzero.compat.partitions import Saved, Spread, saved
from fzero.compat.pickles import verify
from fzero.compat.trees import WholeLeaves, kinds_of, one_count, word_of
from fzero.formats.formats import Format, Plain
from fzero.state.items import Item
from fzero.state.origin import TREES, Origin
from fzero.state.source import Source
from fzero.state.train_state import TrainState
from fzero.table.rows import Leaf
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

    def asked() -> tuple[Wanted, int]:
        need_str(tag, _WHO, "tag", "the name of a checkpoint in the folder, or None", or_none=True)
        need_names(names, like, _WHO)
        need_bool(optim, _WHO, "optim")
        folder = folder_of(path, "compat.load_deepspeed")
        return Wanted(_WHO, folder, like, pattern, lossy, lenient), need_int(seed, _WHO, "seed")

    wanted, seed = agreed(step.axis(), asked)
    given = wanted.place
    with as_found(), private.of_normal_tensors(), private.below_transforms():
        axis = step.axis().of_component(step.name)
        found = agreed(axis, lambda: saved(_tagged(given, tag)))
        said = [f"{os.path.basename(file)} {text}" for file, text in found.files.items()]
        axis.check_same(f"{given} {said} seed {seed}", "The checkpoints", "Give every rank the same path.")
        origin = _Reading(given, found)
        choice = agreed(axis, lambda: choose(wanted, origin.leaves(like, names), origin.structure, step, axis))
        count = agreed(axis, lambda: origin.count(choice.with_moments) if optim else None)
        with ThreadPoolExecutor(1, "fzero-load") as beside:  # files are held against their sums while they are read
            files = [*found.files][Everyone(axis).number :: Everyone(axis).count]
            verified = beside.submit(lambda: [verify(file) for file in files])
            state = filled(origin, choice, wanted, step, axis, seed, count)
            agreed(axis, verified.result)
        if Everyone(axis).leads:
            choice.warn(wanted, 2)
        return state


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


class _Reading(Origin):
    """A checkpoint of DeepSpeed as the origin of a state."""

    call, anew = f"{_WHO}(path, step, lossy=True)", f"{_WHO}(path, step, optim=False)"
    device = torch.device("cpu")
    extras = ()

    def __init__(self, place: str, found: Saved) -> None:
        self.place, self._saved = place, found
        self.kinds: dict[str, str] = {"params": "params"}
        self._names: dict[str, str] = {}  # of leaves, by path

    def leaves(self, like: object, names: Names | None) -> list[Leaf]:
        """What there is, by the paths that the names stand for."""
        shapes = self._saved.shapes
        if like is None:
            paths = pytree.named_leaves(dict.fromkeys(shapes, 0))[0]
            self._names = {path: path for path in paths}
        else:
            asked = paths_of(_WHO, like, names)
            ties = {other: name for other, name in self._saved.shared.items() if other in asked and name in shapes}
            kept = [name for name in shapes if name in asked or name not in ties.values()]
            self._names = by_path(asked, kept)
            self._names |= {asked[other]: name for other, name in ties.items() if other not in shapes}
        params = self._saved.params
        return [(path, shapes[name], params[name].parts[0].dtype) for path, name in self._names.items()]

    def structure(self) -> pytree.Spec:
        return pytree.flatten(dict.fromkeys(self._names, 0))[1]

    def meet(self, moments: Sequence[Item]) -> None:
        words = self._saved.moments.keys()
        if not words and any(item.kind in TREES for item in moments):
            why = "" if self._saved.masters else " of ZeRO stage 0, where they have no names"
            raise ValueError(
                f"{self.place}: got a checkpoint{why} without moments, expected some. Say optim=False to begin them "
                "anew."
            )
        self.kinds.update(kinds_of(moments, words))

    def count(self, paths: Sequence[str]) -> int:
        """How many updates the moments have seen; where they do not count, how many there were."""
        counts = {path: self._saved.counts.get(self._names[path]) for path in paths}
        known = {path: count for path, count in counts.items() if count is not None}
        self._count = one_count(self.place, known, self._saved.updates, "optim=False")
        return self._count

    def value(self, name: str) -> object:
        return self._count if name.rpartition(".")[2] == "count" else None

    def tree(self, name: str) -> Source:
        spreads = self._saved.params if name == "params" else self._saved.moments[word_of(name)]
        return _Tree(self.place, name, {path: spreads.get(own) for path, own in self._names.items()})


class _Tree(WholeLeaves):
    """One of its trees."""

    def __init__(self, place: str, name: str, spreads: Mapping[str, Spread | None]) -> None:
        self._place, self._name, self._spreads = place, name, spreads

    def format(self, path: str) -> Format | None:
        spread = self._spreads.get(path)
        if spread is None:
            if self._name == "params":
                return None
            raise ValueError(
                f"{self._place}: leaf {path!r} has no {word_of(self._name)}, and other leaves have one. Every leaf "
                "that the step trains needs it. Freeze the leaf, or say optim=False to begin the moments anew."
            )
        return Plain(spread.parts[0].dtype)

    def fill(self, path: str, start: int, stop: int, out: torch.Tensor) -> None:
        spread = self._spreads[path]
        assert spread is not None
        spread.read(start, stop, out)
