"""Optimizers on whole leaves: any state, any ranks, the same as by hand in one process; errors on every rank."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from typing import Any, NamedTuple

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nightly import by_day, by_turns, in_turns
from test_leaf_states import keeps

import fzero as fz
from fzero.testing import RankError, assert_trees_close, hazards, run_ranks

F64 = torch.float64


class State(NamedTuple):
    """Of every kind: a number, a moment, a copy of the params, factors, a count in a tensor, nothing."""

    count: int
    moment: Any
    anchor: Any
    rows: Any
    calls: torch.Tensor
    nothing: None = None


def begun(params: Any) -> State:
    def rows(x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros((*x.shape[:-1], 1)) if x.ndim else x.new_zeros(2)

    zeros, copies = (optree.tree_map(fn, params) for fn in (torch.zeros_like, torch.clone))
    return State(0, zeros, copies, optree.tree_map(rows, params), torch.zeros(3, dtype=torch.int32))


def moved(grads: Any, old: State, params: Any) -> tuple[Any, State]:
    """Depends on all of a leaf, on where it began, on its shape and on how many updates there were."""

    def row(r: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return 0.9 * r + (g.square().mean(-1, keepdim=True) if g.ndim else g.square())

    def one(m: torch.Tensor, r: torch.Tensor, a: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        scale = (r if p.ndim else r.mean()).sqrt() + 0.1
        return -0.05 * 0.9**old.count * (m / scale + 0.1 * (p - a) + 0.01 * p / (p.norm() + 1))

    moment = optree.tree_map(lambda m, g: 0.8 * m + g, old.moment, grads)
    rows = optree.tree_map(row, old.rows, grads)
    updates = optree.tree_map(one, moment, rows, old.anchor, params)
    return updates, State(old.count + 1, moment, old.anchor, rows, old.calls + 1)


MOVED = fz.GradientTransformation(begun, moved)
SHAPES = [(5, 7), (7,), (), (3, 4, 5), (1, 6), (33, 4), (2, 64)]


def drawn(shapes: Any, units: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    return [
        {str(i): torch.randn(s, generator=generator, dtype=F64) for i, s in enumerate(shapes)} for _ in range(units)
    ]


@fz.unit
def part(params: Any, x: torch.Tensor) -> torch.Tensor:
    each = [((i + 1) * p.square() * x.mean() + p.cos()).sum() for i, p in enumerate(optree.tree_leaves(params))]
    return torch.stack(each).sum()


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([part(each, x) for each in params]).sum()


SHARDS: dict[str, Any] = {
    "zero1": fz.shard_zero1,
    "zero2": fz.shard_zero2,
    "zero3": fz.shard_zero3,
    "donated": lambda step: fz.donate(fz.shard_zero3(step)),
    "on the host": lambda step: fz.offload(fz.shard_zero3(step), params="host", grads="host", moments="host"),
    "fused": lambda step: fz.fuse_update(fz.shard_zero3(step)),
    "fused, zero1": lambda step: fz.fuse_update(fz.shard_zero1(step)),
    "fused, some": lambda step: fz.fuse_update(fz.shard_zero3(step, pattern="0.*")),
    "fused, held": lambda step: fz.fuse_update(fz.shard_zero3(step), norm="held"),
    "fused, donated": lambda step: fz.donate(fz.fuse_update(fz.shard_zero2(step))),
    "fused, scaled": lambda step: fz.loss_scale(fz.fuse_update(fz.shard_zero3(step)), 8.0),
    "fused, accumulated": lambda step: fz.accumulate(fz.fuse_update(fz.shard_zero3(step)), 2),
    "fused, away": lambda step: fz.offload(
        fz.donate(fz.fuse_update(fz.shard_zero3(step))), params="host", grads="host", moments="host"
    ),
}
FUSED = [how for how in SHARDS if how.startswith("fused")]


def on_rank(how: str, most: float, shapes: Any, units: int, rank: int, between: bool = False) -> Any:
    """Clipped by a norm, for which a fused update pulls back twice or waits, or by none; between other members, too."""
    before = [fz.clip_by_global_norm(most)] if most < torch.inf else []
    own = [MOVED if "zero" in how else fz.whole(MOVED)]  # the same
    own = [fz.clip_by_value(0.5), *own, fz.sgd(-0.5, momentum=0.0)] if between else own
    step = SHARDS[how](fz.train_step(loss, fz.chain(*before, *own)))
    state = step.init(drawn(shapes, units))
    for i in range(3):
        state, _ = step(state, torch.full((2,), i + 1.0 + rank, dtype=F64))
    trees, rest = state.moments[-2 if between else -1]
    return fz.gather(state.params), fz.gather(trees), [x for x in optree.tree_leaves(rest) if not isinstance(x, str)]


def by_hand(most: float, shapes: Any, units: int, ranks: int, between: bool = False) -> Any:
    params = drawn(shapes, units)
    leaves, spec = optree.tree_flatten(params)
    states = [begun(leaf) for leaf in leaves]
    for i in range(3):
        mean = torch.full((2,), i + 1.0 + (ranks - 1) / 2, dtype=F64)
        grads = optree.tree_leaves(torch.func.grad(loss)(optree.tree_unflatten(spec, leaves), mean))
        norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
        grads = [g * (most / norm).clamp(max=1.0) for g in grads]
        grads = [g.clamp(-0.5, 0.5) for g in grads] if between else grads
        found = [moved(g, s, p) for g, s, p in zip(grads, states, leaves, strict=True)]
        factor = 0.5 if between else 1.0
        leaves, states = [p + factor * u for p, (u, _) in zip(leaves, found, strict=True)], [s for _, s in found]
    return optree.tree_unflatten(spec, leaves), states


@by_day(12)
@given(
    how=st.sampled_from(sorted(SHARDS)),
    most=st.sampled_from([3.0, torch.inf]),
    ranks=st.integers(1, 4),
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=5),
    units=st.integers(1, 3),
    between=st.booleans(),
    seed=st.integers(0, 99),
)
@pytest.mark.filterwarnings("ignore:fz.offload")
def test_as_by_hand_from_any_ranks(
    how: str, most: float, ranks: int, shapes: Any, units: int, between: bool, seed: int
) -> None:
    want, states = by_hand(most, shapes, units, ranks, between)
    with hazards(seed):
        found = run_ranks(functools.partial(on_rank, how, most, shapes, units, between=between), ranks)
    for params, _, rest in found:
        assert_trees_close(params, want, rtol=1e-10, atol=1e-12)
        assert [x for x in rest if isinstance(x, int)] == [state.count for state in states]
        calls = [x.tolist() for x in rest if isinstance(x, torch.Tensor) and x.dtype == torch.int32]
        assert calls == [state.calls.tolist() for state in states]


HOW = [("zero1", 3), ("zero3", 3), ("fused", 2), ("fused", 4), ("fused, zero1", 3), ("fused, donated", 3)]


@in_turns(6)
@pytest.mark.parametrize(("run", "most"), by_turns(HOW, [3.0, torch.inf]))
def test_on_real_processes(run: tuple[str, int], most: float) -> None:
    how, ranks = run
    want, _ = by_hand(most, SHAPES, 3, ranks)
    with hazards(1):
        for params, _, _ in run_ranks(functools.partial(on_rank, how, most, SHAPES, 3), ranks, backend="processes"):
            assert_trees_close(params, want, rtol=1e-10, atol=1e-12)


@in_turns(6)
@pytest.mark.parametrize("how", ["zero3", *FUSED])
@pytest.mark.filterwarnings("ignore:fz.offload")
def test_beside_others_in_a_partition(how: str) -> None:
    """Of each unit some leaves are brought to their owners, others are updated where they are, or lie elsewhere too."""
    optimizer = fz.partition({"*.2": fz.sgd(0.02), "1.*": fz.whole(MOVED), "*": fz.chain(fz.whole(MOVED))})

    def on(rank: int) -> Any:
        step = SHARDS[how](fz.train_step(loss, optimizer))
        state = step.init(drawn(SHAPES, 3))
        for i in range(3):
            state, _ = step(state, torch.full((2,), i + 1.0 + rank, dtype=F64))
        return fz.gather(state.params), state.moments["1.*"].rest

    want, states = by_hand(torch.inf, SHAPES, 3, 2)
    paths = [f"1.{i}" for i in range(len(SHAPES)) if i != 2]
    by_sgd = drawn(SHAPES, 3)
    for i in range(3):
        grads = torch.func.grad(loss)(by_sgd, torch.full((2,), i + 1.5, dtype=F64))
        by_sgd = optree.tree_map(lambda p, g: p - 0.02 * g, by_sgd, grads)
    with hazards(2):
        found = run_ranks(on, 2)
    for params, rest in found:
        for got, others, sgd in zip(params, want, by_sgd, strict=True):
            assert_trees_close(got, {**others, "2": sgd["2"]}, rtol=1e-10, atol=1e-12)
        assert sorted(rest) == paths and all(each.count == 3 for each in rest.values())
        own = [states[len(SHAPES) + int(path[2:])] for path in paths]
        assert_trees_close(
            [rest[path].rows[path] for path in paths], [each.rows for each in own], rtol=1e-10, atol=1e-12
        )


@pytest.mark.parametrize("optimizer", [fz.whole(MOVED), fz.adafactor(), fz.whole(keeps((torch.bfloat16,)))])
def test_saved_loaded_and_converted_on_other_ranks_and_in_other_units(optimizer: Any, tmp_path: Any) -> None:
    step, x = fz.train_step(loss, optimizer), torch.ones(2, dtype=F64)
    steps = [fz.shard_zero3(step), fz.shard_zero1(step), fz.train_step(loss, optimizer, units="1")]

    def first(rank: int) -> Any:
        state, _ = steps[0](steps[0].init(drawn(SHAPES, 2)), x)
        fz.save(tmp_path / "state", state)
        return [fz.gather(own(fz.convert(state, own), x)[0].params) for own in steps]

    def then(rank: int) -> Any:
        return [fz.gather(own(fz.load(tmp_path / "state", own), x)[0].params) for own in steps]

    want, *others = run_ranks(first, 3)[0]
    for found in (others, *run_ranks(then, 2)):
        for got in found:
            assert_trees_close(got, want, rtol=1e-12)


@pytest.mark.parametrize("optimizer", [fz.whole(MOVED), fz.adafactor()])
def test_frozen_and_trained_again(optimizer: Any, tmp_path: Any) -> None:
    def on(rank: int) -> Any:
        step, x = fz.shard_zero3(fz.train_step(loss, optimizer)), torch.ones(2, dtype=F64)
        less = fz.freeze(step, "0.1|1.0")
        state, _ = step(step.init(drawn(SHAPES[:3], 2)), x)
        frozen = fz.convert(state, less)
        after, _ = less(frozen, x)
        fz.save(tmp_path / "state", after)
        back = fz.convert(after, step)
        kept = state.moments.rest
        assert "0.1" not in frozen.moments.rest and back.moments.rest.keys() == kept.keys()
        for path in ("0.1", "1.0"):  # which begin anew
            count = back.moments.rest[path].count
            assert (count if isinstance(count, int) else count.own()(path)) == 0
        assert_trees_close(_numbers(back.moments.rest["0.0"]), _numbers(after.moments.rest["0.0"]), rtol=0.0)
        loaded = fz.load(tmp_path / "state", step)
        return [fz.gather(step(each, x)[0].params) for each in (back, loaded)]

    for converted, loaded in run_ranks(on, 2):
        assert_trees_close(loaded, converted, rtol=1e-12)


def _numbers(state: Any) -> Any:
    return [x for x in optree.tree_leaves(state) if isinstance(x, (torch.Tensor, int))]


FAILING = ("zero3", "fused", "fused, held", "fused, donated")


def failing(grads: Any, state: Any, params: Any) -> Any:
    if "1.1" in params:
        raise ArithmeticError("no root of this one")
    return optree.tree_map(torch.neg, grads), state + 1


def failed(how: str, shapes: Any, front: bool, rank: int) -> tuple[str, str]:
    begin = lambda params: torch.zeros(2)  # which the owners would tell the others
    optimizer = fz.partition({"*.2": fz.sgd(0.1), "*": fz.whole(fz.GradientTransformation(begin, failing))})
    step = SHARDS[how](fz.train_step(loss, fz.chain(optimizer, fz.whole(MOVED)) if front else optimizer))
    state, said = step.init(drawn(shapes, 3)), list[str]()
    for _ in range(2):  # and again
        try:
            step(state, torch.ones(2, dtype=F64))
        except Exception as error:
            said.append(f"{type(error).__name__}: {error} {' '.join(getattr(error, '__notes__', ()))}")
        if not step.donates:
            assert_trees_close(fz.gather(state.params), drawn(shapes, 3), rtol=0.0)
            own = state.moments[0] if front else state.moments
            assert all(x.abs().sum() == 0 for x in optree.tree_leaves(own["*"].rest))
    torch.distributed.barrier()  # nobody is left behind
    first, second = said
    return first, second


@in_turns(7)
@pytest.mark.parametrize(("how", "front"), [*[(how, False) for how in FAILING], ("zero3", True), ("fused", True)])
@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_an_error_in_one_leaf_is_every_ranks(how: str, front: bool, backend: Any) -> None:
    with hazards(4):
        both = run_ranks(functools.partial(failed, how, [(4, 5), (5, 4), (3, 3)], front), 3, backend=backend)
    for time, said in enumerate(map(sorted, zip(*both, strict=True))):
        if time and how == "fused, donated":
            assert all("had begun with 6 of its 6 groups" in each for each in said)
            continue
        assert said[0].startswith("ArithmeticError: no root of this one") and "leaf '1.1'" in said[0]
        assert all("part of an update by fz.whole failed: ArithmeticError: no root" in each for each in said[1:])


JOINED: dict[str, Any] = {
    "alone": lambda made: made(),
    "in a chain": lambda made: fz.chain(made(), made()),
    "in a partition": lambda made: fz.partition({"0*": made(), "*": made()}),
}


@pytest.mark.parametrize("joined", JOINED)
@pytest.mark.parametrize("wrap", [lambda step: step, fz.fuse_update])
def test_an_error_keeps_nothing_once_it_is_dropped(wrap: Any, joined: str) -> None:
    seen = list[weakref.ref[Any]]()

    def noted(grads: Any, state: Any, params: Any) -> Any:
        seen.append(weakref.ref(params.popitem()[1].untyped_storage()))
        raise ArithmeticError("no root of this one")

    failing = lambda: fz.whole(fz.GradientTransformation(lambda params: (), noted))
    step = wrap(fz.train_step(loss, JOINED[joined](failing)))
    state = step.init(drawn(SHAPES[:3], 2))
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(ArithmeticError):
            step(state, torch.ones(2, dtype=F64))
        assert len(seen) == 6 and not any(each() is not None for each in seen)
    finally:
        gc.enable()


def test_what_a_leaf_keeps_is_checked() -> None:
    cases = {
        "keeps the structure": lambda g, s, p: (g, (s, s)),
        "keeps the structure, the shapes": lambda g, s, p: (g, {k: torch.zeros(2) for k in s}),
        "the update of leaf '0' is None": lambda g, s, p: ({"0": None}, s),
        "expected a tensor like the leaf": lambda g, s, p: ({"0": torch.zeros(1)}, s),
    }
    for words, update in cases.items():
        begin = lambda p: {k: torch.zeros(3) for k in p}
        step = fz.train_step(lambda p, x: (p["0"] * x).sum(), fz.whole(fz.GradientTransformation(begin, update)))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=words):
            step(step.init({"0": torch.ones(2, 2)}), torch.ones(2, 2))


def test_clipping_by_the_norm_of_all_goes_before() -> None:
    with pytest.raises(ValueError, match=r"Clip before: fz.chain\(fz.clip_by_global_norm"):
        fz.whole(fz.chain(fz.clip_by_global_norm(1.0), fz.sgd(0.1)))
    with pytest.raises(TypeError, match="whole: got optimizer="):
        fz.whole(torch.optim.SGD)  # type: ignore[arg-type]


def learned(weights: torch.Tensor) -> Any:
    def update(grads: Any, state: Any, params: Any) -> Any:
        return optree.tree_map(lambda g: -torch.tanh(g * weights[0]) * weights[1] * g.norm(), grads), state

    return fz.GradientTransformation(lambda params: (), update)


def test_a_learned_optimizer_on_ranks() -> None:
    x, weights = torch.ones(2, dtype=F64), torch.tensor([0.7, 0.1], dtype=F64)

    def plain(weights: torch.Tensor) -> torch.Tensor:
        params, update = drawn(SHAPES[:3], 1), learned(weights).update
        for _ in range(2):
            grads = torch.func.grad(loss)(params, x)
            params = optree.tree_map(lambda p, g: p + update(g, (), p)[0], params, grads)  # type: ignore[index]
        return loss(params, x)

    def on(rank: int) -> Any:
        def after(weights: torch.Tensor) -> torch.Tensor:
            step = fz.shard_zero3(fz.train_step(loss, fz.whole(learned(weights))))
            state = step.init(drawn(SHAPES[:3], 1))
            for _ in range(2):
                state, _ = step(state, x)
            return step.forward(state, x)

        return torch.func.grad(after)(weights)

    want = torch.func.grad(plain)(weights)
    for ranks in (1, 3):
        for got in run_ranks(on, ranks):
            assert_trees_close(got, want, rtol=1e-10)


def adafactors(rank: int, sharded: bool = True) -> Any:
    step = fz.train_step(loss, fz.adafactor(0.02, weight_decay=0.1))
    step = fz.shard_zero3(step) if sharded else step
    params = optree.tree_map(lambda x: x.float(), drawn(SHAPES[:6], 1))
    state = step.init(params)
    for _ in range(4):
        state, metrics = step(state, torch.ones(2))
        assert abs(metrics["lr"].item() - 0.02) < 1e-9
    return fz.gather(state.params)


def test_adafactor_as_torch_has_it() -> None:
    params = [p.float().requires_grad_() for p in optree.tree_leaves(drawn(SHAPES[:6], 1))]
    other = torch.optim.Adafactor(params, 0.02, weight_decay=0.1)
    for _ in range(4):
        other.zero_grad()
        loss([params], torch.ones(2)).backward()
        other.step()
    want = [p.detach() for p in params]
    for got in (adafactors(0, False), *run_ranks(adafactors, 3)):
        assert_trees_close(optree.tree_leaves(got), want, rtol=1e-5, atol=1e-6)


def test_adafactor_keeps_factors_only() -> None:
    state = fz.train_step(loss, fz.adafactor()).init([{"0": torch.ones(64, 32), "1": torch.ones(8)}])
    trees, rest = state.moments
    assert not trees  # that of the leaf of 8 is in the rest, or there were zeros for the other one
    assert rest["0.1"].elements.shape == (8,)
    assert [tuple(x.shape) for x in optree.tree_leaves(rest["0.0"]) if isinstance(x, torch.Tensor)] == [
        (64, 1),
        (1, 32),
    ]


@pytest.mark.parametrize("shape", [(1, 40), (40, 1), (1, 1, 40)])
def test_a_factor_of_its_leafs_shape_costs_others_nothing(shape: tuple[int, ...]) -> None:
    """As of a class token beside matrices."""
    state = fz.train_step(loss, fz.adafactor()).init([{"0": torch.ones(64, 32), "1": torch.ones(shape)}])
    assert sum(x.numel() for x in optree.tree_leaves(state.moments) if isinstance(x, torch.Tensor)) < 64 + 32 + 2 * 42


def test_rows_are_clipped_by_their_own_params() -> None:
    p = {"w": torch.tensor([[3.0, 4.0], [0.0, 0.0]]), "b": torch.tensor([0.0, 2.0])}
    g = {"w": torch.tensor([[0.3, 0.4], [3.0, 4.0]]), "b": torch.tensor([3.0, 4.0])}
    got, _ = (clip := fz.adaptive_clip(0.01, eps=0.1)).update(g, clip.init(p), p)
    want = {"w": torch.tensor([[0.03, 0.04], [0.0006, 0.0008]]), "b": torch.tensor([0.012, 0.016])}
    assert_trees_close(got, want, rtol=1e-6)


@pytest.mark.parametrize("begun", [lambda rank: torch.zeros(2 + rank), lambda rank: torch.full((2,), float(rank))])
def test_ranks_whose_states_begin_otherwise_are_told(begun: Any) -> None:
    def on(rank: int) -> None:
        own = fz.GradientTransformation(lambda params: begun(rank), lambda g, s, p: (g, s))
        fz.shard_zero3(fz.train_step(loss, own)).init(drawn([(3, 3)], 1))

    with pytest.raises(RankError, match=r"fz\.whole: the states of leaves differ between the ranks"):
        run_ranks(on, 2)


def noisy(grads: Any, state: Any, params: Any) -> Any:
    return optree.tree_map(lambda g: -0.1 * g + 0.1 * torch.randn_like(g), grads), state


def begun_by_chance(params: Any) -> Any:
    return optree.tree_map(torch.randn_like, params)


NOISY = fz.whole(fz.GradientTransformation(begun_by_chance, noisy))


@pytest.mark.parametrize(
    "wrap", [fz.shard_zero3, functools.partial(fz.shard_zero3, pattern="0.0"), SHARDS["fused"], SHARDS["fused, held"]]
)
def test_random_numbers_are_the_same_whoever_draws_them(wrap: Any) -> None:
    def on(rank: int) -> Any:
        torch.manual_seed(rank)
        step = wrap(fz.train_step(loss, NOISY)) if rank >= 0 else fz.train_step(loss, NOISY)
        state, x = step.init(drawn(SHAPES[:3], 1), seed=3), torch.ones(2, dtype=F64)
        for _ in range(2):
            state, _ = step(state, x)
        return fz.gather(state.params)

    with torch.random.fork_rng():
        want = on(-1)
    for got in run_ranks(on, 3):
        assert_trees_close(got, want, rtol=1e-12)


def test_members_that_skip_an_update_keep_all_of_their_state() -> None:
    step = fz.train_step(lambda p, x: (p["b"] * x).sum(), fz.whole(MOVED))
    states = [step.init({"b": torch.full((3,), 1.0 + i, dtype=F64)}) for i in range(2)]
    xs = torch.stack([torch.ones(3, dtype=F64), torch.full((3,), float("inf"), dtype=F64)])
    mapped, metrics = torch.vmap(step)(fz.stack(states), xs)
    assert metrics["skipped"].tolist() == [False, True]
    for member, state, x in zip(fz.unstack(mapped), states, xs, strict=True):
        alone, _ = step(state, x)
        assert_trees_close(fz.gather(member.params), fz.gather(alone.params), rtol=1e-12)
        got, want = member.moments.rest["b"], alone.moments.rest["b"]
        assert_trees_close((got.moment, got.rows, got.calls), (want.moment, want.rows, want.calls), rtol=1e-12)


def test_a_plan_of_it() -> None:
    for optimizer in (fz.whole(MOVED), fz.adafactor(), fz.muon(0.1)):
        params = [{"0": torch.ones(64, 8), "1": torch.ones(8, 8)}]
        step = fz.shard_zero3(fz.train_step(loss, optimizer))
        plan = fz.plan(step, params, world_size=4)
        assert "whole" in str(plan) or "muon" in str(plan)
        one, both = (fz.plan(fz.fuse_update(step), params * units, world_size=4) for units in (1, 2))
        assert one.grads == both.grads == plan.grads  # of a unit alone


def test_moments_in_8_bits_are_refused() -> None:
    step = fz.train_step(loss, fz.whole(MOVED), fz.Policy(moment="8-bit"))
    with pytest.raises(ValueError, match=r"stores moments as .8-bit., .* cannot carry"):
        step.init([{"0": torch.ones(4, 4)}])


def test_an_error_on_one_rank_of_a_tensor_axis_is_every_ranks() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    def on(rank: int) -> str:
        def failing(grads: Any, state: Any, params: Any) -> Any:
            if torch.distributed.get_rank() == 1:
                raise ArithmeticError("on this one")
            return grads, state

        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        step = fz.train_step(
            lambda p, x: fz.parallel.sum((p["w"] * x).sum(), fz.parallel.axis(mesh, "tp")),
            fz.whole(fz.GradientTransformation(lambda params: (), failing)),
        )
        step = fz.shard_zero3(fz.shard_tensor(step, {"w": 0}, mesh=mesh, axis="tp"), mesh=mesh, axis="dp")
        state = step.init({"w": torch.ones(4, 2)})
        try:
            step(state, torch.ones(2))
        except (ArithmeticError, RuntimeError) as error:
            return str(error)
        raise AssertionError("no error")

    said = sorted(run_ranks(on, 2))
    assert said[0] == "on this one" and "another rank's part of an update by fz.whole failed" in said[1]
