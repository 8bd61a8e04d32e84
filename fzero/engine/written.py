"""Params are the state's: neither a run of a function nor its pullback writes to them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from fzero.base import private
from fzero.base.refusals import of_higher_order
from fzero.capture.handle import storage_of
from fzero.capture.watch import LeafOf, leaf_of, watching_pullback
from fzero.state.sharded import Sharded
from fzero.state.train_state import TrainState
from fzero.table.layout import Key

Memories = Sequence["tuple[torch.Tensor, LeafOf]"]  # gathered ones or a state's own, and what names the leaf of a view


def memories_of(params: Sharded, key: Key) -> Memories:
    """The buffers of a group that lie on the device; others are read as copies."""
    group, full = params.layout.groups[key], params.held_entries.get(key)
    own, out = params.layout.shard_numel(key) * params.rank_of(key), list[tuple[torch.Tensor, LeafOf]]()
    parts = (*params.placed(key).parts, full)
    for part in [part for part in parts if isinstance(part, torch.Tensor)]:
        start = 0 if isinstance(full, torch.Tensor) and storage_of(part) == storage_of(full) else own
        out.append((part, leaf_of(group, start)))
    return out


def all_of(params: Sharded) -> Memories:
    return [memory for key in params.groups for memory in memories_of(params, key)]


def named(memories: Memories) -> dict[int, LeafOf]:
    """Storage -> what names the leaf of a view of it."""
    return {storage_of(memory): name for memory, name in memories}


def versions(memories: Memories) -> list[int]:
    return [private.version(private.unwrapped(memory)) for memory, _ in memories]


def kill(state: TrainState, who: str) -> None:
    """Refuses all later use of a state whose params were written to."""
    why = (
        f"{who} wrote to the params of this state in place, and what they were is lost. Compute with a copy "
        "(w = w.clone()), and go on from another state."
    )
    state.overwritten(why)
    state.kill(why)


def _written(what: str) -> ValueError:
    return ValueError(
        f"pullback: the backward of an autograd.Function, or a hook, writes in place to {what}. Params change in "
        "step.update only: compute with a copy (w = w.clone()), or use the operation that is not in place."
    )


@contextlib.contextmanager
def unit_pulled(unit: str, outputs: Sequence[torch.Tensor], memories: Memories, looked_at: bool) -> Iterator[None]:
    """Around the pullback of a unit's graph.

    Args:
        outputs: the graph's.
        looked_at: whether the run was, operation by operation.

    Raises:
        ValueError: somebody writes to the unit's params; where it is looked at, before he does.
    """
    before = versions(memories)
    with of_higher_order(f"Unit {unit!r}"), watching_pullback(outputs, named(memories) if looked_at else {}):
        yield
    if versions(memories) != before:
        raise _written(f"params of unit {unit!r}")


@contextlib.contextmanager
def run_pulled(
    state: TrainState | None, outputs: Sequence[torch.Tensor], looked_at: bool
) -> Iterator[Callable[[Key], None]]:
    """Around the pullback of a run, or one of its halves.

    Args:
        state: None where the pullback was used up.
        outputs: the graph's.
        looked_at: whether the run was, operation by operation.

    Returns:
        What settles a group that has been pulled back, which an update may write to from then on.

    Raises:
        ValueError: somebody writes to the state's params. Where the run was not looked at that shows afterwards, and
            the state is dead.
    """
    params = state.params if state is not None else None
    memories = {} if params is None else {key: memories_of(params, key) for key in params.groups}
    before = {key: versions(own) for key, own in memories.items()}

    def refuse(key: Key) -> None:
        if versions(memories[key]) != before[key]:
            assert state is not None and params is not None
            kill(state, "A backward")
            leaves = " or ".join(repr(slot.path) for slot in params.layout.groups[key].slots)
            raise _written(f"leaf {leaves}, which the state did not survive")

    def settle(key: Key) -> None:
        refuse(key)
        del before[key]
        for memory, _ in memories[key]:
            protected.pop(storage_of(memory), None)

    protected = named([memory for own in memories.values() for memory in own]) if looked_at else {}
    try:
        with of_higher_order("step: the function"), watching_pullback(outputs, protected):
            yield settle
    finally:
        for key in before:
            refuse(key)
