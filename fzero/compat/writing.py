"""What one rank writes of a checkpoint of torch: its slices in a file of its own, named by metadata that come last."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from fzero.base.pytree import Count
from fzero.checkpoint.contents import share, written
from fzero.checkpoint.copies import Copies, copies_of
from fzero.checkpoint.everyone import Everyone
from fzero.checkpoint.files import Folder
from fzero.checkpoint.staging import on_host
from fzero.compat.trees import word_of
from fzero.formats.formats import ALIGN
from fzero.state.items import items_in
from fzero.state.sharded import Sharded, check_buffers, is_sharded
from fzero.state.sliced import Sliced, sliced_in
from fzero.state.train_state import TrainState
from fzero.table.layout import Key
from fzero.table.module_params import other_names

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import WriteResult

    from fzero.compat.storage import Writer


class Writing:
    """One call of `save_dcp` on one rank.

    Attributes:
        known: the name of each tensor -> its shape, its dtype, its keys in the nested state dict.
        token: in the names of this save's files.
    """

    def __init__(self, folder: str, state: TrainState, model: str, optim: str | None) -> None:
        from fzero.compat.planners import Save

        self.known: dict[str, tuple[tuple[int, ...], torch.dtype, tuple[str, ...]]] = {}
        self._pieces, self.token, self._trees = {}, "", dict[str, Sharded]()
        self._further = dict[str, str]()  # names that are of the bytes of another one -> that
        self._ties = dict[str, list[str]]()  # path of a tied leaf -> its further names
        rows = state.params.layout.rows
        for name, path in other_names(state.params.structure, [row.path for row in rows]).items():
            self._ties.setdefault(path, []).append(name)
        self._slices: dict[str, tuple[Sliced, int]] = {}
        self._leads = Everyone(state.params.axis).leads
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
        counts = {item.value.value: item.name for item in items if item.kind == "count"}
        if len(counts) > 1:
            (first, name), (other, also), *_ = counts.items()
            raise ValueError(
                f"fz.compat.save_dcp: state.{name} is {first} and state.{also} is {other}, expected one number of "
                "updates: torch's checkpoints have one for each leaf. Say optim=None to leave the moments out."
            )
        count = next(iter(counts), state.step)
        if optim is not None and (count != state.step or torch.tensor(float(count), device="cpu").item() != count):
            raise ValueError(
                f"fz.compat.save_dcp: state.step is {state.step} and the optimizer has counted {count} updates, "
                "expected one number of at most 2**24: torch's checkpoints have the optimizer's alone, in float32. Say "
                "optim=None to leave the moments out, or use fz.save."
            )
        every = [item.value for item in items if item.kind == "count"]
        missed, paused = [x for each in every for x in each.missed], [x for each in every for x in each.paused]
        own = Count(count, tuple(missed), tuple(paused)).own()
        # torch begins the moments that are not there with zeros: their count is zero, too
        begins = {row.path for row in rows if row.moments is None} if any(is_sharded(x.value) for x in items) else ()
        for path in state.params if optim is not None else ():
            seen = 0 if path in begins else own(path)
            self._one(path, functools.partial(names, word="step"), torch.tensor(float(seen), device="cpu"))
        self._planner = Save(self._pieces, self.known, self._slices)
        self._folder, self._locked, self._naming = Folder(folder), contextlib.ExitStack(), False
        self._writer: Writer | None = None

    def _named(
        self, path: str, keys_of: Callable[[str], tuple[str, ...]], shape: tuple[int, ...], dtype: torch.dtype
    ) -> str:
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

    def _one(self, path: str, keys_of: Callable[[str], tuple[str, ...]], value: torch.Tensor) -> None:
        name = self._named(path, keys_of, tuple(value.shape), value.dtype)
        if self._leads:
            self._pieces[name, 0, value.numel()] = lambda start, stop: value.reshape(-1)[start:stop].clone()

    def _add(self, what: str, tree: Sharded, keys_of: Callable[[str], tuple[str, ...]]) -> None:
        check_buffers("fz.compat.save_dcp", f"state.{what}", tree)
        self._trees[what] = tree
        for key in tree.groups:
            dtype, (base, low, high) = tree.format(key).dtype, share(tree, key)
            for slot in tree.layout.groups[key].slots:
                name = self._named(slot.path, keys_of, tree.layout.rows[slot.leaf].shape, dtype)
                if not written(tree.layout, slot.leaf):
                    continue
                if (cut := sliced_in(tree.layout, slot.leaf)) is not None:
                    self._slices[name] = cut, tree.layout.tensor[0]
                start, stop = max(low, slot.offset), min(high, slot.offset + slot.numel)
                if start < stop:
                    make = functools.partial(_values, tree, key, slot.offset - base)
                    self._pieces[name, start - slot.offset, stop - slot.offset] = make

    def copies(self) -> Copies:
        """The checksums of what other ranks hold, too."""
        return copies_of(self._trees)

    def plan(self) -> str:
        from fzero.compat.planners import text_of

        return text_of(self._planner.create_local_plan())

    def begin(self) -> None:
        """The first rank makes the folder, and takes away what saves have left there that never ended."""
        if self._leads:
            from fzero.compat.storage import clear

            self._folder.make()
            self._locked.enter_context(self._folder.only_writer())
            clear(self._folder, begun=True)

    def write(self, plans: Sequence[str], rank: int) -> str:
        """This rank's file; what it has of which tensor, for the metadata."""
        from torch.distributed.checkpoint.planner import SavePlan

        from fzero.compat.planners import text_of, value_of
        from fzero.compat.storage import Writer

        self._writer = writer = Writer(self._folder.path, self.token)
        writer.set_up_storage_writer(self._leads)
        everyone, self._metadata = self._planner.create_global_plan([value_of(text, SavePlan) for text in plans])
        everyone = writer.prepare_global_plan([writer.prepare_local_plan(plan) for plan in everyone])
        return text_of(writer.write_data(everyone[rank], self._planner).wait())

    def finish(self, results: Sequence[str]) -> None:
        """The first rank writes the metadata: with them the new checkpoint is there, and the old one goes."""
        from fzero.compat.planners import value_of
        from fzero.compat.storage import clear

        self._naming = True
        if self._leads:
            assert self._writer is not None
            written = [value_of(text, list) for text in results]
            self._writer.finish(self._metadata, [*written, self._by_further_names(written)])
            with contextlib.suppress(OSError):  # it is whole; what is left over goes with the next save
                clear(self._folder, begun=False)
            self._locked.close()

    def _by_further_names(self, written: Sequence[Sequence[WriteResult]]) -> list[WriteResult]:
        """Adds tensors of further names to the metadata; what was written of them, which is that of the first name."""
        names: dict[str, list[str]] = {}
        tensors = self._metadata.state_dict_metadata
        for name, first in self._further.items():
            tensors[name] = tensors[first]
            names.setdefault(first, []).append(name)
        return [
            dataclasses.replace(result, index=dataclasses.replace(result.index, fqn=name))
            for result in itertools.chain(*written)
            for name in names.get(result.index.fqn, ())
        ]

    def leave(self) -> None:
        """Removes this rank's file of a save that has failed; not where metadata that name it may lie there."""
        with contextlib.suppress(OSError):  # the next save removes it
            if self._writer is not None and not self._naming:
                self._writer.drop()
        with contextlib.suppress(OSError):
            self._locked.close()


def _values(tree: Sharded, key: Key, offset: int, start: int, stop: int) -> torch.Tensor:
    """Elements [start, stop) of a leaf whose buffer has it from `offset` on."""
    low, high = offset + start, offset + stop
    first = low // ALIGN * ALIGN
    stored = tree.stored(key).cut(first, -(-high // ALIGN) * ALIGN)
    values = stored.to(stored.dtype)[low - first : high - first]
    return on_host(values if tree.scale == 1.0 else values / tree.scale).clone()
