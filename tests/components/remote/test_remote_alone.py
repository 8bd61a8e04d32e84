"""A rank that fails while others wait for it in a collective: they do not wait until their group's timeout."""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

import pytest
import remote_builds as builds
import torch

import fzero as fz
from fzero.comm.waits import Waits
from fzero.components.remote.alone import Failing, Standing, tell
from fzero.components.remote.failure import Failure

X = torch.ones(6, 3, dtype=torch.float64)


@pytest.mark.parametrize("on", ["threads", "processes"])
@pytest.mark.parametrize("rank", [0, 2])
def test_who_waits_for_a_rank_that_failed_is_told_soon(on: str, rank: int) -> None:
    """The component is lost, as it would be once the timeout had ended its process group; others' values are good."""
    build = builds.built_trouble
    with fz.remote(build, 3, on, "vision", timeout=40) as own, fz.remote(build, 1, on, "other", timeout=40) as other:
        state, theirs = own.init(), other.init()
        before = own.forward(state, X, "none", rank)
        taken = other.forward(theirs, before, "none")
        assert fz.fetch(taken).equal(X)
        begun = time.monotonic()
        with pytest.raises(fz.ComponentDied, match=r"checked=True") as died:
            fz.fetch(own.forward(state, X, "value", rank))
        assert time.monotonic() - begun < 10
        assert (died.value.component, died.value.rank) == ("vision", rank)
        assert "ValueError: the user's own words" in died.value.cause and "all_gather of unit" in died.value.cause
        assert "remote_builds.py" in died.value.last_words
        for use in (fz.fetch, lambda _: own.init(), lambda _: fz.gather(state.params)):
            with pytest.raises(fz.ComponentDied, match="the user's own words"):
                use(before)
        assert fz.fetch(taken).equal(X) and fz.fetch(other.forward(theirs, X, "none")).equal(X)
    deadline = time.monotonic() + 10  # on threads the others' collectives have ended, too
    while any(thread.name.startswith(("fzero-vision", "fzero-tell")) for thread in threading.enumerate()):
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.02)


@pytest.mark.parametrize("what", ["value", "sleepy"])
def test_a_rank_that_computes_is_left_to_it(what: str) -> None:
    """The one that fails costs the call, where the others need nothing more of it."""
    with fz.remote(functools.partial(_built, what), 2, "threads", timeout=12) as own:
        state = own.init()
        before = own.forward(state, X, 0)
        fz.fetch(before)
        with pytest.raises(ValueError, match="the user's own words"):
            fz.fetch(own.forward(state, X, 1))
        assert fz.fetch(own.forward(state, X, 0)).equal(X) and fz.fetch(before).equal(X)


def _built(what: str, rank: int) -> tuple[Any, ...]:
    def fn(p: Any, x: torch.Tensor, fails: int) -> torch.Tensor:
        if fails and torch.distributed.get_rank():
            raise ValueError("the user's own words")
        if fails and what == "sleepy":
            time.sleep(4)
        return x * p["w"]

    return fz.shard_zero1(fz.train_step(fn, fz.sgd(0.1))), {"w": builds.ONES}


FAILURE = Failure("ValueError", "words", "vision", 1, "trace")


def test_only_what_can_never_end_is_given_up() -> None:
    failing = Failing(4)
    assert failing.failed(7, 1, FAILURE) and not failing.failed(7, 1, FAILURE)
    both, others = Standing("waits", (0, 1), "a gather"), Standing("waits", (2, 3), "a sum")
    assert failing.stands(7, 0, both) is None, "ranks 2 and 3 may compute"
    assert failing.stands(7, 2, others) is None
    assert failing.stands(7, 3, Standing("computes")) is None
    assert failing.stands(7, 3, Standing("over")) is not None
    assert failing.stands(7, 3, Standing("computes")) is None
    rank, cause, trace = failing.stands(7, 3, others) or (0, "", "")
    assert (rank, trace) == (1, "trace") and "rank 0 waited in a gather" in cause and "ValueError: words" in cause
    assert failing.stands(8, 0, both) is None, "nobody has failed there"


def test_ranks_that_wait_for_others_than_the_failed_are_left_to_it() -> None:
    failing = Failing(3)
    failing.failed(7, 1, FAILURE)
    assert failing.stands(7, 0, Standing("waits", (0, 2), "a gather")) is None
    assert failing.stands(7, 2, Standing("waits", (0, 2), "a gather")) is None
    assert failing.stands(7, 0, Standing("over")) is None and failing.stands(7, 2, Standing("over")) is None
    assert not failing._calls


def test_what_a_rank_does_is_reported_as_it_changes() -> None:
    """Of its own call alone: in an earlier one all may come yet."""
    waits, running, told = Waits(), [False], list[Standing]()
    runs: Any = lambda: running[0]
    thread = threading.Thread(target=tell, args=(waits, runs, told.append, 0.4))
    thread.start()
    try:
        with waits.noted((0, 1), lambda: "an earlier one"):
            time.sleep(0.3)
            assert not told
        running[0] = True
        with waits.noted((0, 1), lambda: "a gather"):
            time.sleep(0.05)
        with waits.noted((0, 2), lambda: "a sum"):
            time.sleep(0.3)
            assert told == [Standing("waits", (0, 2), "a sum")]
        time.sleep(0.1)
        assert told[1:] == [Standing("computes")]
    finally:
        running[0] = None  # type: ignore[call-overload]
        thread.join(5)
    assert told[2:] == [Standing("over")]
