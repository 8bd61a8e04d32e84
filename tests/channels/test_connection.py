"""Connections: what is sent arrives to the bit, waits end in time, and what goes wrong ends one connection only."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from channel_peers import KINDS, descriptors, messages, pair, same, soon
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import in_turns

from fzero.channels import BadMessage, Closed, Connection, TimedOut, segments, vocabulary
from fzero.channels.connection import HEADER, MAGIC
from fzero.channels.segments import FREE, SHARED_FROM
from fzero.channels.tensors import INLINE, Row

Pair = tuple[Connection, Connection]


@pytest.fixture(scope="module", params=KINDS)
def lasting(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A connection that serves many examples."""
    with pair(request.param) as ends:
        yield ends


@in_turns(2)
@settings(max_examples=60)
@given(several=st.lists(messages, min_size=1, max_size=3))
def test_messages_arrive(lasting: Pair, several: list[object]) -> None:
    here, there = lasting
    for sender, receiver in ((here, there), (there, here)):
        for message in several:
            sender.send(message)
        received = [receiver.receive(5.0) for _ in several]
        assert same(received, several)
        again = [receiver_side for receiver_side in received]  # still there while others are on their way
        sender.send(several)
        assert same(receiver.receive(5.0), several) and same(again, several)


@pytest.mark.parametrize("kind", KINDS)
def test_transports(kind: str) -> None:
    with pair(kind) as (here, there):
        assert here.transport == there.transport == ("tcp" if kind == "tcp" else "unix")
        assert (here.peer, there.peer) == ("there", "here")
        large = torch.arange(SHARED_FROM)
        here.send(large)
        assert torch.equal(got := there.receive(5.0), large)  # type: ignore[arg-type]
        assert isinstance(got, torch.Tensor) and got.untyped_storage().resizable() == (kind != "shared")


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_may_change_once_it_is_sent(kind: str) -> None:
    with pair(kind) as (here, there):
        x = torch.zeros(1 << 20)
        for number in range(5):
            here.send(x.fill_(number))
        got = [there.receive(5.0) for _ in range(5)]
        for number, one in enumerate(got):
            assert isinstance(one, torch.Tensor) and torch.equal(one, torch.full_like(x, number))
            one.add_(1)  # the receiver's own
        assert (x == 4).all()


def test_what_is_sent_is_what_its_values_are() -> None:
    """Conjugates, negatives, expanded and strided ones: as contiguous memory says them."""
    with pair("shared") as (here, there):
        for count in (3, SHARED_FROM):
            z = torch.randn(count, 2, generator=torch.Generator().manual_seed(0)).to(torch.complex64)
            for x in (z.conj(), z.conj().imag, z.t(), z[::2], torch.ones(1, 1).expand(count, 2)):
                here.send(x)
                got = there.receive(5.0)
                assert isinstance(got, torch.Tensor) and torch.equal(got, x) and got.is_contiguous()


def test_inside_a_transform_what_it_does_not_touch_can_be_sent() -> None:
    constant, few = torch.arange(1 << 17), torch.ones(2, 3).t()
    with pair("shared") as (here, there):

        def fn(x: torch.Tensor) -> torch.Tensor:
            here.send([constant, few, 3])
            return x * 2

        assert torch.func.grad(fn)(torch.ones(())) == 2
        with torch.inference_mode():
            here.send(constant + 1)
        assert same(there.receive(5.0), [constant, few, 3])
        assert same(there.receive(5.0), constant + 1)


@in_turns(3)
@pytest.mark.parametrize("kind", KINDS)
def test_both_send_at_once(kind: str) -> None:
    """Much more than sockets hold, and neither receives before it has sent."""
    payload = [torch.arange(8 << 20), "beside"]
    with pair(kind) as (here, there):
        threads = [threading.Thread(target=end.send, args=(payload, 20.0)) for end in (here, there)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20.0)
        assert same(here.receive(1.0), payload) and same(there.receive(1.0), payload)


@pytest.mark.parametrize("kind", KINDS)
def test_several_threads(kind: str) -> None:
    """Messages stay whole, and those of one thread in order."""
    with pair(kind) as (here, there):

        def send(name: int) -> None:
            for number in range(100):
                here.send((name, number, torch.full((1 << (10 + number % 8),), name)))

        got: list[tuple[int, int, torch.Tensor]] = []
        threads = [threading.Thread(target=send, args=(name,)) for name in range(3)]
        threads += [
            threading.Thread(target=lambda: [got.append(there.receive(10.0)) for _ in range(150)])  # type: ignore[arg-type]
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20.0)
        assert len(got) == 300 and all((x == name).all() for name, _, x in got)
        assert {(name, number) for name, number, _ in got} == set(itertools.product(range(3), range(100)))


@in_turns(3)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_grows(kind: str) -> None:
    with pair(kind) as (here, there):
        large, small = torch.ones(1 << 17), torch.ones(5)

        def turns(count: int) -> None:
            for number in range(count):
                here.send({"number": number, "tensors": [large, small, large]})
                got = there.receive(5.0)
                assert isinstance(got, dict) and got["number"] == number
                there.send(got["tensors"])
                here.receive(5.0)

        def resident() -> int:
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * 4096

        turns(50)
        gc.collect()
        before, memory = descriptors(), resident()
        turns(800)
        gc.collect()
        assert descriptors() == before and resident() - memory < 4 << 20
        assert here._lender is None or here._lender.nbytes <= 8 << 20


def test_descriptors_are_closed() -> None:
    with pair("shared"):
        pass
    gc.collect()
    before = descriptors()
    kept = []
    for kind in KINDS * 3:
        with pair(kind) as (here, there):
            here.send(torch.ones(SHARED_FROM))
            kept.append(there.receive(5.0))  # mapped, and no descriptor
            there.send([torch.ones(SHARED_FROM)] * 80)
    assert soon(lambda: descriptors() == before)
    assert all((x == 1).all() for x in kept)


@pytest.mark.parametrize("kind", KINDS)
def test_waits_end_in_time(kind: str) -> None:
    with pair(kind) as (here, there):
        for seconds in (0, 0.3):
            begin = time.monotonic()
            with pytest.raises(TimedOut, match=f"no message came from there within {seconds} s"):
                here.receive(seconds)
            assert seconds <= time.monotonic() - begin < seconds + 0.5
        there.send("late")
        assert here.receive(5.0) == "late"


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_peer_that_does_not_read(kind: str) -> None:
    """Its thread stands still: a send ends in time, and what is half sent ends the connection."""
    with pair(kind) as (here, there):
        with there._ending, there._sending:
            there._inlet._got = lambda _: time.sleep(1.5) or 0  # type: ignore[method-assign,assignment]
            here.send("wake up")
            time.sleep(0.1)
            begin = time.monotonic()
            with pytest.raises(TimedOut, match=r"there did not read a message within .* closed"):
                here.send(torch.ones(16 << 20), timeout=0.5)
            assert time.monotonic() - begin < 1.0
            with pytest.raises(Closed, match=r"took longer than 0.5 s"):
                here.send(1)
            with pytest.raises(Closed, match=r"took longer than 0.5 s"):
                here.receive(1.0)


def test_a_send_that_waits_for_another() -> None:
    with pair("tcp") as (here, there), here._sending:
        with pytest.raises(TimedOut, match="another send"):
            here.send(1, timeout=0.1)
        there.send(2)
        assert here.receive(1.0) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_closing(kind: str) -> None:
    """What was sent before arrives; then both sides are told, also those who wait."""
    with pair(kind) as (here, there):
        seen: list[BaseException] = []

        def wait(end: Connection) -> None:
            try:
                end.receive(10.0)
            except Closed as error:
                seen.append(error)

        waiting = [threading.Thread(target=wait, args=(here,)) for _ in range(2)]
        for thread in waiting:
            thread.start()
        here.send(torch.ones(1 << 20))
        here.send("last words")
        begin = time.monotonic()
        here.close()
        here.close()
        for thread in waiting:
            thread.join(5.0)
        assert time.monotonic() - begin < 0.5
        assert len(seen) == 2 and all("there has ended: it was closed here" in str(error) for error in seen)
        assert (there.receive(1.0) == 1).all()  # type: ignore[union-attr]
        assert there.receive(1.0) == "last words"
        for use in (lambda: there.receive(1.0), lambda: there.send(1), lambda: there.receive(1.0)):
            with pytest.raises(Closed, match="connection to here has ended: it was closed there"):
                use()
        for use in (lambda: here.receive(1.0), lambda: here.send(1)):
            with pytest.raises(Closed, match="it was closed here"):
                use()
        assert "ended" in repr(here) and "ended" in repr(there)
        assert soon(lambda: not here._reader.is_alive() and not there._reader.is_alive())


def test_what_cannot_be_sent_changes_nothing() -> None:
    large = torch.ones(SHARED_FROM)
    with pair("shared") as (here, there):
        here.send(large)
        del large
        there.receive(5.0)
        assert here._lender is not None
        for wrong in (object(), torch.ones(3, requires_grad=True), [[torch.ones(SHARED_FROM)] * 3, 2j]):
            with pytest.raises(TypeError):
                here.send([torch.ones(SHARED_FROM), wrong])
        assert [own.state for group in here._lender._by_capacity.values() for own in group] == [FREE]
        here.send("well")
        assert there.receive(5.0) == "well"


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, Connection]]:
    """A connection whose other end is a socket that may send anything."""
    ours, theirs = socket.socketpair()
    with ours, Connection(theirs, "a stranger", True) as connection:
        yield ours, connection


def framed(rows: list[object], message: object) -> bytes:
    body = vocabulary.encode((vocabulary.encode(message)[0], rows))[0]
    return HEADER.pack(MAGIC, len(body)) + body


def row(nbytes: int, segment: int = INLINE) -> Row:
    return Row(torch.uint8, (nbytes,), segment)


X = torch.zeros(1)
BAD = {
    "garbage": (bytes(range(200)), "no header"),
    "too long": (HEADER.pack(MAGIC, 1 << 60), "could not be taken"),
    "a value": (HEADER.pack(MAGIC, 1) + b"q", "no message"),
    "no rows": (HEADER.pack(MAGIC, 2) + b"N.", "could not be taken"),
    "a row": (framed([(1, 2)], X), "could not be taken"),
    "a size": (framed([row(-5)], X), "could not be taken"),
    "no descriptor": (framed([row(5, 0)], X), "without its descriptor"),
    "no memory": (framed([row(1 << 36)], X), "without a goodbye|could not be taken"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_message(raw: tuple[socket.socket, Connection], name: str) -> None:
    """What came before is received, then the error, by everybody and every time; the socket is closed."""
    sock, connection = raw
    data, words = BAD[name]
    sock.sendall(framed([], "before") + data)
    if name == "no memory":
        sock.close()
    assert connection.receive(5.0) == "before"
    for _ in range(2):
        with pytest.raises(Closed if name == "no memory" else BadMessage, match=f"a stranger has ended: .*({words})"):
            connection.receive(5.0)
    with pytest.raises(Closed, match=words):
        connection.send(1)
    if name != "no memory":
        sock.settimeout(5.0)
        with contextlib.suppress(ConnectionResetError):  # of what was not read
            assert sock.recv(1) == b""


@pytest.mark.parametrize("kind", ["a file", "too small", "twice", "left over"])
def test_a_descriptor_that_is_no_segment(raw: tuple[socket.socket, Connection], kind: str) -> None:
    sock, connection = raw
    before = descriptors()
    descriptor = segments.create(4096, 0)[1]
    if kind == "a file":
        os.close(descriptor)
        descriptor = os.open(os.devnull, os.O_RDONLY)
    frame, words = {
        "a file": (framed([row(5, 0)], X), "which does not hold it"),
        "too small": (framed([row(4097, 0)], X), "which does not hold it"),
        "twice": (framed([row(5, 0), row(5, 0)], [X, X]), "comes again while tensors still lie in it"),
        "left over": (framed([], None), "no header"),
    }[kind]
    socket.send_fds(sock, [frame], [descriptor])
    os.close(descriptor)
    if kind == "left over":  # it is closed, and nothing else comes of it
        assert connection.receive(5.0) is None
        sock.sendall(bytes(100))
    with pytest.raises(BadMessage, match=words):
        connection.receive(5.0)
    assert soon(lambda: descriptors() == before - 2)  # its sockets


def test_many_messages_at_once(raw: tuple[socket.socket, Connection]) -> None:
    sock, connection = raw
    parts = [framed([row(number % 50)], X) + bytes(number % 50) for number in range(5000)]
    sock.sendall(b"".join(parts))
    for number in range(5000):
        assert same(connection.receive(5.0), torch.zeros(number % 50, dtype=torch.uint8))


def test_descriptors_go_once() -> None:
    """With the first of the many pieces that a message is sent in."""
    with pair("shared") as (here, there):
        here.send([torch.ones(SHARED_FROM), bytes(8 << 20), torch.ones(SHARED_FROM)])
        got = there.receive(5.0)
        here.send(got)
        assert same(there.receive(5.0), got)


@pytest.mark.parametrize("cut", [0, 1, 11, 12, 60, 150])
def test_a_message_that_ends(raw: tuple[socket.socket, Connection], cut: int) -> None:
    sock, connection = raw
    sock.sendall((framed([row(20)], X) + bytes(20))[:cut])
    begin = time.monotonic()
    sock.close()
    with pytest.raises(Closed, match="a stranger has ended: it ended"):
        connection.receive(5.0)
    assert time.monotonic() - begin < 0.5
