"""fz.check_pure: a step's function and its units are proven to be pure, whenever one says so."""

from __future__ import annotations

import contextvars
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fzero.base import pytree
from fzero.base.context import during, variable
from fzero.base.places import definition_of
from fzero.comm.divergence import failing
from fzero.purity.strict import strict
from fzero.purity.trial import Trial
from fzero.table.spec import need_step


class UnitProof(NamedTuple):
    """One call of a unit that was proven.

    Attributes:
        unit: its name, the unit of its leaves.
        captured: how many tensors it closes over, constants; None if it is not proven (`fz.unit(prove=False)`).
    """

    unit: str
    captured: int | None


class Report(NamedTuple):
    """What `fz.check_pure` has proven.

    Attributes:
        units: the units' calls, in order.
    """

    units: tuple[UnitProof, ...]

    def __repr__(self) -> str:
        words = {None: "not proven (prove=False)", 0: "pure"}
        lines = [f"  {own.unit}: {words.get(own.captured, f'pure, {own.captured} constants')}" for own in self.units]
        pure = all(own.captured is not None for own in self.units)
        says = f"The function is pure, and so are its units{'' if pure else ', as far as they are proven'}:"
        return "\n".join([says if lines else "The function is pure.", *lines])


# takes the proofs of units that run; None where none is proven
proofs: contextvars.ContextVar[list[UnitProof] | None] = variable("proofs", None)


def check_pure(step: Any, state: Any, *inputs: object) -> Report:
    """Proves that a step's function, and each of its units, is pure: it depends on its arguments and constants alone.

    Runs the forward twice, and each unit four times in all. Nothing of the state changes. All ranks call it. Use it in
    tests, or if you doubt a function.

    A pure function writes to nothing that it did not make, keeps nothing that it computed, and gives the same for the
    same arguments. It may close over tensors that nothing differentiates, and draw torch's random numbers. What it does
    beside torch (it prints, or counts) is not seen.

    Args:
        step: a step.
        state: its state.
        *inputs: as for a call of the step.

    Returns:
        What was proven. Print it.

    Raises:
        ValueError: something is not pure. The error names the unit, your file and line, what it does, and what to
            write instead.

    Example:
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1))
        >>> fz.check_pure(step, step.init({"w": torch.ones(2)}), torch.ones(2))
        The function is pure.
    """
    need_step(step, "check_pure")
    found: list[UnitProof] = []

    def forward() -> Sequence[object]:
        found.clear()
        return pytree.flatten(step.vjp(state, *inputs)[::2])[0]  # outputs and aux

    given = [x for x in pytree.flatten(inputs)[0] if isinstance(x, torch.Tensor)]
    with failing("check_pure"), during(proofs, found), strict():
        defined = definition_of(step.fn)
        trial = Trial("step: the function", lambda _: forward(), given, unit=False, defined=defined)
        trial.compared(forward)
    return Report(tuple(found))


def note(unit: str, captured: int | None) -> None:
    own = proofs.get()
    if own is not None:
        own.append(UnitProof(unit, captured))
