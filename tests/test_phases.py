"""Leaves that are frozen and thawed in the middle of a run: torch's optimizers with `requires_grad` toggled."""

from __future__ import annotations

import dataclasses
import functools
import json
import pickle
import tempfile
from collections.abc import Sequence
from typing import Any

import phases
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from nightly import by_day, in_turns
from phases import LEAVES, OPTIMIZERS, PROGRESSIVE, Phase, freezing, go_on, leaves_of

import fzero as fz
from fzero.base import pytree
from fzero.components.remote.wire import packed, unpacked
from fzero.testing import assert_trees_close, assert_trees_equal, run_ranks, strategies

F32, F64 = torch.float32, torch.float64
UNITS = ("blocks.0.*", "blocks.1.*")


@st.composite
def drawn_phases(draw: st.DrawFn) -> tuple[Phase, ...]:
    """Five phases, in each of which some leaf trains."""
    out = []
    for _ in range(5):
        said = {path: draw(st.sampled_from(["trains", "trains", "kept", "forgotten"])) for path in LEAVES}
        said[draw(st.sampled_from(LEAVES))] = "trains"
        kept, forgotten = ([path for path, own in said.items() if own == word] for word in ("kept", "forgotten"))
        out.append(phases.phase(draw(st.integers(1, 3)), kept, forgotten))
    return tuple(out)


def chosen(stages: Sequence[int], optimizer: fz.GradientTransformation) -> st.SearchStrategy[Any]:
    """Transforms of a step, without those that keep a state, or that its optimizer does not take."""
    but = ("loss_scale",) if optimizer.by_group else ("loss_scale", "fuse_update")
    every = strategies.transforms(stages=stages, patterns=UNITS)
    return every.map(lambda own: [each for each in own if each[0] not in but])


def run_part(
    rank: int,
    world: int,
    optimizer: fz.GradientTransformation,
    part: Sequence[tuple[Phase, Any]],
    folder: str,
    first: bool,
    dtype: torch.dtype = F64,
    policy: Any = None,
    alike: bool = False,
) -> Any:
    """Some phases, each with its transforms; begins or goes on from the folder, and is saved there.

    Args:
        alike: whether all ranks have the same batches, so that gradients are of the same bits for any number of ranks.

    Returns:
        The params, the moments and what transforms keep.
    """
    loss, params = phases.loss_and_params(dtype)
    state: Any = None
    for own, others in part:
        step = strategies.apply(freezing(fz.train_step(loss, optimizer, policy), own), others)
        if state is None:
            state = step.init(params) if first else fz.load(folder, step)
        else:
            state = fz.convert(state, step)
        state = go_on(step, own, state, *((0, 1) if alike else (rank, world)), dtype)
    fz.save(folder, state)
    return fz.gather(state.params), fz.gather(state.moments), fz.gather(dict(state.extra))


def run_all(
    every: Sequence[tuple[Phase, Any]],
    optimizer: fz.GradientTransformation,
    worlds: tuple[int, int],
    at: int,
    **options: Any,
) -> list[Any]:
    """All phases, with a checkpoint before phase `at`, from which others ranks go on."""
    with tempfile.TemporaryDirectory() as folder:
        for first, world in zip((True, False), worlds, strict=True):
            part = every[:at] if first else every[at:]
            fn = functools.partial(
                run_part, world=world, optimizer=optimizer, part=part, folder=folder, first=first, **options
            )
            found = run_ranks(fn, world)
    return found


@pytest.mark.usefixtures("hazards")
@by_day(6)
@given(
    data=st.data(),
    own=drawn_phases() | st.just(PROGRESSIVE),
    name=st.sampled_from([*OPTIMIZERS]),
    clips=st.booleans(),
    at=st.integers(1, 4),
)
def test_as_torch_with_requires_grad_toggled(data: Any, own: Any, name: str, clips: bool, at: int) -> None:
    optimizer, make = OPTIMIZERS[name]
    if clips:
        optimizer = fz.chain(fz.clip_by_global_norm(phases.CLIP), optimizer)
    worlds = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    every = []
    for place, each in enumerate(own):
        world = worlds[place >= at]
        every.append((each, data.draw(chosen((0,) if world == 1 else (1, 2, 3), optimizer))))
    want = phases.by_torch(own, make, clips)
    for params, *_ in run_all(every, optimizer, worlds, at):
        assert_trees_close(leaves_of(params), want, rtol=1e-10, atol=1e-12)


SHARDS = {1: [("none", lambda step: step)], 2: [("zero1", fz.shard_zero1), ("zero2", fz.shard_zero2)]}
SHARDS |= {4: [("zero3", fz.shard_zero3)]}
POLICIES = {"exact": fz.Policy.exact(), "compact16": fz.Policy.compact16(), "float32": None}
BESIDE: dict[str, Any] = {
    "fused": fz.fuse_update,
    "donated": fz.donate,
    "moments on the host": lambda step: fz.offload(step, moments="host"),
    "all on the host": lambda step: fz.offload(step, params="host", grads="host", moments="host"),
    "norms": lambda step: dataclasses.replace(step, metrics=("leaf_norms",)),
}


@by_day(5)
@given(
    data=st.data(),
    own=drawn_phases(),
    policy=st.sampled_from([*POLICIES]),
    name=st.sampled_from(["adamw", "sgd", "radam", "of whole leaves", "muon"]),
    at=st.integers(1, 4),
)
def test_the_same_bits_over_any_ranks_in_any_memory(data: Any, own: Any, policy: str, name: str, at: int) -> None:
    optimizer, worlds = OPTIMIZERS[name][0], data.draw(st.tuples(*[st.sampled_from([1, 2, 4])] * 2))
    policy = policy if name in ("adamw", "sgd", "muon") else "float32"  # as others have no moments in 8 bits
    every = []
    for place, each in enumerate(own):
        shard = data.draw(st.sampled_from(SHARDS[worlds[place >= at]]))
        beside = data.draw(st.lists(st.sampled_from([*BESIDE]), unique=True))
        beside = [name for name in beside if name != "fused" or optimizer.by_group]
        kept = [("ema", functools.partial(fz.ema, decay=0.9))]  # which begins anew for what is thawed
        every.append((each, [shard, *kept, *[(word, BESIDE[word]) for word in beside]]))
    run = functools.partial(run_all, optimizer=optimizer, at=at, dtype=F32, policy=POLICIES[policy], alike=True)
    plain = [(each, [("ema", functools.partial(fz.ema, decay=0.9))]) for each in own]
    (params, moments, extra), *_ = run(plain, worlds=(1, 1))
    for found in run(every, worlds=worlds):
        for got, want in zip(found, (params, moments, extra), strict=True):
            assert_trees_equal(got, want)


# leaves of one unit begin at other counts
MIXED = (
    phases.phase(2, kept=["head.w"], forgotten=["blocks.0.w"]),
    phases.phase(3, kept=["blocks.0.b"], forgotten=["blocks.1.w"]),
    phases.phase(2),
    phases.phase(2, kept=["blocks.1.w", "head.b"]),
    phases.phase(2, kept=["blocks.0.b"]),
)


@in_turns(11)
@pytest.mark.parametrize("name", [*OPTIMIZERS])
def test_counts_are_of_leaves(name: str) -> None:
    """Also of those that are frozen, and in what is gathered."""
    optimizer, make = OPTIMIZERS[name]
    *_, want = phases.own_counts(MIXED)
    total, frozen = sum(own.updates for own in MIXED), MIXED[-1].kept
    for worlds, shard in (((1, 1), SHARDS[1][0]), ((2, 2), SHARDS[4][0])):
        every = [(own, [shard]) for own in MIXED]
        (params, moments, _), *_ = run_all(every, optimizer, worlds, 2)
        assert_trees_close(leaves_of(params), phases.by_torch(MIXED, make, False), rtol=1e-10, atol=1e-12)
        counts = [x for x in pytree.flatten(moments, is_count)[0] if is_count(x)]
        assert {count.value for count in counts} == {total}
        assert dict([pair for count in counts for pair in count.paused]) == {path: want[path] for path in frozen}
        late = {path: total - n for path, n in want.items() if path not in frozen and n != total}
        assert dict([pair for count in counts for pair in count.missed]) == late


def is_count(node: object) -> bool:
    return isinstance(node, pytree.Count)


def begun(optimizer: fz.GradientTransformation, *others: Phase) -> Any:
    """A state after one update of each phase, and the step of the last."""
    loss, params = phases.loss_and_params()
    state: Any = None
    for own in others:
        step = freezing(fz.train_step(loss, optimizer), own)
        state = step.init(params) if state is None else fz.convert(state, step)
        state, _ = step(state, *phases.batch(0))
    return state, step


LATE = phases.phase(1, kept=["head.w"]), phases.phase(1, forgotten=["blocks.1.w"]), phases.phase(1)


@in_turns(3)
@pytest.mark.parametrize("name", ["adamw", "amsgrad", "sgd", "lamb", "adafactor", "muon", "partition"])
def test_a_transform_goes_on_through_it(name: str) -> None:
    """The same numbers, by the formula in torch's operations; and what is frozen stays."""
    for last in (phases.phase(1), phases.phase(1, kept=["blocks.0.w"])):
        state, step = begun(OPTIMIZERS[name][0], *LATE, last)
        want, _ = step(state, *phases.batch(1))

        def after(params: Any, state: Any = state, step: Any = step) -> Any:
            new, _ = step(state.replace(params=params), *phases.batch(1))
            return new.params, pytree.leaves(new.moments)

        (params, moments), *_ = torch.func.vjp(after, state.params)
        assert_trees_close(fz.gather(params), fz.gather(want.params), rtol=1e-10)
        assert_trees_close(moments, pytree.leaves(want.moments), rtol=1e-10)


def test_gathered_moments_go_on_without_a_step() -> None:
    loss, _ = phases.loss_and_params()
    optimizer = OPTIMIZERS["adamw"][0]
    state, step = begun(optimizer, *LATE)
    params, moments, batch = fz.gather(state.params), fz.gather(state.moments), phases.batch(1)
    updates, _ = optimizer.update(torch.func.grad(loss)(params, *batch), moments, params)
    stepped = [p + u for p, u in zip(pytree.leaves(params), pytree.leaves(updates), strict=True)]
    assert_trees_close(stepped, pytree.leaves(fz.gather(step(state, *batch)[0].params)), rtol=1e-10)


def momentum(grads: Any, state: Any, params: Any) -> Any:
    new = pytree.map(lambda m, g: 0.9 * m + g, state["m"], grads)
    return pytree.map(lambda m: -0.01 * m, new), {**state, "m": new, **({"n": state["n"] + 1} if "n" in state else {})}


def counting(params: Any) -> Any:
    return {"m": pytree.map(torch.zeros_like, params), "n": 0}


def not_counting(params: Any) -> Any:
    return {"m": pytree.map(torch.zeros_like, params)}


@pytest.mark.parametrize("init", [counting, not_counting])
def test_ones_own_declared_elementwise(init: Any) -> None:
    """Each leaf has a count of its own, as on whole leaves."""
    want, _ = begun(fz.GradientTransformation(init, momentum), *LATE)
    own, _ = begun(fz.GradientTransformation(init, momentum, elementwise=True), *LATE)
    assert_trees_close(fz.gather(own.params), fz.gather(want.params), rtol=1e-10)
    if init is counting:
        assert {own.moments.rest[path]["n"] for path in LEAVES} == {1, 2, 3}


@pytest.mark.parametrize("own", [fz.lamb(0.1), fz.chain(fz.clip_by_block_norm(1.0), fz.sgd(0.1))], ids=["lamb", "clip"])
def test_a_part_whose_leaves_are_all_frozen(own: fz.GradientTransformation) -> None:
    """It has no norms of leaves to go by."""
    frozen = phases.phase(1, forgotten=[path for path in LEAVES if path.startswith("blocks.")])
    state, _ = begun(fz.partition({"blocks.*": own, "*": fz.adamw(0.1)}), frozen, frozen)
    want, _ = begun(fz.adamw(0.1), frozen, frozen)
    assert_trees_close(fz.gather(state.params), fz.gather(want.params), rtol=1e-10)


def test_it_is_said_once_of_a_leaf_how_it_is_frozen() -> None:
    loss, params = phases.loss_and_params()
    step = fz.freeze(fz.train_step(loss, fz.adamw(0.1)), "blocks.*")
    twice = r"'blocks.0.b' is set twice: by freeze\('\*.b', keep_moments=True\) and by freeze\('blocks"
    with pytest.raises(ValueError, match=twice):
        fz.freeze(step, "*.b", keep_moments=True).init(params)


def test_what_is_kept_is_planned() -> None:
    loss, params = phases.loss_and_params()
    plain = fz.train_step(loss, fz.adamw(0.1))
    moments = {}
    for word, step in {
        "trains": plain,
        "keeps": fz.freeze(plain, "blocks.*", keep_moments=True),
        "forgets": fz.freeze(plain, "blocks.*"),
    }.items():
        state, plan = step.init(params), fz.plan(step, params)
        own = sum(x.nbytes for x in pytree.leaves(state.moments))
        assert plan.moments == own
        moments[word] = own
        assert ("frozen, adamw" in str(plan)) == (word == "keeps")
    assert moments["keeps"] == moments["trains"] > moments["forgets"]


def test_counts_are_the_same_again_wherever_they_go() -> None:
    count = pytree.Count(7, (("a.b", 3),), (("c", 2),))
    assert [count.own()(path) for path in ("a.b", "c", "d")] == [4, 2, 7]
    for again in (
        pytree.Count.of(json.loads(json.dumps(count.said))),
        pickle.loads(pickle.dumps(count)),
        pytree.map(lambda x: x, {"n": count})["n"],
        unpacked(*packed(count, torch.is_tensor, "it")),
    ):
        assert again.said == count.said == (7, (("a.b", 3),), (("c", 2),))
    assert count.next().said == (8, (("a.b", 3),), (("c", 2),)) and pytree.Count(7).said == 7
    assert repr(count) == "Count(7, missed={'a.b': 3}, paused={'c': 2})"


def test_states_of_leaves_that_began_otherwise_are_not_stacked() -> None:
    one, two = (begun(fz.adamw(0.1), *own)[0] for own in (LATE, LATE[:1] + LATE[2:] + LATE[2:]))
    with pytest.raises(ValueError, match=r"state.moments.count"):
        fz.stack([one, two])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_checkpoints_have_the_own_counts(tmp_path: Any) -> None:
    """Where torch begins moments with zeros, and of moments that are kept."""
    last = phases.phase(1, kept=["blocks.1.b"], forgotten=["head.w"])
    for number, every in enumerate((LATE, (*LATE, last), (phases.phase(1), phases.phase(1, kept=["head.w"])))):
        state, step = begun(fz.adamw(0.1), *every)
        fz.compat.save_dcp(folder := tmp_path / str(number), state)
        own = {path: torch.zeros(()) for path in LEAVES}
        dcp.load({f"optim.state.{path}.step": x for path, x in own.items()}, checkpoint_id=folder, no_dist=True)
        *_, want = phases.own_counts(every)
        assert {path: x.item() for path, x in own.items()} == want
        with pytest.raises(ValueError, match=r"leaf '.*' has seen . updates, leaf 'blocks.0.b' ."):
            fz.compat.load_dcp(folder, step)
