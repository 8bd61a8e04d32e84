"""The numbers of a step and of an evaluation, by their names."""

from __future__ import annotations

import numbers
from collections.abc import Mapping

import torch

from fzero.base.arguments import named
from fzero.state.beyond import here
from fzero.table.needs import numbers_in

STEP, SECONDS = "step", "seconds"  # of a row: how many were taken, and what one took


def numbers_of(values: object, what: str) -> dict[str, float]:
    """Numbers by their names; those of an ensemble as `loss.0`, `loss.1`, ..., of a mapping as `leaf_norms.params.w`.

    "aux" and "collected" are left out.

    Raises:
        TypeError: a name that is no str, or a value that is no number.
        ValueError: a name of the row's own, two values of one name, or a number without a float.
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"loop: got {named(values)} as {what}, expected a mapping of names to numbers.")
    out: dict[str, float] = {}
    numbers = {name: value for name, value in values.items() if name not in ("aux", "collected")}
    for name, value in here(numbers).items():
        if not isinstance(name, str):
            raise TypeError(f"loop: got the name {name!r} in {what}, expected a str.")
        if isinstance(value, Mapping):
            found = {f"{name}.{inner}": x for inner, x in numbers_of(value, f"{what}[{name!r}]").items()}
            names, own = [*found], [*found.values()]
        else:
            own = _floats(value, f"{what}[{name!r}]")
            names = [name] if len(own) == 1 else [f"{name}.{i}" for i in range(len(own))]
        if taken := [each for each in names if each in out or each in (STEP, SECONDS)]:
            raise ValueError(
                f"loop: got {what}[{name!r}] for the column {taken[0]!r} of the log, which has another value there; "
                "expected another name."
            )
        out |= dict(zip(names, own, strict=True))
    return out


def shares_of(values: object, what: str) -> dict[str, tuple[float, float | None]]:
    """Numbers by their names as `numbers_of`, each with what it counts: of a pair (sum, count). Others have None."""
    given = values if isinstance(values, Mapping) else numbers_of(values, what)  # which refuses it
    pairs = {name: value for name, value in given.items() if isinstance(value, tuple) and len(value) == 2}
    counts: dict[str, float] = {}
    for name, (total, count) in pairs.items():
        own = [*numbers_of({name: count}, "a count of " + what).values()]
        if len(own) != 1 or not 0 <= own[0] < float("inf"):
            raise ValueError(f"loop: got {what}[{name!r}] with a count of {count}, expected a number of at least 0.")
        counts |= dict.fromkeys(numbers_of({name: total}, what), own[0])
    sums = numbers_of({name: pairs[name][0] if name in pairs else value for name, value in given.items()}, what)
    return {name: (value, counts.get(name)) for name, value in sums.items()}


def _floats(value: object, place: str) -> list[float]:
    if isinstance(value, torch.Tensor):
        if value.ndim <= 1 and not value.is_complex() and (own := numbers_in(value)):
            return own
    elif isinstance(value, numbers.Real):
        try:
            return [float(value)]
        except OverflowError:
            raise ValueError(f"loop: got {place}, a number that is too large for a float, expected others.") from None
    raise TypeError(
        f"loop: got {place} of {named(value)}, expected a real number, or those of an ensemble, a tensor [members]. "
        "Give other values as the step's aux."
    )
