"""The optimizer's state, in the table's formats."""

from __future__ import annotations

from typing import Any

import torch

from fzero.base import pytree
from fzero.formats.formats import zeros
from fzero.state.sharded import Sharded, is_sharded, part_names
from fzero.table.extras import Extra
from fzero.table.spec import Spec


def init_moments(step: Spec, params: Sharded) -> object:
    """The optimizer's state for the trainable leaves, in the table's formats."""
    template = params.only(params.layout.trainable)
    if not step.optimizer.by_leaf:  # who does not know of formats is given values
        template = template.with_buffers(template.locals())
    return to_moment_dtype(step.optimizer.init(template), step.optimizer.by_leaf)


def init_extras(step: Spec, params: Sharded) -> dict[str, object]:
    """What transforms add to the state, in memory of its own."""
    return {extra.name: _placed(extra, extra.init(params), params) for extra in step.extras}


def next_extra(extra: Extra, value: Any, params: Sharded, applied: bool) -> Any:
    """What an entry is after an update.

    Raises:
        ValueError: its structure changed.
    """
    try:
        new = _placed(extra, extra.update(value, params, applied), params)
    except Exception as error:
        error.add_note(f"This was in the update of state.extra[{extra.name!r}], by {extra.source}.")
        raise
    old, spec = pytree.flatten(value, is_leaf=is_sharded)
    leaves, own = pytree.flatten(new, is_leaf=is_sharded)
    kinds = [[type(leaf) if is_sharded(leaf) or leaf is None else None for leaf in each] for each in (old, leaves)]
    if own != spec or kinds[0] != kinds[1]:
        raise ValueError(
            f"state.extra[{extra.name!r}] ({extra.source}): its update made {own} of {spec}, expected the structure of "
            "what its init returned. Begin with zeros where there is nothing yet."
        )
    return new


def _placed(extra: Extra, value: Any, params: Sharded) -> Any:
    """The value in memory of its own; refused where its trees are not of the params' buffers."""
    for tree in filter(is_sharded, pytree.flatten(value, is_leaf=is_sharded)[0]):
        for key in tree.keys:
            numel, expected = tree.stored(key).numel(), params.layout.shard_numel(key)
            if numel != expected:
                raise ValueError(
                    f"state.extra[{extra.name!r}] ({extra.source}): got {numel} elements for the group of leaf "
                    f"{params.layout.groups[key].slots[0].path!r}, expected the {expected} of this rank's slice. Map "
                    "over a tree with functions that keep shapes."
                )
    return apart(value, params)


def apart(tree: Any, *others: object) -> Any:
    """The tree, its tensors copied where they lie in the memory of others, which are about to be overwritten."""
    taken = {x.untyped_storage()._cdata for x in pytree.flatten(others)[0] if isinstance(x, torch.Tensor)}

    def one(x: object) -> Any:
        return x.clone() if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata in taken else x

    return pytree.map(one, tree)


def to_moment_dtype(moments: object, by_leaf: bool) -> object:
    """The optimizer's trees in the table's moment dtypes; moments in 8 bits must be there already."""

    def one(node: Any) -> Any:
        if not is_sharded(node) or node.kind in ("signed", "nonnegative"):
            return node
        groups = node.layout.groups
        for key in node.keys:
            row = groups[key].row
            if isinstance(row.policy.moment, str):
                raise ValueError(
                    f"params[{row.path!r}]: its policy stores moments as {row.policy.moment!r}, which its optimizer "
                    f"({row.optimizer}) cannot carry: nothing says which of its moments may be negative. fz.adamw, "
                    "fz.adam, fz.lion and fz.sgd can, alone or in fz.chain and fz.partition; or give moment= a dtype."
                )
        return node.with_buffers({key: b.to(groups[key].row.policy.moment) for key, b in node.locals().items()})

    return pytree.map(one, moments, is_leaf=is_sharded)


def zeros_like(params: Any, nonnegative: bool = False) -> Any:
    """Moments that are zero, stored in the formats of their leaves' policies.

    Args:
        params: what an optimizer's `init` is given.
        nonnegative: whether they never are negative (second moments), which decides how 8 bits hold them.
    """
    if not is_sharded(params):
        return pytree.map(torch.zeros_like, params)
    buffers: dict[object, torch.Tensor] = {}
    for key in params.keys:
        form = params.layout.groups[key].row.policy.moment_format(not nonnegative)
        stored = params.stored(key)
        parts = zeros(form, stored.numel(), stored.parts[0].device)
        buffers.update(zip(part_names(form, key), parts, strict=True))
    kind = "nonnegative" if nonnegative else "signed"
    return Sharded(params.layout, params.axis, params.structure, buffers, kind=kind)
