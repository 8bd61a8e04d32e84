"""The params of a module: a dict that also carries what must be known of the module where its params are placed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from fzero.base import pytree
from fzero.table.layout import Layout
from fzero.table.rows import Row
from fzero.table.slices import Hint, Use


class ModuleParams(dict[str, Any]):
    """`{fully qualified name: leaf}`, which knows the names of the leaves that the module does not train.

    A dict in every other way, and a pytree whose leaves have a dict's order and paths. `tree_map`, `copy`, `|` and
    pickle keep what it knows; `dict(params)` and comprehensions do not, which `apply` then notices.

    Attributes:
        frozen: names of the params with `requires_grad=False`.
        hints: name -> what the module says of a param, for `fz.shard_tensor`.

    Example:
        >>> apply, params = fz.functional(torch.nn.Linear(2, 1).requires_grad_(False))
        >>> params.frozen, isinstance(params, dict)
        (('bias', 'weight'), True)
    """

    frozen: tuple[str, ...] = ()
    hints: tuple[tuple[str, tuple[tuple[Any, ...], ...]], ...] = ()  # plain, so that `torch.load` takes them

    def __init__(
        self,
        leaves: Mapping[str, object] | Iterable[tuple[str, object]] = (),
        *,
        frozen: Iterable[str] = (),
        hints: Mapping[str, Hint] = MappingProxyType({}),
    ) -> None:
        super().__init__(leaves)
        self.frozen = tuple(sorted(frozen))
        self.hints = tuple(sorted((name, tuple(map(tuple, uses))) for name, uses in hints.items()))

    def __reduce__(self) -> object:
        return ModuleParams, (dict(self),), vars(self)

    def copy(self) -> ModuleParams:
        """A new dict of the same leaves."""
        return _like(vars(self), self.items())

    def __or__(self, other: object) -> object:
        if not isinstance(other, dict):
            return NotImplemented
        out = _like(vars(self), {**self, **other}.items())
        out.frozen = tuple(sorted({*self.frozen, *getattr(other, "frozen", ())}))
        out.hints = tuple(sorted({**dict(self.hints), **dict(getattr(other, "hints", ()))}.items()))
        return out

    def __ror__(self, other: object) -> object:
        return _like(vars(self), {**other, **self}.items()) if isinstance(other, dict) else NotImplemented


def _like(known: Mapping[str, object], items: Iterable[tuple[str, object]]) -> ModuleParams:
    out = ModuleParams(items)
    vars(out).update(known)
    return out


pytree.register_dict(ModuleParams, vars, _like)
torch.serialization.add_safe_globals([ModuleParams])  # torch.load reads it as it reads a dict


def frozen_leaves(structure: pytree.Spec) -> frozenset[int]:
    """The indices of the leaves that a module somewhere in a tree of params does not train."""
    own = [numbers.get(name) for numbers in _of_modules(structure) for name in numbers.frozen]
    return frozenset(leaf for node in own for leaf in pytree.leaves(node))


def hints_of(structure: pytree.Spec) -> dict[int, Hint]:
    """Index of a leaf in a tree of params -> what the module says of it that it is a param of."""
    hints = [(numbers.get(name), uses) for numbers in _of_modules(structure) for name, uses in numbers.hints]
    return {number: tuple([Use(*use) for use in uses]) for number, uses in hints if isinstance(number, int)}


def _of_modules(structure: pytree.Spec, start: int = 0) -> list[ModuleParams]:
    """The params of modules in a tree, with the indices of leaves, from `start` on, in the place of these."""
    if structure.type is ModuleParams:
        return [pytree.unflatten(structure, list(range(start, start + structure.num_leaves)))]
    found: list[ModuleParams] = []
    for child in structure.children():
        found += _of_modules(child, start)
        start += child.num_leaves
    return found


def other_names(structure: pytree.Spec, paths: Sequence[str]) -> dict[str, str]:
    """The further names of tied leaves -> the paths of these leaves; a name that is a leaf's own path is left out."""
    known, out = {*paths}, dict[str, str]()
    for leaf, (first, *others) in hints_of(structure).items():
        if others and (path := paths[leaf]).endswith(first.name):
            before = path.removesuffix(first.name)
            out |= {name: path for use in others if (name := before + use.name) not in known}
    return out


def refuse_lost(
    params: Mapping[str, torch.Tensor], origins: Mapping[str, Row | None], frozen: Collection[str], running: Layout
) -> None:
    """Refuses a frozen param of a module that the running step trains: that it is frozen was lost on the way."""
    lost: dict[str, str] = {}
    for name in frozen:
        row, shape = origins.get(name), tuple(params[name].shape)
        if row is None:  # computed from a leaf, perhaps: from that of its name
            named = [r for r in running.rows if f".{r.path}".endswith(f".{name}") and r.shape == shape]
            row = named[0] if named and not any(r.frozen for r in named) else None
        if row is not None and not row.frozen:
            lost[row.path] = name
    if lost:
        path, name = next(iter(lost.items()))
        others = f" (and {len(lost) - 1} others of the module)" if len(lost) > 1 else ""
        raise ValueError(
            f"apply: the step trains leaf {path!r}, but {name!r}{others} has requires_grad=False in the module. The "
            "params of fz.functional say so to init, unless they are turned into a plain dict first (dict(params), a "
            "comprehension). Pass them on as they are or by optree.tree_map, which keeps their type; or say "
            f"fz.freeze(step, {path!r}); or, to train it, .requires_grad_(True) before fz.functional."
        )
