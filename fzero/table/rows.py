"""The placement table: a transform adds a rule, the rules give every leaf its row."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fzero.base.patterns import matches, unit_of, unmatched
from fzero.table.policy import ByPath, Policy

FROZEN = "frozen"


@dataclass(frozen=True)
class Rule:
    """One transform's word on one column of the leaves that match a pattern."""

    column: str
    pattern: str
    value: Any
    source: str

    def __str__(self) -> str:
        return f"{self.column:<10} {self.pattern:<16} {self.source}"


@dataclass(frozen=True)
class Sharding:
    """The value of the axis column: which mesh axis a leaf's state is cut over, and from which stage on."""

    stage: int
    mesh: Any
    axis: str
    replicate: str | None

    @property
    def unplaced(self) -> Sharding:
        """The same without its mesh, whose name and sizes say nothing of the ranks."""
        return dataclasses.replace(self, mesh=None)

    @property
    def lifetime(self) -> str:
        return "one use" if self.stage == 3 else "the step"


@dataclass(frozen=True)
class Row:
    """What holds for one leaf. Leaves of a unit whose rows are alike share their buffers."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    unit: str
    policy: Policy
    optimizer: str
    stage: int
    axis: str | None
    remat: bool

    @property
    def frozen(self) -> bool:
        return self.optimizer == FROZEN

    @property
    def numel(self) -> int:
        return int(torch.Size(self.shape).numel())

    @property
    def group(self) -> tuple[Any, ...]:
        """What two leaves of a unit must share to lie in one buffer."""
        return (self.policy, self.optimizer)


def add_rule(rules: Sequence[Rule], new: Rule) -> tuple[Rule, ...]:
    """The rules with one more, in an order that does not depend on the order they were said in."""
    for rule in rules:
        if (rule.column, rule.pattern) == (new.column, new.pattern):
            if rule.value != new.value:
                raise ValueError(
                    f"The column {new.column!r} of the leaves {new.pattern!r} is set twice: by {rule.source} and by "
                    f"{new.source}. Keep one of the two."
                )
            return tuple(rules)
    return tuple(sorted((*rules, new), key=lambda rule: (rule.column, rule.pattern)))


def find(rules: Iterable[Rule], column: str) -> Any:
    """The value of a column that is set for all leaves at once, or None."""
    return next((rule.value for rule in rules if rule.column == column), None)


def check_leaf(path: str, leaf: Any) -> None:
    """Refuses a param that cannot be trained or sharded, by name."""
    if not isinstance(leaf, torch.Tensor):
        raise TypeError(
            f"params[{path!r}]: got {type(leaf).__name__}, expected a floating tensor (or a callable that makes one). "
            "Keep what is not a tensor out of the params; a class of your own that holds some is registered with "
            "optree (optree.register_pytree_node)."
        )
    if not leaf.is_floating_point():
        raise TypeError(
            f"params[{path!r}]: got dtype {leaf.dtype}, expected a floating dtype. "
            "Pass integer tensors as inputs of the function, or let it close over them; of a complex param hold "
            "torch.view_as_real(w), and take torch.view_as_complex of it in the function."
        )
    if leaf.numel() == 0:
        raise ValueError(
            f"params[{path!r}]: got shape {tuple(leaf.shape)}, which has no elements; expected at least one. "
            "Drop the leaf from the params; of a module make it a buffer."
        )


def resolve(
    leaves: Sequence[tuple[str, tuple[int, ...], torch.dtype]],
    rules: Sequence[Rule],
    policy: Policy | ByPath,
    units: Sequence[str] | None,
    label: Any,
    frozen: Container[int] = (),
) -> tuple[Row, ...]:
    """The rows of the table; every pattern must match some leaf.

    Args:
        leaves: path, shape and own dtype of every leaf.
        label: `label(path)` names the optimizer of a leaf.
        frozen: the indices of leaves that are frozen without a rule: their module does not train them.
    """
    paths = [path for path, _, _ in leaves]
    _check_patterns(paths, rules, policy, units)
    sharding: Sharding | None = find(rules, "axis")
    autocast = find(rules, "compute")
    patterns = [rule.pattern for rule in rules if rule.column == FROZEN]
    rows = []
    for index, (path, shape, own) in enumerate(leaves):
        cast = autocast if autocast is not None and len(shape) >= 2 and own != torch.float64 else None
        stays = index in frozen or any(matches(pattern, path) for pattern in patterns)
        try:
            resolved = policy.of(path).resolve(own, cast)
        except ValueError as error:
            raise ValueError(f"params[{path!r}]: {error}") from None
        rows.append(
            Row(
                path=path,
                shape=tuple(shape),
                dtype=own,
                unit=unit_of(path, units),
                policy=resolved,
                optimizer=FROZEN if stays else label(path),
                stage=sharding.stage if sharding else 0,
                axis=sharding.axis if sharding else None,
                remat=bool(find(rules, "remat")),
            )
        )
    return tuple(rows)


def _check_patterns(
    paths: list[str], rules: Sequence[Rule], policy: Policy | ByPath, units: Sequence[str] | None
) -> None:
    some = ", ".join(paths[:6]) + (", ..." if len(paths) > 6 else "")

    def refuse(what: str, pattern: str) -> None:
        raise ValueError(
            f"{what}: the pattern {pattern!r} matches no leaf. The leaves are {some}. "
            "Correct the pattern (fnmatch over dotted paths) or take it out."
        )

    for rule in rules:
        for part in unmatched(rule.pattern, paths) if rule.pattern != "*" else ():
            refuse(rule.source, part)
    if isinstance(policy, ByPath):
        for pattern in policy.unmatched(paths):
            refuse("Policy.by_path", pattern)
    for pattern in units or ():
        if not any(unit_of(path, [pattern]) for path in paths):
            refuse("train_step(units=...)", pattern)
