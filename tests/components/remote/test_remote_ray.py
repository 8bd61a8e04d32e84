"""A component on threads, on processes and as Ray's actors: the same bits.

Skipped where ray is not installed.
"""

from __future__ import annotations

import functools
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import remote_builds as builds
import torch
import torch.utils._pytree as torch_pytree
from nightly import at_length, in_turns

import fzero as fz
from fzero.components.remote import on_ray

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
    options = {"strategy": "SPREAD", "resources": {"CPU": 0.5}} if on == "ray" else {}
    with (
        fz.remote(functools.partial(builds.built, stage=3), 2, on, name="vision") as vision,
        fz.remote(functools.partial(builds.built_head, stage=2), 1, on, name="text", options=options) as text,
    ):
        states, losses = (vision.init(), text.init()), []
        for x, y in zip(images, tokens, strict=True):
            states, loss = builds.both_updated(vision, text, states, x, y)
            losses.append(loss)
        out = [*fz.fetch(losses), *torch_pytree.tree_leaves(fz.gather(tuple(state.params for state in states)))]
        if on == "ray":
            with pytest.raises(TimeoutError, match=r"free are \{'CPU': 0\.5\} of \{'CPU': 3\.0\}\. Let ranks share"):
                fz.remote(builds.built_trouble, 1, "ray", timeout=1.0)
            need_named(text, states[1], y, vision.forward(states[0], x, ("rows",)))
        return out


@in_turns(10, "interpreters of their own")
def test_the_same_bits_wherever_it_runs(cluster: None) -> None:
    """And an actor that dies is named, and one that finds no room: by the same actors, which start slowly."""
    del cluster
    with pytest.raises(ValueError, match="expected some of"):
        fz.remote(builds.built_trouble, 1, "ray", options={"cpus": 2})
    with pytest.raises(TimeoutError, match=r"no room for 4 ranks with \{'CPU': 1\} each in 1 seconds; free are"):
        fz.remote(builds.built_trouble, 4, "ray", timeout=1.0)
    threads, processes, actors = loop("threads"), loop("processes"), loop("ray")
    for x, y, z in zip(threads, processes, actors, strict=True):
        assert torch.equal(x, y) and torch.equal(x, z)


def need_named(text: Any, state: Any, *batch: object) -> None:
    begun = time.monotonic()
    with pytest.raises(fz.ComponentDied, match="ActorDiedError") as died:
        fz.fetch(text.forward(state, *batch, "kill"))
    assert (died.value.rank, died.value.component) == (0, "text") and time.monotonic() - begun < 5


@at_length
def test_a_rank_that_cannot_connect_is_named_with_its_reason(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a firewall."""
    del cluster

    class Blocked(on_ray.Listener):
        def __init__(self, token: bytes, host: str, name: str) -> None:
            super().__init__(token, host, name)
            with socket.create_server((host, 0)) as once:
                self.address = ("", "", *once.getsockname())

    monkeypatch.setattr(on_ray, "Listener", Blocked)
    with pytest.raises(RuntimeError, match=r"rank 0 has ended(.|\n)*before it came up(.|\n)*refused"):
        fz.remote(builds.built_trouble, 1, "ray")


@at_length
def test_ray_that_is_shut_down_under_a_component(cluster: None) -> None:
    """The last test: it takes the cluster away."""
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
