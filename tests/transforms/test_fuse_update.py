"""fuse_update: the bits of the step without it, in less memory."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import scenarios
import torch
from drawn_pipelines import Copied
from hypothesis import given
from hypothesis import strategies as st
from nightly import in_turns

import fzero as fz
from fzero.kernels.onepass import CHUNK
from fzero.testing import LiveBytes, assert_trees_close, assert_trees_equal, run_ranks

pytestmark = pytest.mark.usefixtures("hazards")  # races show

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
SHARDS: dict[int, Any] = {0: lambda step: step, 1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda: fz.adamw(1e-2, weight_decay=0.1),
    "clipped": lambda: fz.chain(fz.clip_by_global_norm(0.1), fz.adamw(1e-2)),
    "value": lambda: fz.chain(fz.clip_by_value(0.01), fz.sgd(0.1, momentum=0.9)),
    "partition": lambda: fz.chain(
        fz.clip_by_global_norm(1.0),
        fz.partition({"*w": fz.lion(1e-3), "*": fz.chain(fz.clip_by_value(0.1), fz.sgd(0.1))}),
    ),
}
POLICIES: dict[str, Any] = {
    "plain": fz.Policy(),
    "exact": fz.Policy.exact(),
    "compact16": fz.Policy.compact16(),
    "bf16 grads": fz.Policy(grad=BF16),
}

block = fz.unit(lambda p, x: torch.tanh(x @ p["w"].to(x.dtype) + p["b"].to(x.dtype)))


def shared(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A block that is called three times, one whose output is used in part, one that is called and not used."""
    first, second, third = params["blocks"]
    h = block(first, block(second, block(first, x)))
    block(third, x)
    h = h + block(first, x) * 0 + block(second, h)
    return ((h @ params["head"]["w"].to(x.dtype) + params["head"]["b"].to(x.dtype) - y) ** 2).mean()


def plain(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for p in params["blocks"]:
        x = block(p, x)
    return ((x @ params["head"]["w"].to(x.dtype) + params["head"]["b"].to(x.dtype) - y) ** 2).mean()


def penalised(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A derivative inside: units are differentiated twice."""
    slope = torch.func.grad(lambda x: plain(params, x, y))(x)
    return plain(params, x, y) + slope.square().sum()


FUNCTIONS = {"plain": plain, "shared": shared, "penalised": penalised}


@given(
    stage=st.sampled_from([0, 1, 2, 3]),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    policy=st.sampled_from(sorted(POLICIES)),
    function=st.sampled_from(sorted(FUNCTIONS)),
    norm=st.sampled_from(["auto", "twice", "held"]),
    count=st.sampled_from([1, 2]),
    remat=st.booleans(),
    donated=st.booleans(),
    scaled=st.booleans(),
    kept=st.booleans(),
)
def test_fused_has_the_bits_of_the_step_without_it(
    stage: int,
    optimizer: str,
    policy: str,
    function: str,
    norm: str,
    count: int,
    remat: bool,
    donated: bool,
    scaled: bool,
    kept: bool,
) -> None:
    _, params = scenarios.stack(dtype=F32)
    world = 2 if stage else 1
    batches = scenarios.vector_batches(world, dtype=F32)

    def rank_main(rank: int) -> None:
        step = fz.train_step(FUNCTIONS[function], OPTIMIZERS[optimizer](), POLICIES[policy])
        step = SHARDS[stage](fz.accumulate(step, count))
        step = fz.remat(step) if remat else step
        step = fz.donate(step) if donated else step
        step = fz.loss_scale(step, 8.0) if scaled else step
        results = []
        for each in (step, fz.fuse_update(step, norm)):
            state = each.init(params, seed=3)
            for _ in range(2):
                if kept:
                    state = each.add_grads(state, each.vjp(state, *batches[rank])[1](torch.ones(()))[0])
                state, metrics = each(state, *batches[rank])
            metrics.pop("loss_scale", None)
            results.append((metrics, state.step, fz.gather(state.params), fz.gather(state.moments)))
        if function == "penalised" and stage == 1 and count == 2:  # reduced once or twice: the last bits differ
            assert_trees_close(*[(m["grad_norm"], p) for m, _, p, _ in results], rtol=1e-2, atol=1e-2)
        else:
            assert_trees_equal(*results)

    run_ranks(rank_main, world)


@pytest.mark.parametrize("norm", ["auto", "twice", "held"])
def test_thirds_that_16_bits_do_not_hold(norm: str) -> None:
    """The share of a loss of three microbatches."""
    x, y = [torch.cat([own] * 3) for own in scenarios.vector_batches(1, dtype=F32)[0]]
    step = fz.accumulate(fz.train_step(lambda p, x, y: plain(p, x, y).to(BF16), fz.sgd(1e-2)), 3)
    results = []
    for each in (step, fz.fuse_update(step, norm)):
        state, metrics = each(each.init(scenarios.stack(dtype=F32)[1]), x, y)
        results.append((metrics, fz.gather(state.params)))
    assert_trees_equal(*results)


@pytest.mark.parametrize("norm", ["auto", "twice", "held"])
@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_not_finite_is_skipped(stage: int, norm: str) -> None:
    """A loss that is not finite skips the update; a gradient too, or of it those elements, where nothing is known."""
    _, params = scenarios.stack()
    x, y = scenarios.vector_batches(1)[0]

    def rank_main(rank: int) -> None:
        step = fz.donate(fz.fuse_update(SHARDS[stage](fz.train_step(plain, fz.adamw(1e-2))), norm))
        state = step.init(params)
        before = fz.gather(state.params)
        state, metrics = step(state, x * float("nan"), y)
        assert bool(metrics["skipped"]) and state.step == 0
        assert_trees_equal(fz.gather(state.params), before)

        def sharp(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return plain(p, x, y) + torch.sqrt(p["head"]["b"][0] - p["head"]["b"][0].detach())

        state, metrics = fz.with_fn(step, sharp)(state, x, y)
        assert not torch.isfinite(metrics["grad_norm"])
        assert bool(metrics["skipped"]) == (norm != "auto")
        after = fz.gather(state.params)
        assert all(leaf.isfinite().all() for leaf in torch.utils._pytree.tree_leaves(after))  # type: ignore[attr-defined]

    run_ranks(rank_main, 2 if stage else 1)


def peak(rank: int, fuse: Any, stage: int) -> int:
    width, blocks = 384, 24
    generator = torch.Generator().manual_seed(0)
    params = {"blocks": [{"w": torch.randn(width, width, generator=generator)} for _ in range(blocks)]}
    own = fz.unit(lambda p, x: torch.tanh(x @ p["w"]))

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        for q in p["blocks"]:
            x = own(q, x)
        return x.mean()

    step = fz.donate(fuse(SHARDS[stage](fz.train_step(loss, fz.chain(fz.clip_by_global_norm(1.0), fz.adamw(1e-3))))))
    state, x = step.init(params), torch.ones(2, width)
    state, _ = step(state, x)
    with LiveBytes() as live:
        state, _ = step(state, x)
        return live.peak


@in_turns(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_never_all_live_at_once(stage: int) -> None:
    world, total = 2 if stage else 1, 24 * 384 * 384 * 4
    peaks = {}
    for norm in ("without", "auto", "held"):
        fuse = (lambda step: step) if norm == "without" else functools.partial(fz.fuse_update, norm=norm)
        with fz.testing.hazards(None):  # which keep what is given back, to poison it
            peaks[norm] = run_ranks(functools.partial(peak, fuse=fuse, stage=stage), world)[0]
    assert peaks["without"] >= total // world
    unit, chunk = total // 24, 48 * CHUNK  # what an eager update of one chunk takes
    # one or two units, gathered, as gradients and in flight
    assert peaks["auto"] <= (6 if stage else 3.5) * unit + chunk
    assert peaks["held"] <= 1.01 * peaks["without"]


def test_what_cannot_be_fused_is_refused() -> None:
    parts = fz.partition({"*w": fz.chain(fz.clip_by_global_norm(1.0), fz.sgd(0.1)), "*": fz.sgd(0.1)})
    with pytest.raises(ValueError, match=r"pulling back twice gives the norm of the gradients"):
        fz.fuse_update(fz.train_step(plain, parts), "twice")
    with pytest.raises(ValueError, match=r"got 'thrice', expected one of 'auto', 'twice', 'held'"):
        fz.fuse_update(fz.train_step(plain, fz.adamw(1e-3)), "thrice")
    with pytest.raises(ValueError, match=r"already has fusion="):
        fz.fuse_update(fz.fuse_update(fz.train_step(plain, fz.adamw(1e-3))), "held")


class _Fails(Copied):
    """The identity, which cannot be pulled back."""

    generate_vmap_rule = True

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        raise RuntimeError("cannot be pulled back")


@pytest.mark.parametrize("donates", [False, True])
def test_a_pullback_that_fails_halfway_says_what_was_updated(donates: bool) -> None:
    size = 520  # small units are updated together, once both are pulled back
    params = {name: {"w": torch.eye(size), "b": torch.zeros(size)} for name in ("head", "tail")}

    def function(p: Any, x: torch.Tensor) -> torch.Tensor:
        return block(p["tail"], _Fails.apply(block(p["head"], x))).sum()  # type: ignore[arg-type]

    step = fz.fuse_update(fz.train_step(function, fz.sgd(0.1), units=("head", "tail")))
    step = fz.donate(step) if donates else step
    state = step.init(params)
    with pytest.raises(RuntimeError, match="cannot be pulled back") as caught:
        step(state, torch.ones(1, size))
    notes = "".join(getattr(caught.value, "__notes__", []))
    assert ("donated to update 1, which had begun with 1 of its 2" in notes and "'tail.b'" in notes) == donates
    if donates:  # half of it is of another update
        with pytest.raises(RuntimeError, match="with 1 of its 2 groups"):
            _ = state.params
    else:
        assert_trees_equal(fz.gather(state.params), params)


def looking_back(p: Any, x: torch.Tensor) -> Any:
    """A weight that is used behind detach too, and params given out as aux; a unit whose name holds what joins keys."""
    x = torch.tanh(x @ p["a#b"]["w"])
    x = torch.tanh(x @ p["a#b"]["w"].detach() + p["a"]["w"])
    return x.square().mean(), {"w": p["a#b"]["w"], "row": p["a"]["w"][1:]}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_weights_behind_detach_and_params_as_aux_are_those_before_the_update(stage: int) -> None:
    generator = torch.Generator().manual_seed(0)
    params = {name: {"w": torch.randn(4, 4, dtype=F64, generator=generator)} for name in ("a", "a#b")}
    x = torch.randn(4, 4, dtype=F64, generator=generator)
    units = ("a", "a#b") if stage < 3 else ()  # leaves of units would be refused outside of them

    def rank_main(rank: int) -> None:
        step = SHARDS[stage](fz.train_step(looking_back, fz.adamw(1e-2), units=units, has_aux=True))
        fused = fz.fuse_update(fz.donate(step))
        expected, state, before = step.init(params), fused.init(params), step.init(params)
        for _ in range(3):
            expected, want = step(expected, x)
            state, got = fused(state, x)
            assert_trees_equal(got["aux"], want["aux"])
            assert_trees_equal(fz.gather(state.params), fz.gather(expected.params))
        assert_trees_equal(dict(fz.gather(before.params)), params)

    run_ranks(rank_main, 2 if stage else 1)


@pytest.mark.parametrize("norm", [None, "auto", "twice", "held"])
@pytest.mark.parametrize("memory", [None, "host"])
@pytest.mark.filterwarnings("ignore:fz.offload to 'host':UserWarning")
def test_an_update_of_nothing_counts(norm: str | None, memory: Any) -> None:
    """All is frozen for a while: the schedule goes on, whatever updates."""
    clipped = [fz.clip_by_global_norm(1.0)] if norm == "twice" else []
    optimizer = fz.chain(*clipped, fz.adamw(lambda count: 1.0 / (1 + count)))
    step = fz.freeze(fz.train_step(plain, optimizer), "*")
    if memory is not None:
        step = fz.offload(step, params=memory, moments=memory)
    if norm is not None:
        step = fz.fuse_update(step, norm)
    (_, params), batch = scenarios.stack(), scenarios.vector_batches(1)[0]
    state, _ = step(step.init(params), *batch)
    assert step(state, *batch)[1]["lr"] == 0.5
