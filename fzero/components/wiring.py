"""Wiring: where each stage's inputs come from, and where the cotangents of what it gives go back to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from fzero.base import pytree
from fzero.base.arguments import named, need_int, wrong

Number = Mapping[int, int | Sequence[int]]


class Wire(NamedTuple):
    """What one component gives to others: one item of the container that it returns, or all that no item names."""

    source: int
    item: Hashable | None = None


class Input(NamedTuple):
    """One of the pipeline's own inputs, by its number."""

    number: int


class Ports(NamedTuple):
    """How a component's output was taken apart: its keys or numbers, and what makes such a container of its values."""

    keys: tuple[Hashable, ...] = ()
    made: Callable[[Sequence[object]], object] | None = None


@dataclass(frozen=True)
class Wiring:
    """Which values flow between the components of a pipeline."""

    stages: int  # the number of stages; components of higher numbers are shared by stages
    inputs: tuple[tuple[int, tuple[int, ...]], ...]  # stage -> the pipeline's inputs that it takes
    # (stage, item) -> the later stages that this item of its output goes to
    skips: tuple[tuple[Wire, tuple[int, ...]], ...]
    shared: tuple[tuple[int, tuple[int, ...]], ...]  # component -> the stages that it gives its output to

    @cached_property
    def arguments(self) -> tuple[tuple[Wire | Input, ...], ...]:
        """Of each stage, in order: the stage before, what skips to it, inputs of its own, what it shares."""
        own = dict(self.inputs)
        return tuple(
            (
                *((Wire(stage - 1),) if stage else ()),
                *(wire for wire, targets in self.skips if stage in targets),
                *map(Input, own.get(stage, ())),
                *(Wire(component) for component, users in self.shared if stage in users),
            )
            for stage in range(self.stages)
        )

    @cached_property
    def users(self) -> dict[Wire, tuple[int, ...]]:
        """Wire -> the stages that take it, the last one first: the order in which their cotangents are added."""
        users: dict[Wire, list[int]] = {}
        for stage in reversed(range(self.stages)):
            for argument in self.arguments[stage]:
                if isinstance(argument, Wire):
                    users.setdefault(argument, []).append(stage)
        return {wire: tuple(stages) for wire, stages in users.items()}

    @cached_property
    def home(self) -> dict[int, int]:
        """Component -> the stage in whose place it runs: of a shared one the first stage that it gives to."""
        return {stage: stage for stage in range(self.stages)} | {c: min(users) for c, users in self.shared}

    @cached_property
    def shared_at(self) -> dict[int, tuple[int, ...]]:
        """Stage -> the shared components that run in its place, just before it."""
        homes = {component: self.home[component] for component, _ in self.shared}
        return {stage: tuple(c for c, home in homes.items() if home == stage) for stage in range(self.stages)}

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Pairs of stages that exchange values beside neighbours."""
        pairs = {(self.home[wire.source], stage) for wire, users in self.users.items() for stage in users}
        return tuple(sorted((source, target) for source, target in pairs if target - source > 1))

    def between(self, source: int, target: int) -> tuple[Wire, ...]:
        """The wires from what runs in one stage's place to another stage, in the order of its arguments."""
        own = [a for a in self.arguments[target] if isinstance(a, Wire) and self.home[a.source] == source]
        return tuple(dict.fromkeys(own))

    def items(self, component: int) -> tuple[Hashable, ...]:
        """The items of a component's output that go elsewhere than to the next stage."""
        return tuple(wire.item for wire, _ in self.skips if wire.source == component)


def wiring(
    components: int,
    stages: int,
    inputs: Number | None,
    skips: Mapping[Any, int | Sequence[int]] | None,
    shared: Number | None,
) -> Wiring:
    """The wiring of `fz.pipeline(...)`, with its arguments checked."""
    skipping = []
    for key, targets in _mapping("skips", skips).items():
        if not (isinstance(key, tuple) and len(key) == 2 and not isinstance(key[0], bool)):
            raise wrong(
                "pipeline", "a key of skips", key, "(stage, item): a stage, and a place or key of what it returns"
            )
        source, item = need_int(key[0], "pipeline", "a stage in skips"), key[1]
        own = _numbers("skips", targets)
        if item is None or not own or not all(source < target < stages for target in own) or source < 0:
            raise ValueError(
                f"pipeline: got skips={{({source}, {item!r}): {targets}}}, expected an item of what a stage returns, "
                f"and later stages of the {stages} that there are."
            )
        skipping.append((Wire(source, item), own))
    sharing = [
        (need_int(component, "pipeline", "a component in shared"), _numbers("shared", users))
        for component, users in _mapping("shared", shared).items()
    ]
    expected = list(range(stages, components))
    if components < stages or sorted(component for component, _ in sharing) != expected:
        raise ValueError(
            f"pipeline: got {components} steps for {stages} stages and shared={dict(sharing)}, expected "
            + (
                f"the stages that each of the components {expected} behind them gives its output to."
                if expected
                else "one step for each stage of the schedule."
            )
        )
    for component, users in sharing:
        if not users or not all(0 <= stage < stages for stage in users):
            raise ValueError(f"pipeline: got shared={{{component}: {users}}}, expected stages from 0 to {stages - 1}.")
    own_inputs = [(stage, _numbers("inputs", numbers)) for stage, numbers in _mapping("inputs", inputs).items()]
    for stage, numbers in own_inputs:
        need_int(stage, "pipeline", "a stage in inputs")
        if not 0 <= stage < stages or min(numbers, default=0) < 0:
            raise ValueError(
                f"pipeline: got inputs={{{stage}: {numbers}}}, expected stages from 0 to {stages - 1}, and numbers "
                "of the pipeline's inputs, counted from 0."
            )
    return Wiring(stages, tuple(own_inputs), tuple(skipping), tuple(sorted(sharing)))


def _mapping(argument: str, value: object) -> Mapping[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise wrong("pipeline", argument, value, "a dict or None")
    return value


def _numbers(argument: str, value: object) -> tuple[int, ...]:
    several = value if isinstance(value, (tuple, list)) else (value,)
    numbers = tuple(need_int(number, "pipeline", f"a number in {argument}") for number in several)
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"pipeline: got {numbers} in {argument}, expected every number once.")
    return numbers


def default_inputs(wires: Wiring, count: int) -> Wiring:
    """The wiring for `count` inputs: the first goes to the first stage, the others to the last, if nothing was said."""
    given = dict(wires.inputs)
    if not given:
        last = wires.stages - 1
        given = {0: tuple(range(count))} if not last else {0: (0,), last: tuple(range(1, count))}
    used = sorted({number for numbers in given.values() for number in numbers})
    if used != list(range(count)):
        raise ValueError(
            f"pipeline: got {count} inputs, and inputs={given}, by which the stages take the numbers {used}; expected "
            f"each of {list(range(count))} to be taken by a stage."
        )
    return Wiring(wires.stages, tuple(given.items()), wires.skips, wires.shared)


def taken_apart(output: Any, items: Collection[Hashable], who: str) -> tuple[dict[Hashable | None, object], Ports]:
    """Item -> value, None for what is left: one value as itself, several in the same container; and how to undo it."""
    if not items:
        return {None: output}, Ports()
    children, keys, made = pytree.one_level(output) if isinstance(output, (dict, tuple, list)) else ((), (), None)
    missing = [item for item in items if item not in keys]
    if missing:
        raise ValueError(
            f"pipeline: {who} returned {named(output)} with {list(keys)}, expected a tuple, list or dict with "
            f"{missing[0]!r}, which skips to another stage."
        )
    found = dict(zip(keys, children, strict=True))
    by_key = {key: found[key] for key in (output if isinstance(output, dict) else keys)}  # in the output's own order
    out: dict[Hashable | None, object] = {item: by_key.pop(item) for item in items}
    left = [*by_key.values()]
    out[None] = left[0] if len(left) == 1 else by_key if isinstance(output, dict) else tuple(left)
    return out, Ports(keys, made)


def put_together(values: Mapping[Hashable | None, Any], items: Collection[Hashable], ports: Ports) -> Any:
    """The inverse of `taken_apart`: the output's container, with a cotangent in each place."""
    if ports.made is None:
        return values[None]
    rest, left = [key for key in ports.keys if key not in items], values[None]
    found = [left] if len(rest) == 1 else [left[key] for key in rest] if isinstance(left, dict) else left
    whole = {**values, **dict(zip(rest, found, strict=True))}
    return ports.made([whole[key] for key in ports.keys])


def wires_of(component: int, items: Sequence[Hashable]) -> Iterator[Wire]:
    """All that a component gives: what is left of its output first."""
    yield Wire(component)
    yield from (Wire(component, item) for item in items)
