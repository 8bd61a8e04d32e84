"""Entries of the state that go with the update of the params, group by group (`Extra.changes`, `Extra.fused`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from fzero.base.arguments import named
from fzero.base.random import Seeds
from fzero.optim.base import values, write_values
from fzero.state.sharded import Draw, Sharded
from fzero.state.train_state import TrainState
from fzero.table.layout import Key
from fzero.table.spec import Extra, Spec
from fzero.update.writing import Writing


def due(step: Spec, state: TrainState) -> list[Extra]:
    """The entries that change the params of the coming update, in the order of their names."""
    return [extra for extra in step.extras if extra.is_due(state.step + 1)]


def draw_of(state: TrainState, extra: Extra) -> Draw:
    """What the changed params are rounded with: bits of their own, as the update's have decided what is changed."""
    return Draw(Seeds(state.seed, *extra.name.encode()).next(), state.step)


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
        self.extra, self._draw = extra, draw_of(state, extra)
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
