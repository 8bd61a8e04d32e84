"""fz.load_safetensors and fz.save_safetensors: models in their own names, streamed into shards and out of them."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import uuid
from collections.abc import Mapping, Sequence

import torch

from fzero.base import private, pytree
from fzero.base.arguments import need_int, need_path, wrong
from fzero.base.interrupts import as_found
from fzero.checkpoint import files
from fzero.checkpoint.choice import Wanted, choose
from fzero.checkpoint.contents import share
from fzero.checkpoint.files import folder_of
from fzero.checkpoint.fill import agreed, filled
from fzero.checkpoint.manifest import CODES, DTYPES
from fzero.checkpoint.snapshot import bytes_of
from fzero.checkpoint.staging import on_host
from fzero.compat.headers import INDEX, SINGLE, Entry, entries_of, files_of, planned, read_into
from fzero.compat.names import Names, paths_of, renamed
from fzero.formats.formats import ALIGN, Format, Plain
from fzero.state.checks import constants
from fzero.state.origin import Origin, Source
from fzero.state.sharded import Sharded
from fzero.state.train_state import TrainState
from fzero.table.rows import Leaf
from fzero.table.spec import Spec, need_step

_AT_ONCE = 1 << 22  # elements that are decoded at a time
_MODEL = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_UNFINISHED = re.compile(r"\..*\.safetensors\.[0-9a-f]{12}")


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
    """A state that begins with the values of safetensors files: each rank reads its slices, none holds the model.

    Args:
        step: of any sharding and policy.
        files: one, several, a folder with one model (as Hugging Face has them), or its index.
        like: a tree of params as `init` takes it, such as that of `fz.functional(module)`, whose names are the files'.
            Its tensors may be on the meta device. By default the params are `{name: tensor}`.
        names: a leaf's path -> its name in the files, where they differ.
        pattern: of the leaves that are read; the others are of `like`.
        lossy: whether values may be rounded to what the step stores; otherwise a leaf that would be is an error.
        lenient: whether a leaf of `like` that the files have in another shape, or not at all, keeps its value, with a
            warning that names them; and what only the files have (buffers, heads) is left out.
        seed: of the state, as of `step.init`.

    Raises:
        FileNotFoundError: a file is not there.
        DamagedCheckpoint: a file is cut, or no safetensors file. On every rank.
        ValueError: leaves, shapes or dtypes do not fit, or something would be lost.

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
    several = [files] if isinstance(files, (str, os.PathLike)) else files
    if not isinstance(several, Sequence) or not several:
        raise wrong(who, "files", files, "a path, or a list of paths")
    paths = [os.path.abspath(need_path(path, who, "files", "the path of a file or a folder")) for path in several]
    seed = need_int(seed, who, "seed")
    if names is not None and (like is None or not callable(names)):
        raise wrong(who, "names", names, "a function of a path, beside a like= whose paths it takes")
    place = paths[0] + (f" and {len(paths) - 1} more" if paths[1:] else "")
    wanted = Wanted(who, place, like, pattern, lossy, lenient)
    wanted.check()
    with as_found(), private.of_normal_tensors(), private.below_transforms():
        axis = step.axis().of_component(step.name)
        listed = lambda: entries_of([own for path in paths for own in files_of(path)])
        found = agreed(axis, listed, place)
        said = [(os.path.basename(own.file), *own._replace(file="")) for own in found.values()]
        axis.check_same(f"{said} names, seed {seed}", "The files", "Give every rank the same ones.")
        origin = _Files(place, found)
        choice = agreed(axis, lambda: choose(wanted, origin.leaves(like, names), origin.structure, step, axis), place)
        state = filled(origin, choice, wanted, step, axis, seed, None)
        if axis.data_rank == 0:
            choice.warn(wanted, 2)
        return state


class _Files(Origin):
    """Safetensors files as the origin of params."""

    call, anew = "fz.load_safetensors(step, files, lossy=True)", "step.init(params)"
    device = torch.device("cpu")
    kinds: Mapping[str, str] = {"params": "params"}
    extras = ()

    def __init__(self, place: str, found: dict[str, Entry]) -> None:
        self.place, self.found = place, found

    def leaves(self, like: object, names: Names | None) -> list[Leaf]:
        """What there is, by the paths that the names stand for."""
        if names is not None:
            paths = paths_of("fz.load_safetensors", like, names)
            self.found = {paths.get(name, name): own for name, own in self.found.items()}
        if like is None:
            self.found = {path: self.found[path] for path in pytree.named_leaves(dict.fromkeys(self.found, 0))[0]}
            strange = next((own for own in self.found.values() if not _floats(own)), None)
            if strange is not None:
                raise ValueError(
                    f"{strange.file}: tensor {strange.name!r} is stored as {strange.dtype} and has shape "
                    f"{strange.shape}; expected elements of a floating dtype. Give like= without it, and lenient=True."
                )
        return [(path, own.shape, DTYPES.get(own.dtype, torch.uint8)) for path, own in self.found.items()]

    def structure(self) -> pytree.Spec:
        return pytree.flatten(dict.fromkeys(self.found, 0))[1]

    def tree(self, name: str) -> Source:
        return self

    def format(self, path: str) -> Format | None:
        own = self.found.get(path)
        if own is not None and not _floats(own):
            raise ValueError(
                f"{own.file}: tensor {own.name!r} is stored as {own.dtype}, expected F64, F32, F16 or BF16. Convert "
                "the file, or leave the leaf out by pattern=."
            )
        return Plain(DTYPES[own.dtype]) if own is not None else None

    def read(self, path: str, start: int, stop: int, into: Sequence[torch.Tensor] | None) -> Sequence[torch.Tensor]:
        own = self.found[path]
        dtype = DTYPES[own.dtype]
        out = into or [torch.zeros(-(-(stop - start) // 64) * 64, dtype=dtype, device="cpu")]
        read_into(own.file, out[0][: stop - start], own.offset + start * dtype.itemsize, own.offset + own.nbytes)
        return out


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
    """Writes a model as safetensors files in its own names: each rank its slices, in place, so that none holds it.

    Every rank calls it, with the same path, in a folder that all ranks reach. Others' loaders find the files:
    `AutoModel.from_pretrained` needs only the model's `config.json` beside them.

    Args:
        path: a folder, for `model.safetensors` or several files with an index; or one file `*.safetensors`. What is
            there already of these names goes once the new files are written.
        state: whose params are written; or a tree like them, such as `state.extra["ema"]`.
        names: a leaf's path -> its name in the files; by default the path.
        also: tensors that are no params, by their names in the files (a module's persistent buffers), of rank 0.
        dtype: of the params in the files; by default that of `fz.gather`.
        shard_bytes: how long a file in a folder grows, unless one tensor alone is longer.

    Raises:
        ValueError: two tensors of one name, or the ranks differ in their arguments.
        OSError: the disk is full, or the folder cannot be written to: on every rank.

    Example:
        >>> import tempfile
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fz.save_safetensors(folder, step.init({"w": torch.ones(3)}), dtype=torch.bfloat16)
        ...     sorted(os.listdir(folder))
        ['model.safetensors']
    """
    who = "fz.save_safetensors"
    target = folder_of(path, "save_safetensors")
    if not isinstance(state, (TrainState, Sharded)):
        raise wrong(who, "state", state, "what step.init or a step returned, or a tree such as state.params")
    if names is not None and not callable(names):
        raise wrong(who, "names", names, "a function of a path")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype in CODES):
        raise wrong(who, "dtype", dtype, "torch.float64, float32, float16 or bfloat16")
    if also is not None and not (isinstance(also, Mapping) and all(map(_is_writable, also.items()))):
        raise wrong(who, "also", also, "a dict of tensors by name, real and dense")
    most = need_int(shard_bytes, who, "shard_bytes", "a number of bytes", least=1)
    (state,) = constants(who, state=state)
    tree = state.params if isinstance(state, TrainState) else state
    with as_found(), private.of_normal_tensors(), private.below_transforms():
        axis = tree.axis
        export = agreed(axis, lambda: _Export(target, tree, names, also or {}, dtype, most), target)
        said = "\n".join([target, *map(str, export.tensors), str(most)])
        axis.check_same(said, "The files", f"Call {who} on every rank with the same arguments.")
        export.token = axis.exchange(uuid.uuid4().hex[:12], "save_safetensors")[0]
        try:
            agreed(axis, export.begin, target)
            agreed(axis, export.write, target)
            agreed(axis, export.end, target)
        finally:
            export.leave()


def _is_writable(item: tuple[object, object]) -> bool:
    name, x = item
    return isinstance(name, str) and isinstance(x, torch.Tensor) and x.layout == torch.strided and x.dtype in CODES


class _Export:
    """One call of `save_safetensors` on one rank.

    Attributes:
        tensors: name, dtype and shape of each tensor that is written.
        token: in the names of files until they are whole.
    """

    def __init__(
        self,
        target: str,
        tree: Sharded,
        names: Names | None,
        also: Mapping[str, torch.Tensor],
        dtype: torch.dtype | None,
        most: int,
    ) -> None:
        self.folder, single = os.path.split(target) if target.endswith(".safetensors") else (target, None)
        self.tree, self.also, self.token = tree, dict(also), ""
        self.names = {path: path if names is None else renamed(names, path) for path in tree}
        own = {path: dtype or tree.format(tree.layout.key_of[path][0]).dtype for path in tree}
        rows = [row for row in tree.layout.rows if row.path in own]
        self.tensors = [(self.names[row.path], own[row.path], row.shape) for row in rows]
        self.tensors += [(name, x.dtype, tuple(x.shape)) for name, x in also.items()]
        counts = collections.Counter(name for name, _, _ in self.tensors)
        if twice := next((name for name, count in counts.items() if count > 1), None):
            raise ValueError(
                f"fz.save_safetensors: got two tensors of the name {twice!r}, also counted; expected one of each."
            )
        self.files, self.index = planned(self.folder, single, self.tensors, most)
        self.places = {own.name: own for file in self.files for own in file.entries}
        self.leads = tree.axis.data_rank == 0
        self._open, self._locked = dict[str, int](), contextlib.ExitStack()

    def begin(self) -> None:
        """The first rank makes the files, as long as they will be."""
        if not self.leads:
            return
        files.make_folder(self.folder)
        self._locked.enter_context(files.only_writer(self.folder))
        for name in os.listdir(self.folder):
            if _UNFINISHED.fullmatch(name):  # of a run that was killed: nobody else writes here
                files.remove(os.path.join(self.folder, name))
        for file in self.files:
            descriptor = self._open[file.name] = files.create(self._unfinished(file.name))
            os.posix_fallocate(descriptor, 0, file.nbytes)
            files.write(descriptor, memoryview(file.header), 0)

    def write(self) -> None:
        """Every rank writes its slices."""
        tree = self.tree
        for key in tree.groups:
            stored = tree.stored(key)
            base, low, high = share(tree, key)
            for slot in tree.layout.groups[key].slots:
                place = self.places[self.names[slot.path]]
                dtype, end = DTYPES[place.dtype], min(high, slot.offset + slot.numel)
                for start in range(max(low, slot.offset), end, _AT_ONCE):
                    stop = min(start + _AT_ONCE, end)
                    values = stored.cut(start - base, -(-stop // ALIGN) * ALIGN - base).to(stored.dtype)[: stop - start]
                    values = values if tree.scale == 1.0 else values / tree.scale
                    self._put(place, values.to(dtype), (start - slot.offset) * dtype.itemsize)
            del stored
        for name, x in self.also.items() if self.leads else ():
            self._put(self.places[name], x.reshape(-1), 0)
        for descriptor in self._open.values():
            files.sync(descriptor)

    def _put(self, place: Entry, values: torch.Tensor, offset: int) -> None:
        path = self._unfinished(os.path.basename(place.file))
        name = os.path.basename(place.file)
        if name not in self._open:
            self._open[name] = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            files.write(self._open[name], bytes_of(on_host(values)), place.offset + offset)
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from None

    def end(self) -> None:
        """The first rank gives the files their names: at no time do those of two models look like one."""
        if not self.leads:
            return
        names = [file.name for file in self.files]
        stale = {*os.listdir(self.folder)} if SINGLE in names or self.index else set[str]()
        stale = {name for name in stale if name == INDEX or _MODEL.fullmatch(name)} - ({*names} - {INDEX})
        if self.index is not None:
            for name in (SINGLE, INDEX):
                files.remove(os.path.join(self.folder, name))
            files.sync_folder(self.folder)
        for name in names:
            files.rename(self._unfinished(name), os.path.join(self.folder, name))
        files.sync_folder(self.folder)
        if self.index is not None:
            files.replace_file(self.folder, INDEX, self.index)
        for name in stale - ({INDEX} if self.index is not None else set()):
            files.remove(os.path.join(self.folder, name))

    def leave(self) -> None:
        """Closes the files; those that have no name yet go."""
        for descriptor in self._open.values():
            os.close(descriptor)
        if self.leads:
            for file in self.files:
                files.remove(self._unfinished(file.name))
            self._locked.close()

    def _unfinished(self, name: str) -> str:
        return os.path.join(self.folder, f".{name}.{self.token}")
