"""Ranks that come up, and those that end before: what they said is heard before their end is told."""

from __future__ import annotations

import queue

import pytest

from fzero.channels import Listener, connect
from fzero.components.remote.link import Message, Settings
from fzero.components.remote.processes import ChannelLink, take_all

TOKEN = b"secret" * 6


class Ended(ChannelLink):
    """A rank whose process has ended."""

    def gone(self) -> tuple[str, str]:
        return "has exited with code 1", "its last words"

    def join(self, timeout: float) -> None:
        pass


def test_what_ranks_said_before_they_ended_is_heard() -> None:
    links = [Ended(Settings("it", "it", 2, 5.0, 1, False), rank) for rank in range(2)]
    heard: queue.Queue[tuple[int, Message]] = queue.Queue()
    with Listener(TOKEN) as listener:
        for rank in range(2):
            rank_side = connect(listener.address, TOKEN, 5.0)
            rank_side.send((rank, listener.address))
            rank_side.send(("broken", f"why of {rank}"))
            rank_side.close()
        take_all(listener, links, TOKEN, 5.0, lambda rank, message: heard.put((rank, message)))
        found = [heard.get(timeout=5.0) for _ in range(4)]
    for rank in range(2):
        own = [message for of, message in found if of == rank]
        assert own == [("broken", f"why of {rank}"), ("died", "has exited with code 1", "its last words")]


def test_one_that_ended_without_a_word_is_told_of() -> None:
    links = [Ended(Settings("it", "it", 1, 5.0, 1, False), 0)]
    with Listener(TOKEN) as listener:
        connect(listener.address, TOKEN, 5.0).close()
        with pytest.raises(RuntimeError, match=r"rank 0 has exited with code 1 before it came up.*\n.*last words"):
            take_all(listener, links, TOKEN, 5.0, lambda *_: None)
