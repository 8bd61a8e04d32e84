"""A step that was pickled or copied is the same step: the same bits, in this process and in another one."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import in_turns
from torch import nn

import fzero as fz
from fzero.testing import assert_trees_equal, run_ranks, strategies

pytestmark = pytest.mark.filterwarnings("ignore:fz.offload to 'host'")

SCHEDULES = (fz.constant(0.1), fz.linear(0.1, 0.0, 3), fz.warmup_cosine(0.1, 1, 3))
SHARDS = {1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}
POLICIES = (
    *(None, fz.Policy.bf16_states(), fz.Policy.exact(), fz.Policy.compact24(), fz.Policy.compact16("4-bit")),
    fz.Policy.by_path({"*b": fz.Policy(), "*": fz.Policy(compute=torch.bfloat16, gather="8-bit")}),
)
MEMORIES: list[Any] = ["host"]


@pytest.fixture(scope="module", autouse=True)
def disk(tmp_path_factory: pytest.TempPathFactory) -> Any:
    MEMORIES.append(fz.Disk(tmp_path_factory.mktemp("disk")))
    yield
    MEMORIES.pop()


@fz.unit
def block(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(x @ p["w"].to(x.dtype) + p["b"].to(x.dtype))


def loss(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for own in p["blocks"]:
        x = block(own, x)
    return ((x @ p["head"].to(x.dtype) - y) ** 2).mean()


def scaled(by: float, p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return by * loss(p, x, y)


class Loss:
    def __call__(self, p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss(p, x, y)

    def half(self, p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss(p, x, y) / 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 8, bias=False)
        self.register_buffer("shift", torch.arange(8.0))
        self.blocks[1].weight = self.blocks[0].weight
        self.head.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for own in self.blocks:
            x = torch.tanh(own(x))
        return self.head(x) + self.shift


def of_module(apply: Callable[..., torch.Tensor], p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((apply(p, x) - y) ** 2).mean()


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 2


def params() -> Any:
    blocks = [{"w": numbers(8, 8, seed=i), "b": numbers(8, seed=i + 2)} for i in range(2)]
    return {"blocks": blocks, "head": numbers(8, 8, seed=4)}


def net() -> tuple[Any, Any]:
    module = Net()
    with torch.no_grad():
        for i, param in enumerate(module.parameters()):
            param.copy_(numbers(*param.shape, seed=i))
    return fz.functional(module)


def batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    return numbers(4, 8, seed=10 + rank), numbers(4, 8, seed=20 + rank)


def trained(rank: int, first: fz.Step, second: fz.Step, given: Any = None) -> Any:
    """All that a training shows; where there are two steps, each takes the states of the other."""
    state = first.init(params() if given is None else given)
    outputs, pullback = second.vjp(state, *batch(rank))
    grads, cotangents = pullback(torch.ones_like(outputs))
    said = [outputs.clone(), fz.gather(grads), cotangents]
    state, metrics = first.update(state, grads)
    said.append(metrics)
    for step in (second, first):
        state, metrics = step(state, *batch(rank))
        said.append(metrics)
    return [*said, fz.gather((state.params, state.moments, state.extra)), second.forward(state, *batch(rank))]


def copies(step: fz.Step) -> list[fz.Step]:
    return [pickle.loads(pickle.dumps(step)), copy.deepcopy(step)]


def check(rank: int, step: fz.Step, given: Any = None) -> Any:
    expected = trained(rank, step, step, given)
    for other, whose in zip(copies(step), (step, None), strict=True):
        assert other.signature == step.signature and str(other) == str(step)
        assert_trees_equal(trained(rank, whose or other, other, given), expected)
    return expected


def elsewhere(rank: int, said: bytes, given: Any = None) -> Any:
    step = pickle.loads(said)
    return trained(rank, step, step, given)


def check_everywhere(step: fz.Step, world: int, given: Any = None) -> None:
    """On threads of this process, and on processes of their own."""
    here = run_ranks(functools.partial(check, step=step, given=given), world)
    there = run_ranks(functools.partial(elsewhere, said=pickle.dumps(step), given=given), world, backend="processes")
    assert_trees_equal(there, here)


@st.composite
def optimizers(draw: st.DrawFn) -> fz.GradientTransformation:
    lr: Any = draw(st.sampled_from((0.05, torch.tensor(0.1), *SCHEDULES)))
    kinds = {
        "adamw": functools.partial(fz.adamw, weight_decay=draw(st.sampled_from((0.0, 0.1)))),
        "adam": functools.partial(fz.adam, weight_decay=draw(st.sampled_from((0.0, 0.1)))),
        "sgd": functools.partial(fz.sgd, momentum=draw(st.sampled_from((None, 0.9))), weight_decay=0.1),
        "lion": fz.lion,
    }
    one, other = (kinds[draw(st.sampled_from(sorted(kinds)))](lr) for _ in range(2))
    before = draw(st.lists(st.sampled_from((fz.clip_by_global_norm(0.1), fz.clip_by_value(0.01))), max_size=2))
    last = draw(st.sampled_from((one, fz.partition({"*b": one, "*": fz.chain(fz.clip_by_value(0.1), other)}))))
    return fz.chain(*before, last) if before else last


@st.composite
def steps(draw: st.DrawFn, stages: Sequence[int]) -> fz.Step:
    fn: Any = draw(st.sampled_from((loss, functools.partial(scaled, 0.5), Loss(), Loss().half)))
    step = fz.train_step(fn, draw(optimizers()), draw(st.sampled_from(POLICIES)))
    patterns = ("blocks.0.*", "blocks.1.*")
    step = strategies.apply(step, draw(strategies.transforms(stages, patterns=patterns, memories=MEMORIES)))
    for transform in draw(st.lists(st.sampled_from((freeze, count, scale)), unique=True)):
        step = transform(step)
    return step


def freeze(step: fz.Step) -> fz.Step:
    return fz.freeze(step, "head")


def count(step: fz.Step) -> fz.Step:
    return step.with_state(fz.Extra("total", "count", zeros, added))


def zeros(params: fz.Sharded) -> fz.Sharded:
    return params.map(torch.zeros_like)


def added(total: fz.Sharded, params: fz.Sharded, applied: bool) -> fz.Sharded:
    return total.map(torch.add, params)


def scale(step: fz.Step) -> fz.Step:
    named = [extra.name for extra in step.extras]
    return step if "loss_scale" in named else fz.loss_scale(step, interval=2)


@settings(max_examples=max(4, settings().max_examples // 3))
@given(data=st.data(), world=st.integers(1, 2))
def test_drawn_steps(data: st.DataObject, world: int) -> None:
    step = data.draw(steps((0,) if world == 1 else (1, 2, 3)))
    check_everywhere(step, world)


@in_turns(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_the_function_of_a_module(stage: int) -> None:
    apply, params = net()
    step = SHARDS[stage](fz.remat(fz.train_step(functools.partial(of_module, apply), fz.adamw(0.1))))
    check_everywhere(step, 2, params)
    other, again = pickle.loads(pickle.dumps((apply, params)))
    assert other.__name__ == apply.__name__ == "apply" and copy.deepcopy(apply) is apply
    assert again.frozen == params.frozen == ("head.weight",)
    x = numbers(3, 8)
    assert_trees_equal(other(again, x), apply(params, x))
    with pytest.raises(ValueError, match=r"missing \['blocks.0.weight'\]"):
        other({name: leaf for name, leaf in again.items() if name != "blocks.0.weight"}, x)
    trains_all = fz.train_step(functools.partial(of_module, other), fz.sgd(0.1))
    with pytest.raises(ValueError, match=r"'head.weight' has requires_grad=False in the module"):
        trains_all.forward(trains_all.init(dict(params)), *batch(0))


def test_every_transform_and_with_fn() -> None:
    """Compiling takes longer than all else here: that the step has the rule must do."""
    step = fz.compile(fz.autocast(fz.train_step(loss, fz.sgd(0.1), has_aux=True)), "blocks.*")
    step = fz.fuse_update(fz.donate(fz.accumulate(fz.remat(step), 2, in_dims=(0, None))), norm="held")
    for other in (*copies(step), *copies(fz.with_fn(step, scaled, has_aux=True))):
        assert (str(other).split("\n")[1:], other.signature) == (str(step).split("\n")[1:], step.signature)
        assert (other.rules, other.microbatches, other.fusion) == (step.rules, step.microbatches, step.fusion)
        assert {*map(hash, other.rules)} == {*map(hash, step.rules)} and other.donates and other.has_aux


def over_a_mesh(rank: int, replicas: int, kept: bool) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (replicas, 2), mesh_dim_names=("copies", "dp"))
    step = fz.shard_zero3(fz.train_step(loss, fz.adamw(0.1)), mesh=mesh, replicate="copies", pattern="blocks.*")
    expected = check(rank, step)
    said = pickle.dumps(step)
    assert fz.shard_zero1(pickle.loads(said), mesh=mesh, replicate="copies", pattern="head").sharding == step.sharding
    if not kept:
        del mesh, step
        gc.collect()
    assert_trees_equal(elsewhere(rank, said), expected)


@in_turns(2)
@pytest.mark.parametrize(("replicas", "backend", "kept"), [(2, "threads", True), (1, "processes", False)])
def test_a_mesh_is_found_again(replicas: int, backend: Any, kept: bool) -> None:
    run_ranks(functools.partial(over_a_mesh, replicas=replicas, kept=kept), 2 * replicas, backend=backend)


def over_one_axis(rank: int, of_state: bool = False) -> bytes:
    mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    step = fz.shard_zero2(fz.train_step(loss, fz.adamw(0.1)), mesh=mesh)
    return pickle.dumps(step(step.init(params()), *batch(rank))[0] if of_state else step)


def refused(rank: int, said: list[bytes]) -> None:
    with pytest.raises(RuntimeError, match=r"A step of rank .* expected the same rank, within their life. Make the"):
        pickle.loads(said[rank])


def test_a_mesh_is_of_its_own_run_and_rank() -> None:
    said = run_ranks(over_one_axis, 2, backend="processes")
    run_ranks(functools.partial(refused, said=said), 2, backend="processes")
    refused(1, said)
    states = run_ranks(functools.partial(over_one_axis, of_state=True), 2, backend="processes")
    with pytest.raises(RuntimeError, match=r"A state of rank 1 .* use fz.save and fz.load"):
        pickle.loads(states[1])

    def rank_main(rank: int) -> None:
        others = [b"", b""]
        torch.distributed.all_gather_object(others, over_one_axis(rank))
        refused(rank, others[::-1])

    run_ranks(rank_main, 2)


def in_use(rank: int, said: bytes) -> None:
    with pytest.raises(RuntimeError, match=r"is in use by another run: process .* Give each run a folder of its own"):
        pickle.loads(said).init(params())


def test_a_disk_is_that_folder_of_whichever_run_has_it(tmp_path: Any) -> None:
    step = fz.offload(fz.train_step(loss, fz.adamw(0.1)), moments=fz.Disk(tmp_path / "folder"))
    said = pickle.dumps(step)
    state = step.init(params())
    run_ranks(functools.partial(in_use, said=said), 1, backend="processes")
    expected = check(0, step)
    del state
    assert_trees_equal(run_ranks(functools.partial(elsewhere, said=said), 1, backend="processes")[0], expected)


def test_what_pickle_does_not_take_is_named() -> None:
    def local(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss(p, x, y)

    unnamed = lambda p, x, y: loss(p, x, y)
    under_another_name = fz.unit(scaled)  # a unit is found by its function's name: decorate that
    for fn, name in ((local, local.__qualname__), (unnamed, "<lambda>"), (under_another_name, "scaled")):
        step = fz.train_step(fn, fz.sgd(0.1))
        with pytest.raises((AttributeError, pickle.PicklingError), match=re.escape(name)):
            pickle.dumps(step)
        assert copy.deepcopy(step).fn is fn
