"""A component on ranks of its own is its function on the whole batch in one process."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import remote_builds as builds
import torch
import torch.utils._pytree as torch_pytree
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import in_turns

import fzero as fz

OPS = ("rows", "narrow", "loss", "other", "flag", "signs")
PLACES = [("threads", 1, 0), ("threads", 2, 3), ("threads", 3, 2), ("processes", 2, 2)]


@pytest.fixture(scope="module", params=PLACES, ids=lambda place: f"{place[0]}-{place[1]}-zero{place[2]}")
def component(request: pytest.FixtureRequest) -> Iterator[Any]:
    on, ranks, stage = request.param
    with fz.remote(functools.partial(builds.built, stage=stage), ranks, on, name="vision") as own:
        yield own


def is_real(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def drawn_like(tree: Any, generator: torch.Generator) -> Any:
    """A cotangent: small whole numbers, so that sums are exact in any order."""

    def one(x: Any) -> Any:
        if not is_real(x):
            return None
        return torch.randint(-3, 4, x.shape, generator=generator).to(x.dtype)

    return torch_pytree.tree_map(one, tree)


def plain(params: Any, inputs: tuple[Any, ...], cotangent: Any) -> tuple[Any, Any, list[Any]]:
    """Outputs, grads and the cotangents of inputs, with torch alone."""
    leaves, spec = torch_pytree.tree_flatten((params, inputs))
    followed = [x.detach().clone().requires_grad_() if is_real(x) else x for x in leaves]
    own, given = torch_pytree.tree_unflatten(followed, spec)
    out = builds.program(own, *given)
    pairs = [
        (x, ct)
        for x, ct in zip(torch_pytree.tree_leaves(out), torch_pytree.tree_leaves(cotangent), strict=True)
        if is_real(x)
    ]
    wanted = [x for x in followed if is_real(x)]
    grads = torch.autograd.grad([x for x, _ in pairs], wanted, [ct for _, ct in pairs], allow_unused=True)
    by_leaf = iter([torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=True)])
    flat = [next(by_leaf) if is_real(x) else None for x in followed]
    own_grads, inputs_cts = torch_pytree.tree_unflatten(flat, spec)
    detached = torch_pytree.tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, out)
    return detached, own_grads, list(inputs_cts)


def need_close(got: Any, expected: Any) -> None:
    left, spec = torch_pytree.tree_flatten(got)
    right, other = torch_pytree.tree_flatten(expected)
    assert spec == other
    for x, y in zip(left, right, strict=True):
        if isinstance(y, torch.Tensor):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)
        else:
            assert x == y


@in_turns(4)
@settings(max_examples=12)
@given(data=st.data())
def test_it_is_the_function_on_the_whole_batch(component: Any, data: st.DataObject) -> None:
    ops = data.draw(st.lists(st.sampled_from(OPS), min_size=1, max_size=4, unique=True))
    ops = tuple(ops) if {*ops} - {"flag", "signs"} else ("rows", *ops)
    rows = data.draw(st.integers(3, 7))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    x = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(rows, generator=generator, dtype=torch.float64)
    tree: Any = {"x": x, "y": y, "label": "a"} if data.draw(st.booleans()) else x
    scale = torch.tensor(1.5, dtype=torch.float64) if data.draw(st.booleans()) else None
    params = builds.weights()
    with torch.no_grad():
        cotangent = drawn_like(builds.program(params, tree, ops, scale), generator)
    outputs, grads, cts = plain(params, (tree, ops, scale), cotangent)

    state = component.init()
    got, pullback = component.vjp(state, tree, ops, scale)
    own, own_cts = pullback(cotangent)
    need_close(fz.fetch(got), outputs)
    need_close(fz.gather(own), grads)
    need_close(fz.fetch(own_cts[0]), cts[0])
    assert own_cts[1] is None and (own_cts[2] is None) == (scale is None)
    if scale is not None:
        need_close(fz.fetch(own_cts[2]), cts[2])
    need_close(fz.fetch(component.forward(state, tree, ops, scale)), outputs)
    norm = torch.cat([g.flatten() for g in torch_pytree.tree_leaves(grads)]).norm()
    torch.testing.assert_close(fz.fetch(fz.global_norm(own)), norm, rtol=1e-10, atol=0)


@in_turns(2)
def test_steps_are_those_of_one_process(component: Any) -> None:
    """A whole loss, uneven shares included, and one step by hand."""
    step, params = builds.built(0, stage=0)
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    local, state = step.init(params), component.init()
    for turn in range(4):
        if turn % 2:
            loss, pull = step.vjp(local, x, ("loss",))
            grads, _ = pull(torch.ones_like(loss))
            local, metrics = step.update(local, grads)
            theirs, their_pull = component.vjp(state, x, ("loss",))
            their_grads, _ = their_pull(torch.ones_like(theirs))
            state, their_metrics = component.update(state, their_grads, fz.global_norm(their_grads))
        else:
            local, metrics = step(local, x, ("loss",))
            state, their_metrics = component(state, x, ("loss",))
        need_close(fz.fetch(their_metrics), dict(metrics))
        need_close(fz.gather(state.params), fz.gather(local.params))
        need_close(fz.gather(state.moments), fz.gather(local.moments))
    assert state.step == local.step == 4


def test_a_step_with_a_cotangent_of_its_own(component: Any) -> None:
    step, params = builds.built(0, stage=0)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    ct = torch.ones(4, 4, dtype=torch.float64)
    local, metrics = step(step.init(params), x, ("rows",), cotangent=ct)
    state, theirs = component(component.init(), x, ("rows",), cotangent=ct)
    need_close(fz.fetch(theirs), dict(metrics))
    need_close(fz.gather(state.params), fz.gather(local.params))
    loss, _ = component(component.init(), x, ("loss",), cotangent=torch.tensor(2.0, dtype=torch.float64))[1], None
    need_close(fz.fetch(loss["loss"]), step(step.init(params), x, ("loss",))[1]["loss"])


def test_values_are_kept_and_gone_back_to(component: Any) -> None:
    """Two states in turn, a pullback asked twice, and a state that was left."""
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    first = component.init()
    loss, pull = component.vjp(first, x, ("loss",))
    g1, _ = pull(torch.ones_like(loss), retain_graph=True)
    g2, _ = pull(torch.full_like(loss, 2.0))
    second, _ = component.update(first, g1)
    third, _ = component.update(first, g2)
    again, _ = component.update(first, g1)
    need_close(fz.gather(again.params), fz.gather(second.params))
    twice = component.add_grads(component.add_grads(first, g1), g1)
    need_close(fz.gather(twice.grads), fz.gather(g2))
    with pytest.raises(RuntimeError, match="retain_graph"):
        pull(torch.ones_like(loss))
    assert component.forward(third, x, ("loss",)).item() != loss.item()
    need_close(fz.fetch(component.forward(first, x, ("loss",))), fz.fetch(loss))


@in_turns(4)
def test_the_loop_of_two_components(component: Any) -> None:
    """DESIGN's multimodal loop: the same with handles as with steps of this process."""
    generator = torch.Generator().manual_seed(6)
    images = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    tokens = torch.randint(0, 4, (5,), generator=generator)
    vision, v_params = builds.built(0, stage=0)
    text, t_params = builds.built_head(0, stage=0)

    def loop(vision: Any, text: Any, states: Any) -> Any:
        for _ in range(3):
            states, loss = builds.both_updated(vision, text, states, images, tokens)
        return fz.gather(tuple(state.params for state in states)), loss

    expected = loop(vision, text, (vision.init(v_params), text.init(t_params)))
    for ranks, stage in ((1, 0), (2, 1), (3, 2)):
        with fz.remote(functools.partial(builds.built_head, stage=stage), ranks, "threads", "text") as there:
            got, loss = loop(component, there, (component.init(), there.init()))
            need_close(got, expected[0])
            need_close(fz.fetch(loss), expected[1])
