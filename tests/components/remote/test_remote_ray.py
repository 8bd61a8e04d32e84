"""A component on threads, on processes and as Ray's actors: the same bits, also where no connection can be opened.

Skipped where ray is not installed.
"""

from __future__ import annotations

import functools
import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import remote_builds as builds
import torch
import torch.utils._pytree as torch_pytree
from nightly import at_length

import fzero as fz
from fzero.components.remote import linked, on_ray, reach, through_ray

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore")  # ray's own


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def loop(on: str) -> list[torch.Tensor]:
    """Losses and params of the multimodal loop."""
    generator = torch.Generator().manual_seed(6)
    images = torch.randn(4, 5, 3, generator=generator, dtype=torch.float64)
    tokens = torch.randint(0, 4, (4, 5), generator=generator)
    options = {"strategy": "SPREAD"} if on == "ray" else {}
    with (
        fz.remote(functools.partial(builds.built, stage=3), 2, on, name="vision") as vision,
        fz.remote(functools.partial(builds.built_head, stage=2), 1, on, name="text", options=options) as text,
    ):
        v_state, t_state = vision.init(), text.init()
        losses = []
        for x, y in zip(images, tokens, strict=True):
            emb, pull_v = vision.vjp(v_state, x, ("rows",))
            loss, pull_t = text.vjp(t_state, y, emb)
            g_t, (_, ct) = pull_t(torch.ones_like(loss))
            g_v, _ = pull_v(ct)
            norm = fz.global_norm(g_v, g_t)
            v_state, _ = vision.update(v_state, g_v, grad_norm=norm)
            t_state, _ = text.update(t_state, g_t, grad_norm=norm)
            losses.append(loss)
        out = [*fz.fetch(losses), *torch_pytree.tree_leaves(fz.gather((v_state.params, t_state.params)))]
        if on == "ray":
            need_named(text, t_state, y, emb)
        return out


def test_the_same_bits_wherever_it_runs(cluster: None) -> None:
    """And an actor that dies is named, by the same actors, each of which takes seconds to start."""
    del cluster
    threads, processes, actors = loop("threads"), loop("processes"), loop("ray")
    for x, y, z in zip(threads, processes, actors, strict=True):
        assert torch.equal(x, y) and torch.equal(x, z)


def need_named(text: Any, state: Any, *batch: object) -> None:
    begun = time.monotonic()
    with pytest.raises(fz.ComponentDied, match="ActorDiedError") as died:
        fz.fetch(text.forward(state, *batch, "kill"))
    assert (died.value.rank, died.value.component) == (0, "text") and time.monotonic() - begun < 5


def test_mistakes_in_options(cluster: None) -> None:
    del cluster
    with pytest.raises(ValueError, match="expected some of"):
        fz.remote(builds.built_trouble, 1, "ray", options={"cpus": 2})


def test_more_than_the_cluster_has_is_refused_at_once(cluster: None) -> None:
    """Alone, and beside what other components of this process hold."""
    del cluster
    begun = time.monotonic()
    with pytest.raises(ValueError, match=r"4 ranks want 4 CPU\. The cluster has 3\. .*\{'CPU': 0\.5\}"):
        fz.remote(builds.built_trouble, 4, "ray")
    shared = {"resources": {"CPU": 1.5}}
    with fz.remote(functools.partial(builds.built_head, stage=2), 1, "ray", options=shared):
        with pytest.raises(ValueError, match=r"2 ranks want 2 CPU, and other components of this process hold 1\.5\."):
            fz.remote(functools.partial(builds.built_head, stage=2), 2, "ray")
        with fz.remote(functools.partial(builds.built_head, stage=2), 1, "ray", options=shared) as other:
            other.init()
    assert time.monotonic() - begun < 50


class Blocked(on_ray.Listener):
    """One that nobody reaches."""

    def __init__(self, token: bytes, host: str, name: str) -> None:
        super().__init__(token, host, name)
        where, _, host, _ = self.address
        self.address = (where, "", host, _port_of_nobody(host))


def _port_of_nobody(host: str) -> int:
    with socket.create_server((host, 0)) as once:
        return once.getsockname()[1]


def blocks(monkeypatch: pytest.MonkeyPatch, host: str, port: int) -> None:
    """Whoever reads from an actor's rank, here and elsewhere, tries to connect to that port instead."""
    nowhere = ("", "", host, port)
    connected = linked.ChannelLink.connected
    there = lambda link, way, address, *rest: connected(link, way, nowhere if link.actor else address, *rest)
    monkeypatch.setattr(linked.ChannelLink, "connected", there)


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every connection is refused: from ranks to here, from here to ranks, and from one component's to another's."""
    monkeypatch.setattr(on_ray, "Listener", Blocked)
    blocks(monkeypatch, "127.0.0.1", _port_of_nobody("127.0.0.1"))


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "fzero.components"]


def left() -> tuple[list[str], list[str], float]:
    """Actors, threads of ours and what Ray has to give, once what was closed is gone."""
    for _ in range(100):
        actors = ray.util.list_named_actors()
        threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("fzero")]
        if not (actors or threads) and ray.available_resources().get("CPU") == 3:
            break
        time.sleep(0.1)
    return actors, threads, ray.available_resources().get("CPU", 0.0)


@at_length
def test_the_same_bits_where_no_connection_can_be_opened(
    cluster: None, blocked: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows are cut unevenly over two ranks, from which the other component's rank takes them."""
    del cluster, blocked
    with caplog.at_level(logging.WARNING, "fzero.components"):
        actors = loop("ray")
    for x, y in zip(loop("threads"), actors, strict=True):
        assert torch.equal(x, y)
    said = warned(caplog)
    for name in ("rank 0 of component 'vision'", "rank 1 of component 'vision'", "rank 0 of component 'text'"):
        own = [words for words in said if name in words]
        assert len(own) == 2 and all("refused" in words and "Ray's calls" in words for words in own), said
        assert own[0].startswith(f"{name} can open no connection to its controlling process"), own
        assert own[1].startswith("process ") and f"can open no connection to {name}" in own[1], own
    assert len(said) == 6 and left() == ([], [], 3.0)


@at_length
def test_errors_and_deaths_where_no_connection_can_be_opened(
    cluster: None, blocked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    del cluster, blocked
    monkeypatch.setattr(through_ray, "MOST_UNREAD", 2)  # calls wait for the ranks to take earlier ones
    x = torch.randn(9001, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with (
        fz.remote(builds.built_trouble, 2, "ray", name="vision") as own,
        fz.remote(builds.built_trouble, 1, "ray", name="reader") as reader,
        fz.remote(builds.built_trouble, 1, "processes", name="outside", timeout=20) as outside,
    ):
        state, other = own.init(), reader.init()
        out = own.forward(state, x, "none")
        assert fz.fetch(out).equal(x) and fz.fetch(reader.forward(other, out, "none")).equal(x)
        with pytest.raises(ValueError, match=r"the user's own words(.|\n)*Rank 0 of component 'vision'"):
            fz.fetch(own.forward(state, x, "value"))
        slow = own.forward(state, x, "sleep")
        assert fz.fetch(reader.forward(other, slow, "none")).equal(x)
        with pytest.raises(fz.ComponentDied, match=r"refused(.|\n)*Nor through Ray: this process is none of Ray's"):
            fz.fetch(outside.forward(outside.init(), out, "none"))
        assert fz.fetch(out).equal(x)
        begun = time.monotonic()
        uses = (lambda: own.forward(state, x, "kill", 1), lambda: reader.forward(other, out, "none"), lambda: out)
        for use in uses:
            with pytest.raises(fz.ComponentDied) as died:
                fz.fetch(use())
            assert (died.value.rank, died.value.component) == (1, "vision") and "ActorDiedError" in died.value.cause
        assert time.monotonic() - begun < 20 and fz.fetch(reader.forward(other, x, "none")).equal(x)
    assert left() == ([], [], 3.0)


@at_length
def test_a_port_that_stays_silent_costs_its_time_once(
    cluster: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As behind a firewall that drops what comes; by a rank's side, for who reads from it here."""
    del cluster
    monkeypatch.setattr(reach, "TRY_SECONDS", 1.0)
    connected = []
    own_connect = reach.connect
    monkeypatch.setattr(reach, "connect", lambda *given: connected.append(given) or own_connect(*given))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        blocks(monkeypatch, *silent.getsockname())
        with fz.remote(builds.built_trouble, 2, "ray", name="vision") as own:
            begun = time.monotonic()
            state = own.init()
            outs = [own.forward(state, torch.ones(n, 3, dtype=torch.float64), "none") for n in range(1, 4)]
            assert [len(fz.fetch(out)) for out in outs] == [1, 2, 3] and time.monotonic() - begun < 20
    assert len(connected) == 1
    first, second = warned(caplog)
    assert "can open no connection to rank 0 of component 'vision'" in first and "within 1.0 s" in first
    assert "to rank 1 of component 'vision': no other port of 127.0.0.1 has answered" in second


@at_length
def test_ray_that_is_shut_down_under_a_component(cluster: None) -> None:
    """The last test: it takes the cluster away.

    Not where values go through Ray: its shutdown may end a process of which a thread is within one of its calls.
    """
    del cluster
    own = fz.remote(builds.built_trouble, 1, "ray", name="vision")
    state = own.init()
    x = torch.ones(4, 3, dtype=torch.float64)
    fz.fetch(state)
    ray.shutdown()
    with pytest.raises(fz.ComponentDied, match="Ray"):
        fz.fetch(own.forward(state, x, "none"))
    own.close()
    assert not ray.is_initialized() and not [t for t in threading.enumerate() if t.name.startswith("fzero")]
