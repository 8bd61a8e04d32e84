"""Who has no token is refused and logged, keeps nobody waiting, and the listener lives on."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import threading
import time

import pytest
import torch
from channel_peers import KINDS, TOKEN, descriptors, over_tcp, pair, soon
from nightly import in_turns

from fzero.channels import Closed, Listener, Refused, TimedOut, connect
from fzero.channels import listener as handshake


def refused(caplog: pytest.LogCaptureFixture, words: str) -> bool:
    """Whether the log says so, soon; nothing else is in it."""
    found = soon(lambda: any(re.search(words, record.getMessage()) for record in caplog.records), 2.0)
    assert all(record.name == "fzero.channels" and record.levelno == logging.WARNING for record in caplog.records)
    return found


def raw(listener: Listener, kind: str) -> socket.socket:
    """A socket that has connected, and says nothing yet."""
    _, name, host, port = listener.address
    if kind == "tcp":
        sock = socket.create_connection((host, port), timeout=5.0)
    else:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect("\0" + name)
    sock.settimeout(5.0)
    return sock


def works(listener: Listener) -> bool:
    """Whether another one that knows the token is taken within a moment."""
    begin = time.monotonic()
    with connect(listener.address, TOKEN, 5.0) as there, listener.accept(5.0) as here:
        there.send("hello")
        return here.receive(5.0) == "hello" and time.monotonic() - begin < 1.0


@pytest.mark.parametrize("kind", ["shared", "tcp"])
def test_a_wrong_token(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with Listener(TOKEN) as listener:
        address = over_tcp(listener.address) if kind == "tcp" else listener.address
        with pytest.raises(Refused, match=r"connect: 127.0.0.1 port \d+.* (tokens differ|another token)"):
            connect(address, TOKEN + b"!", 5.0)
        assert refused(caplog, "another token") and works(listener)
        with pytest.raises(TimedOut, match=r"nobody connected to .* within 0.1 s"):
            listener.accept(0.1)


def test_a_listener_with_another_token() -> None:
    """It cannot answer; also if it repeats the caller's proof."""
    listening = socket.create_server(("127.0.0.1", 0))

    def pretend() -> None:
        with listening.accept()[0] as sock:
            sock.sendall(handshake._hello("a liar"))
            data = b""
            while len(data) < handshake._HELLO.size + 32:
                data += sock.recv(1000)
            sock.sendall(data[-32:])

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(Refused, match="it has another token"):
        connect(("", "", "127.0.0.1", listening.getsockname()[1]), TOKEN, 5.0)
    thread.join()
    listening.close()


@in_turns(2)
@pytest.mark.parametrize("kind", ["shared", "tcp"])
@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", bytes(400), b"fzero\0ch" + bytes(300)])
def test_garbage(kind: str, data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with Listener(TOKEN) as listener:
        with raw(listener, kind) as sock:
            sock.sendall(data)
            with contextlib.suppress(OSError):  # it may have been refused, and ended, already
                sock.shutdown(socket.SHUT_WR)
            assert refused(caplog, "no greeting|went away before its hello|speaks version 0")
            assert works(listener)


def test_the_token_does_not_travel_and_no_proof_serves_twice(caplog: pytest.LogCaptureFixture) -> None:
    """What a caller has said once is no use to whoever has heard it."""
    with Listener(TOKEN) as listener:
        heard = []
        for turn in range(2):
            with raw(listener, "tcp") as sock:
                if turn == 0:
                    ours = handshake._hello("one who knows it")
                    sock.sendall(ours)
                    theirs = sock.recv(handshake._HELLO.size, socket.MSG_WAITALL)
                    heard = [ours, handshake._proof(TOKEN, b"caller", ours + theirs)]
                    sock.sendall(heard[1])
                    assert len(sock.recv(32, socket.MSG_WAITALL)) == 32
                    listener.accept(5.0).close()
                    assert TOKEN not in b"".join((*heard, theirs))
                else:
                    sock.sendall(b"".join(heard))
                    assert refused(caplog, "another token")


@pytest.mark.parametrize("version", [2, 4])  # 2 had other frames
def test_another_version(version: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with Listener(TOKEN) as listener:
        monkeypatch.setattr(handshake, "VERSION", version)
        ours = handshake._hello("another one")
        monkeypatch.undo()
        with raw(listener, "tcp") as sock:
            sock.sendall(ours)
            assert refused(caplog, f"speaks version {version}, this side version 3")
            theirs = sock.recv(handshake._HELLO.size, socket.MSG_WAITALL)
        with pytest.raises(Refused, match="use the same fzero on both"):
            handshake._read(ours)
        assert handshake._read(theirs).shares


def test_the_silent_and_the_slow(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Many say nothing, one a byte now and then; others are taken meanwhile, and all of these are refused in time."""
    monkeypatch.setattr("fzero.channels.listener.HANDSHAKE_SECONDS", 1.0)
    before = descriptors()
    with Listener(TOKEN) as listener:
        begin = time.monotonic()
        silent = [raw(listener, kind) for kind in ("tcp", "shared") * 10]
        slow = raw(listener, "tcp")
        for byte in handshake._hello("slow"):
            try:
                slow.sendall(bytes((byte,)))
            except OSError:
                break
            assert works(listener) and time.monotonic() - begin < 2.0
            time.sleep(0.1)
        for sock in (*silent, slow):
            with sock:
                try:
                    assert len(sock.recv(1000)) == handshake._HELLO.size and sock.recv(1) == b""
                except ConnectionResetError:
                    assert sock is slow
        assert time.monotonic() - begin < 3.0
        assert soon(lambda: len(caplog.records) == 21)
        assert refused(caplog, "its hello did not come within 1.0 s") and works(listener)
    assert soon(lambda: descriptors() == before)


def test_nobody_is_there() -> None:
    with Listener(TOKEN) as listener:
        address = listener.address
    for where in (address, over_tcp(address)):
        with pytest.raises(Refused, match=r"connect: 127.0.0.1 port"):
            connect(where, TOKEN, 5.0)
    silent = socket.create_server(("127.0.0.1", 0))
    begin = time.monotonic()
    with pytest.raises(TimedOut, match=r"its hello did not come within 0.3 s"):
        connect(("", "", "127.0.0.1", silent.getsockname()[1]), TOKEN, 0.3)
    assert time.monotonic() - begin < 0.8
    silent.close()


def test_accept_ends() -> None:
    listener = Listener(TOKEN, name="the listener")
    begin = time.monotonic()
    with pytest.raises(TimedOut, match=r"nobody connected to the listener within 0.3 s"):
        listener.accept(0.3)
    assert time.monotonic() - begin < 0.8
    seen: list[BaseException] = []

    def wait() -> None:
        try:
            listener.accept(10.0)
        except Closed as error:
            seen.append(error)

    waiting = [threading.Thread(target=wait) for _ in range(2)]
    for thread in waiting:
        thread.start()
    never = connect(listener.address, TOKEN, 5.0)  # one of them may take it
    listener.close()
    listener.close()
    for thread in waiting:
        thread.join(5.0)
    assert len(seen) >= 1 and "the listener is closed" in str(seen[0])
    with pytest.raises(Closed):
        listener.accept(1.0)
    never.close()


def test_a_connection_that_nobody_accepts() -> None:
    listener = Listener(TOKEN)
    with connect(listener.address, TOKEN, 5.0) as connection:
        listener.close()
        with pytest.raises(Closed):
            connection.receive(2.0)


@pytest.mark.parametrize("kind", KINDS[::2])
def test_addresses_travel(kind: str) -> None:
    with Listener(TOKEN) as listener, pair(kind) as (here, there):
        here.send(listener.address)
        address = there.receive(5.0)
        assert address == listener.address
        with connect(address, TOKEN, 5.0) as one, listener.accept(5.0) as other:  # type: ignore[arg-type]
            assert one.transport == other.transport == "unix"
        elsewhere = ("another machine", *listener.address[1:])
        with connect(elsewhere, TOKEN, 5.0) as one, listener.accept(5.0) as other:
            assert one.transport == other.transport == "tcp"
            other.send(torch.ones(3))
            one.receive(5.0)


def test_without_unix_sockets_and_without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fzero.channels.listener.has_unix_sockets", lambda: False)
    with Listener(TOKEN) as listener:
        assert listener.address[1] == ""
        with connect(listener.address, TOKEN, 5.0) as one, listener.accept(5.0):
            assert one.transport == "tcp"
    monkeypatch.undo()
    monkeypatch.setattr("fzero.channels.segments.AVAILABLE", False)
    with pair("shared") as (here, there):
        here.send(torch.ones(1 << 20))
        assert (there.receive(5.0) == 1).all()  # type: ignore[union-attr]
        assert here._lender is None and here.transport == "unix"


def test_ipv6() -> None:
    try:
        listener = Listener(TOKEN, host="::1")
    except OSError:
        pytest.skip("no IPv6 here")
    with listener, connect(over_tcp(listener.address), TOKEN, 5.0) as one, listener.accept(5.0) as other:
        one.send(1)
        assert other.receive(5.0) == 1
