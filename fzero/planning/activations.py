"""What units keep for their pullback, and what it costs to compute some of it again: counted on shapes alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fzero.base import pytree, thread_state
from fzero.base.context import during, own_copies, proves
from fzero.base.operators import Flops
from fzero.engine.named import Unit, looking
from fzero.planning.messages import table
from fzero.table.handle import storage_of
from fzero.table.microbatch import Microbatches
from fzero.table.names import EVERY_NAME, need_given
from fzero.table.rows import Row
from fzero.table.spec import Spec

# columns that say nothing of what a function computes on one rank
_ELSEWHERE = ("remat", "compile", "axis", *[f"{what} in" for what in ("params", "grads", "moments", "activations")])


@dataclass(frozen=True)
class Choice:
    """What a unit may keep between its forward run and its pullback.

    Attributes:
        names: names of the kept values (`fz.name`); None if nothing is computed again.
        nbytes: bytes kept, with the unit's input.
        flops: FLOPs that are computed again.
    """

    names: tuple[str, ...] | None
    nbytes: int
    flops: int


@dataclass(frozen=True)
class Activations:
    """What units that are alike keep for their pullback, for one microbatch.

    Attributes:
        units: their names, once for each call.
        forward: FLOPs of one forward run of one of them.
        choices: what they may keep: everything, only the inputs, each name alone, all names.
        chosen: what the step keeps.
    """

    units: tuple[str, ...]
    forward: int
    choices: tuple[Choice, ...]
    chosen: Choice


def activations_of(step: Spec, params: object, inputs: Sequence[object]) -> tuple[tuple[Activations, ...], int]:
    """What the units of a step keep, in the order of their calls, and the FLOPs of a forward run and its pullback."""
    rules = tuple(rule for rule in step.rules if rule.column not in _ELSEWHERE)
    optimizer = step.optimizer._replace(init=lambda _: ())  # moments, which no run of a step's function sees
    plain = dataclasses.replace(step, rules=rules, extras=(), microbatches=Microbatches(), donates=False, fusion=None)
    plain = dataclasses.replace(plain, optimizer=optimizer)
    looks: Any = plain.with_rule("remat", EVERY_NAME, "plan(inputs=...)")
    found: list[Unit] = []
    with during(own_copies, {}), thread_state.without_values():
        batch = step.microbatches.split(tuple(inputs))[0]
        state = looks.init(pytree.map_leaves(_without_value, params))
        fake = [pytree.map_leaves(_without_value, each) for each in batch]
        with during(looking, found.append), during(proves, False), Flops() as flops:
            out, pullback, *_ = looks.vjp(state, *fake, argnums=())
            pullback(pytree.map_leaves(lambda x: torch.ones_like(x) if isinstance(x, torch.Tensor) else x, out))
        rows, given = step.table(state.layout), {name for unit in found for name in unit.run.names}
        need_given(rows.names, given)
        return _alike(found, rows.units), flops.total


def without_axis(step: Spec) -> Spec:
    """A step whose state is not sharded."""
    return dataclasses.replace(step, rules=tuple([rule for rule in step.rules if rule.column != "axis"]))


def _without_value(x: object) -> object:
    if not isinstance(x, torch.Tensor):
        return x
    return torch.empty(x.shape, dtype=x.dtype, device="cpu" if x.is_meta else x.device)


def _alike(found: Sequence[Unit], rows: Mapping[str, Row]) -> tuple[Activations, ...]:
    """The units, those together that keep and cost the same."""
    alike: dict[Activations, list[str]] = {}
    for unit in found:
        own = dataclasses.replace(_of(unit, rows[unit.name] if unit.name in rows else None), units=())
        alike.setdefault(own, []).append(unit.name)
    return tuple([dataclasses.replace(own, units=tuple(names)) for own, names in alike.items()])


def _of(unit: Unit, row: Row | None) -> Activations:
    run, inputs = unit.run, sum({storage_of(x): x.untyped_storage().nbytes() for x in unit.inputs}.values())

    def choice(*names: str) -> Choice:
        plan = run.planned(names)
        return Choice(names, inputs + run.nbytes(plan), run.flops(plan))

    every, whole = Choice(None, inputs + run.nbytes(None), 0), Choice((), inputs, run.total)
    chosen = every
    if row is not None and row.remat:
        names = row.names.all
        chosen = choice(*names) if names else whole
    named = sorted(run.names)
    some = [choice(name) for name in named] + ([choice(*named)] if len(named) > 1 else [])
    return Activations((), whole.flops, (every, whole, *some), chosen)


def activation_lines(activations: Sequence[Activations], total: int) -> list[str]:
    """A table of them; a star says what the step does."""
    head = ("", "units", "kept for the pullback", "bytes of each", "FLOPs again", "of a step's")
    body = [_cells(each, choice, total) for each in activations for choice in each.choices]
    for each in activations:
        if each.chosen not in each.choices:
            body.append(_cells(each, each.chosen, total))
    return table(head, body)


def _cells(each: Activations, choice: Choice, total: int) -> tuple[str, ...]:
    names = "everything" if choice.names is None else ", ".join(choice.names) or "inputs alone"
    first, count = each.units[0], len(each.units)
    units = first if count == 1 else f"{first} and {count - 1} more"
    again = choice.flops * count
    share = f"{again / total:.1%}" if total else "–"
    return "*" if choice == each.chosen else "", units, names, f"{choice.nbytes:,}", f"{again:,}", share
