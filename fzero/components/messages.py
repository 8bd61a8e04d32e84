"""Messages: packed trees between ranks of one process group, received in whatever order they are asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from typing import NamedTuple

import torch

from fzero.comm import backend
from fzero.comm.backend import Group, Sent, Wait
from fzero.components.packing import ALIGN, Packed, opened, total_of

SMALLEST = 4096  # bytes of a message whose size nobody knows yet
TAGS = 1 << 28  # above the numbers of collectives, should there be some in the same group


class MessageId(NamedTuple):
    """What a message is known by on both ends.

    Attributes:
        channel: of whose messages sizes are alike, mostly.
        number: which of that channel's, counted from 0 in each call.
        tag: a number that no other message under way between these two ranks has.
    """

    channel: Hashable
    number: int
    tag: int


class Lost(RuntimeError):
    """A message did not come, or could not be sent: what is left of the call is given up."""


class Messages:
    """Sends and receives packed trees.

    The receiver of a message must know its size. Both ends take the greatest that went through its channel in the last
    call; what does not fit follows in a second message. So one message is enough as long as shapes do not grow.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._sizes: dict[Hashable, int] = {}  # (rank, channel, whether it is sent) -> bytes, of this call
        self._seen: dict[Hashable, int] = {}  # of the next one
        self._sent: list[tuple[Sent, torch.Tensor, int, MessageId]] = []
        self._begun: dict[tuple[int, int], tuple[torch.Tensor, Wait]] = {}
        backend.prepare(group)

    def _size(self, key: Hashable) -> int:
        return self._sizes.get(key, SMALLEST)

    def _note(self, key: Hashable, total: int) -> None:
        self._seen[key] = max(self._seen.get(key, SMALLEST), -(-total // ALIGN) * ALIGN)

    def send(self, rank: int, ident: MessageId, packed: Packed) -> None:
        """Starts to send a tree, whose tensors are copied."""
        key = (rank, ident.channel, True)
        size = self._size(key)
        self._note(key, packed.total)
        buffer = torch.empty(max(size, packed.total), dtype=torch.uint8, device="cpu")
        packed.write(buffer)
        self._sent = [entry for entry in self._sent if not entry[0](0)]
        for number, part in enumerate((buffer[:size], buffer[size : packed.total])):
            if part.numel():
                sent = backend.start_send(part, rank, self.group, _tag(ident, number))
                self._sent.append((sent, buffer, rank, ident))

    def begin(self, rank: int, ident: MessageId) -> None:
        """Starts to receive, if that has not begun."""
        if (rank, ident.tag) not in self._begun:
            buffer = torch.empty(self._size((rank, ident.channel, False)), dtype=torch.uint8, device="cpu")
            wait = backend.start_receive(buffer, rank, self.group, _tag(ident, 0))
            self._begun[rank, ident.tag] = buffer, wait

    def receive(self, rank: int, ident: MessageId) -> object:
        """Waits for a tree."""
        self.begin(rank, ident)
        buffer, wait = self._begun.pop((rank, ident.tag))
        self._wait(wait, rank, ident)
        size, total = buffer.numel(), total_of(buffer)
        self._note((rank, ident.channel, False), total)
        if total > size:
            whole = torch.empty(total, dtype=torch.uint8, device="cpu")
            whole[:size] = buffer
            self._wait(backend.start_receive(whole[size:], rank, self.group, _tag(ident, 1)), rank, ident)
            buffer = whole
        return opened(buffer)

    def hurry(self, seconds: float) -> None:
        """Waits so long at most until everything has been sent."""
        for wait, *_ in self._sent:
            with contextlib.suppress(RuntimeError):
                wait(seconds)

    def _wait(self, wait: Sent | Wait, rank: int, ident: MessageId) -> None:
        try:
            wait()
        except RuntimeError as error:
            self._begun.clear()
            self._sent.clear()
            own, other = (backend.members(self.group)[place] for place in (backend.rank_in(self.group), rank))
            raise Lost(
                f"pipeline: the message {ident.channel}, {ident.number} between rank {own} and rank {other} did "
                f"not come through: {error}. Has that rank ended, or left out a call that this one made? All ranks of "
                "a pipeline make the same calls, in the same order."
            ) from error

    def end_call(self) -> None:
        """Waits until everything has been sent; sizes are known anew."""
        sent, self._sent = self._sent, []
        for wait, _, rank, ident in sent:
            self._wait(wait, rank, ident)
        self._sizes, self._seen = self._seen, {}


def _tag(ident: MessageId, part: int) -> int:
    return TAGS + 2 * ident.tag + part
