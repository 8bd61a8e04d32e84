"""Spec: the fields of a step and the rules of its table. Pure data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch

from fzero.comm.axis import Axis
from fzero.table.fusion import Fusion
from fzero.table.microbatch import Microbatches
from fzero.table.optimizer import GradientTransformation
from fzero.table.policy import ByPath, Policy
from fzero.table.rows import Row, Rule, Sharding, add_rule, find, resolve


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
    microbatches: Microbatches | None = None
    scaler: Any = None
    donates: bool = False
    fusion: Fusion | None = None

    # ---- what transforms use

    def with_rule(self, column: str, value: Any, source: str, pattern: str = "*") -> Self:
        """A step with one more rule; one column set twice to different values raises and names both."""
        return dataclasses.replace(self, rules=add_rule(self.rules, Rule(column, pattern, value, source)))

    def with_header(self, field: str, value: Any, source: str) -> Self:
        """A step with one header field set; each may be set once."""
        old = getattr(self, field)
        if old is not None and old is not False and old != value:
            raise ValueError(f"{source}: this step already has {field}={old}; expected it to be set once. Keep one.")
        return dataclasses.replace(self, **{field: value})

    @property
    def sharding(self) -> Sharding | None:
        return find(self.rules, "axis")

    @property
    def stage(self) -> int:
        """The ZeRO stage: 0 where nothing is sharded."""
        return self.sharding.stage if self.sharding else 0

    @property
    def remats(self) -> bool:
        return bool(find(self.rules, "remat"))

    @property
    def compiles(self) -> bool:
        return bool(find(self.rules, "compile"))

    @property
    def signature(self) -> tuple[Any, ...]:
        """What a state must have been made with: everything that decides how it lies in memory, but for the ranks."""
        rules = [rule for rule in self.rules if rule.column not in ("remat", "compile")]
        axis = [rule for rule in rules if rule.column == "axis"]
        placed = [dataclasses.replace(rule, value=rule.value.unplaced) for rule in axis]
        scaler = getattr(self.scaler, "kind", self.scaler and type(self.scaler).__name__)
        return (self.policy, self.units, scaler, tuple(rule for rule in rules if rule.column != "axis"), tuple(placed))

    def axis(self) -> Axis:
        """The mesh axis, looked up now."""
        sharding = self.sharding
        if sharding is None:
            return Axis()
        return Axis.of(sharding.mesh, sharding.axis, sharding.replicate, f"shard_zero{sharding.stage}")

    def rows(
        self, leaves: Sequence[tuple[str, tuple[int, ...], torch.dtype]], frozen: Container[int] = ()
    ) -> tuple[Row, ...]:
        """The table for leaves given as (path, shape, dtype).

        Args:
            frozen: the indices of the leaves that their module does not train, `frozen_leaves` of the params' tree.
        """
        label = self.optimizer.label or (lambda path: "optimizer")
        return resolve(leaves, self.rules, self.policy, self.units, label, frozen)

    def __str__(self) -> str:
        return describe(self)


S = TypeVar("S", bound=Spec)  # a transform returns a step of the kind that it is given


def header(step: Spec) -> tuple[str, ...]:
    lines = []
    if step.microbatches:
        lines.append(f"accumulate: {step.microbatches.count} microbatches, in_dims={step.microbatches.in_dims}")
    if step.scaler:
        lines.append(f"loss scale: {step.scaler}")
    if step.fusion:
        way = step.fusion.way(step.optimizer, step.scaler is not None)
        ways = {"once": "as soon as its grads are there", "twice": "in a second pullback, once the norm is known"}
        lines.append(
            f"fuse_update: each unit is updated {ways.get(way, f'once the norm is known, grads held ({way})')}"
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
