"""fz.stack and fz.unstack: there and back bit for bit, and states that are no members of one ensemble are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import scenarios
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero as fz
from fzero.base import pytree
from fzero.state.sharded import trees_of
from fzero.testing import assert_trees_equal, run_ranks, strategies

F64 = torch.float64
loss, PARAMS = scenarios.stack()
OTHERS = scenarios.stack(seed=1)[1]
step = fz.train_step(loss, fz.adamw(0.1))
BATCH = scenarios.vector_batches(1)[0]
SHARDS: dict[int, Any] = {0: lambda step: step, 1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}


def buffers(state: fz.TrainState) -> dict[Any, torch.Tensor]:
    """Every tensor of a state, those of its trees as they are stored."""
    out: dict[Any, torch.Tensor] = {}
    for place, tree in enumerate(trees_of((state.params, state.grads, state.moments, dict(state.extra)))):
        out |= {(place, "buffer", name): x for name, x in tree.buffers.items()}
        out |= {(place, "held", name): x for name, x in tree.held.items()}
    leaves = pytree.flatten(dict(state.extra), is_leaf=lambda x: isinstance(x, fz.Sharded))[0]
    return out | {("extra", i): x for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)}


def same(found: fz.TrainState, want: fz.TrainState) -> None:
    own, its = buffers(found), buffers(want)
    assert own.keys() == its.keys()
    assert_trees_equal([*own.values()], [*its.values()])
    assert (found.step, found.signature) == (want.step, want.signature)


def counted(step: fz.Step) -> fz.Step:
    """With a tensor of its own in the state."""
    return step.with_state(fz.Extra("seen", "counted", begun, more))


def begun(params: fz.Sharded) -> object:
    return {"scalar": torch.zeros((), dtype=F64), "pair": [torch.ones(2), None], "number": 3}


def more(value: Any, params: fz.Sharded, applied: bool) -> object:
    return {**value, "scalar": value["scalar"] + params.local(params.groups[0]).sum()}


POLICIES: dict[str, Any] = {
    "plain": None,
    "masters": fz.Policy(param=torch.float32, compute=torch.bfloat16),
    "exact": fz.Policy.exact(),
    "compact": fz.Policy.compact16(),
    "compact, 4 bits": fz.Policy.compact16("4-bit"),
    "in 8 bits": fz.Policy(moment="8-bit", gather="8-bit"),
    "bf16": fz.Policy.bf16_states(),
}


@given(
    chosen=strategies.transforms(patterns=scenarios.BLOCKS),
    world=st.integers(1, 3),
    policy=st.sampled_from(sorted(POLICIES)),
    members=st.integers(1, 3),
    keeps=st.booleans(),
)
def test_there_and_back(chosen: Any, world: int, policy: str, members: int, keeps: bool) -> None:
    """Of any formats, on any ranks, wherever they lie; each goes on as if nothing had been."""
    loss, _ = scenarios.stack(dtype=torch.float32)
    batches = scenarios.vector_batches(world, dtype=torch.float32)

    def rank_main(rank: int) -> None:
        own = fz.train_step(loss, fz.adamw(0.01), POLICIES[policy])
        step = counted(strategies.apply(own, [pair for pair in chosen if pair[0] != "donate"]))
        states = []
        for seed in range(members):
            state = step.init(scenarios.stack(seed=seed, dtype=torch.float32)[1], seed=seed)
            x, y = [part.to(state.layout.rows[0].policy.compute) for part in batches[rank]]
            state, _ = step(state, x, y)
            if keeps:
                outputs, pullback = step.vjp(state, x, y)
                state = step.add_grads(state, pullback(torch.ones_like(outputs))[0])
            states.append(state)
        stacked = fz.stack(states)
        assert not any(tree.away for tree in trees_of((stacked.params, stacked.grads, stacked.moments)))
        back = fz.unstack(stacked)
        assert (stacked.seed, [state.seed for state in back]) == (0, [0] * members)
        memory = [x.untyped_storage().data_ptr() for each in (*states, stacked, *back) for x in plain(each)]
        assert len(set(memory)) == len(memory)
        for found, want in zip(back, states, strict=True):
            same(found, want)
            assert kinds(found) == kinds(want)  # put back where they lay
            same(step(found.replace(seed=want.seed), x, y)[0], step(want, x, y)[0])

    run_ranks(rank_main, world)


def kinds(state: fz.TrainState) -> list[list[type]]:
    """Of every buffer in which memory it lies."""
    trees = trees_of((state.params, state.grads, state.moments))
    return [[type(x) for own in (tree.entries, tree.held_entries) for x in own.values()] for tree in trees]


def plain(state: fz.TrainState) -> list[torch.Tensor]:
    """The tensors of a state that have memory here."""
    trees = trees_of((state.params, state.grads, state.moments))
    own = [x for tree in trees for x in (*tree.entries.values(), *tree.held_entries.values())]
    return [x for x in own if isinstance(x, torch.Tensor)]


def test_files_on_a_disk_are_read_and_written(tmp_path: Path) -> None:
    away = fz.offload(step, params=fz.Disk(tmp_path), moments=fz.Disk(tmp_path))
    states = [away.init(params) for params in (PARAMS, OTHERS)]
    back = fz.unstack(fz.stack(states))
    assert all(state.params.away and state.moments.mu.away for state in back)
    for found, want in zip(back, states, strict=True):
        same(found, want)
    mapped = pytree.map(torch.clone, states[1])  # lies on the device, until its next update
    for found, want in zip(fz.unstack(fz.stack([states[0], mapped])), states, strict=True):
        same(found, want)


def test_stacks_are_stacked() -> None:
    first, second = step.init(PARAMS), step.init(OTHERS)
    stacked = fz.stack([fz.stack([first, second]), fz.stack([second, second])])
    inner = fz.unstack(stacked)
    same(fz.unstack(inner[0])[1], second)
    same(fz.unstack(inner[0])[0], first)


def test_a_derivative_goes_through() -> None:
    """By a learning rate of updates before, and whatever comes after."""

    def run(lr: torch.Tensor, stacks: bool) -> torch.Tensor:
        own = fz.train_step(loss, fz.adamw(lr))
        states = [own(own.init(params), *BATCH)[0] for params in (PARAMS, OTHERS)]
        states = fz.unstack(fz.stack(states)) if stacks else states
        return torch.stack([own.forward(state, *BATCH) for state in states]).sum()

    found, want = [torch.func.grad(run)(torch.tensor(0.1, dtype=F64), stacks) for stacks in (True, False)]
    assert want.abs() > 1e-3
    torch.testing.assert_close(found, want, rtol=1e-12, atol=0)


def kept(state: fz.TrainState) -> fz.TrainState:
    outputs, pullback = step.vjp(state, *BATCH)
    return step.add_grads(state, pullback(torch.ones_like(outputs))[0])


def sized(width: int) -> Any:
    return {**OTHERS, "head": {"w": torch.ones(5, width, dtype=F64), "b": torch.ones(width, dtype=F64)}}


MESSAGE = r"^stack: {} of states\[1\] is not that of states\[0\]: got {}, expected {}\. The members"
DIFFERENT: dict[str, tuple[Callable[[], fz.TrainState], tuple[str, str, str]]] = {
    "an update more": (lambda: step(step.init(OTHERS), *BATCH)[0], ("the step", "1", "0")),
    "a count": (lambda: step(step.init(OTHERS), *BATCH)[0].replace(step=0), (r"state\.moments\.count", "1", "0")),
    "kept grads": (lambda: kept(step.init(OTHERS)), ("the list of trees, tensors and numbers", ".*'grads'.*", ".*")),
    "another optimizer": (
        lambda: fz.train_step(loss, fz.sgd(0.1)).init(OTHERS),
        (r"the optimizer of leaf 'blocks\.0\.b'", "sgd", "adamw"),
    ),
    "a transform": (lambda: fz.freeze(step, "head.b").init(OTHERS), ("the signature", r".*freeze.*", ".*no rules.*")),
    "a policy": (
        lambda: fz.train_step(loss, fz.adamw(0.1), fz.Policy.bf16_states()).init(OTHERS),
        ("the signature", r".*bfloat16.*", r".*Policy\(\).*"),
    ),
    "a shape": (lambda: step.init(sized(3)), (r"the shape of leaf 'head\.b'", r"\(3,\)", r"\(2,\)")),
    "a leaf more": (lambda: step.init({**OTHERS, "more": torch.ones(2)}), ("the number of leaves", "9", "8")),
    "a path": (
        lambda: step.init({"blocks": OTHERS["blocks"], "tail": OTHERS["head"]}),
        ("the path of a leaf", "tail.b", "head.b"),
    ),
    "a container": (
        lambda: step.init({**OTHERS, "blocks": tuple(OTHERS["blocks"])}),
        ("the structure of the params", ".*", ".*"),
    ),
    "a dtype": (
        lambda: (lambda state: state.replace(params=pytree.map(torch.Tensor.float, state.params)))(step.init(OTHERS)),
        (r"state\.params \(leaf 'blocks\.0\.b' and its group\)", ".*float32", ".*float64"),
    ),
    "values": (
        lambda: (lambda state: state.replace(params=state.params.map(torch.clone)))(step.init(OTHERS)),
        (r"the kind of state\.params", "values", "params"),
    ),
}


@pytest.mark.parametrize("name", sorted(DIFFERENT))
def test_what_is_no_member_is_refused(name: str) -> None:
    other, words = DIFFERENT[name]
    with pytest.raises(ValueError, match=MESSAGE.format(*words)):
        fz.stack([step.init(PARAMS), other(), step.init(PARAMS)])


def test_other_ranks_and_another_scale_are_refused() -> None:
    scaled = fz.loss_scale(step)

    def rank_main(rank: int) -> None:
        first = fz.shard_zero3(step).init(PARAMS)
        with pytest.raises(ValueError, match=r"the signature of states\[1\].*got .*no rules.*expected .*zero3"):
            fz.stack([first, step.init(OTHERS)])

    run_ranks(rank_main, 2)
    states = [scaled.init(params) for params in (PARAMS, OTHERS)]
    extra = {"loss_scale": states[1].extra["loss_scale"]._replace(scale=2.0)}
    with pytest.raises(ValueError, match=r"state\.extra\.loss_scale\.scale of states\[1\].*got 2\.0, expected 65536"):
        fz.stack([states[0], states[1].replace(extra=extra)])


def test_what_is_no_state_is_refused() -> None:
    state = step.init(PARAMS)
    with pytest.raises(ValueError, match=r"stack: got states=\[\], expected at least one"):
        fz.stack([])
    with pytest.raises(TypeError, match=r"stack: got states=TrainState, expected a list of states"):
        fz.stack(state)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"stack: got states\[1\]=3, expected a state"):
        fz.stack([state, 3])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"unstack: got state=list, expected a state that fz\.stack returned"):
        fz.unstack([state])  # type: ignore[arg-type]
    message = r"unstack: state\.\S+ \(leaf 'blocks\.0\.b' and its group\): got a tensor of shape \(\d+,\).*its members"
    with pytest.raises(ValueError, match=message):
        fz.unstack(state)
    pair: Any = pytree.map(lambda x: x[:2], fz.stack([state] * 3))
    with pytest.raises(
        ValueError, match=r"unstack: state\..*got a tensor of shape \(2, \d+\).*leading dim of 3 members"
    ):
        fz.unstack(fz.stack([state] * 3).replace(moments=pair.moments))


def test_a_dead_state_says_who_took_it() -> None:
    donating = fz.donate(step)
    old, other = donating.init(PARAMS), donating.init(OTHERS)
    donating(old, *BATCH)
    for states in ([old, other], [other, old]):
        with pytest.raises(RuntimeError, match="donated to the step that applied update 1"):
            fz.stack(states)
    dead = fz.stack([other, other])
    dead.kill("taken")
    with pytest.raises(RuntimeError, match="taken"):
        fz.unstack(dead)


VERBS: dict[str, Callable[[fz.TrainState], object]] = {
    "step": lambda state: step(state, *BATCH),
    "forward": lambda state: step.forward(state, *BATCH),
    "vjp": lambda state: step.vjp(state, *BATCH),
    "gather": lambda state: fz.gather(state.params),
    "global_norm": lambda state: fz.global_norm(state.params),
    "convert": lambda state: fz.convert(state, step),
    "tape": lambda state: fz.tape(step, state).__enter__(),
}


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_a_stacked_state_is_taken_by_no_verb_that_is_not_mapped(verb: str) -> None:
    stacked = fz.stack([step.init(PARAMS), step.init(OTHERS)])
    with pytest.raises(ValueError, match=r"leaf 'blocks\.0\.b' and its group.*shape \(2, \d+\).*in one dimension"):
        VERBS[verb](stacked)
