"""fz.save and fz.load: the same bits over any ranks, in any stage and scheme."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import os
import pickle
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import NIGHTLY, by_day, in_turns

import fzero as fz
from fzero.checkpoint import chunks, files
from fzero.testing import assert_trees_equal, run_ranks


def replicated(step: fz.Step, shard: Any = fz.shard_zero3) -> fz.Step:
    """Sharded within pairs of ranks, of which each pair has a copy; of an odd number each rank has one."""
    ranks = torch.distributed.get_world_size()
    pair = 2 - ranks % 2
    mesh = torch.distributed.init_device_mesh("cpu", (ranks // pair, pair), mesh_dim_names=("copies", "dp"))
    return shard(step, mesh=mesh, replicate="copies")


STAGES = (
    *(lambda step: step, fz.shard_zero1, fz.shard_zero2, fz.shard_zero3),
    lambda step: fz.shard_zero3(fz.shard_zero1(step, pattern="blocks.*"), pattern="head.*"),  # the rest is whole
    replicated,
    functools.partial(replicated, shard=fz.shard_zero2),
)
OVER = [
    (1, 0),
    *itertools.product((1, 2, 3, 4), (1, 2, 3, 4)),
    *itertools.product((2, 3, 4), (5, 6)),
]  # ranks and stage
SCHEMES: dict[str, Any] = {
    "plain": None,
    "exact": fz.Policy.exact(),
    "compact24": fz.Policy.compact24(),
    "compact16": fz.Policy.compact16(),
    "4-bit": fz.Policy.compact16("4-bit"),
    "bf16": fz.Policy.bf16_states(),
    "gather 8-bit": fz.Policy(gather="8-bit"),
}


def params(seed: int = 0) -> Any:
    """Leaves whose sizes no number of ranks divides, in units and outside of them."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator) / 4
    return {
        "blocks": [{"w": draw(9, 9), "b": draw(9)} for _ in range(2)],
        "big": draw(9, 131),
        "scale": draw(()),
        "head": {"w": draw(131, 3), "b": draw(1)},
    }


@fz.unit
def block(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["w"].to(x.dtype) + p["b"].to(x.dtype))


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    for own in p["blocks"]:
        x = block(own, x)
    x = x @ p["big"].to(x.dtype) * p["scale"].to(x.dtype)
    return (x @ p["head"]["w"].to(x.dtype) + p["head"]["b"].to(x.dtype)).square().mean()


def ema(step: fz.Step) -> fz.Step:
    def update(average: fz.Sharded, params: fz.Sharded, applied: bool) -> fz.Sharded:
        return average.map(lambda a, p: 0.5 * a + 0.5 * p, params)

    return step.with_state(fz.Extra("ema", "ema", lambda params: params.map(lambda p: p), update))


def step_of(stage: int, scheme: str, keeps: bool = True, scale: float = 65536.0) -> fz.Step:
    optimizer = fz.chain(
        fz.clip_by_global_norm(1.0), fz.partition({"head*": fz.sgd(0.1, momentum=0.9), "*": fz.adamw(0.01)})
    )
    step = fz.train_step(loss, optimizer, SCHEMES[scheme])
    step = STAGES[stage](step)
    return fz.loss_scale(ema(step), scale) if keeps else step


def batch(rank: int) -> torch.Tensor:
    return torch.randn(4, 9, generator=torch.Generator().manual_seed(rank))


def values(state: fz.TrainState) -> Any:
    """Everything that a state is, over all ranks."""
    trees = {"params": state.params, "moments": state.moments, "ema": state.extra["ema"]}
    if state.grads is not None:
        trees["grads"] = state.grads
    kept = 1.0 if state.grads is None else state.grads.scale
    return {
        **fz.gather(trees),
        "kept": kept,
        "scale": state.extra["loss_scale"],
        "step": state.step,
        "seed": state.seed,
    }


def saved(rank: int, folder: str, stage: int, scheme: str, kept: bool, scale: float) -> Any:
    step = step_of(stage, scheme, scale=scale)
    state = step.init(params(), seed=3)
    for _ in range(2):
        state, _ = step(state, batch(rank))
    if kept:
        _, pullback = step.vjp(state, batch(rank))
        state = step.add_grads(state, pullback(torch.ones(()))[0])
    fz.save(folder, state, extra={"seen": 2})
    return values(state)


def loaded(rank: int, folder: str, stage: int, scheme: str, scale: float) -> Any:
    step = step_of(stage, scheme, scale=scale)
    state = fz.load(folder, step)
    assert fz.load_extra(folder) == {"seen": 2}
    out = values(state)
    new, _ = step(state, batch(rank))
    return out, values(new)


def check(
    folder: Path,
    first: tuple[int, int],
    second: tuple[int, int],
    scheme: str,
    kept: bool,
    scale: float = 65536.0,
    **how: Any,
) -> None:
    (world, stage), (others, new) = first, second
    same = {"folder": str(folder), "scheme": scheme, "scale": scale}
    before = run_ranks(functools.partial(saved, stage=stage, kept=kept, **same), world, **how)[0]
    after, _ = run_ranks(functools.partial(loaded, stage=new, **same), others, **how)[0]
    assert_trees_equal(after, before)


@by_day(8)
@given(
    first=st.sampled_from(OVER),
    second=st.sampled_from(OVER),
    scheme=st.sampled_from([*SCHEMES]),
    kept=st.booleans(),
    scale=st.sampled_from((65536.0, 49.0, 0.3)),
    chunk=st.sampled_from((64, 200, 4 << 20)),  # bytes; slices are of some hundreds
)
def test_the_same_bits_over_any_ranks(
    first: tuple[int, int], second: tuple[int, int], scheme: str, kept: bool, scale: float, chunk: int
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK", chunk)
        check(Path(folder) / "it", first, second, scheme, kept, scale)


SEVERAL = st.sampled_from([each for each in OVER if each[0] > 1])


@in_turns(8, "on processes, as on threads")
@settings(max_examples=max(3, settings().max_examples // 10))
@given(first=SEVERAL, second=SEVERAL, scheme=st.sampled_from([*SCHEMES]), kept=st.booleans())
def test_on_real_processes(first: tuple[int, int], second: tuple[int, int], scheme: str, kept: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for one, other in ((first, second), (second, first)):  # over what lies there
            check(Path(folder), one, other, scheme, kept, backend="processes")
        assert len(os.listdir(folder)) == second[0] + 1


PATHS = [*fz.train_step(loss, fz.sgd(0.1)).init(params()).params]


@given(data=st.data(), world=st.integers(1, 4), stage=st.integers(1, 6), scheme=st.sampled_from([*SCHEMES]))
def test_a_value_that_other_ranks_have_otherwise_is_refused(data: Any, world: int, stage: int, scheme: str) -> None:
    """One bit of one element, on one rank: by name where others hold that element, and saved where nobody does."""
    rank, kind = data.draw(st.integers(0, world - 1)), data.draw(st.sampled_from(["params", "ema"]))
    path = data.draw(st.sampled_from(PATHS))

    def rank_main(own: int) -> str:
        step = step_of(stage, scheme)
        state, _ = step(step.init(params()), batch(own))
        tree: Any = state.params if kind == "params" else state.extra["ema"]
        key, slot = tree.layout.key_of[path]
        low = tree.rank_of(key) * tree.layout.shard_numel(key)
        at = max(slot.offset - low, 0)
        alone = True
        if own == rank and key not in tree.entries:  # it is held in full, by every rank
            changed = tree.held[key].clone()
            changed[slot.offset] = 1 - changed[slot.offset]
            state = state.replace(params=tree.replaced(held={**tree.held_entries, key: changed}))
            alone = tree.axis_of(key).ranks == 1
        elif own == rank and at < min(tree.layout.shard_numel(key), slot.offset + slot.numel - low):
            first = tree.names(key)[0]
            changed = tree.placed(key).parts[0].clone()
            changed[at] = 1 - changed[at]
            tree = tree.replaced(buffers={**tree.entries, first: changed})
            state = state.replace(**({"params": tree} if kind == "params" else {"extra": {**state.extra, "ema": tree}}))
            alone = tree.axis_of(key).ranks == tree.axis_of(key).size
        alone = all(text == "True" for text in state.params.axis.exchange(str(alone), "test"))
        verbs: list[tuple[Any, str]] = [(lambda: fz.convert(state, step), kind), (lambda: fz.save(it, state), kind)]
        if kind == "params":
            verbs.append((lambda: fz.save_safetensors(f"{it}.other", state), "values"))
            verbs.append((lambda: fz.compat.save_dcp(f"{it}.dcp", state, optim=None), "params"))
        for verb, name in verbs:
            refused = pytest.raises((OSError, ValueError), match=f"hold different values of .*{name}.* of leaf '")
            with contextlib.nullcontext() if alone else refused:
                verb()
        if alone:
            assert_trees_equal(values(fz.load(it, step)), values(state))
        return "saved" if alone else "refused"

    with tempfile.TemporaryDirectory() as folder:
        it = f"{folder}/it"
        assert len({*run_ranks(rank_main, world)}) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_copies_of_the_other_sign_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    """The top bits of an even number of words: their sum alone would be the same."""

    def rank_main(rank: int) -> None:
        state = fz.shard_zero1(fz.train_step(loss, fz.sgd(0.1))).init({"w": torch.ones(128, dtype=dtype)})
        if rank == 1:
            _ = [full.neg_() for full in state.params.held.values()]
        with pytest.raises(OSError, match="hold different values of params"):
            fz.save(tmp_path, state)

    run_ranks(rank_main, 2)


@in_turns(3)
@pytest.mark.parametrize("shard", [fz.shard_zero1, fz.shard_zero2, fz.shard_zero3])
def test_equal_copies_go_into_every_kind_of_file(tmp_path: Path, shard: Any) -> None:
    def rank_main(rank: int) -> None:
        step = replicated(fz.train_step(loss, fz.adamw(0.1)), shard)
        state, _ = step(step.init(params()), batch(rank))
        expected = fz.gather(state.params)
        for save, load in (
            (fz.save, lambda folder: fz.load(folder, step)),
            (fz.save_safetensors, lambda folder: fz.load_safetensors(step, folder, like=params())),
            (fz.compat.save_dcp, lambda folder: fz.compat.load_dcp(folder, step, like=params())),
        ):
            save(tmp_path / save.__name__, state)
            assert_trees_equal(fz.gather(load(tmp_path / save.__name__).params), expected)
        assert_trees_equal(fz.gather(fz.convert(state, step).params), expected)

    run_ranks(rank_main, 4)


@in_turns(2)
@pytest.mark.filterwarnings("ignore:fz.offload to 'host'")
@pytest.mark.parametrize("memory", ["host", "disk"])
def test_state_that_is_away(tmp_path: Path, memory: str) -> None:
    place: Any = fz.Disk(tmp_path / "scratch") if memory == "disk" else memory

    def rank_main(rank: int) -> None:
        step = step_of(3, "exact")
        away = fz.offload(step, params=place, moments=place, grads=place)
        state, _ = away(away.init(params()), batch(rank))
        fz.save(tmp_path / "it", state)
        assert_trees_equal(values(fz.load(tmp_path / "it", away)), values(state))
        assert_trees_equal(values(fz.load(tmp_path / "it", step)), values(state))

    run_ranks(rank_main, 2)


@in_turns(4)
@pytest.mark.filterwarnings("ignore:fz.offload to 'host'")
@pytest.mark.parametrize("memory", [None, "host"])
@pytest.mark.parametrize(("scheme", "other"), [("plain", "plain"), ("compact24", "compact24"), ("compact24", "plain")])
def test_nothing_is_used_before_it_has_arrived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, other: str, memory: Any
) -> None:
    read = files.Folder.read_into

    def late(*given: Any) -> int:
        time.sleep(0.005)
        return read(*given)

    def rank_main(rank: int, stage: int, new: int) -> None:
        step = step_of(stage, scheme)
        state, _ = step(step.init(params()), batch(rank))
        fz.save(tmp_path, state)
        step = step_of(new, other)
        step = fz.offload(step, params=memory, moments=memory) if memory else step
        assert_trees_equal(values(fz.load(tmp_path, step)), values(state))

    monkeypatch.setattr(files.Folder, "read_into", late)
    for stage, new in ((1, 3), (3, 1)):
        run_ranks(functools.partial(rank_main, stage=stage, new=new), 2)


def copied(rank: int, stage: int) -> None:
    step = step_of(stage, "exact")
    state, _ = step(step.init(params()), batch(rank))
    expected = values(step(state, batch(rank))[0])
    for again in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert_trees_equal(values(again), values(state))
        assert again.params.axis == state.params.axis
        assert_trees_equal(values(step(again, batch(rank))[0]), expected)
    said = pickle.dumps(state)
    del state, again
    gc.collect()
    assert_trees_equal(values(step(pickle.loads(said), batch(rank))[0]), expected)


@in_turns(6)
@pytest.mark.parametrize(
    ("world", "stage", "backend"),
    [
        *[(*own, "threads") for own in ((1, 0), (2, 1), (2, 3), (3, 4))],
        *[(*own, "processes") for own in ((1, 0), (2, 1), (2, 3), (3, 4))[0 if NIGHTLY else 2 :]],
    ],
)
def test_a_state_is_copied_and_pickled(world: int, stage: int, backend: str) -> None:
    run_ranks(functools.partial(copied, stage=stage), world, backend=backend)


def test_a_pickled_state_is_of_its_own_rank() -> None:
    def rank_main(rank: int) -> bytes:
        step = step_of(3, "plain")
        state = step.init(params())
        return pickle.dumps(state)

    said = run_ranks(rank_main, 2)
    with pytest.raises(RuntimeError, match=r"use fz.save and fz.load"):
        pickle.loads(said[1])
