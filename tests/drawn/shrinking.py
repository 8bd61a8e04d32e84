"""The smallest program that still shows what a program showed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from drawn.language import NUMBERS, Action, Program


def smaller(program: Program) -> Iterator[Program]:
    """Programs with one thing less, the largest steps first."""
    half = len(program.statements) // 2
    if half > 1:
        yield program.replace(statements=program.statements[:half])
        yield program.replace(statements=program.statements[half:])
    for name in ("statements", "actions", "transforms"):
        whole = getattr(program, name)
        for i in range(len(whole)):
            if name != "actions" or len(whole) > 1:
                yield program.replace(**{name: (*whole[:i], *whole[i + 1 :])})
    simpler: dict[str, Any] = {"world": range(1, program.world), "plain": range(1, program.plain)}
    simpler |= {"units": [None], "optimizer": ["sgd"], "form": ["scalar"], "stage": [3]}
    for name, values in simpler.items():
        for value in values:
            if value != getattr(program, name):
                yield program.replace(**{name: value})
    order = ("forward", "vjp", "step")
    for verb in order:
        if len(program.actions) == 1 and program.actions[0].verb not in order[: order.index(verb) + 1]:
            yield program.replace(actions=(Action(verb),))
    for name in ("actions", "statements"):
        whole = getattr(program, name)
        for i, one in enumerate(whole):
            for numbers in _simpler(one.numbers):
                yield program.replace(**{name: (*whole[:i], one._replace(numbers=numbers), *whole[i + 1 :])})


def _simpler(numbers: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if any(numbers):
        yield (0,) * NUMBERS
    for place, number in enumerate(numbers):
        if number:
            yield (*numbers[:place], 0, *numbers[place + 1 :])


def shrunk(program: Program, shows: Callable[[Program], bool], most: int = 300) -> Program:
    """The smallest program found, by at most so many trials, for which `shows` is still true."""
    trials = 0
    found = True
    while found and trials < most:
        found = False
        for candidate in smaller(program):
            trials += 1
            if _fits(candidate) and shows(candidate):
                program, found = candidate, True
                break
            if trials >= most:
                break
    return program


def _fits(program: Program) -> bool:
    """Whether it could have been drawn."""
    forms = all(program.form in feature.forms for feature in program.features)
    verbs = program.form == "scalar" or all(a.verb not in ("hvp", "examples") for a in program.actions)
    return forms and verbs and (program.nests or all(a.verb != "hvp" for a in program.actions))
