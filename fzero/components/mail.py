"""Mail: parcels between ranks of one process group, received in whatever order they are asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from typing import NamedTuple

import torch

from fzero.comm import backend
from fzero.comm.backend import Group, Sent, Wait
from fzero.components.parcel import ALIGN, Parcel, opened, total_of

SMALLEST = 4096  # bytes of a message whose size nobody knows yet
TAGS = 1 << 28  # above the numbers of collectives, should there be some in the same group


class Letter(NamedTuple):
    """What a message is known by on both ends.

    Attributes:
        channel: of whose messages sizes are alike, mostly.
        number: which of that channel's, counted from 0 in each call.
        tag: a number that no other letter under way between these two ranks has.
    """

    channel: Hashable
    number: int
    tag: int


class Lost(RuntimeError):
    """A message did not come, or could not be sent: what is left of the call is given up."""


class Mail:
    """Sends and receives parcels.

    The receiver of a message must know its size. Both ends take the greatest that went through its channel in the last
    call; what does not fit follows in a second message. So one message is enough as long as shapes do not grow.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._sizes: dict[Hashable, int] = {}  # (rank, channel, whether it is sent) -> bytes, of this call
        self._seen: dict[Hashable, int] = {}  # of the next one
        self._sent: list[tuple[Sent, torch.Tensor, int, Letter]] = []
        self._begun: dict[tuple[int, int], tuple[torch.Tensor, Wait]] = {}
        backend.prepare(group)

    def _size(self, key: Hashable) -> int:
        return self._sizes.get(key, SMALLEST)

    def _note(self, key: Hashable, total: int) -> None:
        self._seen[key] = max(self._seen.get(key, SMALLEST), -(-total // ALIGN) * ALIGN)

    def send(self, rank: int, letter: Letter, parcel: Parcel) -> None:
        """Starts to send a tree, whose tensors are copied."""
        key = (rank, letter.channel, True)
        size = self._size(key)
        self._note(key, parcel.total)
        buffer = torch.empty(max(size, parcel.total), dtype=torch.uint8, device="cpu")
        parcel.write(buffer)
        self._sent = [entry for entry in self._sent if not entry[0](0)]
        for number, part in enumerate((buffer[:size], buffer[size : parcel.total])):
            if part.numel():
                sent = backend.start_send(part, rank, self.group, _tag(letter, number))
                self._sent.append((sent, buffer, rank, letter))

    def begin(self, rank: int, letter: Letter) -> None:
        """Starts to receive, if that has not begun."""
        if (rank, letter.tag) not in self._begun:
            buffer = torch.empty(self._size((rank, letter.channel, False)), dtype=torch.uint8, device="cpu")
            wait = backend.start_receive(buffer, rank, self.group, _tag(letter, 0))
            self._begun[rank, letter.tag] = buffer, wait

    def receive(self, rank: int, letter: Letter) -> object:
        """Waits for a tree."""
        self.begin(rank, letter)
        buffer, wait = self._begun.pop((rank, letter.tag))
        self._wait(wait, rank, letter)
        size, total = buffer.numel(), total_of(buffer)
        self._note((rank, letter.channel, False), total)
        if total > size:
            whole = torch.empty(total, dtype=torch.uint8, device="cpu")
            whole[:size] = buffer
            self._wait(backend.start_receive(whole[size:], rank, self.group, _tag(letter, 1)), rank, letter)
            buffer = whole
        return opened(buffer)

    def hurry(self, seconds: float) -> None:
        """Waits so long at most until everything has been sent."""
        for wait, *_ in self._sent:
            with contextlib.suppress(RuntimeError):
                wait(seconds)

    def _wait(self, wait: Sent | Wait, rank: int, letter: Letter) -> None:
        try:
            wait()
        except RuntimeError as error:
            self._begun.clear()
            self._sent.clear()
            own, other = (backend.members(self.group)[place] for place in (backend.rank_in(self.group), rank))
            raise Lost(
                f"pipeline: the message {letter.channel}, {letter.number} between rank {own} and rank {other} did "
                f"not come through: {error}. Has that rank ended, or left out a call that this one made? All ranks of "
                "a pipeline make the same calls, in the same order."
            ) from error

    def end_call(self) -> None:
        """Waits until everything has been sent; sizes are known anew."""
        sent, self._sent = self._sent, []
        for wait, _, rank, letter in sent:
            self._wait(wait, rank, letter)
        self._sizes, self._seen = self._seen, {}


def _tag(letter: Letter, part: int) -> int:
    return TAGS + 2 * letter.tag + part
