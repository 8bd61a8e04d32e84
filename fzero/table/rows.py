"""The placement table: a transform adds a rule, the rules give every leaf its row."""

from __future__ import annotations

import enum
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType, UnionType
from typing import Any, NamedTuple, get_args

import torch

from fzero.base.arguments import named
from fzero.base.patterns import ROOT, matches, unit_of, unmatched
from fzero.comm.backend import Mesh
from fzero.formats.formats import Format
from fzero.stores.memories import DEVICE, HOST, Memory
from fzero.table.names import NO_NAMES, Names
from fzero.table.policy import ByPath, Policy
from fzero.table.slices import AUTO, Cut, Hint, OverMesh, Said, Slices, Styles, TensorAxis, Use, slices_of

Leaf = tuple[str, tuple[int, ...], torch.dtype]  # path, shape, own dtype
FROZEN = "frozen"


class Frozen(enum.Enum):
    """A value of the column `frozen` beside True: the leaf keeps the moments that it has."""

    KEEPS = "keeps moments"


@dataclass(frozen=True)
class Rule:
    """One transform's word on one column of the leaves that match a pattern."""

    column: str
    pattern: str
    value: object
    source: str

    def __str__(self) -> str:
        return f"{self.column:<10} {self.pattern:<16} {self.source}"


@dataclass(frozen=True)
class Sharding(OverMesh):
    """The value of the axis column: which mesh axes a leaf's state is cut over as one, and from which ZeRO stage on."""

    stage: int
    mesh: Mesh | None
    axes: tuple[str, ...]
    replicate: tuple[str, ...]

    def of_state(self) -> Sharding:
        """What it says of a state, whichever the ranks are."""
        return replace(self, mesh=None)


KINDS = ("params", "grads", "moments")  # of state
# column -> whether it is said of a whole unit, which runs as one, and not of single leaves; and what its values are
COLUMNS: dict[str, tuple[bool, type | UnionType]] = {
    "axis": (False, Sharding),
    "compute": (True, torch.dtype),
    "frozen": (False, bool | Frozen),
    "remat": (True, bool | Names),
    "compile": (True, bool),
    **{f"{kind} in": (False, Memory) for kind in KINDS},
    "activations in": (True, Memory),
    "tensor axis": (False, TensorAxis),
    "tensor": (False, Cut),
}
RUNNING = ("remat", "compile", "activations in")  # of those, what says how a unit runs and nothing of a state


class Shard(NamedTuple):
    """A rank keeps its slice along a mesh axis: of dim `dim`, or of the flat buffer where that is None."""

    axis: str
    dim: int | None = None


class Kept(NamedTuple):
    """How one kind of state of a leaf is kept between steps: as what, cut over which mesh axes, in which memory."""

    stored: torch.dtype | str | Format  # moments in 8 or 4 bits by that name, as the two have formats of their own
    cuts: tuple[Shard, ...] = ()
    memory: Memory = DEVICE


@dataclass(frozen=True)
class Row:
    """The table's columns for one leaf. Leaves of a unit whose rows are alike share their buffers."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype  # the leaf's own
    unit: str
    policy: Policy  # the leaf's, with every column filled in
    optimizer: str
    params: Kept
    grads: Kept | None  # None of a frozen leaf
    moments: Kept | None  # None of a frozen leaf that does not keep them
    cuts: tuple[Shard, ...]  # a rank's slice of the leaf, where any of its state is cut
    lifetime: str  # of a gathered copy: "one use", "the step" (it is held between steps too), or "always", ungathered
    autocast: torch.dtype | None = None  # the dtype of torch.autocast while the leaf's unit runs, or None
    # how the leaf is cut over the tensor axis, before anything else; None where it is whole
    slices: Slices | None = None
    styles: Styles = ()  # name -> what its module does there with a leaf that is cut, or copied for each rank
    hint: Hint | None = field(default=None, compare=False)  # what its module says of it
    remat: bool = field(default=False, compare=False)  # which say nothing of what is kept
    names: Names = field(default=NO_NAMES, compare=False)
    compile: bool = field(default=False, compare=False)
    activations: Memory = field(default=DEVICE, compare=False)

    @cached_property
    def frozen(self) -> bool:
        return self.grads is None

    @property
    def held(self) -> bool:
        """True where every rank holds the full params, beside its slice of what is updated (ZeRO-1 and 2)."""
        return self.lifetime == "the step"

    @property
    def beside(self) -> bool:
        """True where the slice that is updated is stored, and no part of what is held already."""
        return not (self.held and self.policy.computes_as_stored and self.params.memory == DEVICE)

    @cached_property
    def memories(self) -> tuple[Memory, ...]:
        """Where params, grads and moments lie."""
        return tuple(DEVICE if kept is None else kept.memory for kept in (self.params, self.grads, self.moments))

    @property
    def fetched(self) -> bool:
        """True where the params are brought to the device for each use."""
        return self.params.memory != DEVICE

    @cached_property
    def reads_files(self) -> bool:
        """True where they come from files."""
        return self.params.memory not in (DEVICE, HOST)

    @cached_property
    def updates_on_host(self) -> bool:
        """True where all that an update writes lies elsewhere: then it comes to the host's memory, otherwise here."""
        return self.fetched and self.moments is not None and self.moments.memory != DEVICE

    @property
    def numel(self) -> int:
        return int(torch.Size(self.shape).numel())

    @property
    def group(self) -> tuple[object, ...]:
        """The fields that two leaves of a unit must share to lie in one buffer."""
        return (self.policy, self.optimizer, self.params, self.grads, self.moments, self.cuts, self.lifetime)


@dataclass(frozen=True)
class Table:
    """The rows of all leaves."""

    rows: tuple[Row, ...]
    outside: torch.dtype | None  # torch.autocast's for what runs outside of units
    sequence: bool = False  # modules that are cut over the tensor axis keep pieces of the tokens

    @cached_property
    def units(self) -> dict[str, Row]:
        """Unit -> a row that says how it runs."""
        return {row.unit: row for row in reversed(self.rows)}

    @cached_property
    def gathers(self) -> bool:
        """True where params are gathered at their use."""
        return any(row.params.cuts for row in self.rows)

    @cached_property
    def names(self) -> frozenset[str]:
        """What units that are recomputed keep."""
        return frozenset(name for row in self.rows for name in row.names.all if name)

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
            if (
                row.unit != ROOT
                and (row.params.cuts or row.fetched or row.remat or row.compile or row.activations != DEVICE)
            )
            or row.autocast != self.outside
        )


def add_rule(rules: Sequence[Rule], new: Rule) -> tuple[Rule, ...]:
    """The rules with one more, in an order that does not depend on the order they were said in."""
    if new.column not in COLUMNS:
        raise ValueError(
            f"{new.source}: got a rule for the column {new.column!r}, expected one of {', '.join(map(repr, COLUMNS))}."
        )
    kind = COLUMNS[new.column][1]
    if not isinstance(new.value, kind):
        name = kind.__name__ if isinstance(kind, type) else " or ".join(each.__name__ for each in get_args(kind))
        raise TypeError(f"{new.source}: got {named(new.value)} for the column {new.column!r}, expected a {name}.")
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


def _value_of(rules: Sequence[Rule], column: str, path: str) -> Any:
    """The value that the rules give one column of the leaf at `path`; None where none does."""
    found = [rule for rule in rules if rule.column == column and matches(rule.pattern, path)]
    return _one(found, path).value if found else None


def _one(found: Sequence[Rule], path: str) -> Rule:
    for other in found[1:]:
        if other.value != found[0].value:
            raise _twice(f"of leaf {path!r}", found[0], other)
    return found[0]


def _plan_of(rules: Sequence[Rule], path: str, uses: Sequence[Use]) -> dict[str, Said]:
    """Name of a leaf -> what the plan of tensors says of it, or of the module that has it."""
    out = {}
    for name, full in _full_names(path, uses).items():
        owner = full.rpartition(".")[0]
        met: list[tuple[Rule, Any]] = [(rule, rule.value) for rule in rules if rule.column == "tensor"]
        met = [(rule, cut) for rule, cut in met if matches(rule.pattern, full) or matches(rule.pattern, owner)]
        found = [(rule, cut) for rule, cut in met if cut.how != "experts"]
        found = [(rule, cut) for rule, cut in found if cut.how != AUTO] or found  # what is said comes first
        if found:
            rule = _one([rule for rule, _ in found], full)
            out[name] = Said(found[0][1], rule.source, any(cut.how == "experts" for _, cut in met))
    return out


def _full_names(path: str, uses: Sequence[Use]) -> dict[str, str]:
    """Name of a leaf in its module -> the path that a pattern is held against."""
    first = uses[0].name
    if not path.endswith(first):  # it was put under another name
        return {first: path}
    prefix = path.removesuffix(first)
    return {use.name: prefix + use.name for use in uses}


def resolve(
    leaves: Sequence[Leaf],
    rules: Sequence[Rule],
    policy: Policy | ByPath,
    units: Sequence[str] | None,
    label: Callable[[str], str],
    frozen: Container[int] = (),
    hints: Mapping[int, Hint] = MappingProxyType({}),
) -> Table:
    """The table of leaves whose optimizers `label(path)` names.

    Args:
        frozen: indices of the leaves that modules do not train.
        hints: index -> what a leaf's module says of it.
    """
    uses = {index: hints.get(index) or (Use(path, ""),) for index, (path, _, _) in enumerate(leaves)}
    names = [name for index, (path, _, _) in enumerate(leaves) for name in _full_names(path, uses[index]).values()]
    planned = [*names, *[name.rpartition(".")[0] for name in names]]
    _check_patterns([path for path, _, _ in leaves], planned, rules, policy, units)
    over = _value_of(rules, "tensor axis", "")
    rows = []
    first: dict[str, tuple[str, Mapping[str, Any]]] = {}  # unit -> its first leaf and what the rules say of it
    for index, (path, shape, own) in enumerate(leaves):
        said = {column: _value_of(rules, column, path) for column in COLUMNS if column != "tensor"}
        unit, sharding = _unit_of(path, units, uses[index][0]), said["axis"]
        other, theirs = first.setdefault(unit, (path, said))
        for column, (whole, _kind) in COLUMNS.items():
            if whole and said[column] != theirs[column]:
                sources = ", ".join(rule.source for rule in rules if rule.column == column)
                what = f"unit {unit!r}" if unit != ROOT else "what lies outside of units"
                raise ValueError(
                    f"{sources}: the column {column!r} holds for one of the leaves {other!r} and {path!r} only, and "
                    f"{what}, to which both belong, runs as one. Say a pattern that matches all of its leaves or none."
                )
        cast = said["compute"] if len(shape) >= 2 and own != torch.float64 and not matches(_ORIGINALS, path) else None
        stays, keeps = index in frozen or bool(said["frozen"]), said["frozen"] is Frozen.KEEPS
        try:
            resolved = policy.of(path).resolve(own, cast)
        except (TypeError, ValueError) as error:
            raise type(error)(f"params[{path!r}]: {error}") from None
        assert resolved.grad and resolved.moment
        memory = {kind: said[f"{kind} in"] or DEVICE for kind in KINDS}
        stage = sharding.stage if sharding else 0
        plan = _plan_of(rules, path, uses[index])
        slices, styles = slices_of(path, shape, plan, uses[index]) if over else (None, ())
        if slices and sharding and over.axis in (*sharding.axes, *sharding.replicate):
            raise ValueError(
                f"shard_tensor: got axis={over.axis!r}, over which the state of leaf {path!r} is sharded or "
                "replicated, too; expected another axis of the mesh for each."
            )
        cuts = tuple([Shard(axis) for axis in sharding.axes]) if sharding else ()
        rows.append(
            Row(
                path=path,
                shape=tuple(shape),
                dtype=own,
                unit=unit,
                policy=resolved,
                optimizer=", ".join([FROZEN] * stays + [label(path)] * (keeps or not stays)),
                params=Kept(resolved.param_format, cuts if stage == 3 else (), memory["params"]),
                grads=None if stays else Kept(resolved.grad, cuts if stage >= 2 else (), memory["grads"]),
                moments=Kept(resolved.moment, cuts, memory["moments"]) if keeps or not stays else None,
                cuts=cuts,
                lifetime="one use" if stage == 3 else "the step" if stage else "always",
                autocast=said["compute"],
                slices=slices,
                styles=styles,
                hint=hints.get(index),
                remat=bool(said["remat"]),
                names=said["remat"] if isinstance(said["remat"], Names) else NO_NAMES,
                compile=bool(said["compile"]),
                activations=said["activations in"] or DEVICE,
            )
        )
    outside = first[ROOT][1]["compute"] if ROOT in first else _value_of(rules, "compute", ROOT)
    return Table(tuple(rows), outside, bool(over and over.sequence))


def _unit_of(path: str, units: Sequence[str] | None, use: Use) -> str:
    """The unit of a leaf; without patterns an element of a ParameterList, say, is in none: nobody calls that."""
    unit, before = unit_of(path, units), path.removesuffix(use.name)
    alone = units is None and use.loose and path.endswith(use.name)
    return ROOT if alone and unit == before + unit_of(use.name, None) else unit


# what torch's parametrisations compute a weight of, in its own dtype: that is what a matmul casts
_ORIGINALS = "*parametrizations.*.original*|*_orig"


def _check_patterns(
    paths: list[str], planned: list[str], rules: Sequence[Rule], policy: Policy | ByPath, units: Sequence[str] | None
) -> None:
    """Refuses patterns that match nothing; those of a plan of tensors may match modules and other names, `planned`."""
    lost = []
    for rule in rules:
        lost += [(rule.source, part) for part in unmatched(rule.pattern, planned if rule.column == "tensor" else paths)]
    for pattern, _ in policy.policies if isinstance(policy, ByPath) else ():
        lost += [("Policy.by_path", pattern)] if not any(matches(pattern, path) for path in paths) else []
    for pattern in units or ():
        lost += [("train_step(units=...)", pattern)] if not any(unit_of(path, [pattern]) for path in paths) else []
    if lost:
        some = ", ".join(paths[:6]) + (", ..." if len(paths) > 6 else "")
        raise ValueError(
            f"{lost[0][0]}: the pattern {lost[0][1]!r} matches no leaf. The leaves are {some}. "
            "Correct the pattern (fnmatch over dotted paths) or take it out."
        )
