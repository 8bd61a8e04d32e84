"""fz.stream gives the leaves of fz.gather, unit by unit in bounded memory; no rank waits for one that left the loop."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import scenarios
import sliced_states
import torch
from hypothesis import given
from hypothesis import strategies as st
from memories import DISK
from nightly import by_day
from test_memory import wide

import fzero as fz
from fzero.base import pytree
from fzero.testing import LiveBytes, RankError, assert_trees_equal, run_ranks, strategies

pytestmark = pytest.mark.usefixtures("hazards")
POLICIES = [None, *sliced_states.POLICIES.values()]


def taken(*args: Any, **given: Any) -> dict[str, Any]:
    """What is streamed, in memory of its own."""
    return {path: leaf if leaf is None else leaf.clone() for path, leaf in fz.stream(*args, **given)}


@by_day(4)
@given(
    data=st.data(),
    chosen=strategies.transforms(patterns=scenarios.BLOCKS, memories=("host", DISK)),
    policy=st.sampled_from(POLICIES),
    world=st.integers(1, 3),
    dtype=st.sampled_from([None, torch.float32, torch.bfloat16]),
    pattern=st.sampled_from(["*", "blocks.*", "*norm*|embed*", "blocks.1.up.weight"]),
)
def test_the_leaves_of_gather(data: Any, chosen: Any, policy: Any, world: int, dtype: Any, pattern: str) -> None:
    """At every stage, in every policy and memory; frozen and tied leaves too."""
    loss, params = scenarios.tiny_lm(dtype=torch.float32)
    if "donate" in dict(chosen) or not any("shard" in name for name, _ in chosen):
        world = 1
    to = data.draw(st.none() | st.integers(0, world - 1))

    def rank_main(rank: int) -> None:
        step = strategies.apply(fz.train_step(loss, fz.sgd(0.1, momentum=0.9), policy), chosen)
        step = fz.freeze(step, "embed.weight")
        state, _ = step(step.init(params), *scenarios.token_batches(world)[rank])
        expected = fz.gather(state.params, pattern)
        found = taken(state.params, dtype, pattern, to=to)
        if to not in (None, rank):
            expected = dict.fromkeys(expected)
        assert_trees_equal(found, {path: x if x is None else x.to(dtype or x.dtype) for path, x in expected.items()})
        assert_trees_equal(taken(state.moments.momentum), fz.gather(state.moments.momentum, "*"))

    run_ranks(rank_main, world)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_leaves_that_are_cut_over_a_tensor_axis(stage: int) -> None:
    shapes = (6, 4), (4, 3), (5,)
    over = sliced_states.Over(2, 2, stage, (sliced_states.Cut(0), sliced_states.Cut(1), sliced_states.Cut(None)))

    def rank_main(rank: int) -> None:
        state = sliced_states.step_over(over, shapes, None).init(sliced_states.params(shapes))
        for to in (None, 3):
            expected = fz.gather(state.params, "*", to) or dict.fromkeys(state.params)
            assert_trees_equal(taken(state.params, to=to), expected)

    run_ranks(rank_main, 4)


def test_a_tree_of_no_leaves() -> None:
    """The grads where everything is frozen."""

    def rank_main(rank: int) -> None:
        loss, params = scenarios.tiny_lm(dtype=torch.float32)
        step = fz.freeze(fz.shard_zero3(fz.train_step(loss, fz.sgd(0.1))), "*")
        _, pullback = step.vjp(step.init(params), *scenarios.token_batches(2)[rank])
        grads, *_ = pullback(torch.tensor(1.0))
        assert pytree.leaves(fz.gather(grads)) == []

    run_ranks(rank_main, 2)


def test_names_are_those_of_the_models_files(tmp_path: Any) -> None:
    """A plain module loads them as they come."""
    from safetensors.torch import load_file

    apply, params = fz.functional(scenarios.TinyLM())
    step = fz.train_step(apply, fz.sgd(0.1))
    state, tokens = step.init(params), scenarios.token_batches(1)[0][0]
    fz.save_safetensors(tmp_path, state)
    assert_trees_equal(taken(state.params), load_file(tmp_path / "model.safetensors"))
    other = scenarios.TinyLM()
    missing, further = other.load_state_dict(taken(state.params), strict=False)
    assert missing == ["head.weight"] and not further  # which is tied
    for _, leaf in fz.stream(state.params):
        leaf.zero_()  # the caller's own
    assert torch.equal(step.forward(state, tokens), other(tokens))


# ---- ranks that leave early, and ranks that disagree


def leaves_early(rank: int, how: str) -> list[str]:
    """The paths that a rank gets of which one leaves the loop; after it all ranks go on together."""
    loss, params = scenarios.stack()
    step = fz.shard_zero3(fz.train_step(loss, fz.sgd(0.1)))
    state, found = step.init(params), list[str]()
    expected = fz.gather(state.params, "*")
    if rank == 0 and how == "never begins":
        fz.stream(state.params)
    elif rank == 0 and how == "closes":
        with contextlib.closing(fz.stream(state.params)) as leaves:
            found.append(next(leaves)[0])
    else:
        with contextlib.suppress(ZeroDivisionError):
            for path, leaf in fz.stream(state.params):
                assert torch.equal(leaf, expected[path])
                found.append(path)
                if rank == 0 and how == "raises":
                    raise ZeroDivisionError
                if rank == 0:
                    break
    step(state, *scenarios.vector_batches(3)[rank])
    return found


WAYS = ("breaks", "raises", "closes", "never begins")


@pytest.mark.parametrize(("how", "backend"), [*[(how, "threads") for how in WAYS], ("breaks", "processes")])
def test_the_others_get_all_leaves(how: str, backend: Any) -> None:
    first, *others = run_ranks(functools.partial(leaves_early, how=how), 3, backend=backend)
    assert len(first) == (how != "never begins") and [len(found) for found in others] == [8, 8]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"pattern": "head.*"}, "\"pattern='head.*'\""),
        ({"dtype": torch.bfloat16}, "'dtype=torch.bfloat16'"),
        ({"to": 1}, "'to=1'"),
        ({"tree": "mapped"}, "'blocks.0.b: torch.bfloat16'"),
    ],
)
def test_ranks_that_disagree(given: dict[str, Any], words: str) -> None:
    loss, params = scenarios.stack()

    def rank_main(rank: int) -> None:
        tree = fz.shard_zero3(fz.train_step(loss, fz.sgd(0.1))).init(params).params
        own = dict(given) if rank else {}
        if own.pop("tree", None):
            tree = tree.map(lambda x: x.bfloat16())
        with pytest.raises(ValueError, match=f"arguments differ between the ranks.*rank 1 has {words}.*fz.stream"):
            fz.stream(tree, **own)

    run_ranks(rank_main, 2)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"pattern": "heads"}, ValueError, "pattern='heads', expected one that matches"),
        ({"pattern": None}, TypeError, "pattern=None, expected a pattern"),
        ({"dtype": torch.int8}, TypeError, "dtype=.*expected a floating dtype"),
        ({"to": 2}, ValueError, "to=2, expected one of the ranks of this run, 0 to 1"),
        ({"to": True}, TypeError, "to=True, expected a rank"),
    ],
)
def test_what_is_wrong_on_every_rank(given: dict[str, Any], error: Any, words: str) -> None:
    loss, params = scenarios.stack()

    def rank_main(rank: int) -> None:
        state = fz.shard_zero3(fz.train_step(loss, fz.sgd(0.1))).init(params)
        with pytest.raises(error, match=f"fz.stream: got {words}"):
            fz.stream(state.params, **given)
        with pytest.raises(TypeError, match=r"tree=TrainState, expected state\.params"):
            fz.stream(state)  # type: ignore[call-overload]

    run_ranks(rank_main, 2)


def test_what_autograd_follows_is_no_silent_constant(tmp_path: Any) -> None:
    loss, params = scenarios.stack()

    def rank_main(rank: int) -> None:
        state = fz.shard_zero3(fz.train_step(loss, fz.sgd(0.1))).init(params)
        followed = state.params.map(lambda x: x.clone().requires_grad_(rank == 1))
        with pytest.raises(ValueError, match="rank 1 has 'a tree that autograd follows'"):
            fz.stream(followed)
        followed = state.params.map(lambda x: x.clone().requires_grad_())
        with pytest.raises(TypeError, match=r"autograd follows.*fz\.gather.*no_grad"):
            fz.stream(followed)
        with torch.no_grad():
            assert_trees_equal(taken(followed), taken(state.params))
        fz.save_safetensors(tmp_path, state.replace(params=followed))

    run_ranks(rank_main, 2)


def test_a_wider_dtype_keeps_what_the_loss_scale_kept() -> None:
    """Grads of float16 that would be zero, or rounded, without their scale."""

    def rank_main(rank: int) -> None:
        step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1), fz.Policy(grad=torch.float16))
        step = fz.loss_scale(fz.shard_zero3(step), 2.0**10)
        _, pullback = step.vjp(step.init({"w": torch.ones(3)}), torch.full((3,), 3e-8))
        grads, _ = pullback(torch.tensor(1.0))
        (leaf,) = taken(grads, torch.float32).values()
        torch.testing.assert_close(leaf, torch.full((3,), 3e-8), rtol=1e-3, atol=0.0)

    run_ranks(rank_main, 2)


def test_a_state_that_a_step_overwrites_meanwhile() -> None:
    loss, params = scenarios.stack()

    def rank_main(rank: int) -> None:
        step = fz.donate(fz.shard_zero3(fz.train_step(loss, fz.sgd(0.1))))
        state = step.init(params)
        for path, _ in fz.stream(state.params):
            if path == "blocks.2.w":  # the last unit is on its way
                step(state, *scenarios.vector_batches(2)[rank])

    with pytest.raises(RankError, match=r"donated.*fz\.donate"):
        run_ranks(rank_main, 2)


# ---- memory

WIDTH = 512
UNIT = 4 * (WIDTH * WIDTH + WIDTH)  # bytes


@pytest.mark.parametrize(
    ("kind", "to", "most"),
    [
        *(("plain", None, 2), ("plain", 0, 2), ("cast", None, 1), ("disk", None, 2)),
        *(("zero1", None, 2), ("exact", None, 2.8), ("compact24", None, 2.8)),
    ],
)
@pytest.mark.parametrize("world", [1, 2])
def test_two_units_at_most(kind: str, to: int | None, most: float, world: int) -> None:
    """Beside the state, and a few numbers; codes are decoded by pieces, of which temporaries are of one size."""
    loss, params = wide(WIDTH, blocks=3)

    def rank_main(rank: int) -> int:
        policy = {"exact": fz.Policy.exact(), "compact24": fz.Policy.compact24()}.get(kind)
        step = fz.train_step(loss, fz.sgd(0.1), policy)
        step = fz.offload(step, params=DISK) if kind == "disk" else step
        step = step if world == 1 else fz.shard_zero1(step) if kind == "zero1" else fz.shard_zero3(step)
        state = step.init(params)
        with LiveBytes() as live:
            for _ in fz.stream(state.params, torch.bfloat16 if kind == "cast" else None, to=to):
                pass
        return live.peak

    with fz.testing.hazards(None):  # which take memory
        peaks = run_ranks(rank_main, world)
    for peak in peaks:
        assert peak <= most * UNIT + 1024
