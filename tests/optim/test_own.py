"""Optimizers of the user's own, in optax's shape, as people write them: in place, leaf by leaf, in other dtypes."""

from __future__ import annotations

import array
import functools
import random
import warnings
from collections.abc import Callable
from typing import Any

import nightly
import numpy as np
import optree
import pytest
import torch

import fzero as fz
from fzero.testing import assert_trees_close, assert_trees_equal, run_ranks

pytestmark = pytest.mark.usefixtures("hazards")  # races show

NOT_TRIED = pytest.mark.filterwarnings("ignore:.*optimizer of your own could not be tried")
F64 = torch.float64
GENERATOR = torch.Generator().manual_seed(0)
PARAMS = {"b": torch.randn(3, generator=GENERATOR, dtype=F64), "w": torch.randn(4, 3, generator=GENERATOR, dtype=F64)}
X = torch.randn(6, 4, generator=GENERATOR, dtype=F64)
SHARDS: list[Callable[[fz.Step], fz.Step]] = [lambda s: s, fz.shard_zero1, fz.shard_zero2, fz.shard_zero3]


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return ((x.to(p["w"].dtype) @ p["w"] + p["b"]) ** 2).mean()


# ---- in place


def by_tree_map(grads: Any, state: Any, params: Any = None) -> Any:
    moment, count = state
    count.add_(1)
    moment = optree.tree_map(lambda m, g: m.mul_(0.9).add_(g), moment, grads)
    return optree.tree_map(lambda m, g: g.zero_().sub_(m, alpha=0.1), moment, grads), (moment, count)


def by_map(grads: Any, state: Any, params: Any = None) -> Any:
    moment, count = state
    moment = moment.map(lambda m, g: m.mul_(0.9).add_(g), grads)
    return moment.map(lambda m, g: g.zero_().sub_(m, alpha=0.1), grads), (moment, count.add_(1))


def fused(params: Any, grads: Any, state: Any) -> Any:
    moment, count = state
    for key in params.groups:
        own, g = moment.local(key).mul_(0.9).add_(grads.local(key)), grads.local(key).zero_()
        params.local(key).add_(g.sub_(own, alpha=0.1))
    return moment, count.add_(1)


def begun(params: Any) -> Any:
    return optree.tree_map(torch.zeros_like, params), torch.zeros(())


IN_PLACE = {
    "tree_map": fz.GradientTransformation(begun, by_tree_map),
    "map": fz.GradientTransformation(begun, by_map),
    "fused": fz.GradientTransformation(begun, by_tree_map, fused),
}


def plain(steps: int) -> Any:
    params = PARAMS
    moment = {k: torch.zeros_like(x) for k, x in params.items()}
    for _ in range(steps):
        grads = torch.func.grad(loss)(params, X)
        moment = {k: 0.9 * m + grads[k] for k, m in moment.items()}
        params = {k: p - 0.1 * moment[k] for k, p in params.items()}
    return params


def tensors(*trees: Any) -> list[torch.Tensor]:
    return [x.clone() for x in optree.tree_leaves(trees) if isinstance(x, torch.Tensor)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stage", "kind", "joined"), nightly.by_turns(range(4), sorted(IN_PLACE), ["alone", "before", "behind"])
)
def test_an_optimizer_that_writes_in_place_leaves_the_old_state(stage: int, kind: str, joined: str) -> None:
    own = IN_PLACE[kind]
    same = fz.clip_by_value(1e9)
    optimizer = {"alone": own, "before": fz.chain(same, own), "behind": fz.chain(own, fz.sgd(-1.0))}[joined]

    def rank_main(rank: int) -> None:
        step = SHARDS[stage](fz.train_step(loss, optimizer))
        state = step.init(PARAMS)
        for count in range(1, 4):
            before, held = state, tensors(state.params, state.moments)
            _, pullback = step.vjp(state, X)
            grads, _ = pullback(torch.ones((), dtype=F64))
            given = tensors(grads)
            state, _ = step(before, X)
            again, _ = step.update(before, grads)
            assert_trees_equal(held, tensors(before.params, before.moments))
            assert_trees_equal(given, tensors(grads))
            assert_trees_close(tensors(again), tensors(state), rtol=1e-12)
            assert_trees_close(fz.gather(state.params), plain(count), rtol=1e-12)

    run_ranks(rank_main, 2) if stage else rank_main(0)


@pytest.mark.parametrize("kind", sorted(IN_PLACE))
def test_with_donation_it_writes_in_place(kind: str) -> None:
    step = fz.donate(fz.train_step(loss, IN_PLACE[kind]))
    state = step.init(PARAMS)
    shared = state.replace(step=0)
    held = tensors(shared.params, shared.moments)
    with pytest.warns(UserWarning, match="still held elsewhere"):
        state, _ = step(state, X)
    assert_trees_equal(held, tensors(shared.params, shared.moments))
    del shared
    for _ in range(2):
        state, _ = step(state, X)
    assert_trees_close(fz.gather(state.params), plain(3), rtol=1e-12)


@pytest.mark.parametrize("memory", ["host", "moments in bfloat16"])
def test_wherever_its_moments_lie(memory: str) -> None:
    policy = None if memory == "host" else fz.Policy(moment=torch.bfloat16)
    step = fz.train_step(loss, IN_PLACE["map"], policy)
    step = fz.offload(step, moments="host") if memory == "host" else step
    state = step.init(PARAMS)
    state, _ = step(state, X)
    held = tensors(state.params, state.moments)
    one, _ = step(state, X)
    other, _ = step(state, X)
    assert_trees_equal(tensors(one), tensors(other))
    assert_trees_equal(held, tensors(state.params, state.moments))


@pytest.mark.parametrize("kind", ["tree_map", "map"])
def test_under_a_transform_of_torch_func(kind: str) -> None:
    step = fz.train_step(loss, IN_PLACE[kind])

    def trained(shift: torch.Tensor, look: bool) -> torch.Tensor:
        state = step.init(optree.tree_map(lambda p: p + shift, PARAMS))  # type: ignore[arg-type]
        for _ in range(2):
            before = state
            state, _ = step(before, X)
            state = step(before, X)[0] if look else state
        return step.forward(state, X)  # type: ignore[no-any-return]

    shift = torch.zeros((), dtype=F64)
    once, twice = (torch.func.grad(functools.partial(trained, look=look))(shift) for look in (False, True))
    torch.testing.assert_close(twice, once, rtol=0, atol=0)
    near = [trained(shift + way, False) for way in (1e-6, -1e-6)]
    torch.testing.assert_close(once, (near[0] - near[1]) / 2e-6, rtol=1e-6, atol=0)


@pytest.mark.parametrize("around", [lambda own: own, fz.chain])
def test_on_plain_trees(around: Any) -> None:
    def update(grads: Any, state: Any, params: Any) -> Any:
        moment = optree.tree_map(lambda m, g: m.mul_(0.9).add_(g), state, grads)
        return optree.tree_map(lambda m, g: g.zero_().sub_(m, alpha=0.1), moment, grads), moment

    own = fz.whole(fz.GradientTransformation(lambda p: optree.tree_map(torch.zeros_like, p), update))
    optimizer = around(own)
    grads = {k: torch.ones_like(x) for k, x in PARAMS.items()}
    state = optimizer.init(PARAMS)
    first, new = optimizer.update(grads, state, PARAMS)
    again, _ = optimizer.update(grads, state, PARAMS)
    assert_trees_equal(first, again)
    assert_trees_close(first, {k: -0.1 * g for k, g in grads.items()}, rtol=1e-12)
    second, _ = optimizer.update(grads, new, PARAMS)
    assert_trees_close(second, {k: -0.19 * g for k, g in grads.items()}, rtol=1e-12)


@pytest.mark.parametrize("memory", ["device", "host"])
def test_an_entry_of_the_state_that_is_written_in_place(memory: str) -> None:
    def averaged(average: fz.Sharded, params: fz.Sharded, applied: bool) -> fz.Sharded:
        average.map(lambda a, p: a.mul_(0.5).add_(p, alpha=0.5), params)
        return average

    extra = fz.Extra("mine", "mine", lambda params: params.map(torch.clone), averaged)
    step = fz.train_step(loss, fz.sgd(0.1)).with_state(extra)
    step = fz.offload(step, moments="host") if memory == "host" else step
    state = step.init(PARAMS)
    held = tensors(state.extra["mine"])
    for _ in range(2):
        new, _ = step(state, X)
        assert_trees_equal(held, tensors(state.extra["mine"]))
        want = optree.tree_map(lambda a, p: 0.5 * a + 0.5 * p, PARAMS, fz.gather(new.params))  # type: ignore[arg-type]
        assert_trees_close(fz.gather(new.extra["mine"]), want, rtol=1e-12)


def changed_in_place(slow: fz.Sharded, params: fz.Sharded) -> tuple[fz.Sharded, fz.Sharded]:
    new = slow.map(lambda s, p: s.mul_(0.5).add_(p, alpha=0.5), params)
    return new, new


def written_params(grads: Any, state: Any, params: Any) -> Any:
    params.map(lambda p, g: p.sub_(g, alpha=0.1), grads)
    return grads.map(torch.zeros_like), state


CHANGES = fz.Extra("mine", "mine", lambda p: p.map(torch.clone), lambda v, p, on: v, changes=changed_in_place)


@pytest.mark.parametrize("transformed", [False, True])
@pytest.mark.parametrize("kind", ["changes", "params"])
def test_what_is_written_in_place_beside_moments(kind: str, transformed: bool) -> None:
    own = fz.sgd(0.1) if kind == "changes" else fz.GradientTransformation(lambda p: (), written_params)
    step = fz.train_step(loss, own)
    step = step.with_state(CHANGES) if kind == "changes" else step
    want = plain(1)
    if kind == "changes":
        want = {k: 0.5 * p + 0.5 * want[k] for k, p in PARAMS.items()}

    def after(shift: torch.Tensor) -> Any:
        first, out = step.init({k: p + shift for k, p in PARAMS.items()}), []
        for _ in range(2):  # from one state
            state, _ = step(first, X)
            out.append(fz.gather(state.params))
        return out

    shift = torch.zeros((), dtype=F64)
    for found in torch.func.vjp(after, shift)[0] if transformed else after(shift):
        assert_trees_close(found, want, rtol=1e-12)


def test_writes_to_decoded_params_are_refused() -> None:
    own = fz.chain(fz.GradientTransformation(lambda p: (), written_params), fz.sgd(0.1))
    step = fz.train_step(loss, own, fz.Policy.bf16_states())
    state = step.init({k: p.float() for k, p in PARAMS.items()})
    with pytest.raises(ValueError, match=r"step.update: .* writes in place to the params of leaf 'b', 'w'"):
        step(state, X.float())


@pytest.mark.parametrize("policy", [fz.Policy(gather="8-bit"), fz.Policy(moment="8-bit"), fz.Policy.compact16()])
def test_what_it_makes_of_the_zeros_between_leaves_is_none_of_theirs(policy: fz.Policy) -> None:
    signs = lambda zero: over_all(lambda g: g.map(lambda x: -x / (x.abs() + zero * (x == 0))))

    def rank_main(rank: int) -> None:
        params = {k: p.float() for k, p in PARAMS.items()}
        found = list[Any]()
        for zero in (0.0, 1.0):  # not a number, and zero
            step = fz.shard_zero3(fz.train_step(loss, fz.chain(signs(zero), fz.adamw(0.01)), policy))
            state = step.init(params)
            for _ in range(3):
                state, _ = step(state, X.float())
            found.append(fz.gather(state.params))
        assert_trees_equal(*found)

    run_ranks(rank_main, 2)


# ---- what it returns


UNLIKE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "complex": lambda x: -x * (1 + 1j),
    "broadcast": lambda x: -x[:1],
    "a number": lambda x: -x.sum(),
    "too many dims": lambda x: -x[None],
}


def scaled(fn: Callable[[torch.Tensor], torch.Tensor]) -> fz.GradientTransformation:
    return fz.GradientTransformation(lambda params: (), lambda g, s, p: (optree.tree_map(fn, g), s))


def kept(fn: Callable[[torch.Tensor], torch.Tensor]) -> fz.GradientTransformation:
    return fz.GradientTransformation(
        lambda params: optree.tree_map(torch.zeros_like, params), lambda g, s, p: (g, optree.tree_map(fn, g))
    )


@NOT_TRIED
@pytest.mark.parametrize(
    ("stage", "kind", "make", "joined"),
    nightly.by_turns([0, 3], sorted(UNLIKE), [scaled, kept], ["alone", "before", "behind"]),
)
def test_what_is_not_like_a_leaf_is_refused(stage: int, kind: str, make: Any, joined: str) -> None:
    own = make(UNLIKE[kind])
    same = fz.clip_by_value(1e9)
    optimizer = {"alone": own, "before": fz.chain(same, own), "behind": fz.chain(own, fz.sgd(-1.0))}[joined]
    what = "update" if make is scaled else "next state"

    def rank_main(rank: int) -> None:
        step = SHARDS[stage](fz.train_step(loss, optimizer))
        state = step.init(PARAMS)
        with pytest.raises(ValueError, match=rf"step.update: the optimizer's {what} of the buffer of leaf 'b', 'w' is"):
            step(state, X)
        with pytest.raises(ValueError, match=r"fz\.whole"):
            torch.func.grad(lambda x: step.forward(step(state, x)[0], x))(X)

    run_ranks(rank_main, 2) if stage else rank_main(0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_updates_in_other_dtypes_are_added_as_torch_does(dtype: torch.dtype) -> None:
    step = fz.train_step(loss, scaled(lambda x: (-x).to(dtype)))
    state, _ = step(step.init(PARAMS), X)
    grads = torch.func.grad(loss)(PARAMS, X)
    assert_trees_equal(fz.gather(state.params), {k: p + (-grads[k]).to(dtype) for k, p in PARAMS.items()})


@NOT_TRIED
def test_what_is_no_pair_of_trees_is_refused() -> None:
    step = fz.train_step(loss, fz.GradientTransformation(lambda params: (), lambda g, s, p: g))
    with pytest.raises(TypeError, match="expected a pair: updates, state"):
        step(step.init(PARAMS), X)
    own = fz.GradientTransformation(lambda params: (), lambda g, s, p: (dict(g), s))
    step = fz.train_step(loss, own)
    with pytest.raises(TypeError, match=r"expected a tree of buffers like grads. Use grads.map\(fn\)"):
        step(step.init(PARAMS), X)
    own = fz.GradientTransformation(lambda params: params.map(lambda p: p * 1j), lambda g, s, p: (g, s))
    with pytest.raises(
        TypeError, match=r"params\['b'\]: its optimizer .* begins with moments of dtype torch.complex128"
    ):
        fz.train_step(loss, own).init(PARAMS)
    whole = fz.whole(fz.GradientTransformation(lambda p: (), lambda g, s, p: ({k: -x * 1j for k, x in g.items()}, s)))
    step = fz.train_step(loss, whole)
    with pytest.raises(ValueError, match=r"whole: the update of leaf 'b' is .*complex128, expected a tensor like"):
        step(step.init(PARAMS), X)


# ---- leaf by leaf


def each(fn: Callable[..., torch.Tensor]) -> fz.GradientTransformation:
    return fz.GradientTransformation(lambda params: (), lambda g, s, p: (optree.tree_map(fn, g, p), s))


def over_all(update: Callable[[Any], Any]) -> fz.GradientTransformation:
    return fz.GradientTransformation(lambda params: (), lambda g, s, p: (update(g), s))


def adam() -> fz.GradientTransformation:
    def update(g: Any, s: Any, p: Any) -> Any:
        count, mu, nu = s
        mu = optree.tree_map(lambda m, x: 0.9 * m + 0.1 * x, mu, g)
        nu = optree.tree_map(lambda v, x: 0.99 * v + 0.01 * x * x, nu, g)
        return optree.tree_map(lambda m, v: -0.1 * m / (v.sqrt() + 1e-8), mu, nu), (count + 1, mu, nu)

    zeros = functools.partial(optree.tree_map, torch.zeros_like)
    return fz.GradientTransformation(lambda p: (0, zeros(p), zeros(p)), update)


def all_over(g: Any) -> Any:
    total = torch.stack([x.abs().sum() for x in optree.tree_leaves(g)]).sum()
    return optree.tree_map(lambda x: -x / total, g)


def kept_moment(fn: Callable[..., torch.Tensor]) -> fz.GradientTransformation:
    def update(g: Any, s: Any, p: Any) -> Any:
        s = s.map(lambda m, x: 0.9 * m + x, g)
        return s.map(fn), s

    return fz.GradientTransformation(lambda p: p.map(torch.zeros_like), update)


def beside_the_last(fn: Callable[..., torch.Tensor]) -> fz.GradientTransformation:
    """By a gradient and the one before."""

    def update(g: Any, s: Any, p: Any) -> Any:
        return optree.tree_map(lambda x, old: -0.1 * x * fn(x, old), g, s), g

    return fz.GradientTransformation(lambda p: optree.tree_map(torch.zeros_like, p), update)


def restarted(g: Any, s: Any, p: Any) -> Any:
    """Momentum, which a leaf forgets where it points uphill."""
    kept = optree.tree_map(lambda m, x: torch.where((m * x).sum() > 0, m, torch.zeros_like(m)) * 0.9 + x, s, g)
    return optree.tree_map(lambda m: -0.1 * m, kept), kept


BY_LEAVES = {
    "a norm that has grown": beside_the_last(lambda g, old: torch.where(g.norm() > old.norm(), 0.5, 1.0)),
    "a spike": beside_the_last(lambda g, old: torch.where(g.norm() > 10 * old.norm(), 0.0, 1.0)),
    "restarts": fz.GradientTransformation(lambda p: optree.tree_map(torch.zeros_like, p), restarted),
    "a bound of 1": each(lambda g, p: -0.1 * g * torch.where(g.norm() > 1, 0.5, 1.0)),
    "a bound of 1e-3": each(lambda g, p: -0.1 * g * (g.norm() > 1e-3)),
    "not finite": each(lambda g, p: -0.1 * g if g.isfinite().all() else torch.zeros_like(g)),
    "a root mean square": kept_moment(lambda m: -0.1 * m / m.square().mean().sqrt().clamp(min=1.0)),
    "a sign": each(lambda g, p: -0.1 * g * (1 + 0.5 * g.sum().sign())),
    "norm": each(lambda g, p: -0.1 * g / g.norm()),
    "mean": each(lambda g, p: -0.1 * (g - g.mean())),
    "trust ratio": each(lambda g, p: -0.1 * g * p.norm() / g.norm()),
    "rows": each(lambda g, p: -0.1 * g / g.norm(dim=-1, keepdim=True)),
    "decay of matrices": each(lambda g, p: -0.1 * (g + 0.1 * p) if p.ndim > 1 else -0.1 * g),
    "by map, behind a moment": kept_moment(lambda m: -0.1 * m / m.norm()),
    "largest": each(lambda g, p: -0.1 * g / g.abs().max()),
    "decay of matrices, little": each(lambda g, p: -0.1 * (g + 1e-4 * p) if p.ndim > 1 else -0.1 * g),
    "unused": each(lambda g, p: -0.1 * (g + 0.1 * p) if g.any() else torch.zeros_like(g)),
}
BY_ELEMENTS = {
    "not finite": each(lambda g, p: -0.1 * torch.where(g.isfinite(), g, 0.0)),
    "sgd": each(lambda g, p: -0.1 * g),
    "sign": each(lambda g, p: -0.1 * g.sign()),
    "adam": adam(),
    "in place": IN_PLACE["map"],
    "by a number that is drawn": each(lambda g, p: -g * torch.rand((), generator=torch.Generator().manual_seed(0))),
    "clipped": over_all(lambda g: fz.clip_by_global_norm(0.1).update(g, (), None)[0]),
}
OVER_ALL = {
    "sum": over_all(all_over),
    "global norm": over_all(lambda g: g.map(lambda x: -x / fz.global_norm(g))),
}


@pytest.mark.parametrize("joined", [lambda own: own, lambda own: fz.chain(own, fz.sgd(-1.0))])
@pytest.mark.parametrize("kind", sorted(BY_LEAVES))
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_one_that_treats_leaves_is_refused(stage: int, kind: str, joined: Any) -> None:
    def rank_main(rank: int) -> None:
        step = SHARDS[stage](fz.train_step(loss, joined(BY_LEAVES[kind])))
        with pytest.raises(ValueError, match=r"step.init: got an optimizer of your own that .*Use fz.whole\(optimizer"):
            step.init(PARAMS)

    run_ranks(rank_main, 2) if stage else rank_main(0)


class Ratio(torch.nn.Module):
    def forward(self, grads: Any, state: Any, params: Any) -> Any:
        return BY_LEAVES["trust ratio"].update(grads, state, params)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "no_grad": torch.no_grad(),
    "inference_mode": torch.inference_mode(),
    "autocast": torch.autocast("cpu", enabled=False),
    "disable": torch.compiler.disable,
    "partial of no_grad": lambda update: functools.partial(torch.no_grad()(update)),
    "singledispatch": functools.singledispatch,
    "module": lambda update: Ratio(),
}


@pytest.mark.parametrize("kind", sorted(WRAPPERS))
def test_whatever_wraps_it(kind: str) -> None:
    own = BY_LEAVES["trust ratio"]
    own = own._replace(update=WRAPPERS[kind](own.update))
    with pytest.raises(ValueError, match=r"step.init: got an optimizer of your own that"):
        fz.train_step(loss, own).init(PARAMS)


def test_one_in_place_that_is_wrapped_leaves_the_old_state() -> None:
    own = IN_PLACE["tree_map"]
    step = fz.train_step(loss, own._replace(update=torch.no_grad()(own.update)))
    state, _ = step(step.init(PARAMS), X)
    before = tensors(state)
    assert_trees_close(fz.gather(step(state, X)[0].params), plain(2), rtol=1e-12)
    assert_trees_equal(tensors(state), before)


@pytest.mark.parametrize("least", [4, 128])
def test_one_that_treats_large_matrices_only(least: int) -> None:
    own = each(lambda g, p: -g / g.norm(dim=-1, keepdim=True) if g.ndim > 1 and min(g.shape) >= least else -g)
    params = {"a": torch.ones(3, 3), "b": torch.ones(least, least + 1), "c": torch.ones(3)}
    with pytest.raises(ValueError, match=r"step.init: got an optimizer of your own that"):
        fz.train_step(loss, own).init(params)


@pytest.mark.parametrize("through", ["params", "a rate", "a rate of many"])
@pytest.mark.parametrize("stage", [0, 1])
def test_one_that_begins_under_torch_func(stage: int, through: str) -> None:
    def rank_main(rank: int) -> None:
        def trained(params: Any, lr: torch.Tensor, kind: str) -> torch.Tensor:
            own = {
                "leaves": each(lambda g, p: -lr * g * p.norm() / g.norm()),
                "elements": each(lambda g, p: -lr * g),
            }[kind]
            step = SHARDS[stage](fz.train_step(loss, own))
            state = step.init(params)
            return state.params.local(next(iter(state.params.groups))).sum()

        rates = torch.tensor([0.1, 0.2], dtype=F64)
        call: Callable[[str], Any] = {
            "params": lambda kind: torch.func.grad(trained)(PARAMS, rates[0], kind),
            "a rate": lambda kind: torch.func.grad(trained, argnums=1)(PARAMS, rates[0], kind),
            "a rate of many": lambda kind: torch.func.vmap(lambda lr: trained(PARAMS, lr, kind))(rates),
        }[through]
        call("elements")
        with pytest.raises(ValueError, match=r"step.init: got an optimizer of your own that"):
            call("leaves")

    run_ranks(rank_main, 2) if stage else rank_main(0)


@pytest.mark.parametrize("kind", sorted(BY_LEAVES))
@pytest.mark.parametrize("stage", [0, 3])
def test_and_is_right_on_whole_leaves(stage: int, kind: str) -> None:
    own = BY_LEAVES[kind]
    if kind in ("by map, behind a moment", "a root mean square"):  # which take a step's trees
        return

    def rank_main(rank: int) -> None:
        step = SHARDS[stage](fz.train_step(loss, fz.whole(own)))
        state, _ = step(step.init(PARAMS), X)
        grads = torch.func.grad(loss)(PARAMS, X)
        updates, _ = own.update(grads, own.init(PARAMS), PARAMS)
        assert_trees_close(fz.gather(state.params), {k: p + updates[k] for k, p in PARAMS.items()}, rtol=1e-12)

    run_ranks(rank_main, 2) if stage else rank_main(0)


@pytest.mark.parametrize("kind", sorted({**BY_ELEMENTS, **OVER_ALL}))
@pytest.mark.parametrize("stage", range(4))
def test_one_that_treats_elements_is_not(stage: int, kind: str) -> None:
    own = {**BY_ELEMENTS, **OVER_ALL}[kind]

    def rank_main(rank: int) -> None:
        before = torch.get_rng_state()
        step = SHARDS[stage](fz.train_step(loss, own))
        if stage and kind == "sum":  # each rank has a part of it
            with pytest.raises(ValueError, match="makes other updates of a leaf such as 'w' in slices"):
                step.init(PARAMS)
            state = fz.train_step(loss, own).init(PARAMS)
            with pytest.raises(ValueError, match="convert: got an optimizer of your own that makes other updates"):
                fz.convert(state, step)
            return
        state = step.init(PARAMS)
        if not stage:  # threads share it
            assert torch.equal(torch.get_rng_state(), before)
        step(state, X)

    run_ranks(rank_main, 3) if stage else rank_main(0)


def summed(g: Any) -> Any:
    """By the sum over all ranks' slices, as its user knows them."""
    total = torch.stack([x.abs().sum() for x in optree.tree_leaves(g)]).sum()
    torch.distributed.all_reduce(total)
    return optree.tree_map(lambda x: -x / total, g)


def on_process(stage: int, rank: int) -> Any:
    out = []
    for own in (IN_PLACE["map"], over_all(summed)):
        step = SHARDS[stage](fz.train_step(loss, own))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*may send something to other ranks")
            state = step.init(PARAMS)
        first, _ = step(state, X)
        state, _ = step(state, X)
        assert_trees_equal(tensors(first), tensors(state))
        out.append(fz.gather(state.params))
    for refused in (BY_LEAVES["norm"], OVER_ALL["sum"]):
        with pytest.raises(ValueError, match=r"step.init: got an optimizer of your own that"):
            SHARDS[stage](fz.train_step(loss, refused)).init(PARAMS)
    return out


@NOT_TRIED
@pytest.mark.parametrize("stage", [1, 3])
def test_on_real_processes(stage: int) -> None:
    grads = torch.func.grad(loss)(PARAMS, X)
    total = sum(float(g.abs().sum()) for g in grads.values())
    for backend in ("threads", "processes"):
        for in_place, over in run_ranks(functools.partial(on_process, stage), 2, backend=backend):
            assert_trees_close(in_place, plain(1), rtol=1e-12)
            assert_trees_close(over, {k: p - grads[k] / total for k, p in PARAMS.items()}, rtol=1e-12)


def test_one_leaf_alone_in_its_buffer_is_whole() -> None:
    own = each(lambda g, p: -0.1 * g / g.norm())
    step = fz.train_step(lambda p: p["w"].square().sum(), own)
    state, _ = step(step.init({"w": torch.full((2, 2), 2.0)}))
    torch.testing.assert_close(fz.gather(state.params)["w"], torch.full((2, 2), 1.95))


def test_what_cannot_be_tried_is_not_refused() -> None:
    mask = torch.ones(128, dtype=F64)
    step = fz.train_step(loss, over_all(lambda g: g.map(lambda x: -x * mask)))
    with pytest.warns(UserWarning, match=r"could not be tried on small leaves: it raises RuntimeError: The size"):
        state = step.init(PARAMS)
    step(state, X)
    rates = iter([0.1] * 9)
    step = fz.train_step(loss, over_all(lambda g: g.map(lambda x: -x * next(rates))))
    with pytest.warns(UserWarning, match="step.init: an optimizer of your own could not be tried .*from an iterator"):
        state = step.init(PARAMS)
    step(state, X)
    assert len(list(rates)) == 8


COUNTED = [0]


class Base:
    of_base = 0
    __slots__ = ("__hidden",)

    def __init__(self) -> None:
        self.__hidden = 0

    def counted(self) -> None:
        global made
        Base.of_base += 1
        self.__hidden += 1
        made = getattr(nightly, "made", 0) + 1
        nightly.made = made  # type: ignore[attr-defined]

    def counts(self) -> tuple[int, int]:
        return Base.of_base, self.__hidden


class Counting(Base):
    count = 0

    def __init__(self) -> None:
        super().__init__()
        self.own, self.sum, self.bytes, self.array = 0, torch.zeros(()), bytearray(1), array.array("i", [0])

    def __call__(self, g: Any, s: Any, p: Any) -> Any:
        self.own += 1
        type(self).count += 1
        type(self).new = getattr(type(self), "new", 0) + 1  # type: ignore[attr-defined]
        COUNTED[0] += 1
        self.sum.data += 1
        self.bytes[0] += 1
        self.array[0] += 1
        self.counted()
        return optree.tree_map(lambda x: -0.1 * self.own * x, g), s


def test_a_trial_leaves_nothing_behind() -> None:
    own, generator = Counting(), torch.Generator().manual_seed(0)
    noise, of_python, of_numpy = generator.get_state(), random.getstate(), np.random.get_state()
    count, items = 0, dict[str, int]()

    def update(g: Any, s: Any, p: Any) -> Any:
        nonlocal count
        count += 1
        items[f"n{count}"] = count
        rate = 0.1 + 0.0 * (random.random() + np.random.rand()) * float(torch.randn((), generator=generator))
        return g.map(lambda x: -rate * count * x), s

    for each in (own, update):
        fz.train_step(loss, fz.GradientTransformation(lambda p: (), each)).init(PARAMS)
    assert (own.own, Counting.count, COUNTED, float(own.sum)) == (0, 0, [0], 0.0) and (count, items) == (0, {})
    assert (own.counts(), own.bytes[0], own.array[0]) == ((0, 0), 0, 0) and not hasattr(Counting, "new")
    assert "made" not in globals() and not hasattr(nightly, "made")
    assert torch.equal(generator.get_state(), noise) and random.getstate() == of_python
    assert all(np.array_equal(x, y) for x, y in zip(np.random.get_state(), of_numpy, strict=True))


def test_one_on_whole_leaves_that_counts_elsewhere_is_refused() -> None:
    own = Counting()
    optimizer = fz.whole(fz.GradientTransformation(lambda p: (), own))
    with pytest.raises(ValueError, match=r"step.init: got an optimizer of your own in fz.whole that .*in its state"):
        fz.train_step(loss, fz.chain(fz.clip_by_global_norm(1.0), optimizer)).init(PARAMS)
    assert own.own == 0


def test_one_that_treats_leaves_and_draws_is_refused() -> None:
    generator = torch.Generator().manual_seed(0)
    own = each(lambda g, p: -g / g.norm() + torch.randn(g.shape, generator=generator, dtype=g.dtype))
    with pytest.raises(ValueError, match=r"step.init: got an optimizer of your own that"):
        fz.train_step(loss, own).init(PARAMS)


KINDS = {"conv": torch.ones(2, 2, 3, 3), "lone": torch.ones(8, 8), "w": torch.ones(4, 5), "b": torch.ones(5)}


@pytest.mark.parametrize("kind", ["2-d", "4-d", "few", "fan", "mean"])
@pytest.mark.parametrize("units", [(), ("conv",), ("lone", "conv")])
def test_leaves_of_every_kind_are_tried(kind: str, units: tuple[str, ...]) -> None:
    update: Callable[..., torch.Tensor] = {
        "2-d": lambda g, p: -g - 0.1 * p if g.ndim == 2 else -g,
        "4-d": lambda g, p: -g - 0.1 * p if g.ndim == 4 else -g,
        "few": lambda g, p: -g / g.norm() if g.numel() <= 36 else -g,
        "fan": lambda g, p: -g / g.shape[1] if g.ndim == 2 else -g,
        "mean": lambda g, p: -g / g.abs().mean(),
    }[kind]
    with pytest.raises(ValueError, match=r"step.init: got an optimizer of your own that"):
        fz.train_step(loss, each(update), units=units).init(KINDS)


@pytest.mark.parametrize("how", ["a pattern", "tensor slices"])
def test_a_sum_of_slices_is_refused_wherever_there_are_some(how: str) -> None:
    def rank_main(rank: int) -> None:
        step = fz.train_step(loss, OVER_ALL["sum"])
        cut = fz.shard_zero1(step, pattern="w") if how == "a pattern" else fz.shard_tensor(step, {"w": "column"})
        with pytest.raises(ValueError, match="makes other updates of a leaf such as 'w' in slices"):
            cut.init(PARAMS)

    run_ranks(rank_main, 2)


def through_attribute() -> Any:
    class Summed:
        reduce = staticmethod(torch.distributed.all_reduce)

        def __call__(self, g: Any, s: Any, p: Any) -> Any:
            total = torch.stack([x.abs().sum() for x in optree.tree_leaves(g)]).sum()
            self.reduce(total)
            return optree.tree_map(lambda x: -x / total, g), s

    return Summed()


def imported_inside(g: Any, s: Any, p: Any) -> Any:
    from torch.distributed import all_reduce

    total = torch.stack([x.abs().sum() for x in optree.tree_leaves(g)]).sum()
    all_reduce(total)
    return optree.tree_map(lambda x: -x / total, g), s


@NOT_TRIED
@pytest.mark.parametrize("kind", ["attribute", "import"])
def test_one_that_knows_of_ranks_is_not_tried(kind: str) -> None:
    update = through_attribute() if kind == "attribute" else imported_inside

    def rank_main(rank: int) -> Any:
        step = fz.shard_zero3(fz.train_step(loss, fz.GradientTransformation(lambda p: (), update)))
        return fz.gather(step(step.init(PARAMS), X)[0].params)

    grads = torch.func.grad(loss)(PARAMS, X)
    total = sum(float(g.abs().sum()) for g in grads.values())
    for found in run_ranks(rank_main, 2, backend="threads"):
        assert_trees_close(found, {k: p - grads[k] / total for k, p in PARAMS.items()}, rtol=1e-12)


def test_one_that_goes_by_all_grads_where_one_is_not_finite_is_refused_on_ranks_only() -> None:
    """Which of them are finite a rank can say of its slices alone."""

    def update(grads: Any, state: Any, params: Any) -> Any:
        finite = all(bool(g.isfinite().all()) for g in optree.tree_leaves(grads))
        return optree.tree_map(lambda g: -0.1 * g if finite else torch.zeros_like(g), grads), state

    own = fz.GradientTransformation(lambda p: (), update)
    state, _ = (step := fz.train_step(loss, own))(step.init(PARAMS), X)
    assert state.step == 1

    def rank_main(rank: int) -> None:
        sharded = fz.shard_zero3(fz.train_step(loss, own))
        with pytest.raises(ValueError, match=r"makes, where a grad is not finite, other updates .* in slices"):
            sharded.init(PARAMS)

    run_ranks(rank_main, 2)
