"""A rank that dies: named to all who wait, nobody else dies, nothing is left, and the run recovers to its bits."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import remote_builds as builds
import torch
import torch.utils._pytree as torch_pytree
from nightly import at_length, in_turns

import fzero as fz

X = torch.arange(12, dtype=torch.float64).view(4, 3)


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it may end while its file is read
        return False


def pids_of(component: Any) -> list[int]:
    return [link._process.pid for link in component.group.links]


def need_gone(pids: list[int], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while any(map(is_there, pids)):
        assert time.monotonic() < deadline, "a process is left"
        time.sleep(0.02)


DEATHS = {
    "kill": ("was killed by SIGKILL", ""),
    "exit": ("has exited with code 7", ""),
    "words": ("was killed by SIGABRT", "farewell"),
}


@in_turns(3)
@pytest.mark.parametrize("what", DEATHS)
def test_a_rank_that_dies_is_named(what: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Within about a second, also where the other rank waits for it in a collective."""
    own = fz.remote(builds.built_trouble, 2, name="vision", timeout=20)
    with fz.remote(builds.built_trouble, 1, name="other", timeout=20) as other:
        pids = pids_of(own)
        state, theirs = own.init(), other.init()
        before, good = own.forward(state, X, "none", 1), other.forward(theirs, X, "none")
        lost = other.forward(theirs, before, "none")
        assert fz.fetch(lost).equal(X)
        begun = time.monotonic()
        with pytest.raises(fz.ComponentDied) as died:
            fz.fetch(own.forward(state, X, what, 1))
        assert time.monotonic() - begun < 4
        error, (cause, words) = died.value, DEATHS[what]
        assert (error.component, error.rank, error.cause) == ("vision", 1, cause) and words in error.last_words
        uses = (fz.fetch, lambda _: own.init(), lambda _: fz.gather(state.params), lambda it: it.shape)
        for use in uses:
            with pytest.raises(fz.ComponentDied, match="vision"):
                use(before)
        need_gone(pids)
        with pytest.raises(fz.ComponentDied, match="vision"):
            other.forward(theirs, before, "none")
        assert fz.fetch(good).equal(X) and fz.fetch(other.forward(theirs, good, "none")).equal(X)
        assert fz.fetch(lost).equal(X)
    own.close()
    capfd.readouterr()


def test_what_waits_for_a_dead_component_is_told() -> None:
    """A call of another one that is on its way; it alone fails, and that one lives."""
    own = fz.remote(builds.built_trouble, 1, name="vision", timeout=20)
    with fz.remote(builds.built_trouble, 2, name="other", timeout=20) as other:
        state, theirs = own.init(), other.init()
        fz.fetch(other.forward(theirs, own.forward(state, X, "none"), "none"))
        fz.fetch([own.forward(state, X, "none"), own.forward(state, X, "sleep"), other.forward(theirs, X, "none")])
        late = own.forward(state, X, "sleep")
        waiting = other.forward(theirs, late, "none")
        after = other.forward(theirs, X, "none")
        os.kill(pids_of(own)[0], signal.SIGKILL)
        with pytest.raises(fz.ComponentDied) as died:
            fz.fetch(waiting)
        assert (died.value.component, died.value.cause) == ("vision", "was killed by SIGKILL")
        assert fz.fetch(after).equal(X)
    own.close()


@pytest.mark.parametrize("on", ["threads", "processes"])
def test_a_rank_that_is_left_alone_costs_the_component(on: str) -> None:
    """Where ranks are not checked: its group is of no use any more, which is said in time. Others' values are good."""
    with (
        fz.remote(builds.built_trouble, 2, on, name="vision", timeout=2) as own,
        fz.remote(functools.partial(builds.built_trouble, stage=0), 1, "threads") as other,
    ):
        state = own.init()
        before = own.forward(state, X, "none", 1)
        taken = other.forward(other.init(), before, "none")
        assert fz.fetch(taken).equal(X)
        begun = time.monotonic()
        with pytest.raises(fz.ComponentDied, match=r"checked=True") as died:
            fz.fetch(own.forward(state, X, "value", 1))
        assert time.monotonic() - begun < 8
        assert (died.value.component, died.value.rank) == ("vision", 1)
        assert "ValueError: the user's own words" in died.value.cause and "remote_builds.py" in died.value.last_words
        for use in (fz.fetch, lambda _: own.init(), lambda _: fz.gather(state.params)):
            with pytest.raises(fz.ComponentDied, match="the user's own words"):
                use(before)
        assert fz.fetch(taken).equal(X)


def test_a_rank_that_fails_where_nobody_waits_for_it_costs_the_call() -> None:
    """The others need nothing of it in that call."""
    with fz.remote(_built_apart, 2, "threads", timeout=12) as own:
        state = own.init()
        before = own.forward(state, X, 0)
        fz.fetch(before)
        with pytest.raises(ValueError, match="the user's own words"):
            fz.fetch(own.forward(state, X, 1))
        assert fz.fetch(own.forward(state, X, 0)).equal(X) and fz.fetch(before).equal(X)


def _built_apart(rank: int) -> tuple[Any, ...]:
    def fn(p: Any, x: torch.Tensor, fails: int) -> torch.Tensor:
        if fails and torch.distributed.get_rank():
            raise ValueError("the user's own words")
        return x * p["w"]

    return fz.shard_zero1(fz.train_step(fn, fz.sgd(0.1))), {"w": builds.ONES}


@in_turns(2)
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("on", ["threads", "processes"])
def test_no_call_meets_the_collectives_of_one_that_failed_before(on: str, waits: bool) -> None:
    """Calls are on their way as a rank fails alone, where others wait for it, or have only sent it something."""
    good, bad = torch.zeros(4, 1), torch.tensor([[0.0], [0.0], [1.0], [1.0]])
    with fz.remote(functools.partial(builds.built_alone, waits=waits), 2, on, timeout=2) as own:
        state = own.init()
        assert fz.fetch(own.forward(state, X, good)).eq(X[:2].sum()).all()
        begun, failing = time.monotonic(), own.forward(state, X, bad)
        later: list[Any] = []
        with contextlib.suppress(fz.ComponentDied):  # it may be over at once
            later += [own.forward(state, X * k, good) for k in (2, 3, 4)]
        with pytest.raises((ValueError, fz.ComponentDied), match="the user's own words"):
            fz.fetch(failing)
        for each in later:
            with pytest.raises(fz.ComponentDied, match=r"the user's own words.*checked=True"):
                fz.fetch(each)
        assert time.monotonic() - begun < 8


def test_a_rank_that_fails_beside_one_that_does_not_end_costs_the_component() -> None:
    """It computes, and nobody waits in a collective; whoever waits for later calls is told."""
    with fz.remote(_built_slow, 2, "threads", timeout=3) as own:
        state = own.init()
        fz.fetch(own.forward(state, X, torch.zeros(4, 1)))
        own.forward(state, X, torch.ones(4, 1))
        later = own.forward(state, X, torch.zeros(4, 1))
        with pytest.raises(fz.ComponentDied, match=r"the user's own words.*has not ended after 3 seconds"):
            fz.fetch(later)


def _built_slow(rank: int) -> tuple[Any, ...]:
    def fn(p: Any, x: torch.Tensor, bad: torch.Tensor) -> torch.Tensor:
        if bad.any() and rank:
            time.sleep(6)
        elif bad.any():
            raise ValueError("the user's own words")
        return x * p["w"]

    return fz.shard_zero1(fz.train_step(fn, fz.sgd(0.1))), {"w": builds.ONES}


def test_a_call_that_never_ends_is_said_in_time() -> None:
    with fz.remote(functools.partial(builds.built_trouble, stage=0), 1, name="vision", timeout=3) as own:
        state = own.init()
        fz.fetch(own.forward(state, X, "none"))
        begun = time.monotonic()
        with pytest.raises(TimeoutError, match="has not ended after 3 seconds"):
            own.forward(state, X, "hang")
        assert 2.9 < time.monotonic() - begun < 10


STEPS = 3


def loop(places: Any, vision: Any, text: Any, folder: Path, kills: dict[int, str]) -> Any:
    """Steps of the multimodal loop with a save after each, started anew where a component dies."""
    images = torch.randn(STEPS, 5, 3, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    tokens = torch.randint(0, 4, (STEPS, 5), generator=torch.Generator().manual_seed(7))
    v_state, t_state = vision.init(), text.init()
    step, died = 0, 0
    fz.save(folder / "v0", v_state)
    fz.save(folder / "t0", t_state)
    draw = random.Random(0)

    def kill() -> None:
        if victim := kills.pop(step, None):
            time.sleep(draw.random() * 0.02)
            os.kill(draw.choice(pids_of(vision if victim == "vision" else text)), signal.SIGKILL)

    while step < len(images):
        try:
            states = v_state, t_state
            (new_v, new_t), _ = builds.both_updated(vision, text, states, images[step], tokens[step], kill)
            fz.save(folder / f"v{step + 1}", new_v)
            fz.save(folder / f"t{step + 1}", new_t)
            v_state, t_state, step = new_v, new_t, step + 1
        except fz.ComponentDied as error:
            died += 1
            assert error.component in ("vision", "text") and error.cause == "was killed by SIGKILL"
            if error.component == "vision":
                vision.close()
                vision = places(error.component)
                v_state = fz.load(folder / f"v{step}", vision)
            else:
                text.close()
                text = places(error.component)
                t_state = fz.load(folder / f"t{step}", text)
    out = fz.gather((v_state.params, t_state.params))
    vision.close()
    text.close()
    return out, died


def places(which: str) -> Any:
    build = functools.partial(builds.built, stage=3) if which == "vision" else functools.partial(builds.built_head)
    return fz.remote(build, 2 if which == "vision" else 1, name=which, timeout=20)


@in_turns(10, "interpreters of their own")
@pytest.mark.filterwarnings("ignore")
def test_a_killed_run_recovers_to_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    before = {*os.listdir("/dev/shm")}
    expected, died = loop(places, places("vision"), places("text"), tmp_path / "a", {})
    assert not died
    kills = {0: "vision", 2: "text"}
    got, died = loop(places, places("vision"), places("text"), tmp_path / "b", kills)
    assert died == 2
    for x, y in zip(*map(torch_pytree.tree_leaves, (expected, got)), strict=True):
        assert torch.equal(x, y)
    # semaphores are of other processes of the tests
    assert {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")} <= before


SCRIPT = """
import sys, time, torch, remote_builds as builds, fzero as fz
if __name__ == "__main__":
    own = fz.remote(builds.built_trouble, 2, timeout=20)
    out = own.forward(own.init(), torch.ones(4, 3, dtype=torch.float64), "none")
    fz.fetch(out)
    print(*[link._process.pid for link in own.group.links], flush=True)
    time.sleep(float(sys.argv[1]))
"""


@in_turns(10, "interpreters of their own")
@pytest.mark.parametrize("kill", [True, pytest.param(False, marks=at_length)])
def test_no_rank_outlives_its_controlling_process(kill: bool, tmp_path: Path) -> None:
    """Killed, and ended without a close: silently."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, str(script), "100" if kill else "0"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None and run.stderr is not None
        pids = [int(word) for word in run.stdout.readline().split()]
        assert len(pids) == 2 and (not kill or all(map(is_there, pids)))
        if kill:
            run.kill()
        said = run.stderr.read()
        run.wait(20)
    need_gone(pids)
    assert kill or (said, run.returncode) == ("", 0)


def test_a_rank_that_stands_still_is_said_in_time() -> None:
    """It is not dead, and goes on later."""
    with fz.remote(functools.partial(builds.built_trouble, stage=0), 1, name="vision", timeout=1.5) as own:
        (pid,), state = pids_of(own), own.init()
        first = own.forward(state, X, "none")
        assert fz.fetch(first).equal(X)
        os.kill(pid, signal.SIGSTOP)
        begun = time.monotonic()
        try:
            with pytest.raises(TimeoutError, match="no sign of life"):
                fz.fetch(own.forward(state, X, "none"))
        finally:
            os.kill(pid, signal.SIGCONT)
        assert 1 < time.monotonic() - begun < 4
        os.kill(pid, signal.SIGTERM)  # a job's manager tells all processes; the controlling one may want to save
        assert fz.fetch(own.forward(state, X, "none")).equal(X) and fz.fetch(first).equal(X)
