"""Trees into the memories that their rows say."""

from __future__ import annotations

import torch

from fzero.state.sharded import Sharded, group_of
from fzero.stores.away import Away, Buffer
from fzero.stores.memories import DEVICE, Memory, put
from fzero.table.layout import Key
from fzero.table.rows import KINDS, Row


def memory_of(row: Row, kind: str) -> Memory:
    """The memory of one kind of a leaf's state."""
    return row.memories[KINDS.index(kind)]


def settle(tree: Sharded, key: Key, kind: str, tensor: torch.Tensor) -> Buffer:
    """The buffer for a tensor of a group, which is not the caller's any more."""
    memory = tree.layout.groups[key].row.memories[KINDS.index(kind)]
    return tensor if memory == DEVICE else put(memory, tensor, tensor.device, f"the {kind} of {key}")


def placed(tree: Sharded, kind: str) -> Sharded:
    """The tree, its buffers that are on the device and should not be put where they should."""
    rows = tree.layout.groups
    moves = any(
        not isinstance(x, Away) and memory_of(rows[group_of(name)].row, kind) != DEVICE
        for name, x in tree.entries.items()
    )
    if not moves:
        return tree
    buffers = {
        name: x if isinstance(x, Away) else settle(tree, group_of(name), kind, x) for name, x in tree.entries.items()
    }
    return tree.replaced(buffers=buffers)
