"""What `save_dcp` writes: whole tensors that all ranks send the first one, in a file that torch's metadata name."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from fzero.base.pytree import Count
from fzero.checkpoint import files
from fzero.checkpoint.contents import Copies, copies_of
from fzero.checkpoint.fill import Everyone
from fzero.compat.trees import word_of
from fzero.state.gather import stream
from fzero.state.items import items_in
from fzero.state.sharded import Sharded, check_buffers, is_sharded
from fzero.state.train_state import TrainState
from fzero.table.module_params import other_names

Keys = Callable[[str], tuple[str, ...]]  # the path of a leaf -> keys in the nested state dict


class Writing:
    """One call of `save_dcp` on one rank."""

    def __init__(self, folder: str, state: TrainState, model: str, optim: str | None) -> None:
        # the name of each tensor -> its shape, its dtype, its keys in the nested state dict
        self.known: dict[str, tuple[tuple[int, ...], torch.dtype, tuple[str, ...]]] = {}
        self._folder, self._leads = folder, Everyone(state.params.axis).leads
        self._trees, self._counts = dict[str, tuple[Sharded, Keys]](), dict[str, torch.Tensor]()
        self._further = dict[str, str]()  # names that are of the bytes of another one -> that
        self._ties = dict[str, list[str]]()  # path of a tied leaf -> its further names
        rows = state.params.layout.rows
        for name, path in other_names(state.params.structure, [row.path for row in rows]).items():
            self._ties.setdefault(path, []).append(name)
        self._add("params", state.params, lambda path: (model, path) if model else (path,))
        items = items_in("moments", state.moments) if optim is not None else []
        names = lambda path, word: (*([optim] if optim else []), "state", path, word)
        for item in items:
            if is_sharded(item.value):
                self._add(item.name, item.value, functools.partial(names, word=word_of(item.name)))
            elif item.kind != "count" and item.value is not None:
                raise ValueError(
                    f"fz.compat.save_dcp: state.{item.name} is {item.value!r}, for which torch's checkpoints have no "
                    "name; expected the moments of fz.sgd, adam, adamw or lion. Say optim=None to leave them out."
                )
        # of a partition each member counts, all of them the same updates: torch has one count for each leaf
        every = [item.value for item in items if item.kind == "count"]
        count = next((each.value for each in every if each.value != state.step), state.step)
        if optim is not None and (count != state.step or torch.tensor(float(count), device="cpu").item() != count):
            raise ValueError(
                f"fz.compat.save_dcp: state.step is {state.step} and the optimizer has counted {count} updates, "
                "expected one number of at most 2**24: torch's checkpoints have one for each leaf, in float32. Say "
                "optim=None to leave the moments out, or use fz.save."
            )
        missed, paused = [x for each in every for x in each.missed], [x for each in every for x in each.paused]
        own = Count(count, tuple(missed), tuple(paused)).own()
        # torch begins the moments that are not there with zeros: their count is zero, too
        begins = {row.path for row in rows if row.moments is None} if any(is_sharded(x.value) for x in items) else ()
        for path in state.params if optim is not None else ():
            seen = torch.tensor(float(0 if path in begins else own(path)), device="cpu")
            self._counts[self._named(path, functools.partial(names, word="step"), (), seen.dtype)] = seen

    def _named(self, path: str, keys_of: Keys, shape: tuple[int, ...], dtype: torch.dtype) -> str:
        """The name of what a leaf has, which is known by the leaf's further names from here on, too."""
        first = ".".join(keys_of(path))
        for keys in map(keys_of, (path, *self._ties.get(path, ()))):
            name = ".".join(keys)
            if name in self.known:
                raise ValueError(
                    f"fz.compat.save_dcp: got two tensors of the name {name!r}, expected one. Say other prefixes with "
                    "model= and optim=, or optim=None."
                )
            self.known[name] = shape, dtype, keys
            if name != first:
                self._further[name] = first
        return first

    def _add(self, what: str, tree: Sharded, keys_of: Keys) -> None:
        check_buffers("fz.compat.save_dcp", f"state.{what}", tree)
        self._trees[what] = tree, keys_of
        for key in tree.groups:  # in the order of `stream`
            for slot in tree.layout.groups[key].slots:
                self._named(slot.path, keys_of, tree.layout.rows[slot.leaf].shape, tree.format(key).dtype)

    def copies(self) -> Copies:
        """The checksums of what other ranks hold, too."""
        return copies_of({what: tree for what, (tree, _) in self._trees.items()})

    def begin(self) -> None:
        """The first rank makes the folder."""
        if self._leads:
            files.Folder(self._folder).make()
            if os.path.lexists(f"{self._folder}/.metadata"):
                raise FileExistsError(
                    f"fz.compat.save_dcp: {self._folder} has a checkpoint of torch.distributed.checkpoint, expected a "
                    "folder without one. Save into a new folder, or remove this one before."
                )

    def write(self) -> None:
        """The first rank writes what all take out of their slices; with the metadata the checkpoint is there."""
        tensors = self._tensors()
        try:
            if self._leads:
                with files.Folder(self._folder).only_writer():
                    self._write(tensors)
        finally:
            for _ in tensors:  # the others wait for this rank until the end
                pass

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for tree, keys_of in self._trees.values():
            for path, leaf in stream(tree) if tree.groups else ():
                yield ".".join(keys_of(path)), leaf
        yield from self._counts.items()

    def _write(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        firsts = {name: known[:2] for name, known in self.known.items() if name not in self._further}
        planner = _Save(firsts, tensors)
        writer = FileSystemWriter(self._folder, per_thread_copy_ahead=0)  # which takes tensors in another order
        writer.set_up_storage_writer(True)
        (plan,) = writer.prepare_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
        planned = [(item.index.fqn, item.tensor_data) for item in plan.items]
        stored = {name: TensorStorageMetadata(x.properties, x.size, [x.chunk]) for name, x in planned if x is not None}
        try:
            results = writer.write_data(plan, planner).wait()
            written = {result.index.fqn: result for result in results}
            for name, first in self._further.items():
                index = dataclasses.replace(written[first].index, fqn=name)
                stored[name], written[name] = stored[first], dataclasses.replace(written[first], index=index)
            keys = {name: keys for name, (_, _, keys) in self.known.items()}
            writer.finish(Metadata({**stored}, planner_data=keys), [[*written.values()]])
        except (RuntimeError, OSError) as error:  # torch hides that of a disk behind the one
            for name in Path(self._folder).glob("*.distcp"):
                name.unlink()  # or the disk stays as full
            raise OSError(f"{self._folder}: cannot be written: {error.__context__ or error!r}.") from error
        files.sync_folder(self._folder)


class _Save(DefaultSavePlanner):
    """Plans to write whole tensors."""

    def __init__(
        self, known: Mapping[str, tuple[tuple[int, ...], torch.dtype]], tensors: Iterator[tuple[str, torch.Tensor]]
    ) -> None:
        super().__init__()
        self._known, self._tensors = known, tensors

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, (shape, dtype) in self._known.items():
            size, start = torch.Size(shape), torch.Size([0] * len(shape))
            data = TensorWriteData(ChunkStorageMetadata(start, size), TensorProperties(dtype=dtype), size)
            items.append(WriteItem(MetadataIndex(name, start), WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        name, tensor = next(self._tensors)
        assert name == write_item.index.fqn
        return tensor
