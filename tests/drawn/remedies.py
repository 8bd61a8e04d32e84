"""What a refusal tells the user to write instead, and whether it then works.

Every feature that may be refused can be written in another way (`Statement.remedied`); other remedies are other units,
or a transform less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from drawn.language import FEATURES, Program
from drawn.verdicts import Verdict

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


def candidates(program: Program, message: str) -> Iterator[tuple[str, Program]]:
    """Programs with one thing written as the message tells, the most likely first."""
    for i, statement in enumerate(program.statements):
        if FEATURES[statement.feature].remedy and not statement.remedied:
            changed = statement._replace(remedied=True)
            statements = (*program.statements[:i], changed, *program.statements[i + 1 :])
            yield statement.feature, program.replace(statements=statements)
    if "units" in message:
        for units in OTHER_UNITS:
            if units != program.units:
                yield f"units={units}", program.replace(units=units)
    for name in program.transforms:
        if name in message:
            yield f"without {name}", program.replace(transforms=tuple(t for t in program.transforms if t != name))


def remedy(program: Program, verdict: Verdict, run: Callable[[Program], Verdict], most: int = 6) -> Remedy:
    """Follows refusals until the program is equal, or no change makes a difference.

    Args:
        program: one that was refused.
        verdict: of it.
        run: gives the verdict of a program.
        most: changes in a row.
    """
    changes: tuple[str, ...] = ()
    seen = {program}
    while verdict.kind == "refused" and len(changes) < most:
        for what, changed in candidates(program, verdict.detail):
            if changed in seen:
                continue
            seen.add(changed)
            found = run(changed)
            if found.kind == "equal" or (found.kind == "refused" and found.detail != verdict.detail):
                changes, program, verdict = (*changes, what), changed, found
                break
        else:
            break
    return Remedy(changes, verdict, program)
