"""How a program is drawn: from a seed, or by Hypothesis, which then can make it smaller."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from drawn.language import FEATURES, KINDS, NUMBERS, Action, Feature, Program, Statement

UNITS: list[tuple[str, ...] | None] = [
    None,
    ("blocks.*",),
    ("blocks",),
    ("emb", "blocks.*", "head"),
    ("blocks.0", "emb"),
]
# not pure, in some of their forms
EFFECTS = (
    "self.aux that the parent sums",
    "a list argument that is appended to",
    "a dict argument that is filled",
    "a dataclass argument",
    "an attribute that the parent sets before the call",
    "a stash that a later unit reads",
    "a buffer that is assigned",
    "a class attribute",
    "an error that the caller catches",
    "data that decide what a unit reads",
    "an except that takes everything",
    "closures over self",
    "a closure over an activation",
    "in-place on a unit's input, inside it",
    "nn.ReLU(inplace=True) at the beginning of a unit",
)
# Percent of these features' statements that are drawn as a refusal tells to write them. What the library refuses by
# design, it refuses in every program where it takes effect, so that nothing else in that program would be compared.
# People write it once and then as they are told; so do programs, and at most 5 % of them are refused. What is left is
# seen refused hundreds of times in 20,000 programs, and in tests/test_drawn.py in every form.
TOLD = {
    **dict.fromkeys(EFFECTS, 95),
    "a regulariser over all leaves": 93,
    "leaves filtered by isinstance": 93,
    "in-place on a leaf": 95,
    "a leaf outside its unit": 90,
    "a leaf behind detach": 90,
    "an embedding tied to a head": 75,
    "a torch.Generator as an argument": 96,
    "a closure over a list of leaves": 95,
    "an argument given twice": 60,
    "a unit that returns its input, changed outside": 90,
    "a unit that returns a view of its input, changed outside": 90,
    "torch.utils.checkpoint over a unit's own weights": 80,
}
OPTIMIZERS = ("sgd", "clipped", "adamw")
FORM_DRAWS = (*["scalar"] * 4, *["aux"] * 3, *["outputs"] * 3)
SCALAR_VERBS = ("step", "vjp", "twice", "interleaved", "forward", "tape", "add", "hvp", "hvp")
VERBS = ("vjp", "step", "twice", "interleaved", "forward", "tape", "add")


Source = Callable[[int], int]  # count -> one of 0, ..., count - 1; small ones are simple ones


def chance(source: Source, percent: int) -> bool:
    return source(100) >= 100 - percent


def pick(source: Source, options: Sequence[Any]) -> Any:
    return options[source(len(options))]


def numbers(source: Source) -> tuple[int, ...]:
    return tuple(source(12) for _ in range(NUMBERS))


def weighted(source: Source, features: Sequence[Feature]) -> Feature:
    place = source(int(sum(f.weight * 10 for f in features)))
    for one in features:
        place -= int(one.weight * 10)
        if place < 0:
            return one
    return features[-1]


def draw(source: Source, seed: int) -> Program:
    """A program; `seed` is that of its values."""
    kind, form = pick(source, KINDS), pick(source, FORM_DRAWS)
    allowed = [f for f in FEATURES.values() if kind in f.kinds and form in f.forms]
    statements: list[Statement] = []
    while len(statements) < 2 or (len(statements) < 12 and chance(source, 86)):
        chosen = weighted(source, allowed)
        allowed = [f for f in allowed if f is not chosen]
        statements.append(Statement(chosen.name, numbers(source)))
    program = Program(
        seed=seed,
        kind=kind,
        plain=1 + source(3),
        statements=tuple(statements),
        form=form,
        units=pick(source, UNITS) if chance(source, 40) else None,
        world=pick(source, (1, 1, 2, 2, 2, 2, 3, 4)),
        optimizer=pick(source, OPTIMIZERS),
    )
    if "an embedding tied to a head" in {s.feature for s in statements} and program.units and "head" in program.units:
        program = program.replace(units=("emb", "blocks.*"))  # its weight has one name, the embedding's
    if program.checkpoints:
        program = program.replace(units=None)
    stages = (3, 3, 1, 2) if program.world > 1 else (3, 3, 1, 2, 0)
    program = program.replace(stage=pick(source, stages), transforms=_transforms(source, program))
    program = program.replace(actions=_actions(source, program))
    told = [s._replace(remedied=chance(source, TOLD.get(s.feature, 0))) for s in program.statements]
    return program.replace(statements=tuple(told))


def _transforms(source: Source, program: Program) -> tuple[str, ...]:
    allowed = [("remat", 35), ("donate", 20), ("fuse_update", 20), ("loss_scale", 15), ("freeze", 15)]
    if program.rows:
        allowed.append(("accumulate", 60))
    allowed += [("sharding of some", 15)]
    chosen = [name for name, percent in allowed if chance(source, percent)]
    for kind, percent in (("activations", 25), ("params", 20), ("moments", 15), ("grads", 15)):
        if chance(source, percent):
            chosen.append(f"{kind}= {pick(source, ('host', 'disk'))}{pick(source, ('', ' of some'))}")
    if "remat" in chosen and chance(source, 30):
        chosen[chosen.index("remat")] = "remat of some"
    out: list[str] = []
    while chosen:  # in any order
        out.append(chosen.pop(source(len(chosen))))
    hooks = "a hook on a tensor" in {s.feature for s in program.statements}  # which run as often as the pullback does
    return tuple(name for name in out if not (hooks and name == "fuse_update"))


def _actions(source: Source, program: Program) -> tuple[Action, ...]:
    verbs = [*(SCALAR_VERBS if program.form == "scalar" else VERBS)]
    if not program.nests and "hvp" in verbs:
        verbs = [verb for verb in verbs if verb != "hvp"]
    if program.rows and program.form == "scalar" and not program.checkpoints:
        verbs += ["examples"] * 3
    out: list[Action] = []
    while not out or (len(out) < 3 and chance(source, 55)):
        out.append(Action(pick(source, verbs), numbers(source)))
    return tuple(out)


def from_seed(seed: int) -> Program:
    return draw(random.Random(seed).randrange, seed)


def programs() -> Any:
    """A Hypothesis strategy."""
    from hypothesis import strategies as st

    @st.composite
    def drawn(draw_: Any) -> Program:
        source = lambda count: draw_(st.integers(0, count - 1))
        return draw(source, source(1000))

    return drawn()
