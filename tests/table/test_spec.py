"""State that a transform adds: it begins, is updated, skipped, donated, converted and mapped over like moments."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import scenarios
import torch
import torch.utils._pytree as torch_pytree
from nightly import in_turns

import fzero as fz
from fzero.base import pytree
from fzero.testing import assert_trees_close, assert_trees_equal, run_ranks

SHARDS: dict[int, Any] = {0: lambda step: step, 1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}


def total(step: fz.Step, source: str = "total()") -> fz.Step:
    """The sum of the params after every update, and how many there were."""

    def init(params: fz.Sharded) -> Any:
        return {"sum": params, "count": 0}

    def update(value: Any, params: fz.Sharded, applied: bool) -> Any:
        if not applied:
            return value
        return {"sum": value["sum"].map(torch.add, params), "count": value["count"] + 1}

    return step.with_state(fz.Extra("total", source, init, update))


@in_turns(3)
@pytest.mark.parametrize("donated", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_it_follows_the_params(stage: int, fused: bool, donated: bool) -> None:
    loss, params = scenarios.stack()

    def rank_main(rank: int) -> None:
        step = total(SHARDS[stage](fz.train_step(loss, fz.adamw(1e-2))))
        step = fz.fuse_update(step) if fused else step
        step = fz.donate(step) if donated else step
        state, want = step.init(params), params
        for _ in range(3):
            state, _ = step(state, *scenarios.vector_batches(2)[rank])
            want = optree.tree_map(torch.add, want, fz.gather(state.params))
        assert state.extra["total"]["count"] == 3
        assert_trees_close(fz.gather(state.extra["total"]["sum"]), want, rtol=1e-13)
        assert not {x.data_ptr() for x in state.params.buffers.values()} & {
            x.data_ptr() for x in state.extra["total"]["sum"].buffers.values()
        }

    run_ranks(rank_main, 2 if stage else 1)


def test_a_skipped_update_says_so() -> None:
    step = total(fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1)))
    state, metrics = step(step.init({"w": torch.ones(2)}), torch.tensor([1.0, float("nan")]))
    assert metrics["skipped"] and state.extra["total"]["count"] == 0


def test_numbers_are_no_leaves_and_trees_are() -> None:
    loss, params = scenarios.stack()
    step = total(fz.train_step(loss, fz.adamw(1e-2)))
    state: Any = step.init(params)
    leaves, spec = optree.tree_flatten(state)
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    assert len(leaves) == 4 * len(state.layout.groups)
    again: Any = optree.tree_unflatten(spec, [leaf + 1 for leaf in leaves])
    assert again.extra["total"]["count"] == 0 and repr(pytree.Count(2)) == "Count(2)"
    assert_trees_equal(fz.gather(again.extra["total"]["sum"]), optree.tree_map(lambda p: p + 1, params))
    mean: Any = torch_pytree.tree_map(lambda a, b: (a + b) / 2, state, again)
    assert_trees_close(fz.gather(mean.extra["total"]["sum"]), optree.tree_map(lambda p: p + 0.5, params))


def test_it_is_converted_and_never_lost_without_a_word() -> None:
    loss, params = scenarios.stack()

    def rank_main(rank: int) -> None:
        plain = fz.train_step(loss, fz.adamw(1e-2))
        one, other = fz.shard_zero3(total(plain)), total(fz.shard_zero1(plain))
        state, _ = one(one.init(params), *scenarios.vector_batches(2)[rank])
        there = fz.convert(state, other)
        assert there.extra["total"]["count"] == 1
        assert_trees_equal(fz.gather(there.extra["total"]["sum"]), fz.gather(state.extra["total"]["sum"]))
        with pytest.raises(ValueError, match=r"keeps state\.extra\['total'\] of total\(\), which the step does not"):
            fz.convert(state, fz.shard_zero3(plain))
        assert not fz.convert(state, fz.shard_zero3(plain), lossy=True).extra
        begun = fz.convert(fz.shard_zero3(plain).init(params), one)
        assert begun.extra["total"]["count"] == 0

    run_ranks(rank_main, 2)


def kept(step: fz.Step, name: str = "kept", source: str = "kept()", **options: Any) -> fz.Step:
    init = options.pop("init", lambda params: params)
    return step.with_state(fz.Extra(name, source, init, options.pop("update", lambda v, p, a: v), **options))


def test_one_of_another_kind_is_not_begun_anew_without_a_word() -> None:
    plain = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1))
    state = kept(plain, source="kept(1)").init({"w": torch.ones(2)})
    with pytest.raises(ValueError, match=r"keeps state\.extra\['kept'\] of kept\(1\), which the step does not"):
        fz.convert(state, kept(plain, source="kept(2)"))
    with pytest.raises(ValueError, match=r"made with .*kept\(1\).*expected one made with .*kept\(2\)"):
        kept(plain, source="kept(2)")(state, torch.ones(2))
    with pytest.raises(ValueError, match=r"a state of another step"):  # of one source, by another name
        kept(plain, "other", "kept(1)")(state, torch.ones(2))
    named = kept(kept(plain, "loss_scale", "mine()"), "b")
    with pytest.raises(ValueError, match=r"keeps state\.extra\['loss_scale'\] of mine\(\)"):
        fz.convert(named.init({"w": torch.ones(2)}), kept(plain, "b"))


def test_one_of_another_structure_is_refused() -> None:
    plain = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1))
    inits = [lambda params: 0, lambda params: params, lambda params: {"a": 0}]
    for own in inits:
        state = kept(plain, init=own).init({"w": torch.ones(2)})
        for other in inits:
            if other is own:
                fz.convert(state, kept(plain, init=other))
                continue
            with pytest.raises(
                ValueError, match=r"convert: the state has a state\.extra\['kept'\] of another structure"
            ):
                fz.convert(state, kept(plain, init=other))


def test_entries_go_by_name_in_whatever_order() -> None:
    plain = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1))
    count = lambda value, params, applied: value + 1
    step = kept(kept(plain, "a", "a()", init=lambda params: 0, update=count), "b")
    state, _ = step(step.init({"w": torch.ones(2)}), torch.ones(2))
    state = state.replace(extra={name: state.extra[name] for name in ("b", "a")})
    assert fz.convert(state, fz.donate(step)).extra["a"] == 1


def test_a_leaf_that_was_frozen_begins_as_init_says() -> None:
    loss, params = scenarios.stack()
    step = kept(fz.train_step(loss, fz.adamw(1e-2)), init=lambda params: params.only(params.layout.trainable))
    state = fz.freeze(step, "blocks.0.*").init(params)
    assert_trees_equal(fz.gather(fz.convert(state, step).extra["kept"]), params)


def test_what_no_entry_may_be_is_refused_by_name() -> None:
    plain, x = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1)), torch.ones(2)
    params = {"w": torch.ones(2)}
    with pytest.raises(ValueError, match=r"got the name 'lr' for an entry of state\.extra, which is that of a metric"):
        kept(plain, "lr")
    with pytest.raises(ValueError, match=r"Extra: got name=''"):
        kept(plain, "")
    for scale in (0.0, float("nan"), float("inf"), -1.0):
        bad = kept(plain, scale=lambda value, scale=scale: scale)
        with pytest.raises(ValueError, match=r"got a scale of .*expected a positive"):
            bad(bad.init(params), x)
    with pytest.raises(ValueError, match=r"got 1 elements for the group of leaf 'w', expected the 64"):
        kept(plain, init=lambda params: params.map(lambda p: p.sum().view(1))).init(params)
    grows = kept(plain, update=lambda v, p, a: v.map(lambda q: torch.cat([q, q])))
    with pytest.raises(ValueError, match=r"got 128 elements for the group of leaf 'w', expected the 64"):
        grows(grows.init(params), x)
    lazy = kept(plain, init=lambda params: None, update=lambda v, p, a: p)
    with pytest.raises(ValueError, match=r"expected the structure of what its init returned.*Begin with zeros"):
        lazy(lazy.init(params), x)
    wrong: Any = lambda value, params: value
    with pytest.raises(TypeError) as caught:
        two = kept(plain, update=wrong)
        two(two.init(params), x)
    assert caught.value.__notes__ == ["This was in the update of state.extra['kept'], by kept()."]


def test_a_state_of_a_step_without_it_is_refused() -> None:
    loss, params = scenarios.stack()
    plain = fz.train_step(loss, fz.sgd(0.1))
    with pytest.raises(ValueError, match=r"a state of another step, made with .*expected one made with .*total\(\)"):
        total(plain)(plain.init(params), *scenarios.vector_batches(1)[0])
    with pytest.raises(ValueError, match=r"got extra=\[\], expected \['total'\]"):
        total(plain).init(params).replace(extra={})


def test_two_of_one_name_are_refused_unless_they_are_one() -> None:
    step = total(fz.train_step(lambda p: p, fz.sgd(0.1)))
    assert total(step) is step
    with pytest.raises(ValueError, match=r"other\(\): this step already keeps state\.extra\['total'\], by total\(\)"):
        total(step, "other()")


def test_a_donated_state_whose_extra_fails_is_dead_and_says_why() -> None:
    def update(value: Any, params: fz.Sharded, applied: bool) -> Any:
        raise KeyError("mine")

    step = fz.donate(fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1)))
    step = step.with_state(fz.Extra("bad", "bad()", lambda params: 0, update))
    state = step.init({"w": torch.ones(2)})
    with pytest.raises(KeyError, match="mine"):
        step(state, torch.ones(2))
    with pytest.raises(RuntimeError, match=r"had begun with .*'w'.* and then failed in the update of state\.extra"):
        _ = state.params


STEP = fz.train_step(lambda p: p["w"].sum(), fz.sgd(0.1))


def test_a_rule_makes_a_new_step_and_leaves_the_old_one() -> None:
    frozen = fz.freeze(STEP, "w")
    assert frozen is not STEP and "freeze" in str(frozen) and "freeze" not in str(STEP)
    params = {"w": torch.ones(1), "v": torch.ones(1)}
    assert [row.frozen for row in fz.plan(frozen, params).rows] == [False, True]


def test_two_values_of_one_header_are_refused() -> None:
    with pytest.raises(ValueError, match=r"accumulate\(3\): this step already has microbatches=.*count=2"):
        fz.accumulate(fz.accumulate(STEP, 2), 3)


def test_what_is_asked_for_is_taken_and_otherwise_what_is_needed() -> None:
    plain, clipped = fz.sgd(0.1), fz.chain(fz.clip_by_global_norm(1.0), fz.sgd(0.1))

    def norm(step: fz.Step, **how: str) -> str:
        return fz.fuse_update(step, **how).fused_norm

    steps = [fz.train_step(lambda p: p["w"].sum(), optimizer) for optimizer in (plain, clipped)]
    assert norm(steps[0]) == "once" and norm(fz.loss_scale(steps[0], 2.0)) == "twice"
    assert norm(steps[1]) == "twice" and norm(steps[0], norm="held") == "held"


def test_a_plan_counts_all_that_entries_keep() -> None:
    def rank_main(rank: int) -> None:
        loss, params = scenarios.stack()
        for init in (lambda p: p, lambda p: torch.zeros(1000), lambda p: {"sum": p, "count": 0}):
            step = SHARDS[1](fz.train_step(loss, fz.adamw(1e-2))).with_state(
                fz.Extra("it", "it()", init, lambda v, p, a: v)
            )
            kept = optree.tree_leaves(step.init(params).extra)
            assert fz.plan(step, params).extra == sum(x.nbytes for x in kept if isinstance(x, torch.Tensor))

    run_ranks(rank_main, 2)


@pytest.mark.parametrize(
    "wrong", [{"init": 1}, {"update": 3}, {"scale": 1.5}, {"name": []}, {"scale": 0}, {"fused": 2}]
)
def test_entries_of_a_wrong_kind_are_refused(wrong: Any) -> None:
    given = {"name": "it", "source": "it()", "init": lambda p: 0, "update": lambda v, p, a: v} | wrong
    with pytest.raises(TypeError, match=rf"Extra: got {next(iter(wrong))}="):
        fz.Extra(**given)
    with pytest.raises(ValueError, match=r"Extra: got both changes and fused \(it\(\)\); expected one of them"):
        fz.Extra("it", "it()", lambda p: p, lambda v, p, a: v, changes=lambda v, p: (v, p), fused=lambda v, p: None)
    with pytest.raises(ValueError, match=r"Extra: got fused without update \(it\(\)\)"):
        fz.Extra("it", "it()", lambda p: p, fused=lambda v, p: None)
    with pytest.raises(TypeError, match=r"with_state: got extra=3, expected an fz.Extra"):
        fz.train_step(lambda p: p, fz.sgd(0.1)).with_state(3)  # type: ignore[arg-type]
