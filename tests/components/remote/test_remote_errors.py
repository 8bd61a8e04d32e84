"""What fails on a rank is raised where its results are used, in the user's own words; the rest goes on."""

from __future__ import annotations

import functools
import gc
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import remote_builds as builds
import torch

import fzero as fz

X = torch.arange(12, dtype=torch.float64).view(4, 3)


@pytest.fixture(
    scope="module",
    params=[("threads", 1), ("threads", 2), ("processes", 2)],
    ids=lambda place: f"{place[0]}-{place[1]}",
)
def component(request: pytest.FixtureRequest) -> Iterator[Any]:
    on, ranks = request.param
    with fz.remote(builds.built_trouble, ranks, on, name="vision", checked=True, timeout=20) as own:
        yield own


def test_the_users_error_comes_at_the_next_use(component: Any) -> None:
    state = component.init()
    component.forward(state, X, "none")
    with pytest.raises(ValueError, match="the user's own words") as first:
        component.forward(state, X, "value")  # the first of its kind, whose tree is waited for
    assert "Rank 0 of component 'vision'" in str(first.value) and "raise ValueError" in str(first.value)
    assert component.forward(state, X, "none").shape == (4, 3)


def test_errors_are_those_of_what_depends_on_them(component: Any) -> None:
    """A bad cotangent: the call returns, and all that is made of its grads says why."""
    state = component.init()
    out, pullback = component.vjp(state, X, "none")
    component.update(state, pullback(torch.ones_like(out), retain_graph=True)[0])
    grads, (ct, _) = pullback(torch.ones(9, 9, dtype=torch.float64))
    with pytest.raises(ValueError, match="cotangent"):
        fz.fetch(ct)
    with pytest.raises(ValueError, match="cotangent"):
        _, metrics = component.update(state, grads)
        fz.fetch(metrics)
    assert fz.fetch(out).equal(X) and component.forward(state, X, "none").shape == (4, 3)


def test_one_rank_that_fails_alone_leaves_nobody_behind(component: Any) -> None:
    """The others wait for it in a collective, and are told."""
    state = component.init()
    component.forward(state, X, "none", 0)
    last = component.group.settings.ranks - 1
    for _ in range(3):
        with pytest.raises(ValueError, match="the user's own words"):
            fz.fetch(component.forward(state, X, "value", last))
        assert fz.fetch(component.forward(state, X, "none", 0)).equal(X)


def test_mistakes_that_can_be_seen_are_refused_at_once(component: Any) -> None:
    state = component.init()
    out, pullback = component.vjp(state, X, "none")
    grads, _ = pullback(torch.ones_like(out))
    with pytest.raises(RuntimeError, match="retain_graph"):
        pullback(torch.ones_like(out))
    with pytest.raises(TypeError, match="got state="):
        component.vjp(grads, X, "none")
    with pytest.raises(TypeError, match="got grads="):
        component.update(state, state.params)
    with pytest.raises(ValueError, match=r"dim 0.*\(4, 3\).*\(3,\)"):
        component.forward(state, X, torch.ones(3))
    with pytest.raises(TypeError, match=r"inputs: got a module .* at '1'"):
        component.forward(state, X, torch.nn.Identity())
    with pytest.raises(TypeError, match="autograd follows"):
        component.forward(state, X.clone().requires_grad_(), "none")
    with pytest.raises(ValueError, match="got the structure"):
        component.vjp(state, X, "none")[1]([X])
    with fz.remote(builds.built_trouble, 1, "threads", "other") as other:
        theirs = other.init()
        with pytest.raises(ValueError, match=r"state of component 'other'.*'vision'"):
            component.forward(theirs, X, "none")
        with pytest.raises(ValueError, match=r"grads of component 'vision'.*'other'"):
            other.update(theirs, grads)


def test_a_handle_is_no_tensor(component: Any) -> None:
    out = component.forward(component.init(), X, "none")
    with pytest.raises(TypeError, match=r"torch\.add.*fz\.fetch"):
        torch.add(out, 1)
    with pytest.raises(TypeError, match="ones_like"):
        torch.ones_like(out, device="cpu")
    assert fz.fetch(torch.ones_like(out)).equal(torch.ones_like(X))
    assert fz.fetch(torch.full_like(out, 2, dtype=torch.float32)).equal(torch.full((4, 3), 2.0))
    assert torch.zeros_like(torch.ones_like(out)).shape == (4, 3)
    assert (out.shape, out.dtype, out.ndim, out.device.type) == ((4, 3), torch.float64, 2, "cpu")


def test_another_tree_than_the_known_one_is_refused() -> None:
    calls = []

    def fn(p: dict[str, Any], x: torch.Tensor) -> Any:
        calls.append(0)
        return x * p["w"] if len(calls) < 2 else {"now": x * p["w"]}

    def build(rank: int) -> Any:
        return fz.train_step(fn, fz.sgd(0.1)), {"w": torch.ones(3, dtype=torch.float64)}

    with fz.remote(build, 1, "threads") as own:
        state = own.init()
        assert fz.fetch(own.forward(state, X)).equal(X)
        out = own.forward(state, X)
        with pytest.raises(ValueError, match="another structure"):
            fz.fetch(out)


def test_what_build_raises_is_raised(component: Any) -> None:
    del component
    with pytest.raises(KeyError, match=r"^no such thing on rank"):
        fz.remote(builds.fails_to_build, 2, "threads")
    with pytest.raises(TypeError, match=r"expected \(step, params\)"):
        fz.remote(lambda rank: 3, 1, "threads")


def test_values_nobody_holds_are_forgotten(component: Any) -> None:
    """A value lives as long as its handle, also where a call that needs it is on its way."""
    if not component.group.links[0].local:
        pytest.skip("looks into the rank")
    records = component.group.links[0].host.values._records
    gc.collect()
    before = len(records)
    state = component.init()
    for _ in range(20):
        out, pullback = component.vjp(state, X, "sleep" if _ == 0 else "none")
        grads, _cts = pullback(torch.ones_like(out))
        state, metrics = component.update(state, grads)
        assert not metrics["skipped"]
    del out, pullback, grads, _cts, metrics
    gone = weakref.ref(state)
    del state
    assert gone() is None
    for _ in range(100):
        if len(records) <= before:
            break
        time.sleep(0.02)
    assert len(records) <= before


def test_closing_is_silent_and_final() -> None:
    own = fz.remote(functools.partial(builds.built_trouble, stage=0), 2, "threads")
    state = own.init()
    out = own.forward(state, X, "none")
    assert fz.fetch(out).equal(X)
    own.close()
    own.close()
    with pytest.raises(RuntimeError, match="was closed"):
        own.forward(state, X, "none")
    with pytest.raises(RuntimeError, match="was closed"):
        fz.fetch(out)


def test_the_callers_own_process_group_is_left_alone() -> None:
    def rank_main(rank: int) -> float:
        mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        with fz.remote(builds.built_trouble, 2, "threads") as own:
            out = own.forward(own.init(), X, "none")
            total = torch.tensor(float(rank))
            torch.distributed.all_reduce(total, group=mesh.get_group("dp"))
            assert fz.fetch(out).equal(X)
        torch.distributed.all_reduce(total)
        return total.item()

    assert fz.testing.run_ranks(rank_main, 2) == [2.0, 2.0]
    assert not torch.distributed.is_initialized()


def test_groups_of_this_process_keep_their_names() -> None:
    """Before, during and after a component on threads, and for the next one."""
    dist = torch.distributed
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        for turn in range(2):
            with fz.remote(builds.built_trouble, 2, "threads") as own:
                assert fz.fetch(own.forward(own.init(), X, "none")).equal(X) and mesh.get_group("dp").size() == 1
                other = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=(f"a{turn}", "b"))
            assert other.get_group("b").size() == mesh.get_group("dp").size() == 1
            assert fz.testing.run_ranks(lambda rank: dist.get_rank(), 2) == [0, 1]
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with fz.remote(builds.built_trouble, 1, "threads"):
            dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    finally:
        dist.destroy_process_group()


def test_a_component_that_waits_for_another_can_be_closed() -> None:
    build = functools.partial(builds.built_trouble, stage=0)
    with fz.remote(build, 1, "threads", name="slow") as slow:
        own = fz.remote(build, 1, "threads", name="waits")
        state, theirs = own.init(), slow.init()
        fz.fetch([slow.forward(theirs, X, "sleep"), own.forward(state, slow.forward(theirs, X, "none"), "none")])
        late = [slow.forward(theirs, X, "sleep") for _ in range(4)]
        own.forward(state, late[-1], "none")
        begun = time.monotonic()
        own.close()
        assert time.monotonic() - begun < 0.9 and not own.group.links[0].thread.is_alive()  # type: ignore[attr-defined]
        assert fz.fetch(late[-1]).equal(X)
