"""fz.load and fz.load_extra: a checkpoint as a state of any step, over any ranks."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

import torch

from fzero.base import private, pytree
from fzero.base.arguments import need_bool, need_str
from fzero.base.interrupts import as_found
from fzero.base.patterns import matches, unmatched
from fzero.checkpoint.contents import Item, entries, kind_of, refilled
from fzero.checkpoint.files import folder_of
from fzero.checkpoint.manifest import DTYPES, DamagedCheckpoint, Manifest, read_manifest
from fzero.checkpoint.read import Reader
from fzero.checkpoint.structure import Unnamed, built
from fzero.comm.axis import Axis
from fzero.formats.formats import decode, encode, zeros
from fzero.state.init import as_held, init_state, leaf_specs
from fzero.state.moments import init_extras, init_moments
from fzero.state.placing import settle
from fzero.state.sharded import Sharded, is_sharded, part_names
from fzero.state.train_state import TrainState
from fzero.stores.away import Buffer, tensor_of
from fzero.table.layout import Key, Layout
from fzero.table.module_params import frozen_leaves
from fzero.table.rows import Leaf
from fzero.table.spec import Spec, need_step

T = TypeVar("T")
_KINDS = (DamagedCheckpoint, FileNotFoundError, PermissionError, ValueError, TypeError, OSError)


def load(
    path: str | os.PathLike[str],
    step: Spec,
    *,
    like: object = None,
    pattern: str = "*",
    params_only: bool = False,
    lossy: bool = False,
    lenient: bool = False,
) -> TrainState:
    """The state of a checkpoint as a state of `step`, to the bit where nothing is stored more narrowly.

    The step may have another sharding, mesh, number of ranks, policy or units than the one that was saved. Every rank
    calls it; each reads what it needs, after the files were held against their checksums, each by one rank.

    Args:
        path: of the folder that `fz.save` has written.
        step: with the same optimizer (any, with `params_only`) and transforms that keep state.
        like: a tree of params as `init` takes it. Its containers are the state's; its values are those of leaves that
            are not read.
        pattern: of the leaves that are read, as those of transforms; the others are of `like`, their moments zero.
        params_only: whether moments, `state.extra`, kept grads and the number of updates begin anew.
        lossy: whether values may be rounded to what the step stores; otherwise a leaf that would be is an error.
        lenient: whether a leaf of `like` that the checkpoint has in another shape, or not at all, keeps the value that
            it has there, with a warning that names them; and what only the checkpoint has is left out.

    Raises:
        FileNotFoundError: there is no checkpoint.
        DamagedCheckpoint: a file is missing, cut or changed: which one. On every rank.
        ValueError: the leaves, shapes or the optimizer are others, or something would be lost.

    Example:
        >>> import tempfile
        >>> loss = lambda p, x: (p["w"] * x).sum()
        >>> state = fz.train_step(loss, fz.adamw(0.1)).init({"w": torch.ones(3)})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fz.save(folder, state)
        ...     small = fz.load(folder, fz.train_step(loss, fz.adamw(0.1), fz.Policy.exact(torch.float32)))
        >>> fz.gather(small.params)["w"]
        tensor([1., 1., 1.])
    """
    folder = folder_of(path, "load")
    need_step(step, "load")
    need_str(pattern, "fz.load", "pattern", "a pattern over dotted paths")
    for argument, value in (("params_only", params_only), ("lossy", lossy), ("lenient", lenient)):
        need_bool(value, "fz.load", argument)
    if like is None and (pattern != "*" or lenient):
        raise ValueError(
            f"fz.load: got pattern={pattern!r}, lenient={lenient} and no like=, expected a tree of params there, whose "
            "values the leaves have that are not read."
        )
    with as_found(), private.of_normal_tensors(), private.below_transforms():
        axis = step.axis().of_component(step.name)
        manifest = _agreed(axis, lambda: read_manifest(folder), folder)
        axis.check_same(f"{folder} {manifest.token}", "The checkpoints", "Give every rank the same path.")
        loading = _Loading(folder, manifest, step, axis, lossy)
        _agreed(axis, lambda: loading.choose(like, pattern, lenient), folder)
        with ThreadPoolExecutor(1, "fzero-load") as beside:  # files are hashed while they are read
            verified = beside.submit(loading.reader.verify, axis.data_rank, axis.ranks)
            own = init_state(step, like, manifest.seed, sync=False) if loading.partial else None
            params = loading.held(_agreed(axis, lambda: loading.params(own), folder))
            moments, extra = init_moments(step, params), init_extras(step, params)
            grads, count = None, 0
            if not params_only:
                loading.check_extras()
                moments, extra, grads = _agreed(axis, lambda: loading.rest(moments, extra, params), folder)
                count = manifest.step
            _agreed(axis, verified.result, folder)
        return TrainState(params, grads, moments, extra, count, manifest.seed, step.signature)


def load_extra(path: str | os.PathLike[str]) -> Any:
    """What `fz.save` was given as `extra`; None where it was given nothing.

    Raises:
        FileNotFoundError: there is no checkpoint.
        DamagedCheckpoint: its manifest is damaged.

    Example:
        >>> import tempfile
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fz.save(folder, step.init({"w": torch.ones(3)}), extra={"seen": 3})
        ...     fz.load_extra(folder)
        {'seen': 3}
    """
    return read_manifest(folder_of(path, "load_extra")).extra


def _agreed(axis: Axis, job: Callable[[], T], folder: str) -> T:
    """What a job that communicates nothing gives; where it fails on one rank, every rank raises."""
    error, out = None, None
    try:
        out = job()
    except Exception as own:
        error = own
    if axis.ranks > 1:
        said = json.dumps([type(error).__name__, str(error)] if error else [])
        for rank, text in enumerate(axis.exchange(said, "load")):
            if error is None and (theirs := json.loads(text)):
                kind = next((kind for kind in _KINDS if kind.__name__ == theirs[0]), RuntimeError)
                error = kind(f"rank {rank}: {theirs[1]}")
    try:
        if error is not None:
            raise error
    finally:
        del error  # which holds this frame
    return cast(T, out)


class _Loading:
    """One call of `load`: what is read, and for which leaves."""

    def __init__(self, folder: str, manifest: Manifest, step: Spec, axis: Axis, lossy: bool) -> None:
        self.folder, self.manifest, self.step, self.axis, self.lossy = folder, manifest, step, axis, lossy
        self.reader = Reader(folder, manifest)
        self.taken: dict[str, int] = {}  # path -> the number of the checkpoint's leaf
        self.device = torch.get_default_device()
        self.layout: Layout
        self.structure: pytree.Spec

    def choose(self, like: object, pattern: str, lenient: bool) -> None:
        """Decides on the leaves and their places."""
        saved = {leaf.path: (number, leaf.shape) for number, leaf in enumerate(self.manifest.leaves)}
        if like is None:
            try:
                self.structure = built(self.manifest.structure)
            except Unnamed as kind:
                raise ValueError(
                    f"{self.folder}: its params are in a container of kind {kind}, which no checkpoint can make. Say "
                    "fz.load(path, step, like=params), with params of that kind as step.init takes them."
                ) from None
            specs = [(leaf.path, leaf.shape, DTYPES[leaf.dtype]) for leaf in self.manifest.leaves]
        else:
            try:
                specs, leaves, self.structure = leaf_specs(like)
            except (TypeError, ValueError) as error:
                raise type(error)(f"fz.load, like: {error}") from None
            self.device = next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), self.device)
        if lost := unmatched(pattern, [path for path, _, _ in specs]):
            raise ValueError(
                f"fz.load: got pattern={pattern!r}, of which {lost[0]!r} matches no leaf; expected some of "
                f"{_some(specs)}."
            )
        other = []
        for path, shape, _ in specs:
            number, theirs = saved.get(path, (None, None))
            if not matches(pattern, path):
                continue
            if number is not None and theirs == tuple(shape):
                self.taken[path] = number
            else:
                has = f"has it with shape {theirs}" if theirs is not None else "has none of that path"
                other.append(f"leaf {path!r}: the checkpoint {has}, expected shape {tuple(shape)}")
        given = {path for path, _, _ in specs}
        other += [
            f"leaf {path!r} of the checkpoint, of shape {shape}, is not in like"
            for path, (_, shape) in saved.items()
            if path not in given and matches(pattern, path)
        ]
        if other and not lenient:
            more = f" (and {len(other) - 1} more)" if other[1:] else ""
            raise ValueError(
                f"fz.load: got a like of other leaves than {self.folder}, expected the same: {other[0]}{more}. Give a "
                "tree of the params that were saved, or say lenient=True, and those that differ keep their values."
            )
        if other and self.axis.data_rank == 0:
            warnings.warn(f"fz.load({self.folder!r}): " + "; ".join(other), stacklevel=4)
        rows = self.step.rows(specs, frozen_leaves(self.structure))
        self.layout = Layout.build(rows, self.axis.size)

    @property
    def partial(self) -> bool:
        """True where leaves keep values that are not the checkpoint's."""
        return len(self.taken) < len(self.layout.rows)

    def params(self, own: TrainState | None) -> Sharded:
        """This rank's slices of all params; those that are held whole on the device still."""
        empty = Sharded(self.layout, self.axis, self.structure, {}, kind="params")
        buffers: dict[object, Buffer] = {}
        for key, group in self.layout.groups.items():
            base = own.params.stored(key).parts if own is not None else ()
            out = [part.cpu().clone() for part in base] or zeros(empty.format(key), self.layout.shard_numel(key), "cpu")
            parts: list[Buffer] = list(self._filled(empty, key, 0, out))
            if not group.row.held:
                parts = [settle(empty, key, "params", tensor_of(part)) for part in parts]
            buffers.update(zip(part_names(empty.format(key), key), parts, strict=True))
        return empty.replaced(buffers=buffers)

    def held(self, params: Sharded) -> Sharded:
        """The params with the full buffers that every rank holds in ZeRO-1 and 2."""
        buffers, held = dict(params.entries), dict[Key, Buffer]()
        for key, group in self.layout.groups.items():
            if not group.row.held:
                continue
            names = params.names(key)
            parts = [tensor_of(buffers.pop(name)) for name in names]
            full = [self.axis.gather(part, f"load of {key}") for part in parts]
            held[key] = settle(params, key, "params", as_held(group.row.policy, full))
            if group.row.beside:
                buffers.update(
                    (name, settle(params, key, "params", part)) for name, part in zip(names, parts, strict=True)
                )
        return params.replaced(buffers=buffers, held=held)

    def rest(
        self, moments: object, extra: dict[str, object], params: Sharded
    ) -> tuple[object, dict[str, object], Sharded | None]:
        """The moments, entries of `state.extra` and kept grads, in the places of those that begin."""
        saved = [kept.name for kept in self.manifest.items if kept.name.split(".")[0] == "moments"]
        met: list[str] = []
        moments = refilled("moments", moments, lambda item: self._value(item, "moments", met))
        if met != saved:
            raise self._other_optimizer(
                next((name for name in saved if name not in met), saved[0] if saved else "moments")
            )
        kinds = {name: kind for name, kind, _ in self.manifest.extras}
        alike = {name for name, kind, _ in self.step.signature.extras if kinds.get(name) == kind}
        extra = {
            name: refilled(f"extra.{name}", value, lambda item: self._value(item, None, [])) if name in alike else value
            for name, value in extra.items()
        }
        grads, number = None, self.reader.number("grads")
        if number is not None:
            dtypes = {key: self.layout.groups[key].row.policy.reduce for key in self.layout.trainable}
            empty = params.with_buffers(
                {key: torch.empty(0, dtype=dtype, device=self.device) for key, dtype in dtypes.items()}
            )
            empty = empty.scaled(1 / self.manifest.items[number].scale)
            grads = self._tree(empty, number, "grads")
        return moments, extra, grads

    def check_extras(self) -> None:
        """Refuses to drop an entry of `state.extra` without being told."""
        kinds = {name: kind for name, kind, _ in self.step.signature.extras}
        for name, kind, expendable in self.manifest.extras:
            if kinds.get(name) != kind and not expendable and not self.lossy:
                raise ValueError(
                    f"{self.folder}: the checkpoint keeps state.extra[{name!r}] of {kind}, which the step does not. "
                    "Say fz.load(path, step, lossy=True) to drop it, or use a step with the same transforms."
                )

    def _value(self, item: Item, kind: str | None, met: list[str]) -> object:
        """What the checkpoint has of the name of an item, in the item's format."""
        number, value = self.reader.number(item.name), item.value
        saved = self.manifest.items[number] if number is not None else None
        own = kind_of(value)
        if number is None or saved is None or saved.kind != own:
            raise self._other_optimizer(item.name)
        met.append(item.name)
        if is_sharded(value):
            return self._tree(value, number, kind).replaced(scale=saved.scale)
        if isinstance(value, torch.Tensor):
            return self.reader.tensor(number).to(value.device)
        return pytree.Count(saved.value) if own == "count" else saved.value

    def _other_optimizer(self, name: str) -> ValueError:
        return ValueError(
            f"{self.folder}: the checkpoint and the step do not both have state.{name}, or not of one kind: it is of "
            "another optimizer, or of other transforms. Use what it was saved with, or say params_only=True to begin "
            "the moments anew."
        )

    def _tree(self, tree: Sharded, item: int, kind: str | None) -> Sharded:
        """A tree's groups, read; in the memory for a kind of state. What it has on the CPU is written over."""
        buffers: dict[object, Buffer] = {}
        for key in tree.groups:
            whole = all(self._has(slot.path, item) for slot in self.layout.groups[key].slots)
            placed, size = tree.placed(key), self.layout.shard_numel(key)
            if (placed.away and whole) or placed.numel() != size:
                out: Sequence[torch.Tensor] = zeros(tree.format(key), size, "cpu")
            else:  # what the optimizer made of the params may be the params
                out = [part.cpu() for part in placed.stored().parts]
                out = out if tree.kind in ("signed", "nonnegative") else [part.clone() for part in out]
            parts: list[Buffer] = list(self._filled(tree, key, item, out))
            if kind is not None:
                parts = [settle(tree, key, kind, tensor_of(part)) for part in parts]
            buffers.update(zip(tree.names(key), parts, strict=True))
        return tree.over(buffers)

    def _has(self, path: str, item: int) -> bool:
        return path in self.taken and self.reader.format(item, self.taken[path]) is not None

    def _filled(self, tree: Sharded, key: Key, item: int, out: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's slice of a group, read into `out`, on the CPU: leaves that the checkpoint lacks stay there."""
        form, size = tree.format(key), self.layout.shard_numel(key)
        low = tree.rank_of(key) * size
        for slot in self.layout.groups[key].slots:
            start, stop = max(low, slot.offset), min(low + size, slot.offset + slot.numel)
            if start >= stop or not self._has(slot.path, item):
                continue
            leaf = self.taken[slot.path]
            have = self.reader.format(item, leaf)
            assert have is not None
            if not (self.lossy or form.keeps(have)):
                raise ValueError(
                    f"{self.folder}: leaf {slot.path!r} of {self.manifest.items[item].name} is stored as {have}, and "
                    f"would be rounded to {form}. Say fz.load(path, step, lossy=True) to round it to nearest, or use a "
                    "step whose policy keeps it, such as fz.Policy.exact()."
                )
            first, last = start - slot.offset, stop - slot.offset
            at = [(start - low) // part.every for part in form.parts]
            if have.parts == form.parts:
                counts = [entries(form, part, last - first) for part in form.parts]
                into = [target[a : a + count] for target, a, count in zip(out, at, counts, strict=True)]
                self.reader.read(item, leaf, first, last, have, into)
                continue
            wide = torch.float64 if form.parts[0].dtype == torch.float64 else torch.float32
            values = encode(form, decode(have, self.reader.read(item, leaf, first, last, have), wide))
            for target, a, value in zip(out, at, values, strict=True):
                target[a : a + value.numel()] = value
        return [part.to(self.device) for part in out]


def _some(specs: Sequence[Leaf]) -> str:
    return ", ".join(path for path, _, _ in specs[:6]) + (", ..." if len(specs) > 6 else "")
