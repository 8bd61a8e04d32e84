"""The pullback as the interface: any cotangent, several forwards and pullbacks, several components."""

from __future__ import annotations

from typing import Any

import pytest
import scenarios
import torch
import torch.utils._pytree as pytree
from hypothesis import given
from hypothesis import strategies as st

import fzero as fz
from fzero.testing import assert_trees_close, assert_trees_equal, run_ranks, strategies

pytestmark = pytest.mark.usefixtures("hazards")  # races show

F64 = torch.float64
ONE = torch.ones((), dtype=F64)
CHOSEN = strategies.transforms(stages=(1, 2, 3))


def features(p: Any, x: torch.Tensor) -> torch.Tensor:
    block = fz.unit(lambda q, x: torch.tanh(x @ q["w"] + q["b"]))
    for q in p["blocks"]:
        x = block(q, x)
    return x


def mean_grads(fn: Any, params: Any, batches: Any, cotangents: Any) -> Any:
    grads = [torch.func.vjp(fn, params, *b)[1](c)[0] for b, c in zip(batches, cotangents, strict=True)]
    return pytree.tree_map(lambda *g: torch.stack(g).mean(0), *grads)


@given(chosen=CHOSEN, world=st.integers(1, 4))
def test_a_tensor_cotangent(chosen: Any, world: int) -> None:
    """Non-scalar outputs: exact through every placement, the loss scale and accumulation applied exactly once."""
    _, params = scenarios.stack()
    batches = [(x,) for x, _ in scenarios.vector_batches(world)]
    cotangents = [torch.cos(x) for (x,) in batches]
    want = mean_grads(features, params, batches, cotangents)

    def rank_main(rank: int) -> None:
        step = strategies.apply(fz.train_step(features, fz.sgd(0.1)), chosen)
        state = step.init(params)
        out, pullback = step.vjp(state, *batches[rank])
        assert_trees_close(out, features(params, *batches[rank]), rtol=1e-10)
        grads, (cotangent,) = pullback(cotangents[rank])
        assert_trees_close(fz.gather(grads), want, rtol=1e-10)
        plain = torch.func.vjp(features, params, *batches[rank])[1](cotangents[rank])[1]
        assert_trees_close(cotangent, plain, rtol=1e-10)
        del pullback
        new, _ = step(state, *batches[rank], cotangent=cotangents[rank])
        moved = pytree.tree_map(lambda p, g: p - 0.1 * g, params, want)
        assert_trees_close(fz.gather(new.params), moved, rtol=1e-10)

    run_ranks(rank_main, world)


@given(chosen=CHOSEN, world=st.integers(1, 3))
def test_pytrees_of_outputs_integers_and_none(chosen: Any, world: int) -> None:
    _, params = scenarios.stack()
    batches = scenarios.vector_batches(world)

    def fn(p: Any, x: torch.Tensor, labels: torch.Tensor) -> Any:
        h = features(p, x)
        return {"h": h, "pair": (h * 2, h.argmax(1)), "same": labels}

    def only_h(p: Any, x: torch.Tensor) -> torch.Tensor:
        return features(p, x)

    want = mean_grads(only_h, params, [(x,) for x, _ in batches], [torch.full_like(x, 2.0) for x, _ in batches])

    def rank_main(rank: int) -> None:
        x = batches[rank][0]
        labels = torch.arange(len(x))
        step = strategies.apply(fz.train_step(fn, fz.sgd(0.1)), chosen)
        out, pullback = step.vjp(step.init(params), x, labels)
        assert out["pair"][1].dtype == torch.int64 and torch.equal(out["same"], labels)
        ct = {"h": None, "pair": (torch.ones_like(x), None), "same": None}
        grads, cotangents = pullback(ct)
        assert_trees_close(fz.gather(grads), want, rtol=1e-10)
        assert cotangents[1] is None and cotangents[0].shape == x.shape

    run_ranks(rank_main, world)


@given(chosen=CHOSEN, world=st.integers(1, 3))
def test_siamese_forwards_and_several_pullbacks_before_one_update(chosen: Any, world: int) -> None:
    """Two forwards into one loss; several pullbacks added up; in any order, beside another state."""
    _loss, params = scenarios.stack()
    batches = scenarios.vector_batches(world)

    def siamese(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (features(p, x) * features(p, 2 * x)).sum() + features(p, -x).sum()

    want = mean_grads(siamese, params, batches, [ONE] * world)

    def rank_main(rank: int) -> None:
        x, _ = batches[rank]
        step = strategies.apply(fz.train_step(features, fz.sgd(0.1)), [c for c in chosen if c[0] != "donate"])
        state, other = step.init(params), step.init(pytree.tree_map(torch.cos, params))
        a, pull_a = step.vjp(state, x)
        b, pull_b = step.vjp(state, 2 * x)
        o, pull_o = step.vjp(other, x)
        c, pull_c = step.vjp(state, -x)
        pull_o(torch.ones_like(o))
        kept = step.add_grads(state, pull_b(a)[0])
        kept = step.add_grads(kept, pull_c(torch.ones_like(c))[0])
        grads, _ = pull_a(b)
        new, metrics = step.update(kept, grads)
        assert new.grads is None and state.grads is None
        assert_trees_close(fz.gather(new.params), pytree.tree_map(lambda p, g: p - 0.1 * g, params, want), rtol=1e-10)
        assert_trees_close(metrics["grad_norm"], fz.global_norm(want), rtol=1e-10)

    run_ranks(rank_main, world)


@given(first=CHOSEN, second=CHOSEN, world=st.integers(1, 3))
def test_two_components_train_as_one(first: Any, second: Any, world: int) -> None:
    """Different placements and optimizers, a joint loss, a joint clip: as one model in one process."""
    loss, text_params = scenarios.stack(seed=1)
    _, vision_params = scenarios.stack(seed=2)
    batches = scenarios.vector_batches(world)

    def joint(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss(p["text"], features(p["vision"], x), y)

    optimizer = fz.chain(fz.clip_by_global_norm(0.3), fz.adamw(1e-2))
    whole = fz.train_step(joint, optimizer)
    state = whole.init({"text": text_params, "vision": vision_params})
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    for _ in range(3):
        state, _ = whole(state, x, y)
    want = fz.gather(state.params)

    def rank_main(rank: int) -> None:
        x, y = batches[rank]
        vision = strategies.apply(fz.train_step(features, optimizer), first)
        text = strategies.apply(fz.train_step(lambda p, h, y: loss(p, h, y), optimizer), second)
        v_state, t_state = vision.init(vision_params), text.init(text_params)
        for _ in range(3):
            h, pull_v = vision.vjp(v_state, x)
            out, pull_t = text.vjp(t_state, h, y, argnums=0)
            g_t, (ct, none) = pull_t(torch.ones_like(out))
            assert none is None
            g_v, _ = pull_v(ct)
            norm = fz.global_norm(g_v, g_t)
            v_state, _ = vision.update(v_state, g_v, grad_norm=norm)
            t_state, _ = text.update(t_state, g_t, grad_norm=norm)
        assert_trees_close(fz.gather(v_state.params), want["vision"], rtol=1e-9)
        assert_trees_close(fz.gather(t_state.params), want["text"], rtol=1e-9)

    run_ranks(rank_main, world)


def test_argnums() -> None:
    loss, params = scenarios.stack()
    x, y = scenarios.vector_batches(1)[0]
    step = fz.train_step(lambda p, x, extra, n: loss(p, x, extra["y"]), fz.sgd(0.1))
    state = step.init(params)
    extra, n = {"y": y, "name": "n"}, torch.tensor(1)
    for argnums, wanted in (
        (None, (True, True, False)),
        (0, (True, False, False)),
        ((1,), (False, True, False)),
        ((), (False,) * 3),
    ):
        _, pullback = step.vjp(state, x, extra, n, argnums=argnums)
        _, cotangents = pullback(ONE)
        assert tuple(c is not None for c in cotangents) == wanted
    with pytest.raises(TypeError, match=r"argnums: input 2 has a tensor of dtype torch\.int64"):
        step.vjp(state, x, extra, n, argnums=2)
    _, pullback = step.vjp(state, x, extra, n, argnums=1)
    assert pullback(ONE)[1][1]["name"] is None


@pytest.mark.parametrize(
    "sharded", [lambda step: step, fz.shard_zero2, fz.shard_zero3, lambda step: fz.remat(fz.shard_zero3(step))]
)
@pytest.mark.parametrize("unit", [False, True])
def test_a_pullback_that_is_transformed_although_its_forward_was_not(unit: bool, sharded: Any) -> None:
    """Nothing but the graph follows a transform of the cotangent."""
    layer = lambda q, x: torch.sin(x @ q["w"])
    each = fz.unit(layer) if unit else layer
    params = {"q": {"w": torch.arange(1.0, 4.0, dtype=F64)}}
    x, f = torch.eye(3, dtype=F64), torch.func
    _, expected = f.vjp(lambda w: layer({"w": w}, x), params["q"]["w"])

    def rank_main(rank: int) -> None:
        step = sharded(fz.train_step(lambda p, x: each(p["q"], x), fz.sgd(0.1)))
        state = step.init(params)
        _, pullback = step.vjp(state, x)

        def grads(c: torch.Tensor) -> torch.Tensor:
            (own,) = pullback(c, retain_graph=True)[0].locals().values()
            return own[:3]

        for transform in (
            f.vmap,
            lambda g: lambda c: torch.stack(f.jvp(g, (c[0],), (c[1],))),
            lambda g: f.grad(lambda c: g(c[0]).square().sum()),
            lambda g: f.vmap(f.grad(lambda c: g(c).sin().sum())),
        ):
            assert_trees_close(transform(grads)(x), transform(lambda c: expected(c)[0])(x), rtol=1e-12)
        aside = f.grad(lambda s: s * grads(x[0]).sum())(torch.ones((), dtype=F64))  # in one that it has no part in
        assert_trees_close(aside, expected(x[0])[0].sum(), rtol=1e-12)

    run_ranks(rank_main, 1)


def test_saved_tensor_hooks_around_a_step() -> None:
    step = fz.remat(fz.train_step(lambda p, x: (p["w"] * x).square().sum(), fz.sgd(0.1)))
    state = step.init({"w": torch.ones(2)})
    want, _ = step(state, torch.ones(2))
    with torch.autograd.graph.save_on_cpu():
        got, _ = step(state, torch.ones(2))
    assert_trees_equal(fz.gather(got.params), fz.gather(want.params))
