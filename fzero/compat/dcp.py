"""fz.compat.save_dcp and fz.compat.load_dcp: torch's distributed checkpoints, written and read slice by slice."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fzero.base import private, pytree
from fzero.base.arguments import need_str, wrong
from fzero.base.patterns import matches
from fzero.checkpoint.contents import need_same
from fzero.checkpoint.files import folder_of
from fzero.checkpoint.fill import Wanted, agreed, loaded
from fzero.checkpoint.manifest import DamagedCheckpoint
from fzero.comm.axis import Axis
from fzero.compat.trees import WORDS, Others, need_same_values, one_count, ties_of, untied
from fzero.formats.formats import Format, Plain
from fzero.state.checks import constants
from fzero.state.train_state import TrainState
from fzero.table.spec import Spec, need_step

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from fzero.compat.planners import Reader
_TIED = "If it is tied to another leaf, give the model's params as like=, which know its names. "
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def save_dcp(
    path: str | os.PathLike[str], state: TrainState, *, model: str = "model", optim: str | None = "optim"
) -> None:
    """Writes a state as a checkpoint of torch.distributed.checkpoint (DCP).

    `dcp.load` reads it over any ranks and mesh. All ranks call this. The first one writes what all send it unit by
    unit, as by `fz.stream`: no rank ever holds the model, and the others need not reach the folder.

    Names are those of `{"model": model_state_dict, "optim": optimizer_state_dict}`, as
    `torch.distributed.checkpoint.state_dict` has them: `model.<path>`, `optim.state.<path>.exp_avg`, `exp_avg_sq`,
    `momentum_buffer` and `step`. A tied param is there under each of its names. There are no `optim.param_groups`: give
    `dcp.load` a `DefaultLoadPlanner(allow_partial_load=True)`.

    Args:
        path: a folder without a checkpoint, which is made if it is missing.
        state: its params and moments are written. Kept grads and `state.extra` are not.
        model: prefix of the params' names; "" for none.
        optim: prefix of the moments' names; None writes no moments.

    Raises:
        ValueError: the ranks differ in their arguments, or DCP has no name for the optimizer's moments.
        OSError: the folder has a checkpoint (FileExistsError) or is not writable, or the disk is full. It is raised on
            every rank.

    Example:
        >>> import tempfile
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.adamw(0.1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fz.compat.save_dcp(folder, step.init({"w": torch.ones(3)}))
        ...     sorted(name.rpartition(".")[2] for name in os.listdir(folder))
        ['distcp', 'metadata']
    """
    from fzero.compat.writing import Writing  # which takes long to import

    who = "fz.compat.save_dcp"
    if not isinstance(state, TrainState):
        raise wrong(who, "state", state, "what step.init or a step returned")
    (state,) = constants(who, state=state)
    axis = state.params.axis

    def asked() -> str:
        need_str(model, who, "model", "a prefix of names")
        need_str(optim, who, "optim", "a prefix of names", or_none=True)
        return folder_of(path, "compat.save_dcp")

    folder = agreed(axis, asked)
    with private.of_normal_tensors(), private.below_transforms():
        writing = agreed(axis, lambda: Writing(folder, state, model, optim))
        axis.check_same(
            f"{folder}\ncomponent {axis.who}\n{writing.known} update {state.step} seed {state.seed}",
            "The checkpoints",
            f"Call {who} alike on every rank.",
        )
        need_same(axis, agreed(axis, writing.copies), "compat.save_dcp")
        agreed(axis, writing.begin)
        agreed(axis, writing.write)


def load_dcp(
    path: str | os.PathLike[str],
    step: Spec,
    *,
    like: object = None,
    model: str = "model",
    optim: str | None = "optim",
    pattern: str = "*",
    lossy: bool = False,
    lenient: bool = False,
    seed: int = 0,
) -> TrainState:
    """Loads a checkpoint of torch.distributed.checkpoint (DCP) as a state, over any ranks, mesh and sharding.

    All ranks call it, and each reads its own slices. Names are as `torch.distributed.checkpoint.state_dict` and
    `save_dcp` write them. DCP keeps no checksums, so a file that was changed later is not noticed. Its metadata is a
    pickle, of which only DCP's own classes are read; tensors are read with `weights_only=True`.

    Args:
        path: the checkpoint's folder.
        step: has the optimizer of the checkpoint; any optimizer with `optim=None`.
        like: a tree of params as for `init`, such as that of `fz.functional(module)`. Its paths are the names. Its
            tensors may be on the meta device. A tied param may have any of its names in the files. By default the
            params are `{name: tensor}`.
        model: prefix of the params' names; "" for none.
        optim: prefix of the moments' names; None begins moments anew.
        pattern: which leaves are read (fnmatch over dotted paths). The others come from `like`.
        lossy: allow rounding to what the step stores. By default that is an error.
        lenient: a leaf of `like` that has another shape in the files, or is missing, keeps its value, with a warning.
            What only the files have is left out.
        seed: of the state, as for `step.init`.

    Raises:
        FileNotFoundError: there is no checkpoint.
        DamagedCheckpoint: it cannot be read, or was overwritten meanwhile. It is raised on every rank.
        ValueError: leaves, shapes or the optimizer differ, a value would be rounded or lost, or two names of a tied
            param have different values.

    Example:
        >>> import tempfile
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.adamw(0.1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fz.compat.save_dcp(folder, step.init({"w": torch.ones(3)}))
        ...     fz.gather(fz.compat.load_dcp(folder, step).params)["w"]
        tensor([1., 1., 1.])
    """
    who = "fz.compat.load_dcp"
    need_step(step, "compat.load_dcp")

    def asked() -> Wanted:
        need_str(model, who, "model", "a prefix of names")
        need_str(optim, who, "optim", "a prefix of names", or_none=True)
        return Wanted(who, folder_of(path, "compat.load_dcp"), like, pattern, lossy, lenient, seed)

    return loaded(step, asked, lambda wanted, _: _Reading(wanted.place, model, optim, like), lambda: optim is None)[0]


class _Reading(Others[str]):
    """A checkpoint of torch as the origin of a state."""

    call, anew = "fz.compat.load_dcp(path, step, lossy=True)", "fz.compat.load_dcp(path, step, optim=None)"
    else_said = _TIED

    def __init__(self, folder: str, model: str, optim: str | None, like: object) -> None:
        self.place, self.kinds = folder, {"params": "params"}
        self._reader, self._tensors, same = _opened(folder)
        lines = [f"{name} {tuple(own.size)} {own.properties.dtype}" for name, own in self._tensors.items()]
        self.said = "\n".join([folder, *sorted(lines), f"metadata with checksum {self._reader.checksum}"])
        before = f"{model}." if model else ""
        state = f"{optim}.state." if optim else "state."
        params = {name.removeprefix(before): name for name in self._tensors if name.startswith(before)}
        if like is None:  # names of the same bytes are one leaf's
            ties = {name.removeprefix(before): first.removeprefix(before) for name, first in same.items()}
        else:
            ties = ties_of(like)
        known, found = params.keys() | ties.keys() | {*ties.values()}, dict[str, dict[str, str]]()
        for name in self._tensors if optim is not None else ():
            path, _, word = name.removeprefix(state).rpartition(".")
            if name.startswith(state) and path in known:
                found.setdefault(word, {})[path] = name
        moments = {name for own in found.values() for name in own.values()}
        params = {path: name for path, name in params.items() if name not in moments}
        params, self._ties = untied(params, ties)
        self.params = {path: params[path] for path in pytree.named_leaves(dict.fromkeys(params, 0))[0]}
        self.moments = moments_of = dict[str, dict[str, str]]()
        for word, own in found.items():
            moments_of[word], also = untied(own, ties)
            self._ties += also
        self._ties = [tie for tie in self._ties if same.get(tie.second) != tie.first]
        self._state, self._model = state, before

    def alone(self) -> None:
        """Refuses to make a tree of the names alone where not all of them are surely those of params."""
        for path, name in self.params.items():
            if (dtype := self.form(name)[1]) not in _FLOATS:
                raise ValueError(
                    f"{self.place}: tensor {name!r} is of {dtype}, expected elements of a floating dtype. Give like= "
                    "without it, and lenient=True."
                )
            _, state, rest = path.rpartition("state.")
            whose, _, word = rest.rpartition(".")
            if state and whose in self.params and word in WORDS.values():
                raise ValueError(
                    f"{self.place}: tensor {name!r} may be a moment of another leaf, expected names of params after "
                    f"{self._model!r}. Say the prefix of the moments with optim=, or the params with like=."
                )

    def need_ties(self, pattern: str, axis: Axis) -> None:
        ties = [tie for tie in self._ties if matches(pattern, tie.path)]
        need_same_values(self.place, ties, self.form, self._elements, axis)

    def check(self, number: int, count: int) -> None:
        if self._reader.read_checksum() != self._reader.checksum:
            raise DamagedCheckpoint(f"{self.place}: was saved over while it was read. Load it again once it is whole.")

    def structure(self) -> pytree.Spec:
        self.alone()
        return super().structure()

    def lacks(self) -> str:
        return (
            f"got no tensors of an optimizer: no name begins with {self._state!r}. Give their prefix as optim=, or say "
            "optim=None to begin the moments anew."
        )

    def count(self, paths: Sequence[str]) -> int:
        self._counts = counts = {
            path: self._update(name) for path, name in self.moments.get("step", {}).items() if path in {*paths}
        }
        self._uncounted = next((path for path in paths if path not in counts), None)
        self._count = one_count(self.place, counts, 0, "optim=None")
        return self._count

    def _update(self, name: str) -> int:
        """One leaf's number of updates."""
        numel = self._tensors[name].size.numel()
        value = self._elements(name, 0, 1).item() if numel == 1 else f"{numel} elements"
        if not (isinstance(value, (int, float)) and value >= 0 and float(value).is_integer()):
            raise ValueError(
                f"{self.place}: tensor {name!r} of {self.form(name)[1]} has {value}, expected a number of updates. Say "
                "optim=None to begin the moments anew."
            )
        return int(value)

    def value(self, name: str) -> object:
        if name.rpartition(".")[2] != "count":
            return None
        if self._uncounted is not None and (self._counts or "exp_avg_sq" in self.moments):  # others count nothing
            raise ValueError(
                f"{self.place}: got no tensor {self._state}{self._uncounted}.step, the number of updates of this "
                f"leaf's moments. The optimizer of the step needs it. {_TIED}Otherwise say optim=None to begin the "
                "moments anew."
            )
        return self._count

    def form(self, tensor: str) -> tuple[tuple[int, ...], torch.dtype]:
        return tuple(self._tensors[tensor].size), self._tensors[tensor].properties.dtype

    def stored(self, path: str, tensor: str) -> Format:
        (shape, dtype), (expected, _) = self.form(tensor), self.form(self.params[path])
        if dtype not in _FLOATS:
            raise ValueError(
                f"{self.place}: tensor {tensor!r} is of {dtype}, expected a floating dtype. Leave the leaf out by "
                "pattern=."
            )
        if shape != expected:
            raise ValueError(
                f"{self.place}: tensor {tensor!r} has shape {shape}, expected {expected}, that of leaf {path!r}. Say "
                "optim=None to begin the moments anew."
            )
        return Plain(dtype)

    def fill(self, tensor: str, start: int, stop: int, out: torch.Tensor) -> None:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
        from torch.distributed.checkpoint.planner import LoadPlan
        from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

        from fzero.compat.planners import Load

        saved = self._tensors[tensor]
        offsets, sizes, row = [0] * len(saved.size), list(saved.size), saved.size[1:].numel()
        if sizes:  # the rows that the elements lie in
            offsets[0], sizes[0] = start // row, -(-stop // row) - start // row
        rows, met = (torch.zeros(sizes, dtype=dtype, device="cpu") for dtype in (out.dtype, torch.bool))
        box = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        items = create_read_items_for_chunk_list(tensor, saved, [box])
        for item in items:
            Load(met).resolve_tensor(item).fill_(True)
        if not met.all():
            raise DamagedCheckpoint(f"{self.place}: tensor {tensor!r} lacks elements between {start} and {stop}.")
        try:
            self._reader.read_data(LoadPlan(items), Load(rows)).wait()
        except Exception as error:
            raise DamagedCheckpoint(f"{self.place}: tensor {tensor!r} cannot be read: {error!r}.") from error
        out.copy_(rows.view(-1)[start % row :][: stop - start])

    def _elements(self, name: str, start: int, stop: int) -> torch.Tensor:
        out = torch.empty(stop - start, dtype=self.form(name)[1], device="cpu")
        self.fill(name, start, stop, out)
        return out


def _opened(folder: str) -> tuple[Reader, dict[str, TensorStorageMetadata], dict[str, str]]:
    """A reader of a checkpoint, its tensors by name, and the names of bytes that an earlier name has, too -> that."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from fzero.compat.planners import Reader

    reader = Reader(folder)
    try:
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, True)
        found = {
            name: own for name, own in metadata.state_dict_metadata.items() if isinstance(own, TensorStorageMetadata)
        }
        for own in found.values():  # of damaged metadata parts may be missing
            _ = [(chunk.offsets, chunk.sizes) for chunk in own.chunks], own.size.numel(), own.properties.dtype
        places = dict[str, set[object]]()
        for index, own in metadata.storage_data.items():
            places.setdefault(index.fqn, set()).add((index.offset, own.relative_path, own.offset))
        firsts, same = dict[frozenset[object], str](), dict[str, str]()
        for name in found:
            if name in places and (first := firsts.setdefault(frozenset(places[name]), name)) != name:
                same[name] = first
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{folder}: got no checkpoint of torch.distributed.checkpoint, expected a folder with a .metadata."
        ) from None
    except Exception as error:
        raise DamagedCheckpoint(f"{folder}/.metadata cannot be read: {error!r}.") from error
    return reader, found, same
