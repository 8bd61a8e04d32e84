"""Modules whose leaves are cut over a tensor axis: which of them are converted, and whose heads they share."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from fzero.comm.axis import Axis
from fzero.modules.conversion import Converted, CutLeaf
from fzero.modules.hints import heads_of, kind_of
from fzero.parallel import maps
from fzero.parallel.piece import whole
from fzero.table.rows import Row
from fzero.table.slices import style_of_dim


class Cuts(NamedTuple):
    """The leaves of a module that are cut, over an axis; what a copy of the module is converted for."""

    leaves: tuple[CutLeaf, ...]
    axis: Axis
    group: object  # of the axis, which may be of a process group that is started anew
    sequence: bool  # what rows and embeddings give is a piece of the tokens on each rank

    @staticmethod
    def over(leaves: tuple[CutLeaf, ...], axis: Axis, sequence: bool) -> Cuts:
        return Cuts(leaves, axis, axis.group, sequence)


def cut_leaves(origins: Mapping[str, Row | None], aliases: Mapping[str, str], module: nn.Module) -> tuple[CutLeaf, ...]:
    """What is cut of a module's params; `aliases` has the one name of a leaf by each of its names."""
    found = []
    for name, leaf in aliases.items():
        row = origins[leaf]
        if row is None or not (row.slices or {style for _, style in row.styles} & {"copied", "experts"}):
            continue
        styles, slices = dict(row.styles), row.slices
        style = styles.get(name) or (styles.get(row.path) if name == leaf else "")
        if not style and slices is not None:
            kind = kind_of(module.get_submodule(name.rpartition(".")[0]))
            style = style_of_dim(kind, slices.dim, len(row.shape), tied=True)
        found.append(CutLeaf(name, style or "", slices, row.shape))
    return tuple(found)


def need_slices(params: Mapping[str, object], origins: Mapping[str, Row | None], module: nn.Module) -> None:
    """Refuses params that were computed from slices, of which nothing tells how the module is to use them."""
    whole = dict(module.named_parameters())
    for name, leaf in params.items():
        if origins[name] is None and isinstance(leaf, torch.Tensor) and leaf.shape != whole[name].shape:
            raise ValueError(
                f"apply: param {name!r} has shape {tuple(leaf.shape)}, and the module's {tuple(whole[name].shape)}; "
                "expected the leaf that the step gives its function, or a whole param. What is computed from a leaf "
                "that fz.shard_tensor cuts is no slice that the module knows: let the plan leave it whole."
            )


def converted(module: nn.Module, cuts: Cuts) -> dict[str, tuple[dict[str, object], str]]:
    """Converts the modules that leaves are cut of; name of a leaf -> where their forwards read it."""
    by_module: dict[str, list[CutLeaf]] = {}
    for leaf in cuts.leaves:
        by_module.setdefault(leaf.name.rpartition(".")[0], []).append(leaf)
    made: dict[str, Converted] = {}
    once: dict[int, Converted] = {}  # a module may be at two paths
    for path, leaves in by_module.items():
        own = module.get_submodule(path)
        made[path] = once[id(own)] = once.get(id(own)) or Converted(path, own, leaves, cuts.axis, cuts.sequence)
    for path, own in module.named_modules(remove_duplicate=False):
        _share_heads(path, own, made, cuts)
    for each in {id(each): each for each in made.values()}.values():
        each.install()
    return {
        (f"{path}.{name}" if path else name): (each.leaves, name) for path, each in made.items() for name in each.leaves
    }


def _share_heads(path: str, module: nn.Module, made: dict[str, Converted], cuts: Cuts) -> None:
    """Gives each rank the keys and values of its queries' heads, where their pieces are not those already."""
    axis, heads, before = cuts.axis, heads_of(module), path + "." if path else ""
    if heads is None or (query := made.get(before + "q_proj")) is None:
        return
    leaf = query.cut["weight"]
    if leaf.style != "column" or leaf.slices is None or len(leaf.slices.parts) > 1:
        return
    own = [ranges[0] for ranges in leaf.slices.ranges(axis.size)]
    if any(start % heads.dim or size % heads.dim for start, size in own):
        raise query.refused(f"it is cut within a head of {heads.dim} elements, {leaf.slices.sizes(axis.size)}")
    if not all(size for _, size in own):
        raise query.refused(f"its {leaf.shape[0] // heads.dim} heads are fewer than the {axis.size} ranks")
    keys = [made.get(before + name) for name in ("k_proj", "v_proj")]
    wanted = [(start // heads.groups, size // heads.groups) for start, size in own]
    shared = any(size % (heads.dim * heads.groups) for _, size in own)  # one head of keys by queries of several ranks
    if not shared and all(_pieces(key, axis.size) == wanted for key in keys):
        return
    start, size = (each // heads.dim for each in own[axis.rank])
    chosen = [head // heads.groups for head in range(start, start + size)]
    for name, key in zip(("k_proj", "v_proj"), keys, strict=True):
        if key is None:
            key = made[before + name] = Converted(before + name, getattr(module, name), (), axis, cuts.sequence)
        elif key.cut["weight"].style == "column":
            key.cut["weight"] = key.cut["weight"]._replace(style="column_gather")
        key.then = functools.partial(_chosen_heads, axis, heads.dim, chosen)
        key.heads = tuple([size for _, size in own])
    if hasattr(module, "num_key_value_groups"):
        module.num_key_value_groups = 1  # type: ignore[assignment]


def _pieces(key: Converted | None, ranks: int) -> list[tuple[int, int]] | None:
    if key is None or key.cut["weight"].slices is None or key.cut["weight"].style != "column":
        return None
    return [ranges[0] for ranges in key.cut["weight"].slices.ranges(ranks)]


def _chosen_heads(axis: Axis, dim: int, chosen: Sequence[int], x: torch.Tensor) -> torch.Tensor:
    """The head of keys or values for each of this rank's heads of queries, of those that all ranks have."""
    own = maps.shared(whole(x), axis).unflatten(-1, (-1, dim))
    return own.index_select(-2, torch.tensor(chosen, device=x.device)).flatten(-2)
