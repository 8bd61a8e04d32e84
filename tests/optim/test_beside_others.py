"""Optimizers beside and in front of those that only return updates (a user's own, declared elementwise)."""

from __future__ import annotations

import collections
import functools
from pathlib import Path
from typing import Any

import optree
import pytest
import scenarios
import torch
from hypothesis import given
from hypothesis import strategies as st
from nightly import NIGHTLY, by_day, by_turns, in_turns

import fzero as fz
from fzero.base import private
from fzero.optim import _muon
from fzero.state.items import items_of
from fzero.state.sharded import trees_of
from fzero.testing import assert_trees_close, assert_trees_equal, run_ranks

pytestmark = pytest.mark.usefixtures("hazards")  # races show

SHARDS: dict[int, Any] = {0: lambda step: step, 1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}
MEMBERS: dict[str, Any] = {
    "muon": lambda: fz.muon(0.02),
    "adamw": lambda: fz.adamw(0.01),
    "amsgrad": lambda: fz.adamw(0.01, amsgrad=True),
    "sgd": lambda: fz.sgd(0.01, momentum=0.9),
    "lion": lambda: fz.lion(0.01),
    "adafactor": lambda: fz.adafactor(0.01),
    "whole": lambda: fz.whole(fz.adamw(0.01)),
}


def two_moments(u: Any, state: Any, params: Any) -> Any:
    mu = optree.tree_map(lambda m, g: 0.9 * m + 0.1 * g, state["mu"], u)
    nu = optree.tree_map(lambda v, g: 0.9 * v + 0.1 * g * g, state["nu"], u)
    updates = optree.tree_map(lambda m, v, p: -0.01 * (m / (v.sqrt() + 1e-3) + 0.1 * p), mu, nu, params)
    return updates, {"mu": mu, "nu": nu}


EIGHT_BITS = ("adamw", "amsgrad", "sgd", "lion")
OTHERS: dict[str, Any] = {
    "two moments": lambda: fz.GradientTransformation(
        lambda params: {name: optree.tree_map(torch.zeros_like, params) for name in ("mu", "nu")},
        two_moments,
        label=lambda path: "two",
        elementwise=True,
    ),
    "own": lambda: fz.GradientTransformation(
        lambda params: optree.tree_map(torch.zeros_like, params),
        lambda u, state, params: (optree.tree_map(lambda x: -0.1 * x, u), u),
        elementwise=True,
    ),
}
JOINED: dict[str, Any] = {
    "beside": lambda member, other: fz.partition({"*w": member, "*": other}),
    "in front": lambda member, other: fz.chain(fz.partition({"*w": member, "*": fz.sgd(-0.5)}), other),
    "behind": lambda member, other: fz.chain(other, fz.partition({"*w": member, "*": other})),
}
POLICIES: dict[str, Any] = {
    "float64": None,
    "moments in bf16": fz.Policy(moment=torch.bfloat16),
    "exact": fz.Policy.by_path({"*w": fz.Policy.exact(torch.float32), "*": fz.Policy(param=torch.float32)}),
    "bf16 states": fz.Policy.by_path({"*w": fz.Policy.bf16_states(), "*": fz.Policy(param=torch.float32)}),
    "8-bit": fz.Policy.by_path(
        {"*w": fz.Policy(param=torch.float32, moment="8-bit"), "*": fz.Policy(param=torch.float32)}
    ),
}


@fz.unit
def block(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["w"].to(x.dtype) + p["b"])


def loss(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for each in p["blocks"]:
        x = block(each, x)
    return ((x @ p["head"]["w"].to(x.dtype) + p["head"]["b"] - y) ** 2).mean()


def drawn_params(dtype: torch.dtype = torch.float64) -> Any:
    return scenarios.stack(blocks=2, width=6, dtype=dtype)[1]


def kinds(state: fz.TrainState) -> dict[str, Any]:
    """What a state keeps of moments, by names: kinds of trees, and the dtypes of their buffers."""
    found = dict[str, Any]()
    for name, kind, value in [(item.name, item.kind, item.value) for item in items_of(state)]:
        dtypes = {key: x.dtype for key, x in value.buffers.items()} if isinstance(value, fz.Sharded) else None
        found[name] = kind, dtypes
    return found


def assert_keeps_slices_only(moments: object) -> None:
    """No buffer of moments keeps memory of others."""
    for tree in trees_of(moments):
        for name, x in tree.buffers.items():
            assert x.untyped_storage().nbytes() == x.nbytes, name


class Drawn(tuple[str, str, str, str, int, bool]):
    """The names of a member, of the other, of how they are joined and of a policy; a stage; whether it donates."""

    def step(self, stage: int | None = None) -> fz.Step:
        member, other, joined, policy, own, donates = self
        optimizer = JOINED[joined](MEMBERS[member](), OTHERS[other]())
        step = SHARDS[own if stage is None else stage](fz.train_step(loss, optimizer, POLICIES[policy]))
        return fz.donate(step) if donates else step

    def trained(self, rank: int, world: int, steps: int, step: fz.Step) -> tuple[fz.TrainState, Any]:
        dtype = torch.float64 if self[3] == "float64" else torch.float32
        batch = scenarios.vector_batches(world, width=6, dtype=dtype)[rank]
        state = step.init(drawn_params(dtype))
        before = kinds(state)
        for _ in range(steps):
            state, _ = step(state, *batch)
        after = kinds(state)
        assert after == before
        return state, batch


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    policy = draw(st.sampled_from(sorted(POLICIES)))
    member = draw(st.sampled_from(sorted(MEMBERS) if policy != "8-bit" else EIGHT_BITS))
    joined = draw(st.sampled_from(sorted(JOINED) if policy != "8-bit" else ["beside"]))
    return Drawn(
        (member, draw(st.sampled_from(sorted(OTHERS))), joined, policy, draw(st.integers(0, 3)), draw(st.booleans()))
    )


def goes_on(config: Drawn, world: int, folder: Path, rank: int) -> Any:
    """The params after three updates, which a loaded state comes to as well, and a converted one."""
    step = config.step()
    state, batch = config.trained(rank, world, 2, step)
    assert_keeps_slices_only(state.moments)
    fz.save(folder / "state", state)
    other = config.step((config[4] + 1) % 4)
    moved = fz.convert(state, other)
    loaded = fz.load(folder / "state", step)
    assert kinds(loaded) == kinds(state)
    want = fz.gather(step(state, *batch)[0].params)
    assert_trees_equal(fz.gather(step(loaded, *batch)[0].params), want)
    fz.gather(other(moved, *batch)[0].params)
    return want


CONFIGS = [
    Drawn(("muon", "two moments", "beside", "float64", 3, False)),
    Drawn(("muon", "two moments", "in front", "exact", 1, False)),
    Drawn(("muon", "own", "behind", "bf16 states", 2, True)),
    Drawn(("adamw", "two moments", "beside", "8-bit", 3, True)),
    Drawn(("adamw", "own", "in front", "moments in bf16", 1, False)),
    Drawn(("sgd", "two moments", "behind", "exact", 2, False)),
    Drawn(("amsgrad", "two moments", "in front", "bf16 states", 3, False)),
    Drawn(("lion", "own", "beside", "8-bit", 0, False)),
]


@by_day(8)
@given(config=drawn(), world=st.integers(1, 4))
def test_a_state_is_saved_loaded_and_converted(tmp_path_factory: Any, config: Drawn, world: int) -> None:
    world = world if config[4] else 1
    found = run_ranks(functools.partial(goes_on, config, world, tmp_path_factory.mktemp("beside")), world)
    for params in found:
        assert_trees_equal(params, found[0])


def every(world: int, folder: Path, rank: int) -> Any:
    return [
        goes_on(config, world, folder / str(place), rank)
        for place, config in enumerate(CONFIGS if NIGHTLY else CONFIGS[::2])
        if config[4] or world == 1
    ]


@in_turns(8, "on processes, as on threads")
@pytest.mark.parametrize("world", [2, 3, 4] if NIGHTLY else [3])
def test_on_real_processes(tmp_path: Path, world: int) -> None:
    found = run_ranks(functools.partial(every, world, tmp_path), world, backend="processes")
    for params in found:
        assert_trees_equal(params, found[0])


@in_turns(3)
@pytest.mark.parametrize(("other", "joined"), by_turns(sorted(OTHERS), sorted(JOINED), of=3))
def test_matrices_are_orthogonalised_once_over_the_exchanges_of_a_plan(
    other: str, joined: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = collections.Counter[tuple[int, ...]]()

    def counted(x: torch.Tensor, steps: int, eps: float) -> torch.Tensor:
        seen[tuple(x.shape)] += not private.is_fake(x)  # as a plan's
        return orthogonal(x, steps, eps)

    orthogonal = _muon.orthogonal
    monkeypatch.setattr(_muon, "orthogonal", counted)
    worlds = (2, 3), (3, 1), (4, 2)
    for world, stage in worlds if NIGHTLY else (worlds[sorted(OTHERS).index(other) % 3],):
        config = Drawn(("muon", other, joined, "float64", stage, False))
        params = drawn_params()

        def sent(rank: int, config: Drawn = config, world: int = world) -> tuple[int, int]:
            step = config.step()
            state, batch = config.trained(rank, world, 1, step)
            with fz.testing.recorded_collectives() as records:
                step(state, *batch)
            tags = ("matrices to orthogonalise", "orthogonal matrices", "leaves of")
            sizes = [size for _, tag, size in records if str(tag).startswith(tags)]
            return sum(sizes), len(sizes)

        seen.clear()
        plans = [fz.plan(config.step(), params, world_size=world, rank=rank) for rank in range(world)]
        wanted = [[(own.nbytes, own.messages) for own in plan.messages if own.purpose == "leaves"] for plan in plans]
        assert [[found] for found in run_ranks(sent, world)] == wanted
        assert seen == {(6, 6): 2 * 2, (6, 2): 2}


@in_turns(2)
@pytest.mark.parametrize("member", ["muon", "whole"])
def test_under_a_transform_ranks_keep_slices_only(member: str) -> None:
    params = drawn_params()

    def rank_main(rank: int) -> None:
        step = fz.shard_zero3(fz.train_step(loss, JOINED["beside"](MEMBERS[member](), fz.lamb(0.01))))
        x, y = scenarios.vector_batches(2, width=6)[rank]
        state = step.init(params)

        def after(x: torch.Tensor) -> Any:
            return [tree.buffers for tree in trees_of(step(state, x, y)[0].moments)]

        found = torch.func.jvp(after, (x,), (torch.ones_like(x),))[0]
        for buffers in found:
            for name, own in buffers.items():
                assert own.untyped_storage().nbytes() == own.nbytes, name

    run_ranks(rank_main, 2)


def test_moments_in_few_bits_beside_another_are_near_those_alone() -> None:
    """They are decoded for it, and encoded again."""
    params = drawn_params(torch.float32)
    (batch,) = scenarios.vector_batches(1, width=6, dtype=torch.float32)
    found = dict[str, Any]()
    for policy in ("8-bit", "float64"):
        optimizer = JOINED["beside"](fz.sgd(0.01, momentum=0.9), OTHERS["two moments"]())
        step = fz.train_step(loss, optimizer, POLICIES[policy])
        state = step.init(params)
        for _ in range(3):
            state, _ = step(state, *batch)
        found[policy] = fz.gather(state.moments["*w"].momentum), fz.gather(state.params)
    assert state.moments["*w"].momentum.kind == "signed"
    assert_trees_close(found["8-bit"], found["float64"], rtol=3e-2, atol=1e-2)


def test_who_cannot_carry_few_bits_is_said() -> None:
    policy, params = fz.Policy(moment="8-bit"), {"w": torch.ones(4, 3), "b": torch.ones(3)}
    other = OTHERS["two moments"]()
    for optimizer, said in (
        (JOINED["beside"](fz.adamw(0.1), other), r"params\['b'\].*\(two \(\*\)\).* may be negative"),
        (fz.chain(fz.sgd(0.1, 0.9), other), r"\(sgd\+two\).*may be negative"),
    ):
        with pytest.raises(ValueError, match=said):
            fz.train_step(lambda p: p["w"].sum(), optimizer, policy).init(params)
