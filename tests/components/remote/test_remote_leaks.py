"""What a component keeps of others, and of calls, is let go of: runs that make components again go on for long."""

from __future__ import annotations

import functools
import gc
import os
import threading
import time
import weakref
from typing import Any

import pytest
import remote_builds as builds
import torch

import fzero as fz
from fzero.components.remote.link import Kept

X = torch.ones(4, 3, dtype=torch.float64)
BUILD = functools.partial(builds.built_trouble, stage=0)


def counted() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def settled(expected: Any, found: Any) -> Any:
    """What is found in the end, as threads end a little later than what they serve."""
    for _ in range(200):
        gc.collect()
        if found() == expected:
            break
        time.sleep(0.02)
    return found()


@pytest.mark.parametrize("on", ["threads", "processes"])
def test_a_component_that_was_closed_is_forgotten_by_its_readers(on: str) -> None:
    """Of one on threads its memory, the threads that serve it and their descriptors."""
    with fz.remote(BUILD, 1, on, name="reader", timeout=20) as reader:
        state = reader.init()
        fz.fetch(reader.forward(state, X, "none"))
        before = counted()
        for _ in range(2):
            with fz.remote(BUILD, 2, "threads", name="closed", timeout=20) as other:
                value = other.forward(other.init(), X, "none")
                assert fz.fetch(reader.forward(state, value, "none")).equal(X)
            hosts = [weakref.ref(link.host) for link in other.group.links]  # type: ignore[attr-defined]
            with pytest.raises(RuntimeError, match="closed"):
                reader.forward(state, value, "none")
            del other, value
            assert settled([None, None], lambda: [host() for host in hosts]) == [None, None]
        no_more = lambda: all(now <= then for now, then in zip(counted(), before, strict=True))
        assert settled(True, no_more), (counted(), before)
        assert fz.fetch(reader.forward(state, X, "none")).equal(X)


def test_calls_that_wait_for_one_that_is_closed_are_told() -> None:
    with fz.remote(BUILD, 1, "threads", name="reader", timeout=20) as reader:
        state = reader.init()
        fz.fetch(reader.forward(state, X, "none"))
        with fz.remote(BUILD, 1, "threads", name="closed", timeout=20) as other:
            theirs = other.init()
            fz.fetch(
                [reader.forward(state, other.forward(theirs, X, "none"), "none"), other.forward(theirs, X, "sleep")]
            )
            late = [other.forward(theirs, X, "sleep") for _ in range(3)]
            waiting = [reader.forward(state, each, "none") for each in late]
        with pytest.raises(RuntimeError, match="'closed'"):
            fz.fetch(waiting)
        assert fz.fetch(reader.forward(state, X, "none")).equal(X)


def of_a_number(p: Any, x: torch.Tensor, number: float) -> Any:
    return (x * p["w"] * number, None) if number == 3.5 else x * p["w"] * number


def test_kinds_of_calls_are_forgotten() -> None:
    """Those that were not used for long; they may come again."""

    def build(rank: int) -> Any:
        return fz.train_step(of_a_number, fz.sgd(0.1)), {"w": builds.ONES}

    with fz.remote(build, 1, "threads", timeout=20) as own:
        own._kinds.most = 4
        host: Any = own.group.links[0].host  # type: ignore[attr-defined]
        host._trees.most = 4
        state = own.init()
        for turn in [*range(20), *range(20)]:
            out = own.forward(state, X, turn / 2)
            out = out[0] if turn == 7 else out
            assert fz.fetch(out).equal(X * turn / 2)
            assert len(own._kinds) <= 4 and len(host._trees) <= 4
    kept = Kept[str, int]()
    kept.most = 2
    for name in ("a", "b", "a", "c"):
        kept[name] = kept.get(name, 1)
    assert (kept.get("a"), kept.get("b"), kept.get("c"), len(kept)) == (1, None, 1, 2)
