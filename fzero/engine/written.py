"""Params are the state's: neither a run of a function nor its pullback writes to them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from fzero.base import private
from fzero.base.refusals import noted, of_higher_order, place_of
from fzero.base.uncounted import STATISTICS, told
from fzero.state.sharded import Part, Sharded
from fzero.state.train_state import TrainState
from fzero.table.handle import storage_of
from fzero.table.layout import Group, Key

LeafOf = Callable[[torch.Tensor], str]
Memories = Sequence["tuple[torch.Tensor, LeafOf]"]  # gathered ones or a state's own, and what names the leaf of a view


def leaf_of(group: Group, start: int = 0) -> LeafOf:
    """Names the leaf of a group that a tensor in its buffer, or in a part of that from `start` on, belongs to."""
    return lambda x: f"leaf {group.leaf_at(start + int(private.unwrapped(x).storage_offset()))!r}"


def memories_of(params: Sharded, key: Key) -> Memories:
    """The buffers of a group that lie on the device; others are read as copies."""
    group, full = params.layout.groups[key], params.held_entries.get(key)
    own, out = params.layout.shard_numel(key) * params.rank_of(key), list[tuple[torch.Tensor, LeafOf]]()
    stored = params.names(key) if key in params.entries else ()  # otherwise the slice lies in the full one
    parts = (*[params.entries[name] for name in stored], full)
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
    return versions_of([memory for memory, _ in memories])


def buffers_of(params: Sharded) -> dict[Key, list[torch.Tensor]]:
    """The buffers of each group that lie on the device."""
    found: dict[Key, list[torch.Tensor]] = {}
    for own in (params.entries, params.held_entries):
        for name, x in own.items():
            if isinstance(x, torch.Tensor):
                found.setdefault(name.group if isinstance(name, Part) else name, []).append(x)
    return found


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often each has been written to."""
    found = []
    for x in tensors:
        plain = private.unwrapped(x)
        found.append(0 if plain.is_inference() else plain._version)
    return found


_COPY = "compute with a copy (w = w.clone())"
_BUFFERS = (
    "running statistics are buffers. Say apply, params, buffers = fz.functional(module, buffers=True), or give them to "
    "the function behind its params, which returns new ones (fz.carry); or call the layer with training=False"
)
# what is written by whom, where that is no copy
_INSTEAD = {**dict.fromkeys(STATISTICS, _BUFFERS), "aten::embedding_renorm_": f"leave out max_norm, or {_COPY}"}


def refusing_uncounted(protected: Callable[[], Mapping[int, LeafOf]]) -> told:
    """Refuses what no version counter would tell of, before it is done: operators that write to these storages.

    Args:
        protected: storage -> what names the leaf of a view of it; called where there is such an operator.

    Raises:
        ValueError: inside, by the operator's call.
    """

    def refuse(operator: str, x: torch.Tensor) -> None:
        leaf_of = protected().get(storage_of(x))
        if leaf_of is not None:
            raise noted(
                ValueError(
                    f"A unit or the step's function writes to {leaf_of(x)} in place, by {operator}{place_of()}. Params "
                    f"change in step.update only: {_INSTEAD.get(operator, _COPY)}."
                )
            )

    return told(refuse)


def kill(state: TrainState, who: str) -> None:
    """Refuses all later use of a state whose params were written to."""
    why = (
        f"{who} wrote to the params of this state in place, and what they were is lost. Compute with a copy "
        "(w = w.clone()), and go on from another state."
    )
    state.overwritten(why)
    state.kill(why)


@contextlib.contextmanager
def run_unwritten(
    state: TrainState, stored: Sequence[torch.Tensor], protected: Callable[[], Mapping[int, LeafOf]]
) -> Iterator[None]:
    """Around a run of the step's function.

    Args:
        stored: the state's own buffers. If one has been written to at the end, the state is dead, whoever else refuses
            that.
        protected: as of `refusing_uncounted`.

    Raises:
        ValueError: somebody writes to the state's params.
    """
    before = versions_of(stored)
    try:
        with refusing_uncounted(protected):
            yield
    except BaseException:
        if versions_of(stored) != before:
            kill(state, "The step's function")
        raise
    if versions_of(stored) != before:
        kill(state, "The step's function")
        raise ValueError(
            "step: the function wrote to its params in place, which this state did not survive. Params change in "
            "step.update only: compute with a copy (w = w.clone()), or use operations that are not in place."
        )


def _written(what: str) -> ValueError:
    return ValueError(
        f"pullback: the backward of an autograd.Function, or a hook, writes in place to {what}. Params change in "
        "step.update only: compute with a copy (w = w.clone()), or use the operation that is not in place."
    )


@contextlib.contextmanager
def unit_pulled(unit: str, memories: Memories) -> Iterator[None]:
    """Around the pullback of a unit's graph.

    Raises:
        ValueError: somebody writes to the unit's params.
    """
    before = versions(memories)
    with of_higher_order(f"Unit {unit!r}"), refusing_uncounted(lambda: named(memories)):
        yield
    if versions(memories) != before:
        raise _written(f"params of unit {unit!r}")


@contextlib.contextmanager
def run_pulled(state: TrainState | None) -> Iterator[Callable[[Key], None]]:
    """Around the pullback of a run, or one of its halves.

    Args:
        state: None where the pullback was used up.

    Returns:
        What settles a group that has been pulled back, which an update may write to from then on.

    Raises:
        ValueError: somebody has written to the state's params, and the state is dead.
    """
    params = state.params if state is not None else None
    buffers = {} if params is None else buffers_of(params)
    before = {key: versions_of(own) for key, own in buffers.items()}

    def refuse(key: Key) -> None:
        if versions_of(buffers.get(key, ())) != before.get(key, []):
            assert state is not None and params is not None
            kill(state, "A backward")
            leaves = " or ".join(repr(slot.path) for slot in params.layout.groups[key].slots)
            raise _written(f"leaf {leaves}, which the state did not survive")

    def settle(key: Key) -> None:
        refuse(key)
        before.pop(key, None)  # of one that is away there is nothing to write to
        buffers.pop(key, None)

    def protecting() -> dict[int, LeafOf]:
        return {} if params is None else named([memory for key in before for memory in memories_of(params, key)])

    try:
        with of_higher_order("step: the function"), refusing_uncounted(protecting):
            yield settle
    finally:
        for key in before:
            refuse(key)
