"""The smallest program that still shows what a program showed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from drawn.language import NUMBERS, Action, Program, Statement


def smaller(program: Program) -> Iterator[Program]:
    """Programs with one thing less, the largest steps first."""
    statements, actions = program.statements, program.actions
    half = len(statements) // 2
    if half > 1:
        yield program.replace(statements=statements[:half])
        yield program.replace(statements=statements[half:])
    for i in range(len(statements)):
        yield program.replace(statements=(*statements[:i], *statements[i + 1 :]))
    for i in range(len(actions)):
        if len(actions) > 1:
            yield program.replace(actions=(*actions[:i], *actions[i + 1 :]))
    for name in program.transforms:
        yield program.replace(transforms=tuple(t for t in program.transforms if t != name))
    for world in range(1, program.world):
        yield program.replace(world=world, stage=program.stage)
    if program.units is not None:
        yield program.replace(units=None)
    if program.optimizer != "sgd":
        yield program.replace(optimizer="sgd")
    if program.plain > 1:
        yield program.replace(plain=program.plain - 1)
    if program.form != "scalar":
        yield program.replace(form="scalar")
    if program.stage != 3:
        yield program.replace(stage=3)
    for verb in ("forward", "vjp", "step"):
        if (
            len(actions) == 1
            and actions[0].verb not in ("forward", "vjp", verb)[: ("forward", "vjp", "step").index(verb) + 1]
        ):
            yield program.replace(actions=(Action(verb),))
    zero = (0,) * NUMBERS
    for i, action in enumerate(actions):
        if action.numbers != zero:
            yield program.replace(actions=(*actions[:i], action._replace(numbers=zero), *actions[i + 1 :]))
    for i, statement in enumerate(statements):
        for changed in _simpler(statement):
            yield program.replace(statements=(*statements[:i], changed, *statements[i + 1 :]))


def _simpler(statement: Statement) -> Iterator[Statement]:
    zero = (0,) * NUMBERS
    if statement.numbers != zero:
        yield statement._replace(numbers=zero)
    for place, number in enumerate(statement.numbers):
        if number:
            changed = (*statement.numbers[:place], 0, *statement.numbers[place + 1 :])
            if changed != zero:
                yield statement._replace(numbers=changed)


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
