"""What an earlier run of a function showed of its calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fzero.table.layout import Key

Keys = tuple[Key, ...]


class Facts(NamedTuple):
    """What an earlier run showed of one call of a unit, beside the leaves that it is given.

    Attributes:
        mutated: positions among its tensors of those that it changes in place.
        more: indices of leaves that it reads although it is not given them.
        read: places among the tensors that lie in objects of those that it reads.
        returned: positions among its tensors of those that it returns, or views of them, where it will be run again:
            the caller may change them meanwhile.
        draws: whether it draws from random generators that are Python's or numpy's own.
        watched: whether it computes with tensors of functorch levels that have ended, so that each operation must be
            looked at to tell them from those of levels that go on.
        joint: of the tensors that it puts out, each -> the others that depend on it inside.
    """

    mutated: frozenset[int] = frozenset()
    more: tuple[int, ...] = ()
    read: frozenset[int] = frozenset()
    returned: frozenset[int] = frozenset()
    draws: bool = False
    watched: bool = False
    joint: Mapping[int, frozenset[int]] = {}


class Record:
    """What the last run of a function called, in order, and what is known of those calls.

    Attributes:
        facts: by a call's number and the places among its tensors of those that are differentiated.
    """

    def __init__(self) -> None:
        self.order: tuple[Keys, ...] | None = None
        self.facts: dict[tuple[int, tuple[int, ...]], Facts] = {}
        self.as_nodes: set[Any] = set()  # the code of plain units that functorch refuses
        self.draws = False  # whether some unit may have begun later to draw from Python's or numpy's own generators
        self.may_be: dict[Any, bool] = {}  # that of those that were called -> whether it names what functorch refuses
