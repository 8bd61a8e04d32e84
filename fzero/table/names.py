"""Names of what a unit that is recomputed keeps."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Names:
    """What a unit that is recomputed keeps, by the names that `fz.name` gives it."""

    save: tuple[str, ...] = ()  # on the device
    offload: tuple[str, ...] = ()  # in the host's memory

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.save, *self.offload)

    @property
    def said(self) -> str:
        """As arguments."""
        return ", ".join(f"{argument}={names}" for argument, names in vars(self).items() if names)

    @property
    def words(self) -> str:
        said = [("keeps", self.save), ("offloads", self.offload)]
        return " ".join(f"{word} {' '.join(names)}" for word, names in said if names)


NO_NAMES, EVERY_NAME = Names(), Names(("",))  # the other for who looks at all that has one


def need_given(wanted: Collection[str], given: Collection[str], which: str = "") -> None:
    """Refuses names that are to be kept and that no unit gives; `which` says what units are meant."""
    if lost := sorted({*wanted} - {*given}):
        raise ValueError(
            f"remat: got the name {lost[0]!r} to keep, which no unit gives{which}; expected one of "
            f"{', '.join(map(repr, sorted(given))) or 'those that fz.name gives, of which they call none'}. Say "
            f"fz.name(x, {lost[0]!r}) inside a unit, or leave it out."
        )
