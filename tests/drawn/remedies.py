"""What a refusal tells the user to write instead, and whether it then works.

Every feature that may be refused can be written in another way (`Statement.remedied`); other remedies are other units,
or a transform less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from drawn.language import FEATURES, Program
from drawn.verdicts import Verdict

MOST = 20  # programs that are tried
OTHER_UNITS = (None, ("head",), ("emb",), ("blocks.0",))


@dataclass(frozen=True)
class Remedy:
    """What was changed, in words, and what became of the program."""

    changes: tuple[str, ...]
    verdict: Verdict
    program: Program

    @property
    def works(self) -> bool:
        return self.verdict.kind == "equal"


def remedy(program: Program, verdict: Verdict, run: Callable[[Program], Verdict]) -> Remedy:
    """Writes everything as refusals tell, until the program is equal; then as much as possible as it was.

    Args:
        program: one that was refused.
        verdict: of it.
        run: gives the verdict of a program.
    """
    before = program
    program, verdict = _search(program, verdict, run)
    if verdict.kind != "equal":
        return Remedy((), verdict, program)
    for i, statement in enumerate(before.statements):
        if program.statements[i].remedied and not statement.remedied:
            back = program.replace(statements=(*program.statements[:i], statement, *program.statements[i + 1 :]))
            if run(back).kind == "equal":
                program = back
    changes = [s.feature for s, old in zip(program.statements, before.statements, strict=True) if s != old]
    changes += [f"units={program.units}"] if program.units != before.units else []
    changes += [f"without {name}" for name in before.transforms if name not in program.transforms]
    return Remedy(tuple(changes), verdict, program)


def _search(program: Program, verdict: Verdict, run: Callable[[Program], Verdict]) -> tuple[Program, Verdict]:
    """Follows a refusal to the next one, as a program may have several causes; an equal program, or the last tried."""
    todo, seen = [(program, verdict)], {program}
    while todo and len(seen) <= MOST:
        refused, refusal = todo.pop(0)
        for program in _remedied(refused, refusal.detail):
            if program in seen:
                continue
            seen.add(program)
            verdict = run(program)
            if verdict.kind == "equal":
                return program, verdict
            if verdict.kind == "refused":
                todo.append((program, verdict))
    return program, verdict


def _remedied(program: Program, message: str) -> Iterator[Program]:
    """The program with all its statements as they are told to be; then also with other units, or a transform less."""
    statements = tuple(s._replace(remedied=FEATURES[s.feature].remedy) for s in program.statements)
    told = program.replace(statements=statements)
    if told != program:
        yield told
    if "units" in message:
        for units in OTHER_UNITS:
            if units != program.units:
                yield told.replace(units=units)
    for name in program.transforms:
        if name.split()[0] in message:
            yield told.replace(transforms=tuple(t for t in program.transforms if t != name))
