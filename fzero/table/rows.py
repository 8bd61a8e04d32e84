"""The placement table: a transform adds a rule, the rules give every leaf its row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from fzero.base.patterns import ROOT, matches, unit_of, unmatched
from fzero.formats.formats import Format
from fzero.table.policy import ByPath, Policy

Leaf = tuple[str, tuple[int, ...], torch.dtype]  # path, shape, own dtype
FROZEN = "frozen"
# column -> whether it is said of a whole unit, which runs as one, and not of single leaves
COLUMNS = {"axis": False, "compute": True, "frozen": False, "remat": True, "compile": True}


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
    """The value of the axis column: which mesh axis a leaf's state is cut over, and from which ZeRO stage on."""

    stage: int
    mesh: Any
    axis: str
    replicate: str | None

    @property
    def unplaced(self) -> Sharding:
        """The same without its mesh, whose name and sizes say nothing of the ranks."""
        return dataclasses.replace(self, mesh=None)


class Cut(NamedTuple):
    """A rank keeps its slice along a mesh axis: of dim `dim`, or of the flat buffer where that is None."""

    axis: str
    dim: int | None = None


class Kept(NamedTuple):
    """How one kind of state of a leaf is kept between steps.

    Attributes:
        stored: its dtype or format; moments in 8 or 4 bits by that name, as the two have formats of their own.
        cuts: the mesh axes that it is cut over.
        memory: where it lies.
    """

    stored: torch.dtype | str | Format
    cuts: tuple[Cut, ...] = ()
    memory: str = "device"


@dataclass(frozen=True)
class Row:
    """What holds for one leaf. Leaves of a unit whose rows are alike share their buffers.

    Attributes:
        dtype: the leaf's own.
        policy: with every column filled in: what is computed and summed in.
        params, grads, moments: how these are kept; None of a frozen leaf's grads and moments.
        cuts: what a rank's slice of the leaf is, where any of its state is cut.
        lifetime: how long a gathered copy lives: "one use", "the step" (it is held between steps too), or "always",
            where nothing is gathered.
        autocast: the dtype of torch.autocast while the leaf's unit runs, or None.
        remat: whether its unit is recomputed.
        compile: whether its unit is compiled.
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    unit: str
    policy: Policy
    optimizer: str
    params: Kept
    grads: Kept | None
    moments: Kept | None
    cuts: tuple[Cut, ...]
    lifetime: str
    autocast: torch.dtype | None = None
    remat: bool = field(default=False, compare=False)  # which say nothing of what is kept
    compile: bool = field(default=False, compare=False)

    @property
    def frozen(self) -> bool:
        return self.optimizer == FROZEN

    @property
    def held(self) -> bool:
        """Whether every rank holds the full params, beside its slice of what is updated (ZeRO-1 and 2)."""
        return self.lifetime == "the step"

    @property
    def numel(self) -> int:
        return int(torch.Size(self.shape).numel())

    @property
    def group(self) -> tuple[Any, ...]:
        """What two leaves of a unit must share to lie in one buffer."""
        return (self.policy, self.optimizer, self.params, self.grads, self.moments, self.cuts, self.lifetime)


@dataclass(frozen=True)
class Table:
    """The rows of all leaves.

    Attributes:
        outside: the dtype of torch.autocast for what runs outside of units, or None.
    """

    rows: tuple[Row, ...]
    outside: torch.dtype | None

    @cached_property
    def units(self) -> dict[str, Row]:
        """Unit -> a row that says how it runs."""
        return {row.unit: row for row in reversed(self.rows)}

    @cached_property
    def gathers(self) -> bool:
        """Whether params are gathered where they are used."""
        return any(row.params.cuts for row in self.rows)

    @cached_property
    def remats(self) -> bool:
        return any(row.remat for row in self.rows)

    @cached_property
    def compiled(self) -> frozenset[str]:
        """The units that are compiled."""
        return frozenset(row.unit for row in self.rows if row.compile)

    @cached_property
    def acting(self) -> frozenset[str]:
        """The units in which something is to be done: to gather, to recompute, to compile, to compute in a dtype."""
        return frozenset(
            row.unit
            for row in self.rows
            if row.unit != ROOT and (row.params.cuts or row.remat or row.compile or row.autocast != self.outside)
        )


def add_rule(rules: Sequence[Rule], new: Rule) -> tuple[Rule, ...]:
    """The rules with one more, in an order that does not depend on the order they were said in.

    Raises:
        ValueError: an unknown column; one that is set twice, for one pattern, to different values.
    """
    if new.column not in COLUMNS:
        raise ValueError(
            f"{new.source}: got a rule for the column {new.column!r}, expected one of {', '.join(map(repr, COLUMNS))}."
        )
    for rule in rules:
        if (rule.column, rule.pattern) == (new.column, new.pattern):
            if rule.value != new.value:
                raise _twice(f"of the leaves {new.pattern!r}", rule, new)
            return tuple(rules)
    return tuple(sorted((*rules, new), key=lambda rule: (rule.column, rule.pattern)))


def _twice(of: str, rule: Rule, other: Rule) -> ValueError:
    return ValueError(
        f"The column {rule.column!r} {of} is set twice: by {rule.source} and by {other.source}. Keep one of the two."
    )


def value_of(rules: Sequence[Rule], column: str, path: str) -> Any:
    """What the rules say of one column of the leaf at `path`; None where none does.

    Raises:
        ValueError: two of them say different things.
    """
    found = [rule for rule in rules if rule.column == column and matches(rule.pattern, path)]
    for other in found[1:]:
        if other.value != found[0].value:
            raise _twice(f"of leaf {path!r}", found[0], other)
    return found[0].value if found else None


def resolve(
    leaves: Sequence[Leaf],
    rules: Sequence[Rule],
    policy: Policy | ByPath,
    units: Sequence[str] | None,
    label: Callable[[str], str],
    frozen: Container[int] = (),
) -> Table:
    """The table.

    Args:
        leaves: path, shape and own dtype of every leaf.
        label: `label(path)` names the optimizer of a leaf.
        frozen: the indices of leaves that are frozen without a rule: their module does not train them.

    Raises:
        ValueError: a pattern that matches no leaf; a leaf with two rules that contradict each other, or with a policy
            that does not fit it; leaves of a unit that differ in what holds for units.
    """
    _check_patterns([path for path, _, _ in leaves], rules, policy, units)
    rows = []
    for index, (path, shape, own) in enumerate(leaves):
        said = {column: value_of(rules, column, path) for column in COLUMNS}
        cast = said["compute"] if len(shape) >= 2 and own != torch.float64 else None
        stays = index in frozen or bool(said["frozen"])
        try:
            resolved = policy.of(path).resolve(own, cast)
        except ValueError as error:
            raise ValueError(f"params[{path!r}]: {error}") from None
        assert resolved.grad and resolved.moment
        sharding: Sharding | None = said["axis"]
        stage = sharding.stage if sharding else 0
        cuts = (Cut(sharding.axis),) if sharding else ()
        rows.append(
            Row(
                path=path,
                shape=tuple(shape),
                dtype=own,
                unit=unit_of(path, units),
                policy=resolved,
                optimizer=FROZEN if stays else label(path),
                params=Kept(resolved.param_format, cuts if stage == 3 else ()),
                grads=None if stays else Kept(resolved.grad, cuts if stage >= 2 else ()),
                moments=None if stays else Kept(resolved.moment, cuts),
                cuts=cuts,
                lifetime="one use" if stage == 3 else "the step" if stage else "always",
                autocast=said["compute"],
                remat=bool(said["remat"]),
                compile=bool(said["compile"]),
            )
        )
    _check_units(rows, rules)
    root = next((row for row in rows if row.unit == ROOT), None)
    return Table(tuple(rows), root.autocast if root else value_of(rules, "compute", ROOT))


def _check_units(rows: Sequence[Row], rules: Sequence[Rule]) -> None:
    """Refuses leaves of one unit that differ in what is said of whole units."""
    first: dict[str, Row] = {}
    for row in rows:
        other = first.setdefault(row.unit, row)
        for column in (column for column, whole in COLUMNS.items() if whole):
            if value_of(rules, column, row.path) != value_of(rules, column, other.path):
                sources = [rule.source for rule in rules if rule.column == column]
                what = f"unit {row.unit!r}" if row.unit != ROOT else "what lies outside of units"
                raise ValueError(
                    f"{', '.join(sources)}: the column {column!r} holds for one of the leaves {other.path!r} and "
                    f"{row.path!r} only, and {what}, to which both belong, runs as one. Say a pattern that matches all "
                    "of its leaves or none."
                )


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
