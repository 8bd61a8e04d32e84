"""Optimizers of the user's own, declared elementwise, as people write them: in place, in other dtypes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import nightly
import optree
import pytest
import torch

import fzero as fz
from fzero.testing import assert_trees_close, assert_trees_equal, run_ranks

pytestmark = pytest.mark.usefixtures("hazards")  # races show

F64 = torch.float64
GENERATOR = torch.Generator().manual_seed(0)
PARAMS = {"b": torch.randn(3, generator=GENERATOR, dtype=F64), "w": torch.randn(4, 3, generator=GENERATOR, dtype=F64)}
X = torch.randn(6, 4, generator=GENERATOR, dtype=F64)
SHARDS: list[Callable[[fz.Step], fz.Step]] = [
    *(lambda s: s, fz.shard_zero1, fz.shard_zero2, fz.shard_zero3, lambda s: fz.fuse_update(fz.shard_zero2(s)))
]


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return ((x.to(p["w"].dtype) @ p["w"] + p["b"]) ** 2).mean()


elementwise = functools.partial(fz.GradientTransformation, elementwise=True)


# ---- in place


def by_tree_map(grads: Any, state: Any, params: Any = None) -> Any:
    moment, count = state
    count.add_(1)
    moment = optree.tree_map(lambda m, g: m.mul_(0.9).add_(g), moment, grads)
    return optree.tree_map(lambda m, g: g.zero_().sub_(m, alpha=0.1), moment, grads), (moment, count)


def begun(params: Any) -> Any:
    return optree.tree_map(torch.zeros_like, params), torch.zeros(())


def views(params: Any) -> Any:
    own = optree.tree_map(lambda p: p.reshape(-1)[:1], params)
    return own, optree.tree_map(torch.clone, own)


def with_views(grads: Any, state: Any, params: Any) -> Any:
    """Keeps a view of the param, which stays as it was."""
    assert_trees_equal(state[2], state[3])
    updates, moved = by_tree_map(grads, state[:2])
    return updates, (*moved, *views(params))


IN_PLACE = {
    "tree_map": elementwise(begun, by_tree_map),
    "whole leaves": fz.GradientTransformation(begun, by_tree_map),
    "views": fz.GradientTransformation(lambda params: (*begun(params), *views(params)), with_views),
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


@nightly.in_turns(8)
@pytest.mark.parametrize(
    ("stage", "kind", "joined"), nightly.by_turns(range(5), sorted(IN_PLACE), ["alone", "before", "behind"])
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
    step = fz.train_step(loss, IN_PLACE["tree_map"], policy)
    step = fz.offload(step, moments="host") if memory == "host" else step
    state = step.init(PARAMS)
    state, _ = step(state, X)
    held = tensors(state.params, state.moments)
    one, _ = step(state, X)
    other, _ = step(state, X)
    assert_trees_equal(tensors(one), tensors(other))
    assert_trees_equal(held, tensors(state.params, state.moments))


def test_under_a_transform_of_torch_func() -> None:
    step = fz.train_step(loss, IN_PLACE["tree_map"])

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
    optree.tree_map(lambda p, g: p.sub_(g, alpha=0.1), params, grads)
    return optree.tree_map(torch.zeros_like, grads), state


CHANGES = fz.Extra("mine", "mine", lambda p: p.map(torch.clone), lambda v, p, on: v, changes=changed_in_place)


@pytest.mark.parametrize("transformed", [False, True])
def test_what_is_written_in_place_beside_moments(transformed: bool) -> None:
    step = fz.train_step(loss, fz.sgd(0.1)).with_state(CHANGES)
    want = {k: 0.5 * p + 0.5 * new for (k, p), new in zip(PARAMS.items(), plain(1).values(), strict=True)}

    def after(shift: torch.Tensor) -> Any:
        first, out = step.init({k: p + shift for k, p in PARAMS.items()}), []
        for _ in range(2):  # from one state
            state, _ = step(first, X)
            out.append(fz.gather(state.params))
        return out

    shift = torch.zeros((), dtype=F64)
    for found in torch.func.vjp(after, shift)[0] if transformed else after(shift):
        assert_trees_close(found, want, rtol=1e-12)


@pytest.mark.parametrize("policy", [None, fz.Policy.bf16_states()])
@pytest.mark.parametrize("around", [lambda own: own, lambda own: fz.chain(own, fz.sgd(0.1))])
@pytest.mark.parametrize(("kind", "made"), [("elementwise", elementwise), ("whole", fz.GradientTransformation)])
def test_writes_to_params_are_refused(kind: str, made: Any, around: Any, policy: Any) -> None:
    step = fz.train_step(loss, around(made(lambda p: (), written_params)), policy)
    said = rf"{kind}: the update of leaf 'b' writes to its param in place"

    def after(shift: torch.Tensor) -> Any:
        return step.forward(step(step.init({k: p.float() + shift for k, p in PARAMS.items()}), X.float())[0], X.float())

    with pytest.raises(ValueError, match=said):
        after(torch.zeros(()))
    if policy is None:
        with pytest.raises(ValueError, match=said):
            torch.func.grad(after)(torch.zeros(()))
        with pytest.raises(ValueError, match=said):
            fz.fuse_update(step)(step.init(PARAMS), X)
        donated = fz.donate(step)
        state = donated.init(PARAMS)
        with pytest.raises(ValueError, match=said):
            donated(state, X)
        with pytest.raises(RuntimeError, match="was donated to update 1"):  # and is not what it was
            donated(state, X)


@pytest.mark.parametrize("policy", [fz.Policy(gather="8-bit"), fz.Policy(moment="8-bit"), fz.Policy.compact16()])
def test_what_it_makes_of_the_zeros_between_leaves_is_none_of_theirs(policy: fz.Policy) -> None:
    signs = lambda zero: scaled(lambda x: -x / (x.abs() + zero * (x == 0)))

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
    return elementwise(lambda params: (), lambda g, s, p: (optree.tree_map(fn, g), s))


def kept(fn: Callable[[torch.Tensor], torch.Tensor]) -> fz.GradientTransformation:
    return elementwise(
        lambda params: optree.tree_map(torch.zeros_like, params), lambda g, s, p: (g, optree.tree_map(fn, g))
    )


@nightly.in_turns(2)
@pytest.mark.parametrize(
    ("stage", "kind", "make", "joined"),
    nightly.by_turns([0, 3], sorted(UNLIKE), [scaled, kept], ["alone", "before", "behind"]),
)
def test_what_is_not_like_a_leaf_is_refused(stage: int, kind: str, make: Any, joined: str) -> None:
    own = make(UNLIKE[kind])
    same = fz.clip_by_value(1e9)
    optimizer = {"alone": own, "before": fz.chain(same, own), "behind": fz.chain(own, fz.sgd(-1.0))}[joined]
    what = "update" if make is scaled else "state"

    def rank_main(rank: int) -> None:
        step = SHARDS[stage](fz.train_step(loss, optimizer))
        state = step.init(PARAMS)
        with pytest.raises(ValueError, match=rf"elementwise: the {what} of leaf '[bw]' is"):
            step(state, X)
        with pytest.raises(ValueError, match=rf"elementwise: the {what} of leaf"):
            torch.func.grad(lambda x: step.forward(step(state, x)[0], x))(X)

    run_ranks(rank_main, 2) if stage else rank_main(0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_updates_in_other_dtypes_are_added_as_torch_does(dtype: torch.dtype) -> None:
    step = fz.train_step(loss, scaled(lambda x: (-x).to(dtype)))
    state, _ = step(step.init(PARAMS), X)
    grads = torch.func.grad(loss)(PARAMS, X)
    assert_trees_equal(fz.gather(state.params), {k: p + (-grads[k]).to(dtype) for k, p in PARAMS.items()})


@pytest.mark.parametrize("found", [lambda g: g, lambda g: ([*g.values()], ())])
def test_what_is_no_pair_of_trees_is_refused(found: Any) -> None:
    step = fz.train_step(loss, elementwise(lambda params: (), lambda g, s, p: found(g)))
    with pytest.raises(ValueError, match=r"elementwise: the update of leaf 'b' is .*, expected a pair"):
        step(step.init(PARAMS), X)


# ---- what it begins with


UNKEPT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bool": lambda x: x > 0,
    "int64": lambda x: x.long(),
    "complex": lambda x: x * 1j,
    "a number of each": lambda x: torch.zeros(2),
}


@pytest.mark.parametrize("joined", ["alone", "chain", "partition"])
@pytest.mark.parametrize("kind", sorted(UNKEPT))
def test_a_state_of_other_tensors_is_refused(kind: str, joined: str) -> None:
    own = elementwise(lambda params: optree.tree_map(UNKEPT[kind], params), lambda g, s, p: (g, s))
    optimizer = {
        "alone": own,
        "chain": fz.chain(fz.clip_by_value(1.0), own),
        "partition": fz.partition({"b": own, "*": fz.sgd(0.1)}),
    }[joined]

    def rank_main(rank: int) -> None:
        with pytest.raises(TypeError, match=r"elementwise: the state of leaf 'b' begins with .* fz.whole\(optimizer\)"):
            fz.shard_zero3(fz.train_step(loss, optimizer)).init(PARAMS)

    run_ranks(rank_main, 2)


def test_moments_that_their_slices_would_not_hold_are_refused() -> None:
    own = elementwise(lambda p: optree.tree_map(lambda x: x.double(), p), lambda g, s, p: (g, s))
    fz.train_step(loss, own).init(PARAMS)
    with pytest.raises(ValueError, match=r"leaf 'b' begins with .*, expected at most torch.float32"):
        fz.train_step(loss, own).init({k: x.float() for k, x in PARAMS.items()})


def test_numbers_and_trees_in_any_container_are_kept() -> None:
    """They are the same on any number of ranks, of which some have no piece of a leaf."""

    def init(p: Any) -> Any:
        zeros = optree.tree_map(torch.zeros_like, p)
        return {"history": [zeros, zeros], "norms": [torch.zeros(()) for _ in range(4)], "count": 0, "none": None}

    def update(g: Any, s: Any, p: Any) -> Any:
        last, before = s["history"]
        new = optree.tree_map(lambda x, y, z: x + 0.5 * y + 0.25 * z + s["norms"][0], g, last, before)
        norms = [norm + 0.5 for norm in s["norms"]]
        rate = -0.1 / (1 + s["count"])
        out = optree.tree_map(lambda x: rate * x, new)
        return out, {**s, "history": [new, last], "norms": norms, "count": s["count"] + 1}

    def trained(wrap: Any) -> Any:
        step = wrap(fz.train_step(loss, fz.chain(elementwise(init, update), fz.sgd(-1.0))))
        state = step.init(PARAMS)
        for _ in range(3):
            state, _ = step(state, X)
        return fz.gather(state.params), optree.tree_leaves(state.moments[0].rest)  # type: ignore[arg-type]

    want = trained(lambda step: step)
    assert 3 in want[1] and 1.5 in want[1]
    for found in run_ranks(lambda rank: trained(fz.shard_zero3), 3):
        assert_trees_close(found, want, rtol=1e-12)


@pytest.mark.parametrize("kind", ["lamb", "adafactor", "noise", "muon", "clip", "partition"])
def test_what_needs_whole_leaves_is_refused_inside(kind: str) -> None:
    inner: Any = {
        "lamb": lambda: fz.lamb(0.1),
        "adafactor": fz.adafactor,
        "noise": fz.gradient_noise,
        "muon": lambda: fz.muon(0.1),
        "clip": lambda: fz.clip_by_global_norm(0.1),
        "partition": lambda: fz.partition({"*": fz.sgd(0.1)}),
    }[kind]()
    step = fz.train_step(loss, elementwise(inner.init, lambda g, s, p: inner.update(g, s, p)))
    with pytest.raises((TypeError, ValueError), match=r"Leave elementwise=True|a matrix|alone, by|a tree of"):
        step(step.init(PARAMS), X)
