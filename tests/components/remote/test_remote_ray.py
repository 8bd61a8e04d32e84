"""A component on threads, on processes and as Ray's actors: the same bits. Skipped where ray is not installed."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator

import pytest
import remote_builds as builds
import torch
import torch.utils._pytree as torch_pytree

import fzero as fz

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
    with (
        fz.remote(functools.partial(builds.built, stage=3), 2, on, name="vision") as vision,
        fz.remote(functools.partial(builds.built_head, stage=2), 1, on, name="text") as text,
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
        return [*fz.fetch(losses), *torch_pytree.tree_leaves(fz.gather((v_state.params, t_state.params)))]


def test_the_same_bits_wherever_it_runs(cluster: None) -> None:
    del cluster
    threads, processes, actors = loop("threads"), loop("processes"), loop("ray")
    for x, y, z in zip(threads, processes, actors, strict=True):
        assert torch.equal(x, y) and torch.equal(x, z)


def test_an_actor_that_dies_is_named(cluster: None) -> None:
    del cluster
    with fz.remote(builds.built_trouble, 1, "ray", name="vision", options={"strategy": "SPREAD"}) as own:
        state = own.init()
        x = torch.ones(4, 3, dtype=torch.float64)
        assert fz.fetch(own.forward(state, x, "none", 0)).equal(x)
        begun = time.monotonic()
        with pytest.raises(fz.ComponentDied, match="ActorDiedError") as died:
            fz.fetch(own.forward(state, x, "kill", 0))
        assert (died.value.rank, died.value.component) == (0, "vision") and time.monotonic() - begun < 5
    with pytest.raises(ValueError, match="expected some of"):
        fz.remote(builds.built_trouble, 1, "ray", options={"cpus": 2})
