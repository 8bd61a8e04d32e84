"""Trees of the next state, written group by group: in place, in copies, or where what is away is brought to.

Entries of the state may go with the params (`Extra.changes`, `Extra.fused`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from fzero.base import pages, private
from fzero.base.arguments import named
from fzero.base.random import Seeds
from fzero.comm.backend import finish_all
from fzero.optim.base import values, write_values
from fzero.state.placing import memory_of, settle
from fzero.state.sharded import Draw, Part, Sharded, group_of
from fzero.state.train_state import TrainState
from fzero.stores.away import Away, Buffer, Wait
from fzero.stores.memories import DEVICE
from fzero.table.layout import Key
from fzero.table.spec import Extra, Spec

Name = Key | Part


class Writing:
    """The buffers of a tree's next value.

    Those on the device are overwritten only where they were donated and nobody else held them when this was made, nor
    does when they are written. Those that are away are brought, and the updated ones put in their place.

    Args:
        kind: "params" or "moments".
        on_host: the groups whose update runs in the host's memory, where those of other groups pass through the device.
        copied: takes the leaf of each buffer that was donated and is held elsewhere.
    """

    def __init__(
        self, tree: Sharded, kind: str, donates: bool, copied: Callable[[str], None], on_host: Collection[Key]
    ) -> None:
        self.tree, self.kind, self._donates, self._copied, self._on_host = tree, kind, donates, copied, on_host
        self._trainable = frozenset(tree.layout.trainable)
        # key -> the names of its buffers, and whether these are put elsewhere than on the device
        self._names_of = {key: tree.names(key) for key in self._trainable & tree.entries.keys()}
        self._settled = {key: memory_of(tree.layout.groups[key].row, kind) != DEVICE for key in self._names_of}
        # what is away, and may be overwritten where it lies; of a group's slice and of its whole copy each by itself
        self._taken, self._taken_held = set[Name](), set[Name]()
        self._brought: dict[Name, Wait] = {}
        self._opened: dict[Name, torch.Tensor] = {}
        self.entries = {name: self._own(tree.entries, name, self._taken) for name in tree.entries}
        self.held = {name: self._own(tree.held_entries, name, self._taken_held) for name in tree.held_entries}

    def _own(self, buffers: dict[Name, Buffer], name: Name, taken: set[Name]) -> Buffer:
        """A buffer to write: the old one where the state was donated and nobody else holds it, else a copy."""
        if group_of(name) not in self._trainable:
            return buffers[name]
        alone = self._donates and private.entry_holders(buffers, name) == 0
        buffer = buffers[name]
        if isinstance(buffer, Away):
            if alone:
                taken.add(name)
            return buffer
        if alone and private.storage_holders(buffer) == 1:
            return buffer
        if self._donates:
            self._copied(self.tree.layout.groups[group_of(name)].slots[0].path)
        return pages.copied(buffer)

    def _names(self, keys: Iterable[Key]) -> list[Name]:
        return [name for key in keys for name in self._names_of.get(key, ())]

    def start(self, keys: Iterable[Key]) -> None:
        """Begins to bring what is away of some groups."""
        for name in self._names(keys):
            buffer = self.entries[name]
            if isinstance(buffer, Away) and name not in self._brought and name not in self._opened:
                host = group_of(name) in self._on_host
                self._brought[name] = buffer.start_open(name in self._taken) if host else buffer.start_read()

    def open(self, keys: Sequence[Key]) -> Sharded:
        """The buffers of some groups, to be written to."""
        self.start(keys)
        if self._donates:
            self._spare_readers(keys)
        buffers: dict[Name, Buffer] = {}  # of these alone: groups are many
        for name in self._names(keys):
            if name in self._brought:
                self._opened[name] = self._brought.pop(name)()
            buffers[name] = self._opened.get(name, self.entries[name])
        held = {key: self.held[key] for key in keys if key in self.held}
        return self.tree.replaced(buffers=buffers, held=held).only(keys) if held else self.tree.over(buffers)

    def _spare_readers(self, keys: Sequence[Key]) -> None:
        """Leaves a donated buffer to whoever came to hold it since: a graph that is not pulled back yet, an output."""
        for buffers, names in ((self.entries, self._names(keys)), (self.held, keys)):
            for name in names:
                buffer = buffers.get(name)
                if isinstance(buffer, torch.Tensor) and private.storage_holders(buffer) > 1:
                    buffers[name] = pages.copied(buffer)

    def close(self, keys: Sequence[Key]) -> None:
        """The buffers of some groups are written: they go where they belong."""
        for name in self._names(keys):
            buffer = self.entries[name]
            if isinstance(buffer, Away):
                host, takes = group_of(name) in self._on_host, name in self._taken
                self.entries[name] = buffer.again(self._opened.pop(name), opened=host, takes=takes)
            elif self._settled[group_of(name)]:
                self.entries[name] = settle(self.tree, group_of(name), self.kind, buffer)

    def hold(self, key: Key, full: torch.Tensor) -> None:
        """The full buffer of a group, gathered anew."""
        buffer = self.held[key]
        self.held[key] = (
            buffer.again(full, opened=False, takes=key in self._taken_held)
            if isinstance(buffer, Away)
            else settle(self.tree, key, self.kind, full)
        )

    def finished(self) -> Sharded:
        return self.tree.replaced(
            buffers=self.entries, held=self.held, stale=self.tree.stale - frozenset(self.tree.layout.trainable)
        )

    def forget(self) -> None:
        """Leaves what was brought and not written."""
        brought, self._brought, self._opened = self._brought, {}, {}
        finish_all(list(brought.values()))


def due(step: Spec, state: TrainState) -> list[Extra]:
    """The entries that change the params of the coming update, in the order of their names."""
    return [extra for extra in step.extras if extra.is_due(state.step + 1)]


def changed(extra: Extra, value: Sharded, params: Sharded) -> tuple[Sharded, Sharded]:
    """The entry and the params to go on with, values of the same groups."""
    assert extra.changes is not None
    try:
        found = extra.changes(value, params)
        if not isinstance(found, tuple) or len(found) != 2:
            raise TypeError(f"got {named(found)}, expected a pair: the entry and the params to go on with.")
        return _alike(found[0], value), _alike(found[1], params)
    except Exception as error:
        error.add_note(f"This was in the change of params by state.extra[{extra.name!r}], by {extra.source}.")
        raise


def _alike(new: object, old: Sharded) -> Sharded:
    """A tree of the groups of another one."""
    if not isinstance(new, Sharded):
        raise TypeError(f"got {named(new)}, expected a Sharded of the groups that it was given, as `map` makes it.")
    if {k: x.shape for k, x in new.locals().items()} != {k: x.shape for k, x in old.locals().items()}:
        raise ValueError(f"got {new}, expected the groups of {old}, each with as many elements.")
    return new


class Entry:
    """One entry of the next state, which is written with the params of each group: it changes them, or follows them."""

    def __init__(
        self, extra: Extra, state: TrainState, donates: bool, copied: Callable[[str], None], host: Collection[Key]
    ) -> None:
        # what params are rounded with that it changes: bits of their own, as the update's have decided what is changed
        self.extra, self._draw = extra, Draw(Seeds(state.seed, *extra.name.encode()).next(), state.step)
        self.writing = Writing(state.extra[extra.name], "moments", donates, copied, host)

    def write(self, keys: Sequence[Key], own: Sharded) -> None:
        """Writes to some groups, whose params the optimizer has written to."""
        tree = self.writing.open(keys)
        if self.extra.changes is None:
            self._follow(tree, own)
        for key in keys if self.extra.changes is not None else ():  # each makes its next values before it is written
            new = changed(self.extra, values(tree.only([key])), values(own.only([key])))
            for target, value in zip((tree, own), new, strict=True):
                write_values(target, key, value.local(key), self._draw)
            del new
        self.writing.close(keys)

    def _follow(self, tree: Sharded, own: Sharded) -> None:
        assert self.extra.fused is not None
        try:
            self.extra.fused(tree, own)
        except Exception as error:
            error.add_note(f"This was in the update of state.extra[{self.extra.name!r}], by {self.extra.source}.")
            raise
