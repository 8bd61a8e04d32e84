"""Spec: the fields of a step and the rules of its table. Pure data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from fzero.comm.axis import Axis
from fzero.table.extras import Extra
from fzero.table.fusion import Fusion
from fzero.table.layout import Layout
from fzero.table.microbatch import Microbatches
from fzero.table.optimizer import GradientTransformation
from fzero.table.policy import ByPath, Policy
from fzero.table.rows import Leaf, Row, Rule, Sharding, Table, add_rule, resolve


@dataclass(frozen=True)
class Spec:
    """What a step is made of, as data: transforms return one with one more rule, and the engine reads it.

    `fz.Step` adds the verbs.
    """

    fn: Callable[..., Any]
    optimizer: GradientTransformation
    policy: Policy | ByPath = Policy()  # noqa: RUF009 - frozen
    units: tuple[str, ...] | None = None
    has_aux: bool = False
    rules: tuple[Rule, ...] = ()
    extras: tuple[Extra, ...] = ()
    microbatches: Microbatches = Microbatches()  # noqa: RUF009 - frozen
    donates: bool = False
    fusion: Fusion | None = None

    # ---- what transforms use

    def with_rule(self, column: str, value: Any, source: str, pattern: str = "*") -> Self:
        """A step with one more rule; one column set twice to different values raises and names both."""
        return dataclasses.replace(self, rules=add_rule(self.rules, Rule(column, pattern, value, source)))

    def with_header(self, field: str, value: Any, source: str) -> Self:
        """A step with one header field set; each may be set once."""
        old = getattr(self, field)
        if old not in (type(self).__dataclass_fields__[field].default, value):
            raise ValueError(f"{source}: this step already has {field}={old}; expected it to be set once. Keep one.")
        return dataclasses.replace(self, **{field: value})

    def with_state(self, extra: Extra) -> Self:
        """A step that keeps more in its state: `state.extra[extra.name]`.

        Raises:
            ValueError: the step keeps something else by this name.
        """
        for other in self.extras:
            if other.name == extra.name:
                if other.source != extra.source:
                    raise ValueError(
                        f"{extra.source}: this step already keeps state.extra[{extra.name!r}], by {other.source}; "
                        "expected it to be said once. Keep one."
                    )
                return self
        return dataclasses.replace(self, extras=tuple(sorted((*self.extras, extra), key=lambda extra: extra.name)))

    @property
    def sharding(self) -> Sharding | None:
        """Any of the rules for the axis: all are over one mesh and axis."""
        return next((rule.value for rule in self.rules if rule.column == "axis"), None)

    @property
    def scales(self) -> bool:
        """Whether cotangents are scaled inside the pullback."""
        return any(extra.scale for extra in self.extras)

    @property
    def signature(self) -> tuple[Any, ...]:
        """What a state must have been made with: everything that decides how it lies in memory, but for the ranks."""
        rules = [
            dataclasses.replace(rule, value=rule.value.unplaced) if rule.column == "axis" else rule
            for rule in self.rules
            if rule.column not in ("remat", "compile")
        ]
        extras = tuple((extra.name, extra.kind, extra.expendable) for extra in self.extras)
        return (self.policy, self.units, extras, tuple(rules))

    def axis(self) -> Axis:
        """The mesh axis, looked up now."""
        sharding = self.sharding
        if sharding is None:
            return Axis()
        return Axis.of(sharding.mesh, sharding.axis, sharding.replicate, f"shard_zero{sharding.stage}")

    def rows(self, leaves: Sequence[Leaf], frozen: Container[int] = ()) -> tuple[Row, ...]:
        """The rows of the table for leaves given as (path, shape, dtype).

        Args:
            frozen: the indices of the leaves that their module does not train, `frozen_leaves` of the params' tree.
        """
        return self._resolved(leaves, frozen).rows

    def _resolved(self, leaves: Sequence[Leaf], frozen: Container[int]) -> Table:
        label = self.optimizer.label or (lambda path: "optimizer")
        return resolve(leaves, self.rules, self.policy, self.units, label, frozen)

    def table(self, layout: Layout) -> Table:
        """The table for the leaves of a state, which another step may have made."""
        known = layout.tables.get(self.rules)
        if known is None:
            leaves = [(row.path, row.shape, row.dtype) for row in layout.rows]
            frozen = [index for index, row in enumerate(layout.rows) if row.frozen]
            known = layout.tables[self.rules] = self._resolved(leaves, frozen)
        return known

    def __str__(self) -> str:
        return describe(self)


S = TypeVar("S", bound=Spec)  # a transform returns a step of the kind that it is given


def header(step: Spec) -> tuple[str, ...]:
    """What holds for the step as a whole, a line each."""
    lines = []
    if step.microbatches.count > 1:
        lines.append(f"accumulate: {step.microbatches.count} microbatches, in_dims={step.microbatches.in_dims}")
    lines += [f"state.extra[{extra.name!r}]: {extra.source}" for extra in step.extras]
    if step.fusion:
        mode = step.fusion.mode(step.optimizer, step.scales)
        modes = {"once": "as soon as its grads are there", "twice": "in a second pullback, once the norm is known"}
        lines.append(
            f"fuse_update: each unit is updated {modes.get(mode, f'once the norm is known, grads held ({mode})')}"
        )
    if step.donates:
        lines.append("donate: the state passed in is overwritten")
    return tuple(lines)


def describe(step: Spec) -> str:
    """The rules of a step, one a line: what `print(step)` shows."""
    name = getattr(step.fn, "__name__", type(step.fn).__name__)
    lines = [
        f"train_step({name}), units {', '.join(step.units) if step.units else 'up to the first integer of a path'}"
    ]
    lines.append(f"  {'policy':<10} {'*':<16} {step.policy}")
    lines += [f"  {rule}" for rule in step.rules]
    return "\n".join([*lines, *(f"  {line}" for line in header(step))])
