"""The optimizer's state, in the table's formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from fzero.base import private, pytree
from fzero.base.rebound import is_others
from fzero.formats.formats import zeros
from fzero.state.items import counted
from fzero.state.placing import placed
from fzero.state.sharded import Sharded, entries_of, is_sharded, map_trees, part_names, trees_of
from fzero.stores.away import Buffer
from fzero.table.layout import Key
from fzero.table.spec import Extra, Spec

Tree = TypeVar("Tree")


def init_moments(step: Spec, params: Sharded, without_memory: bool = False) -> object:
    """The optimizer's state for the leaves that have moments, in the table's formats.

    Args:
        without_memory: on the meta device, where the optimizer allows it.
    """
    layout = params.layout
    template = params.only([key for key, group in layout.groups.items() if group.row.moments])
    if step.optimizer.blank and without_memory:
        entries = template.entries.items()
        template = template.over({name: torch.empty(x.numel(), dtype=x.dtype, device="meta") for name, x in entries})
    moments = placed_moments(step.optimizer.init(template))
    return counted(moments, layout, lambda item, path: False) if layout.keeping else moments


def placed_moments(moments: object) -> Any:
    """The optimizer's trees, each buffer in the memory that its row says."""
    return map_trees(lambda tree: placed(tree, "moments"), moments)


def init_extras(step: Spec, params: Sharded) -> dict[str, object]:
    """The transforms' entries of the state, in memory of their own, where moments lie."""
    return {extra.name: _placed(extra, extra.init(params), params) for extra in step.extras}


def next_extra(extra: Extra, value: object, params: Sharded, applied: bool) -> object:
    """The value of an entry after an update, which keeps its structure."""
    if extra.update is None:
        return value
    given = copied(value) if is_others(extra.update) else value  # which a user's function may write to
    try:
        found = extra.update(given, params, applied)
        new = value if found is value else _placed(extra, found, params)  # what stays is brought from nowhere
    except Exception as error:
        error.add_note(f"This was in the update of state.extra[{extra.name!r}], by {extra.source}.")
        raise
    (old, spec), (leaves, own) = (pytree.flatten(tree, is_leaf=is_sharded) for tree in (value, new))
    kinds, known = ([(is_sharded(leaf), leaf is None) for leaf in each] for each in (leaves, old))
    if own != spec or kinds != known:
        raise ValueError(
            f"state.extra[{extra.name!r}] ({extra.source}): its update made {own} of {spec}, expected the structure of "
            "what its init returned. Begin with zeros where there is nothing yet."
        )
    return new


def _placed(extra: Extra, value: object, params: Sharded) -> object:
    """The value in memory of its own, where moments lie; refused where its trees are not of the params' buffers."""
    by_group = extra.changes or extra.fused
    if by_group and not (is_sharded(value) and set(value.groups) == set(params.layout.trainable)):
        raise TypeError(
            f"state.extra[{extra.name!r}] ({extra.source}): got {type(value).__name__}, expected a Sharded of all "
            f"leaves that are trained, as it {'changes' if extra.changes else 'goes with'} them. Make it of "
            "params.only(params.layout.trainable)."
        )
    for tree in trees_of(value):
        for key in tree.groups:
            numel, expected = tree.placed(key).numel(), params.layout.shard_numel(key)
            if numel != expected:
                raise ValueError(
                    f"state.extra[{extra.name!r}] ({extra.source}): got {numel} elements for the group of leaf "
                    f"{params.layout.groups[key].slots[0].path!r}, expected the {expected} of this rank's slice. Map "
                    "over a tree with functions that keep shapes."
                )
    return placed_moments(_apart(map_trees(lambda tree: tree.only(tree.groups), value), params))


def copied(tree: Tree) -> Tree:
    """The tree in tensors of its own, on the device, which may be written to."""
    return pytree.map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, tree)


def _apart(tree: object, params: Sharded) -> object:
    """The tree, its tensors copied where they lie in the memory of the params, which are about to be overwritten."""
    taken = {_memory(x) for x in entries_of(params)} - {None}  # what is away shares memory with nothing
    return pytree.map(lambda x: x.clone() if _memory(x) in taken else x, tree)


def _memory(x: object) -> object:
    """The storage of a tensor, None for what has none that could be overwritten."""
    own = isinstance(x, torch.Tensor) and not private.is_wrapped(x) and x.layout == torch.strided
    return x.untyped_storage()._cdata if own else None  # type: ignore[union-attr]


def zeros_like(params: object, nonnegative: bool = False) -> Any:
    """Moments that are zero; how 8 bits hold them depends on whether they never are negative (second moments)."""
    if not is_sharded(params):
        return pytree.map(torch.zeros_like, params)
    empty = Sharded(params.layout, params.axis, params.structure, {}, kind="nonnegative" if nonnegative else "signed")
    return filled(empty, {key: params.placed(key).device for key in params.groups})


def filled(empty: Sharded, devices: Mapping[Key, torch.device]) -> Sharded:
    """An empty tree with zeros for some of its groups, in the formats that its leaves' policies have for its kind."""
    buffers: dict[object, Buffer] = {}
    for key, device in devices.items():
        form, size = empty.format(key), empty.layout.shard_numel(key)
        own = empty.over(dict(zip(part_names(form, key), zeros(form, size, device), strict=True)))
        buffers.update(placed(own, "moments").entries)  # one group at a time
    return empty.over(buffers)
