"""Processes at the other end: killed, forked, ending while connections are open; nobody else comes to harm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from channel_peers import TOKEN, descriptors, echo, forks, hold, peer, pour, same, soon
from nightly import in_turns

from fzero.channels import Closed, Listener


def shared_files() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "fzero" in name}


@pytest.mark.parametrize("tcp", [False, True])
def test_there_and_back(tcp: bool) -> None:
    with peer(echo, tcp) as (connection, _):
        assert connection.peer == "the peer" and connection.transport == ("tcp" if tcp else "unix")
        message = {"large": torch.arange(1 << 18), 3: [torch.ones(2).bfloat16(), None, 1 << 90]}
        for _ in range(20):
            connection.send(message)
        assert all(same(connection.receive(5.0), message) for _ in range(20))


@pytest.mark.parametrize("tcp", [False, True])
def test_killed_while_others_wait(tcp: bool) -> None:
    """Who waits is told at once, and what had arrived stays good."""
    with peer(echo, tcp) as (connection, process):
        connection.send(torch.arange(1 << 18))
        kept = connection.receive(5.0)
        seen: list[tuple[float, str]] = []

        def wait() -> None:
            try:
                connection.receive(30.0)
            except Closed as error:
                seen.append((time.monotonic(), str(error)))

        threads = [threading.Thread(target=wait) for _ in range(2)]
        for thread in threads:
            thread.start()
        begin = time.monotonic()
        process.kill()
        for thread in threads:
            thread.join(5.0)
        assert len(seen) == 2 and all(at - begin < 0.5 for at, _ in seen)
        assert all("the peer has ended" in words and "may have died" in words for _, words in seen)
        with pytest.raises(Closed, match="the peer has ended"):
            connection.send(1)
        assert same(kept, torch.arange(1 << 18))


@in_turns(3)
@pytest.mark.parametrize("tcp", [False, True])
@pytest.mark.parametrize("after", [0.0, 0.01, 0.05])
def test_killed_while_it_sends(tcp: bool, after: float) -> None:
    before = shared_files()
    with peer(pour, tcp) as (connection, process):
        connection.receive(10.0)
        time.sleep(after)
        process.kill()
        with pytest.raises(Closed, match="may have died"):
            while True:
                assert (connection.receive(5.0) == 1).all()  # type: ignore[union-attr]
    assert shared_files() == before


@pytest.mark.parametrize("tcp", [False, True])
def test_stopped_and_killed_while_it_is_sent_to(tcp: bool) -> None:
    """A process that stands still makes sends time out; killed, they end at once."""
    with peer(hold, tcp) as (connection, process):
        connection.send("keep")
        assert connection.receive(10.0) == "held" and process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        threading.Timer(0.3, process.kill).start()
        begin = time.monotonic()
        with pytest.raises(Closed, match="the peer has ended"):
            for _ in range(1000):
                connection.send(torch.ones(1 << 14)[:16000], timeout=10.0)
        assert 0.2 < time.monotonic() - begin < 1.5


def test_closing_towards_one_that_stands_still() -> None:
    with peer(hold):
        pass  # the server of forks has begun
    before = descriptors()
    with peer(hold) as (connection, process):
        connection.send("keep")
        assert connection.receive(10.0) == "held" and process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        begin = time.monotonic()
        connection.close()
        assert time.monotonic() - begin < 1.5 and not connection._reader.is_alive()
    assert soon(lambda: descriptors() == before)


def test_a_forked_child_has_no_part_in_it() -> None:
    """It cannot send, its tensors' end is not the parent's, and the parent's end is noticed although it lives on."""
    with peer(forks) as (connection, process):
        connection.send(torch.ones(1 << 20, dtype=torch.int32))
        what, child, said = connection.receive(10.0)  # type: ignore[misc]
        try:
            assert what == "child" and said.startswith(f"{1 << 20} the connection to the test has ended: it belongs")
            for _ in range(3):
                connection.send(torch.zeros(1 << 20, dtype=torch.int32))
            assert connection.receive(10.0) == 1 << 20
            begin = time.monotonic()
            process.kill()
            with pytest.raises(Closed, match="may have died"):
                connection.receive(5.0)
            assert time.monotonic() - begin < 0.5
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)


SCRIPT = """
import sys, threading, torch
from fzero.channels import Listener, connect
token = b"a token that both sides know"
listener = Listener(token)
here = connect(listener.address, token, 5.0)
there = listener.accept(5.0)
here.send([torch.ones(1 << 20), torch.ones(3)])
kept = there.receive(5.0)
waiting = threading.Thread(target=lambda: there.receive(600.0), daemon=True)
waiting.start()
sys.kept = there, kept
print("done")
"""


@in_turns(10, "interpreters of their own")
def test_an_interpreter_ends_quietly() -> None:
    command = [sys.executable, "-W", "error", "-X", "dev", "-c", SCRIPT]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0 and done.stdout == "done\n" and not done.stderr, done.stderr


def test_listeners_leave_nothing() -> None:
    before = shared_files()
    for _ in range(3):
        with Listener(TOKEN) as listener:
            name = listener.address[1]
            assert name in Path("/proc/net/unix").read_text()
    assert name not in Path("/proc/net/unix").read_text() and shared_files() == before
