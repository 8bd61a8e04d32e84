"""Params are the state's: neither a run of a function nor its pullback writes to them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from fzero.base import private
from fzero.base.refusals import of_higher_order
from fzero.state.sharded import Part, Sharded
from fzero.state.train_state import TrainState
from fzero.table.handle import storage_of
from fzero.table.layout import Group, Key

LeafOf = Callable[[torch.Tensor], str]
Memories = Sequence["tuple[torch.Tensor, LeafOf]"]  # gathered ones or a state's own, and what names the leaf of a view


def leaf_of(group: Group, start: int = 0) -> LeafOf:
    """Names the leaf of a group that a tensor in its buffer, or in a part of that from `start` on, belongs to."""
    return lambda x: f"leaf {group.leaf_at(start + int(private.unwrapped(x).storage_offset()))!r}"


def named(params: Sharded) -> dict[int, LeafOf]:
    """The storage of each buffer that lies on the device -> what names the leaf of a view of it."""
    found = dict[int, LeafOf]()
    for name, x in stored(params):
        group = params.layout.groups[name.group if isinstance(name, Part) else name]
        start = params.layout.shard_numel(group.key) * params.rank_of(group.key) if x.numel() < group.numel else 0
        found.setdefault(storage_of(x), leaf_of(group, start))
    return found


def stored(params: Sharded) -> list[tuple[Key | Part, torch.Tensor]]:
    """The buffers of params that lie on the device; others are read as copies."""
    every = (*params.held_entries.items(), *params.entries.items())
    return [(name, x) for name, x in every if isinstance(x, torch.Tensor)]


@contextlib.contextmanager
def unwritten(state: TrainState, who: str) -> Iterator[None]:
    """Around a run of a function on a state's params, or a pullback.

    Args:
        who: what runs.

    Raises:
        ValueError: it has written to the state's own buffers, and the state is dead.
    """
    every = stored(state.params)
    names, buffers = [name for name, _ in every], [x for _, x in every]
    before = private.versions(buffers)

    def kill() -> str | None:
        now = private.versions(buffers)
        if now == before:
            return None
        written = next(name for name, x, y in zip(names, before, now, strict=True) if x != y)
        group = state.layout.groups[written.group if isinstance(written, Part) else written]
        leaves = " or ".join(repr(slot.path) for slot in group.slots)
        why = (
            f"{who} wrote in place to the params of this state (leaf {leaves}), and what they were is lost. Params "
            "change in step.update only: compute with a copy (w = w.clone()), and go on from another state."
        )
        state.overwritten(why)
        state.kill(why)
        return why

    try:
        with of_higher_order("step: the function"):
            yield
    except BaseException as error:
        if (why := kill()) and isinstance(error, RuntimeError):  # torch's, of a view whose memory was written to
            raise ValueError(why) from error
        raise
    if why := kill():
        raise ValueError(why)
