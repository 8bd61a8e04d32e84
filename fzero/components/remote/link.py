"""How a component's controlling process reaches one rank."""

from __future__ import annotations

from typing import Any, NamedTuple

Message = tuple[Any, ...]  # of a kind, which is first
Arguments = dict[str, Any]  # of a call, by name


class Settings(NamedTuple):
    """What all ranks of a component are told as they start.

    Attributes:
        identity: of the component, which no other has.
        timeout: seconds that a call, or the start, may take.
        threads: that torch computes with, as in the controlling process: sums have the same bits then.
        checked: whether what ranks communicate is compared first.
    """

    component: str
    identity: str
    ranks: int
    timeout: float
    threads: int
    checked: bool


class Place(NamedTuple):
    """A rank's place in its component.

    Attributes:
        data_rank, data_size: which of how many parts of a batch it gets.
        mean_rank, means: which of how many the step takes means over it is.
    """

    data_rank: int
    data_size: int
    mean_rank: int
    means: int


class Link:
    """One rank, as its component's controlling process has it.

    Attributes:
        local: whether it is in this process.
    """

    local = False

    def send(self, message: Message) -> None:
        """Sends a message; raises OSError where the rank has ended."""
        raise NotImplementedError

    def source(self, local: bool) -> Any:
        """What a reader asks for values: in this process, or what is sent to one elsewhere."""
        raise NotImplementedError

    def gone(self) -> tuple[str, str] | None:
        """How its process has ended, and its last words, once it has."""
        return None

    def end(self) -> None:
        """Ends the rank at once, where that can be done."""

    def join(self, timeout: float) -> None:
        """Waits for its end."""
