"""States that a transform has left with values in the place of codes (`straight`), there and back."""

from __future__ import annotations

import torch

from fzero.comm.pieces import gathered
from fzero.formats.formats import decode
from fzero.state.sharded import Sharded, map_trees, trees_of
from fzero.state.straight import codes_of
from fzero.state.train_state import TrainState


def decoded(tree: Sharded) -> Sharded:
    """A tree with values in the place of all codes whose policy is straight-through."""
    keys = [key for key in tree.groups if tree.goes_as_values(key) and not tree.holds_values(key)]
    if not keys:
        return tree
    gone = {name for key in keys for name in tree.names(key)}
    buffers = {name: x for name, x in tree.entries.items() if name not in gone}
    return tree.replaced(buffers=buffers | {key: tree.local(key).to(torch.float32) for key in keys})


def with_values(state: TrainState) -> TrainState:
    """The state with values in the place of all codes whose policies are straight-through."""
    return state.replace(params=decoded(state.params), moments=map_trees(decoded, state.moments))


def _encoded(tree: Sharded, exact: list[bool]) -> Sharded:
    """The tree with codes in the place of values; notes of each group whether they are those of its values."""
    buffers = dict(tree.entries)
    for key in tree.groups if tree.kind != "values" else ():
        if tree.holds_values(key):
            (form, names), own = tree.coded_as(key), tree.local(key)
            parts = codes_of(form, own)
            exact.append(torch.equal(decode(form, parts, torch.float32).nan_to_num(), own.nan_to_num()))
            buffers.update(zip(names, parts, strict=True))
    return tree.replaced(buffers=buffers)


def with_codes(state: TrainState) -> TrainState:
    """The state with codes in the place of values that a transform has left; itself where others were put there.

    All ranks call it.
    """
    if not holds_values(state):
        return state
    exact, axis = list[bool](), state.params.axis
    trees = map_trees(lambda tree: _encoded(tree, exact), (state.params, state.moments))
    other = torch.tensor(float(not all(exact)), device=state.params.device)
    if axis.ranks > 1:
        other = axis.sum(other, "codes of values")
    if axis.tensor is not None and axis.tensor.size > 1:
        other = gathered(axis.tensor, other.view(1), 0, [1] * axis.tensor.size, "codes of values").sum()
    return state if other > 0 else state.replace(params=trees[0], moments=trees[1])


def holds_values(state: TrainState) -> bool:
    """Tells whether a transform has left values in a state, in the place of codes."""
    if not state.layout.straight:
        return False
    return any(tree.holds_values(key) for tree in trees_of((state.params, state.moments)) for key in tree.groups)
