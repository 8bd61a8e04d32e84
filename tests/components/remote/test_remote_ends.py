"""How components end, and how they do not: by a forked child, by an interrupt, by what is no Exception."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import remote_builds as builds
import torch
from nightly import in_turns

import fzero as fz
from fzero.components.remote.failure import error_of

X = torch.ones(4, 3, dtype=torch.float64)

FORKS = """
import gc, os, sys, time, torch, remote_builds as builds, fzero as fz

def main(on):
    global own, state, out
    x = torch.ones(4, 3, dtype=torch.float64)
    own = fz.remote(builds.built_trouble, 2, on, name="vision", timeout=20)
    state = own.init()
    out = own.forward(state, x, "none")
    fz.fetch([out, own.forward(state, x, "sleep")])

    def uses():
        begun, late = time.monotonic(), own.forward
        for use in (lambda: fz.fetch(out), lambda: out.shape, lambda: late(state, x, "none"), own.init,
                    lambda: fz.gather(state.params), lambda: state.step, lambda: fz.fetch(state)):
            try:
                use()
                print("it went on", flush=True)
            except RuntimeError as error:
                assert "was forked from it" in str(error), error
        assert time.monotonic() - begun < 2
        os._exit(0)

    def collected():
        global own, state, out
        own = state = out = None
        gc.collect()
        time.sleep(0.2)
        os._exit(0)

    def closes():
        own.close()
        os._exit(0)

    for child in (uses, collected, closes, sys.exit):
        waiting = own.forward(state, x, "sleep")
        pid = os.fork()
        if not pid:
            child()
        print(os.waitpid(pid, 0)[1], fz.fetch([waiting, own.forward(state, x, "none"), out])[0].equal(x), flush=True)
    own.close()

if __name__ == "__main__":
    main("threads")
    main("processes")
"""


@in_turns(10, "interpreters of their own")
def test_a_forked_child_ends_nothing(tmp_path: Path) -> None:
    """It may be collected there, closed, or used: which is refused at once."""
    script = tmp_path / "forks.py"
    script.write_text(FORKS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "0 True\n" * 8, (done.stdout, done.stderr)


def leaving(p: Any, x: torch.Tensor, kind: str) -> torch.Tensor:
    if kind:
        raise KINDS[kind]("the user's words")
    return x * p["w"]


class NoWords(Exception):
    """Which cannot say what it is."""

    def __str__(self) -> str:
        raise ValueError("no words")


KINDS: dict[str, Any] = {
    "interrupt": KeyboardInterrupt,
    "cancelled": asyncio.CancelledError,
    "closed": GeneratorExit,
    "exit": SystemExit,
    "none": NoWords,
}


def built_leaving(rank: int, kind: str = "") -> Any:
    if kind:
        raise KINDS[kind]("the user's words")
    return fz.shard_zero1(fz.train_step(leaving, fz.sgd(0.1))), {"w": builds.ONES}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_exception_ends_a_component_on_threads(kind: str) -> None:
    """And is told at once, in fn and in build; an exception without words is one of its call."""
    error: Any = RuntimeError if kind == "none" else fz.ComponentDied
    with fz.remote(built_leaving, 2, "threads", timeout=20) as own:
        state = own.init()
        own.forward(state, X, "")
        begun = time.monotonic()
        with pytest.raises(error, match=KINDS[kind].__name__):
            fz.fetch(own.forward(state, X, kind))
        if kind == "none":
            assert fz.fetch(own.forward(state, X, "")).equal(X)
        else:
            with pytest.raises(error, match=KINDS[kind].__name__) as died:
                own.forward(state, X, "")
            assert "raise KINDS[kind]" in died.value.last_words
    with pytest.raises(error, match=KINDS[kind].__name__):
        fz.remote(functools.partial(built_leaving, kind=kind), 2, "threads", timeout=20)
    assert time.monotonic() - begun < 5


def test_a_thread_without_its_group_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where its peer has left before they were connected: at once, and not by a traceback of its thread alone."""

    def refused(*arguments: Any, **others: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(torch.distributed, "init_process_group", refused)
    begun = time.monotonic()
    with pytest.raises(fz.ComponentDied, match="Connection closed by peer"):
        fz.remote(built_leaving, 2, "threads", timeout=20)
    assert time.monotonic() - begun < 5


def test_all_ranks_are_waited_for_at_once() -> None:
    """Not one after the other, and who comes later does not wait as long again."""
    with fz.remote(functools.partial(builds.built_trouble, stage=0), 4, "threads", timeout=3) as own:
        state = own.init()
        fz.fetch(own.forward(state, X, "none"))
        with pytest.raises(TimeoutError):
            begun = time.monotonic()
            fz.fetch(own.forward(state, X, "sleepy"))
        assert time.monotonic() - begun < 8
        with pytest.raises(TimeoutError):
            begun = time.monotonic()
            own.forward(state, X, "other")
        assert time.monotonic() - begun < 1.5


def test_an_interrupted_close_ends_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    own = fz.remote(functools.partial(builds.built_trouble, stage=0), 2, timeout=20)
    links: Any = own.group.links
    pids = [link._process.pid for link in links]
    state = own.init()
    fz.fetch(own.forward(state, X, "none"))

    def hang() -> None:
        with contextlib.suppress(RuntimeError):  # of a component that is closed meanwhile
            own.forward(state, X, "hang")

    busy = threading.Thread(target=hang)
    busy.start()
    time.sleep(0.3)

    def interrupted(timeout: float) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(links[0], "join", interrupted)
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        own.close()
    own.close()
    busy.join(10)
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() - begun < 5
        time.sleep(0.02)


def _sent_with(send: Callable[[Any], None], early: bool, does: Callable[[], object]) -> Callable[[Any], None]:
    """A link's send of one call, before or after which something happens."""

    def sent(message: Any) -> None:
        called = message[0] == "call"
        if called and early:
            does()
        send(message)
        if called and not early:
            does()

    return sent


@in_turns(6)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("on", ["threads", "processes"])
@pytest.mark.usefixtures("terminal")
def test_an_interrupt_while_a_call_is_sent_costs_nothing(
    on: str, early: bool, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C waits until all ranks have the call: one that had not would be waited for by the others, for ever."""
    with fz.remote(functools.partial(builds.built_trouble, stage=1), 2, on, timeout=3) as own:
        state = own.init()
        before = own.forward(state, X, "none")
        fz.fetch(before)
        link: Any = own.group.links[rank]
        monkeypatch.setattr(link, "send", _sent_with(link.send, early, lambda: signal.raise_signal(signal.SIGINT)))
        with pytest.raises(KeyboardInterrupt):
            own.forward(state, X, "none")
        monkeypatch.undo()
        assert fz.fetch(own.forward(state, X, "none")).equal(X) and fz.fetch(before).equal(X)
        hosts = [one.host for one in own.group.links] if on == "threads" else []  # type: ignore[attr-defined]
        deadline = time.monotonic() + 2
        while any(2 in host.values._records for host in hosts):
            assert time.monotonic() < deadline, "what the call has made is kept"
            time.sleep(0.02)


@pytest.mark.parametrize("on", ["threads", "processes"])
def test_what_interrupts_a_call_otherwise_ends_the_component(on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can tell whether the first rank has the call: the others do not wait for it."""
    with fz.remote(functools.partial(builds.built_trouble, stage=1), 2, on, timeout=3) as own:
        state = own.init()
        fz.fetch(own.forward(state, X, "none"))

        def leaves() -> None:
            raise SystemExit

        link: Any = own.group.links[0]
        monkeypatch.setattr(link, "send", _sent_with(link.send, False, leaves))
        with pytest.raises(SystemExit):
            own.forward(state, X, "none")
        with pytest.raises(fz.ComponentDied, match="perhaps not got a call"):
            fz.fetch(own.forward(state, X, "none"))


def test_a_call_that_a_rank_has_not_got_is_waited_for_in_time() -> None:
    with fz.remote(functools.partial(builds.built_trouble, stage=1), 2, "threads", timeout=3) as own:
        state = own.init()
        fz.fetch(own.forward(state, X, "none"))
        first: Any = own.group.links[0]
        objects = {"state": state.name}
        first.send(("call", 2, "look", {"objects": objects, "options": {}, "refers": True}, None))
        with pytest.raises(TimeoutError, match="call 2 has not arrived"):
            raise error_of(first.host.trees(2))
        threads = [one.thread for one in own.group.links]  # type: ignore[attr-defined]
    for thread in threads:  # nor does a rank that is closed wait for a call that another one has begun
        thread.join(5)
        assert not thread.is_alive()
