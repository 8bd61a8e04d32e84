"""What a rank has for calls of its actor, without Ray: messages in their order, reports, answers, and what is wrong."""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from fzero.channels import BadMessage, Closed, Listener, Refused, TimedOut
from fzero.components.remote import reach
from fzero.components.remote.failure import Failure
from fzero.components.remote.host import Host
from fzero.components.remote.link import Settings
from fzero.components.remote.mailbox import Mailbox
from fzero.components.remote.through_ray import HELLO, as_received, as_sent
from fzero.components.remote.values import whole

LARGE = torch.arange(1 << 17, dtype=torch.int32)


@pytest.fixture
def host() -> Iterator[Host]:
    own = Host(Settings("vision", "its identity", 4, 1.0, 1, False), 3, lambda message: None)
    yield own
    own.close(Failure("RuntimeError", "over", "vision", 3))


@pytest.mark.parametrize("seed", range(5))
def test_messages_are_taken_in_their_order(seed: int) -> None:
    mailbox, order = Mailbox(), [*range(20)]
    random.Random(seed).shuffle(order)
    for number in order:
        assert as_received(mailbox.tell(number, as_sent(("call", number, LARGE + number)))) == ("taken",)
    for number in range(20):
        kind, got, x = mailbox.receive(0.0)  # type: ignore[misc]
        assert (kind, got) == ("call", number) and x.equal(LARGE + number)
    with pytest.raises(TimedOut):
        mailbox.receive(0.01)


def test_reports_come_before_the_end() -> None:
    mailbox = Mailbox()
    assert as_received(mailbox.report(0.01)) == ("wait",)
    mailbox.send(("failed", 1))
    mailbox.send(("ready", LARGE))
    mailbox.close()
    with pytest.raises(Closed):
        mailbox.send(("late",))
    for _ in range(2):
        with pytest.raises(Closed):
            mailbox.receive(1.0)
    assert as_received(mailbox.report(1.0)) == ("report", ("failed", 1))
    assert as_received(mailbox.report(1.0))[1][1].equal(LARGE)
    assert as_received(mailbox.report(1.0)) == ("end",)


@pytest.mark.parametrize(
    "wrong",
    [b"pickle", (b"", b"", []), (*as_sent(1)[:2], [LARGE.numpy()]), (*as_sent([LARGE])[:2], []), None],
    ids=["pickle", "nothing", "another tensor", "no tensor", "None"],
)
def test_what_is_no_message_is_refused(wrong: object, host: Host, caplog: pytest.LogCaptureFixture) -> None:
    """A reader is told; the controlling process is not heard any more, as after a message that was cut off."""
    mailbox = Mailbox()
    mailbox.serves(host)
    kind, failure = as_received(mailbox.ask(wrong))
    assert kind == "failed" and failure[2:4] == ("vision", 3) and "refused a request" in caplog.text
    with pytest.raises((BadMessage, TypeError, ValueError)):
        mailbox.tell(0, wrong)
    with pytest.raises(Closed):
        mailbox.receive(1.0)
    assert as_received(mailbox.report(1.0)) == ("end",)


def test_answers(host: Host) -> None:
    """One that takes long is a sign of life first, and the thread is free for others."""
    mailbox = Mailbox()
    assert as_received(mailbox.ask(as_sent(HELLO))) == ("taken",)
    assert as_received(mailbox.ask(as_sent(("metas", [(0, 1)])))) == ("wait",)
    mailbox.serves(host)
    record = host.values.begin(0)
    for request in (("metas", [(0, 1)]), ("trees", 0), ("arrived", 0)):
        assert as_received(mailbox.ask(as_sent(request))) == ("wait",)
    record.finish({1: whole(LARGE)})
    kind, ((name, told, *_),) = as_received(mailbox.ask(as_sent(("metas", [(0, 1)]))))
    assert (kind, name, told) == ("answer", "Meta", "block")
    kind, (block,) = as_received(mailbox.ask(as_sent(("blocks", ([((0, 1), ((5, 9),))], "")))))
    assert kind == "answer" and block.equal(LARGE[5:9])
    kind, (block,) = as_received(mailbox.ask(as_sent(("blocks", ([((0, 1), None)], "")))))
    assert block.equal(LARGE) and block.data_ptr() != LARGE.data_ptr()
    block.zero_()
    assert LARGE[1] == 1
    kind, failure = as_received(mailbox.ask(as_sent(("nonsense", 0))))
    assert kind == "failed" and failure[0] == "AssertionError"


def test_the_way_is_a_connection_where_one_can_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    token, waited = secrets.token_bytes(32), []
    mailbox = Mailbox()
    thread = threading.Thread(target=lambda: waited.append(mailbox.why(30.0)))
    thread.start()
    begun = time.monotonic()
    with Listener(token) as listener:
        way = mailbox.way(listener.address, token, 5.0, "rank 3")
        assert way is not mailbox and listener.accept(5.0).peer == "rank 3"
        way.close()
    thread.join()
    assert time.monotonic() - begun < 20
    assert waited == [b""] and mailbox.why(0.0) == b""
    other = Mailbox()
    assert other.way(listener.address, token, 5.0, "rank 3") is other and b"refused" in other.why(0.0)


def test_a_rank_without_an_actor_is_reached_by_connections_alone() -> None:
    token = secrets.token_bytes(32)
    with Listener(token) as listener:
        address = listener.address
        own = reach.Reach(address, token, "", "rank 3", 5.0, set())
        own.way().close()
        reach.Reach(address, token, "an actor", "rank 3", 5.0, set()).way().close()
    for actor, words in (("", "refused"), ("an actor", "refused(.|\n)*Nor through Ray: this process is none of Ray's")):
        with pytest.raises(OSError, match=words):
            reach.Reach(address, token, actor, "rank 3", 5.0, set()).way()


class Actor:
    """Answers as a rank's actor does, or not at all."""

    answers = True

    def __init__(self, name: str, peer: str) -> None:
        self.peer = peer

    def send(self, message: object, timeout: float = 1.0) -> None:
        assert message == HELLO

    def receive(self, timeout: float) -> object:
        if not self.answers:
            raise Closed("Ray lost rank 3: it has died.")
        return ("taken",)

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize("silent", [False, True])
def test_a_reader_tries_once_to_connect(
    silent: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And asks the actors of a machine from then on; it does not where a rank has died, which may be the reason."""
    tried: list[object] = []

    def connect(address: object, token: bytes, timeout: float) -> None:
        tried.append(timeout)
        raise (TimedOut if silent else Refused)("nobody answered.")

    monkeypatch.setattr(reach, "connect", connect)
    monkeypatch.setattr(reach, "Asking", Actor)
    machine: set[str] = set()
    first, second = (
        reach.Reach(("", "", "host", 1), b"", "an actor", f"rank {rank}", 60.0, machine) for rank in (3, 4)
    )
    assert all(isinstance(first.way(), Actor) for _ in range(3)) and tried == [reach.TRY_SECONDS]
    assert isinstance(second.way(), Actor) and len(tried) == (1 if silent else 2)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and "to rank 3: nobody answered. It goes through Ray's" in said[0] and "to rank 4" in said[1]
    monkeypatch.setattr(Actor, "answers", False)
    for _ in range(2):
        dead = reach.Reach(("", "", "other", 1), b"", "an actor", "rank 3", 0.5, machine)
        with pytest.raises(Refused, match=r"nobody answered. Nor through Ray: Ray lost rank 3"):
            dead.way()
    assert len(caplog.records) == 2 and tried[-2:] == [0.5, 0.5]
