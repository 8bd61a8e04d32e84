"""What a refusal tells the user to write instead, and whether it then works.

Every feature that may be refused can be written in another way (`Statement.remedied`); other remedies are other units,
or a transform less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from drawn.language import FEATURES, Program
from drawn.verdicts import Verdict

MOST = 20  # programs that are tried
OTHER_UNITS = (None, ("head",), ("emb",), ("blocks.0",))


def remedy(program: Program, verdict: Verdict, run: Callable[[Program], Verdict]) -> Program | None:
    """Follows a refusal to the next one, as a program may have several causes: an equal program, if there is one.

    Args:
        program: one that was refused.
        verdict: of it.
        run: gives the verdict of a program.
    """
    todo, seen = [(program, verdict)], {program}
    while todo and len(seen) <= MOST:
        refused, refusal = todo.pop(0)
        for program in _remedied(refused, refusal.detail):
            if program in seen:
                continue
            seen.add(program)
            verdict = run(program)
            if verdict.kind == "equal":
                return program
            if verdict.kind == "refused":
                todo.append((program, verdict))
    return None


def _remedied(program: Program, message: str) -> Iterator[Program]:
    """The program with all its statements as they are told to be; then also with other units, or a transform less."""
    statements = tuple(s._replace(remedied=bool(FEATURES[s.feature].remedy)) for s in program.statements)
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
