"""fz.load_safetensors and fz.save_safetensors: models in their own names, streamed into shards and out of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from fzero.base import private, pytree
from fzero.base.arguments import need_int, need_path, wrong
from fzero.base.patterns import matches
from fzero.checkpoint.contents import copies_of, need_same
from fzero.checkpoint.files import folder_of
from fzero.checkpoint.fill import Everyone, Wanted, agreed, loaded
from fzero.checkpoint.manifest import CODES, DTYPES
from fzero.comm.axis import Axis
from fzero.compat.export import Export
from fzero.compat.opened import Entry, Opened
from fzero.compat.trees import (
    Names,
    Others,
    Tie,
    by_path,
    need_names,
    need_same_values,
    paths_of,
    renamed,
    ties_of,
    untied,
)
from fzero.formats.formats import Format
from fzero.state.checks import constants
from fzero.state.sharded import Sharded
from fzero.state.train_state import TrainState
from fzero.table.spec import Spec, need_step


def load_safetensors(
    step: Spec,
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    like: object = None,
    names: Names | None = None,
    pattern: str = "*",
    lossy: bool = False,
    lenient: bool = False,
    seed: int = 0,
) -> TrainState:
    """Begins a state from safetensors files, such as those of a Hugging Face model.

    All ranks call it, and each reads its own slices. No rank ever holds the model.

    Args:
        step: of any sharding and policy.
        files: one file, several, a folder with one model as Hugging Face has it, or its index. A folder has
            `model.safetensors`, or an index that names several.
        like: a tree of params as for `init`, such as that of `fz.functional(module)`. Its paths are the names. Its
            tensors may be on the meta device. A tied param may have any of its names in the files. By default the
            params are `{name: tensor}`.
        names: a function of a leaf's path in `like` that gives its name in the files.
        pattern: which leaves are read (fnmatch over dotted paths). The others come from `like`.
        lossy: allow rounding to what the step stores. By default that is an error.
        lenient: a leaf of `like` that has another shape in the files, or is missing, keeps its value, with a warning.
            What only the files have (buffers, heads) is left out.
        seed: of the state, as for `step.init`.

    Returns:
        The state, with moments of zero.

    Raises:
        FileNotFoundError: a file is missing.
        DamagedCheckpoint: a file is cut, is no safetensors file, changed meanwhile, or lacks what its index says. It is
            raised on every rank.
        ValueError: leaves, shapes or dtypes do not fit, a value would be rounded or lost, the ranks find different
            files, or two names of a tied param have different values.

    Example:
        >>> import tempfile
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fz.save_safetensors(folder, step.init({"w": torch.ones(3)}))
        ...     fz.gather(fz.load_safetensors(step, folder).params)["w"]
        tensor([1., 1., 1.])
    """
    who = "fz.load_safetensors"
    need_step(step, "load_safetensors")

    def paths() -> list[str]:
        several = [files] if isinstance(files, (str, os.PathLike)) else files
        if not isinstance(several, Sequence) or not several:
            raise wrong(who, "files", files, "a path, or a list of paths")
        return [os.path.abspath(need_path(path, who, "files", "the path of a file or a folder")) for path in several]

    def asked() -> Wanted:
        first, *rest = paths()
        need_names(names, like, who)
        place = first + (f" and {len(rest)} more" if rest else "")
        return Wanted(who, place, like, pattern, lossy, lenient, seed)

    return loaded(step, asked, lambda wanted, axis: _Files(wanted.place, paths(), like, names, axis), lambda: True)[0]


class _Files(Others[Entry]):
    """Safetensors files as the origin of params."""

    call, anew, what = "fz.load_safetensors(step, files, lossy=True)", "step.init(params)", "The files"
    kinds: Mapping[str, str] = MappingProxyType({"params": "params"})

    def __init__(self, place: str, paths: Sequence[str], like: object, names: Names | None, axis: Axis) -> None:
        self.place, self._opened, self._ties = place, Opened(paths), list[Tie]()
        try:
            self._opened.open()
            self._named = self._opened.entries
            self.said = self._opened.said() if Everyone(axis).count > 1 else ""
            self.params = {path: self._named[name] for path, name in self._paths(like, names).items()}
        except BaseException:
            self.close()
            raise

    def _paths(self, like: object, names: Names | None) -> Mapping[str, str]:
        """The names of what there is, by the paths that they stand for."""
        if like is not None:
            asked, ties = paths_of("fz.load_safetensors", like, names), ties_of(like)
            for other in ties:
                with contextlib.suppress(ValueError, TypeError):  # a name that these names do not know
                    asked.setdefault(other if names is None else renamed(names, other), other)
            out, self._ties = untied(by_path(asked, self._named), ties)
            return out
        strange = next((own for own in self._named.values() if not _floats(own)), None)
        if strange is not None:
            raise ValueError(
                f"{strange.file}: tensor {strange.name!r} is stored as {strange.dtype} and has shape "
                f"{strange.shape}; expected elements of a floating dtype. Give like= without it, and lenient=True."
            )
        return {path: path for path in pytree.named_leaves(dict.fromkeys(self._named, 0))[0]}

    def need_ties(self, pattern: str, axis: Axis) -> None:
        def read(name: str, start: int, stop: int) -> torch.Tensor:
            out = torch.empty(stop - start, dtype=DTYPES[self._named[name].dtype], device="cpu")
            self.fill(self._named[name], start, stop, out)
            return out

        ties = [tie for tie in self._ties if matches(pattern, tie.path) and _floats(self._named[tie.first])]
        form = lambda name: (self._named[name].shape, self._named[name].dtype)
        need_same_values(self.place, ties, form, read, axis)

    def check(self, number: int, count: int) -> None:
        self._opened.check()

    def close(self) -> None:
        self._opened.close()

    def form(self, tensor: Entry) -> tuple[tuple[int, ...], torch.dtype]:
        return tensor.shape, DTYPES.get(tensor.dtype, torch.uint8)

    def stored(self, path: str, tensor: Entry) -> Format:
        if not _floats(tensor):
            raise ValueError(
                f"{tensor.file}: tensor {tensor.name!r} is stored as {tensor.dtype}, expected F64, F32, F16 or BF16. "
                "Convert the file, or leave the leaf out by pattern=."
            )
        return super().stored(path, tensor)

    def fill(self, tensor: Entry, start: int, stop: int, out: torch.Tensor) -> None:
        self._opened.read_into(tensor, out, start * out.itemsize)


def _floats(own: Entry) -> bool:
    dtype = DTYPES.get(own.dtype)
    return dtype is not None and dtype.is_floating_point and own.nbytes > 0


def save_safetensors(
    path: str | os.PathLike[str],
    state: TrainState | Sharded,
    *,
    names: Names | None = None,
    also: Mapping[str, torch.Tensor] | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a model as safetensors files, in the model's own names.

    All ranks call it with the same path. The first rank writes what all send it unit by unit, as by `fz.stream`: no
    rank ever holds the model, and the others need not reach the folder. `AutoModel.from_pretrained` reads the folder if
    the model's `config.json` is there too.

    Args:
        path: a folder, for `model.safetensors` or several files with an index; or one file `*.safetensors`. One file
            that is there stays whole until the new one is whole. Several files need a folder without a model.
        state: its params are written. Or a tree like them, such as `state.extra["ema"]`.
        names: a function of a leaf's path that gives its name in the files. By default the name is the path.
        also: more tensors by name, such as a module's persistent buffers. Those of rank 0 are written.
        dtype: of the params in the files. By default that of `fz.gather`.
        shard_bytes: largest size of a file in a folder, in bytes. Only a single larger tensor exceeds it.

    Raises:
        ValueError: two tensors have one name, the format cannot have a name, the ranks differ in their
            arguments, or the path is a folder for a model of peft (its `save_pretrained` writes what others read).
        TypeError: the format does not have the dtype.
        OSError: the disk is full, the folder is not writable, or it has a model of several files (FileExistsError). It
            is raised on every rank.

    Example:
        >>> import tempfile
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fz.save_safetensors(folder, step.init({"w": torch.ones(3)}), dtype=torch.bfloat16)
        ...     sorted(os.listdir(folder))
        ['model.safetensors']
    """
    who = "fz.save_safetensors"
    if not isinstance(state, (TrainState, Sharded)):
        raise wrong(who, "state", state, "what step.init or a step returned, or a tree such as state.params")
    (state,) = constants(who, state=state)
    tree = state.params if isinstance(state, TrainState) else state
    axis = tree.axis

    def asked() -> tuple[str, int]:
        if names is not None and not callable(names):
            raise wrong(who, "names", names, "a function of a path")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype in CODES):
            raise wrong(who, "dtype", dtype, "torch.float64, float32, float16 or bfloat16")
        if also is not None and not (isinstance(also, Mapping) and all(map(_is_dense, also.items()))):
            raise wrong(who, "also", also, "a dict of tensors by name, dense and with values")
        return folder_of(path, "save_safetensors"), need_int(shard_bytes, who, "shard_bytes", "a number of bytes", 1)

    target, most = agreed(axis, asked)
    with private.of_normal_tensors(), private.below_transforms():
        export = agreed(axis, lambda: Export(target, tree, names, also or {}, dtype, most))
        of = f"update {state.step}, seed {state.seed}" if isinstance(state, TrainState) else f"a tree of {tree.kind}"
        said = "\n".join([target, f"component {axis.who}", of, *map(str, export.tensors), str(most)])
        axis.check_same(said, "The files", f"Call {who} on every rank with the same arguments.")
        need_same(axis, agreed(axis, lambda: copies_of({"values": tree})), "save_safetensors")
        try:
            for stage in (export.begin, export.write, export.end):
                agreed(axis, stage)
        finally:
            export.leave()


def _is_dense(item: tuple[object, object]) -> bool:
    name, x = item
    return isinstance(name, str) and isinstance(x, torch.Tensor) and x.layout == torch.strided and not x.is_meta
