"""Chains and partitions, nested as one likes, at every stage and in every fused way, against a plain float64 step."""

from __future__ import annotations

import functools
from typing import Any

import chains
import pytest
import scenarios
import torch
from hypothesis import given
from hypothesis import strategies as st
from nightly import NIGHTLY, by_turns, in_turns

import fzero as fz
from fzero.base import pytree
from fzero.base.rebound import made_with
from fzero.testing import assert_trees_close, run_ranks

pytestmark = pytest.mark.usefixtures("hazards")  # races show

F64 = torch.float64
SHARDS: dict[int, Any] = {0: lambda step: step, 1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}
PATHS = ("blocks.0.b", "blocks.0.w", "blocks.1.b", "blocks.1.w", "head.b", "head.w")
WAYS = (None, "auto", "twice", "held")
STEPS = 3


def expected(spec: chains.Spec, world: int) -> Any:
    """The params after some steps of the optimizer on full tensors, in one process."""
    loss, params = scenarios.stack(blocks=2, width=3)
    batches = scenarios.vector_batches(world, width=3)
    names, leaves, structure = pytree.named_leaves(params)
    flat = dict(zip(names, leaves, strict=True))
    optimizer = chains.plain(spec)
    state = optimizer.init(flat)
    for _ in range(STEPS):

        def mean(flat: Any) -> torch.Tensor:
            tree = pytree.unflatten(structure, list(flat.values()))
            return torch.stack([loss(tree, *batch) for batch in batches]).mean()

        updates, state = optimizer.update(torch.func.grad(mean)(flat), state, flat)
        flat = {path: flat[path] + updates[path] for path in flat}
    return pytree.unflatten(structure, list(flat.values()))


def check(spec: chains.Spec, stage: int, way: str | None, world: int, transform: Any = lambda step: step) -> None:
    # each rank gives an optimizer its shards: what a user's own adds up over elements is this rank's
    world = world if stage else 1
    want = expected(spec, world)
    for params in run_ranks(functools.partial(on_rank, spec, stage, way, world, transform), world):
        if params is not None:
            assert_trees_close(params, want, rtol=1e-9)


def on_rank(spec: chains.Spec, stage: int, way: str | None, world: int, transform: Any, rank: int) -> Any:
    loss, params = scenarios.stack(blocks=2, width=3)
    step = SHARDS[stage](fz.train_step(loss, chains.build(spec)))
    step = step if transform is None else transform(step)
    if way is not None:
        try:
            step = fz.fuse_update(step, norm=way)
        except ValueError:  # a remedy that works is named
            assert way == "twice"
            step = fz.fuse_update(step, norm="held")
    state = step.init(params)
    for _ in range(STEPS):
        state, _ = step(state, *scenarios.vector_batches(world, width=3)[rank])
    return fz.gather(state.params)


@given(
    spec=chains.specs(PATHS),
    stage=st.sampled_from([0, 1, 2, 3]),
    way=st.sampled_from(WAYS),
    world=st.integers(1, 4),
    chosen=st.sampled_from([lambda step: step, fz.donate, lambda step: fz.loss_scale(step, 64.0)]),
)
def test_drawn_chains(spec: Any, stage: int, way: Any, world: int, chosen: Any) -> None:
    check(spec, stage, way, world, chosen)


@given(
    spec=chains.specs(PATHS, own=False),
    last=st.sampled_from([("sgd", 0.1, 0.9, 0.1), ("adamw", 0.01, 0.8, 0.95, 1e-6, 0.1), ("rows", 0.8)]),
    stage=st.sampled_from([0, 1, 2, 3]),
    way=st.sampled_from(WAYS),
    world=st.integers(1, 4),
)
def test_drawn_chains_that_can_be_fused(spec: Any, last: Any, stage: int, way: Any, world: int) -> None:
    check(("chain", (spec, last)), stage, way, world)


VALUE, NORM, SGD = ("by_value", 0.1), ("by_norm", 0.01), ("sgd", 1.0, None, 0.0)
CASES: dict[str, chains.Spec] = {
    "a norm behind another member": ("chain", (VALUE, NORM, SGD)),
    "a norm in a nested chain": ("chain", (VALUE, ("chain", (NORM, SGD)))),
    "a norm at the end of a nested chain": ("chain", (("chain", (VALUE, NORM)), SGD)),
    "two norms": ("chain", (("by_norm", 0.02), NORM, SGD)),
    "a norm in a chain in a partition": ("partition", (("*b", SGD), ("*", ("chain", (VALUE, NORM, SGD))))),
    "a partition with a norm in a chain": (
        "chain",
        (VALUE, ("partition", (("*b", ("chain", (NORM, SGD))), ("*", SGD)))),
    ),
    "a norm behind a partition": ("chain", (("partition", (("*b", VALUE), ("*", NORM))), NORM, SGD)),
    "moments in front": ("chain", (NORM, ("sgd", 0.1, 0.9, 0.1), ("adamw", 0.01, 0.8, 0.95, 1e-6, 0.1), SGD)),
    "a norm at the end": ("chain", (SGD, NORM)),
    "a user's own in front": ("chain", (NORM, ("trace", 0.5), SGD)),
    "a user's own that passes on its old state": ("chain", (("delay",), ("trace", 0.5), SGD)),
    "a user's own that passes on the params": ("chain", (("params",), ("adamw", 0.1, 0.8, 0.95, 1e-6, 0.5))),
    "a user's own that keeps old params": ("chain", (("momentum", 0.5), SGD)),
    "a user's own that looks at whole leaves": ("chain", (("lars", 0.3), SGD)),
    "a user's own that keeps old params, alone": ("chain", (("scale", -0.1), ("momentum", 0.5))),
    "a user's own that looks at whole leaves, in a partition": (
        "partition",
        (("head*", SGD), ("*", ("chain", (("lars", 0.3), SGD)))),
    ),
    "a user's own around whole leaves": ("chain", (("delay",), ("rows", 0.8), ("trace", 0.5), SGD)),
}
ROWS, MOMENTUM, MUON = ("rows", 0.8), ("sgd", 0.5, 0.9, 0.0), ("muon", 0.1, 0.9, 0.1)
WHOLE: dict[str, chains.Spec] = {
    "in front": ("chain", (ROWS, SGD)),
    "in front of each other": ("chain", (ROWS, MOMENTUM, ROWS)),
    "behind a norm": ("chain", (NORM, ROWS, ("adamw", 0.01, 0.8, 0.95, 1e-6, 0.1))),
    "in front of a norm": ("chain", (ROWS, NORM, ROWS, SGD)),
    "in a partition in front": (
        "chain",
        (("partition", (("head*", ("chain", (MOMENTUM, ROWS))), ("*b", MOMENTUM), ("*", ROWS))), VALUE, SGD),
    ),
    "in a chain in front": ("chain", (("chain", (MOMENTUM, ROWS, VALUE)), ("partition", (("*b", SGD), ("*", ROWS))))),
    "muon beside a user's own": ("partition", (("*w", MUON), ("*", ("momentum", 0.5)))),
    "muon between users' own": (
        "chain",
        (("trace", 0.5), ("partition", (("*w", MUON), ("*", ("scale", -0.1)))), ("scale", 0.5)),
    ),
    "beside a user's own": ("partition", (("*b", ("delay",)), ("*", ("chain", (MOMENTUM, ROWS))))),
    "muon in front": ("chain", (("partition", (("*w", MUON), ("*", VALUE))), MOMENTUM)),
}


@in_turns(8)
@pytest.mark.parametrize(("case", "stage", "way"), by_turns(sorted(CASES), range(4), WAYS, of=8))
def test_a_chain(case: str, stage: int, way: str | None) -> None:
    check(CASES[case], stage, way, 2)


@in_turns(9)
@pytest.mark.parametrize(("case", "stage", "way"), by_turns(sorted(WHOLE), range(4), WAYS, of=8))
def test_whole_leaves(case: str, stage: int, way: str | None) -> None:
    check(WHOLE[case], stage, way, 3)


def on_process(world: int, rank: int) -> Any:
    """Every stage in every way, of one case after the other."""
    ways = [(stage, way) for stage in (1, 2, 3) for way in WAYS]
    cases = [(spec, *ways[place % len(ways)]) for place, spec in enumerate(WHOLE.values(), 7 * world)]
    cases = [(spec, stage, None if chains.has(spec, *chains.OWN) else way) for spec, stage, way in cases]
    return [on_rank(*case, world, None, rank) for case in cases]


@in_turns(8, "on processes, as on threads")
@pytest.mark.parametrize("world", [2, 3, 4] if NIGHTLY else [3])
def test_whole_leaves_on_real_processes(world: int) -> None:
    wanted = [expected(spec, world) for spec in WHOLE.values()]
    for found in run_ranks(functools.partial(on_process, world), world, backend="processes"):
        for params, want in zip(found, wanted, strict=True):
            assert_trees_close(params, want, rtol=1e-9)


@pytest.mark.parametrize("stage", [1, 3])
def test_moments_in_front_in_eight_bits(stage: int) -> None:
    """They are written back in their format: the second of two updates shows them."""

    def rank_main(rank: int) -> None:
        loss, params = scenarios.stack(dtype=torch.float32)
        optimizer = fz.chain(fz.sgd(0.1, momentum=0.9), fz.sgd(-1.0))
        policy = fz.Policy(moment="8-bit")
        step = SHARDS[stage](fz.train_step(loss, optimizer, policy))
        plain = SHARDS[stage](fz.train_step(loss, fz.sgd(0.1, momentum=0.9)))
        batch = scenarios.vector_batches(2, dtype=torch.float32)[rank]
        state, wanted = step.init(params), plain.init(params)
        for _ in range(3):
            state, _ = step(state, *batch)
            wanted, _ = plain(wanted, *batch)
        assert_trees_close(fz.gather(state.params), fz.gather(wanted.params), rtol=2e-2)
        found, want = fz.gather(state.moments[0].momentum), fz.gather(wanted.moments.momentum)
        assert_trees_close(found, want, rtol=0.1)

    run_ranks(rank_main, 2)


def test_a_norm_that_is_pulled_twice_for_is_that_of_the_gradients() -> None:
    step = fz.train_step(
        lambda p, x: (p["w"] * x).sum(), fz.chain(fz.clip_by_value(1.0), fz.clip_by_global_norm(0.1), fz.sgd(1.0))
    )
    with pytest.raises(ValueError, match=r"fuse_update\(norm='twice'\).*norm='held'"):
        fz.fuse_update(step, norm="twice")
    step = fz.fuse_update(step)
    state, _ = step(step.init({"w": torch.zeros(2)}), torch.tensor([3.0, 4.0]))
    assert_trees_close(fz.gather(state.params)["w"], torch.full((2,), -0.1 / 2**0.5), rtol=1e-6)


def test_a_partition_in_a_partition_needs_patterns_for_its_own_leaves_only() -> None:
    inner = fz.partition({"*.w": fz.sgd(0.1), "*.b": fz.sgd(0.2)})
    step = fz.train_step(
        lambda p, x: sum((x * q).sum() for part in p.values() for q in part.values()),
        fz.partition({"a.*": inner, "c.*": fz.sgd(0.3)}),
    )
    params = {"a": {"w": torch.ones(1), "b": torch.ones(1)}, "c": {"d": torch.ones(1)}}
    state, _ = step(step.init(params), torch.ones(()))
    got = fz.gather(state.params)
    assert [round(x.item(), 4) for x in (got["a"]["w"], got["a"]["b"], got["c"]["d"])] == [0.9, 0.8, 0.7]
    with pytest.raises(ValueError, match=r"the pattern '\*\.e' is used for no leaf"):
        fz.train_step(step.fn, fz.partition({"*.e": fz.sgd(0.1), "*": fz.sgd(0.1)})).init(params)


def test_a_state_that_changes_its_structure_is_refused() -> None:
    grows = chains.elementwise(lambda params: (), lambda u, state, params: (u, {"seen": u}))
    step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.chain(grows, fz.sgd(0.1)))
    with pytest.raises(ValueError, match=r"elementwise: the state of leaf 'w' is another one after an update"):
        step(step.init({"w": torch.ones(2)}), torch.ones(2))


@pytest.mark.parametrize("stage", [0, 3])
def test_partition_is_a_column_of_the_table(stage: int) -> None:
    loss, params = scenarios.tiny_lm()
    batch = scenarios.token_batches(1)[0]
    split = fz.partition({"*norm*|*bias": fz.sgd(0.1), "*": fz.adamw(fz.linear(0.1, 0.0, 10), weight_decay=0.5)})

    def rank_main(rank: int) -> None:
        step = fz.train_step(loss, fz.chain(fz.clip_by_global_norm(0.1), split))
        step = fz.shard_zero3(step) if stage else step
        rows = {row.path: row.optimizer for row in fz.plan(step, params, world_size=2).rows}
        assert rows["blocks.0.norm.weight"] == "sgd (*norm*|*bias)" and rows["blocks.0.up.weight"] == "adamw (*)"
        state = step.init(params)
        _, pullback = step.vjp(state, *batch)
        grads, _ = pullback(torch.ones((), dtype=F64))
        factor = min(1.0, 0.1 / fz.global_norm(grads).item())
        new, metrics = step.update(state, grads)
        full, old, g = fz.gather(new.params), fz.gather(state.params), fz.gather(grads)
        name = "blocks.0.norm.weight"
        assert_trees_close(full[name], old[name] - 0.1 * factor * g[name], rtol=1e-12)
        name = "blocks.0.up.weight"
        scaled = factor * g[name]
        assert_trees_close(full[name], old[name] - 0.1 * (scaled / (scaled.abs() + 1e-8) + 0.5 * old[name]), rtol=1e-9)
        assert metrics["lr"] == 0.1 and new.moments[-1]["*"].mu.groups == new.moments[-1]["*"].nu.groups

    run_ranks(rank_main, 2 if stage else 1)


@pytest.mark.parametrize("transform", [fz.shard_zero1, fz.shard_zero2, fz.shard_zero3])
def test_a_part_is_clipped_by_its_own_norm_over_all_its_groups(transform: Any) -> None:
    loss, params = scenarios.tiny_lm()
    batch = scenarios.token_batches(1)[0]
    split = fz.partition({"*norm*|*bias": fz.sgd(0.1), "*": fz.chain(fz.clip_by_global_norm(0.01), fz.sgd(0.1))})

    def one_update(step: Any) -> Any:
        state, _ = step(step.init(params), *batch)
        return fz.gather(state.params)

    plain = one_update(fz.train_step(loss, split))
    for got in run_ranks(lambda rank: one_update(transform(fz.train_step(loss, split))), 2):
        assert_trees_close(got, plain, rtol=1e-10)


def test_what_ranks_compare_of_nested_optimizers_grows_with_their_members() -> None:
    """Each of them has a dozen functions that lead to its members: `step.init` took seconds at three levels."""

    def said(levels: int, last: float = 0.25) -> str:
        optimizer = fz.sgd(0.125)
        for level in range(levels):
            optimizer = fz.chain(optimizer, fz.clip_by_value(last if level == 0 else 0.25))
        return made_with(optimizer)

    lengths = [len(said(levels)) for levels in (2, 3, 4)]
    assert lengths[2] - lengths[1] <= lengths[1] - lengths[0] <= lengths[0]
    assert said(4).count("lr=0.125") == 1 and said(4) != said(4, last=0.5)


def test_partition_mistakes() -> None:
    loss, params = scenarios.tiny_lm()
    with pytest.raises(ValueError, match=r"leaf 'blocks\.0\.down\.weight' matches none of|matches none of \*bias"):
        fz.train_step(loss, fz.partition({"*bias": fz.sgd(0.1)})).init(params)
    with pytest.raises(ValueError, match=r"the pattern 'nothing' is used for no leaf"):
        fz.train_step(loss, fz.partition({"nothing": fz.sgd(0.1), "*": fz.sgd(0.1)})).init(params)
    with pytest.raises(TypeError, match=r"partition: got a tree of type ModuleParams"):
        fz.partition({"*": fz.sgd(0.1)}).init(params)
    with pytest.raises(TypeError, match=r"chain: got member 0=function"):
        fz.chain(lambda g: g)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"chain: got no members"):
        fz.chain()


def rates(count: int) -> float:
    return 0.1 * (count + 1)


def late(count: int) -> float:
    return 0.1 if count == 0 else 0.7


@pytest.mark.parametrize("tensors", [False, True])
def test_metrics_name_the_rate_of_each_group(tensors: bool) -> None:
    """By the same names in every update, also where rates happen to be equal; "lr" is the first pattern's."""
    number: Any = torch.tensor if tensors else float
    optimizer = fz.partition(
        {
            "head.*": fz.gradient_noise(0.0),  # which has no rate
            "*.b": fz.adamw(late),
            "blocks.0.*": fz.chain(fz.clip_by_global_norm(1.0), fz.sgd(rates)),
            "*": fz.partition({"*.w": fz.lion(number(0.1))}),
        }
    )
    loss, params = scenarios.stack(blocks=2, width=3)
    step = fz.train_step(loss, optimizer)
    state, batch = step.init(params), scenarios.vector_batches(1, width=3)[0]
    for first, second in ((0.1, 0.1), (0.7, 0.2)):
        state, metrics = step(state, *batch)
        found = {name: float(value) for name, value in metrics.items() if name.startswith("lr")}
        assert found == pytest.approx({"lr": first, "lr/*.b": first, "lr/blocks.0.*": second, "lr/*": 0.1})


def test_metrics_of_one_group_are_its_own() -> None:
    loss, params = scenarios.stack(blocks=2, width=3)
    step = fz.train_step(loss, fz.partition({"*": fz.adamw(0.1)}))
    _, metrics = step(step.init(params), *scenarios.vector_batches(1, width=3)[0])
    assert [name for name in metrics if name.startswith("lr")] == ["lr"]
