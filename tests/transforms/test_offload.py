"""fz.offload: the bits of the same step without it, from every memory, and nothing on the device that is not in use."""

from __future__ import annotations

import functools
import warnings
from typing import Any, cast

import exactness
import pytest
import scenarios
import torch
from hypothesis import given
from hypothesis import strategies as st
from memories import DISK, HOST, MEMORIES, OF_PROCESSES
from nightly import NIGHTLY, by_day, in_turns

import fzero as fz
from fzero.optim import _paused
from fzero.optim.base import call_fused
from fzero.stores.away import Away
from fzero.testing import assert_trees_close, assert_trees_equal, run_ranks, strategies

pytestmark = pytest.mark.usefixtures("hazards")  # races show

F64 = torch.float64
NAMES = ("host", "disk")
KINDS = ("params", "grads", "moments", "activations")


def test_it_says_so_in_the_table() -> None:
    step = fz.offload(fz.train_step(lambda p, x: x, fz.adamw(0.1)), moments=HOST, pattern="blocks.*")
    rows = step.rows([("blocks.0.w", (2,), F64), ("head", (2,), F64)])
    assert [row.moments.memory for row in rows if row.moments] == ["host", "device"]
    assert [row.params.memory for row in rows] == ["device", "device"]
    twice = fz.offload(fz.offload(step, params=HOST, pattern="blocks.*"), params=HOST, pattern="blocks.*")
    found = [row.memories for row in twice.rows([("blocks.0.w", (2,), F64), ("head", (2,), F64)])]
    assert found == [("host", "device", "host"), ("device", "device", "device")]
    assert "moments in blocks.*         offload(moments='host', pattern='blocks.*')" in str(step)
    assert "fp64, host" in str(fz.plan(step, {"blocks": [{"w": torch.ones(2, dtype=F64)}]}))


def results(rank: int, scenario: str, chosen: Any, world: int) -> tuple[Any, Any]:
    """What every verb of a step returns: what is held to the bit, and what is rounded (derivatives of derivatives)."""
    make, batches = exactness.SCENARIOS[scenario]
    loss, params = make()
    step = fz.train_step(loss, fz.chain(fz.clip_by_global_norm(0.5), fz.adamw(1e-2)))
    step = strategies.apply(step, chosen)
    state, batch, out = step.init(params), batches(world)[rank], []
    for _ in range(2):
        state, metrics = step(state, *batch)
        out += [metrics["loss"], metrics["grad_norm"]]
    out.append(step.forward(state, *batch))
    loss, pullback = step.vjp(state, *batch)
    grads, _ = pullback(torch.ones_like(loss), retain_graph=True)
    again, _ = pullback(torch.full_like(loss, 2.0))
    out += [loss, fz.gather(grads), fz.gather(again), fz.global_norm(grads)]
    product = fz.hvp(step, state, grads, *batch)
    state = step.add_grads(step.add_grads(state, grads), again)
    new, metrics = step.update(state, grads)
    out += [metrics["grad_norm"], fz.gather(new.params), fz.gather(new.moments), new.step]
    return out, fz.gather(product)


@by_day(6)
@given(
    scenario=st.sampled_from(sorted(exactness.SCENARIOS)),
    chosen=strategies.transforms(patterns=scenarios.BLOCKS, memories=MEMORIES),
    world=st.integers(1, 3),
)
def test_the_bits_are_those_of_the_step_without_it(scenario: str, chosen: Any, world: int) -> None:
    without = [(name, transform) for name, transform in chosen if "offload" not in name]
    world = world if any("shard" in name for name, _ in chosen) else 1

    def both(rank: int) -> None:
        got, want = (results(rank, scenario, each, world) for each in (chosen, without))
        assert_trees_equal(got[0], want[0])
        assert_trees_close(got[1], want[1], rtol=1e-11)

    run_ranks(both, world)


def on_a_process(rank: int, chosen: Any, world: int) -> Any:
    return [results(rank, scenario, chosen, world) for scenario in sorted(exactness.SCENARIOS)]


SOME = [(2, 2, 1), (3, 3, 0)]


@in_turns(5, "on processes, as on threads")
@pytest.mark.parametrize(("stage", "world", "memory"), [*SOME, (1, 3, 1), (1, 2, 0), (3, 3, 1)] if NIGHTLY else SOME)
def test_on_gloo_processes(stage: int, world: int, memory: int) -> None:
    others = [("it", exactness.SHARDS[stage]), ("remat", fz.remat), ("donate", fz.donate)]
    away = [("offload", functools.partial(fz.offload, **dict.fromkeys(KINDS, OF_PROCESSES[memory])))]
    got, want = (
        run_ranks(functools.partial(on_a_process, chosen=chosen, world=world), world, backend="processes")
        for chosen in ([*others, *away], others)
    )
    for one, other in zip(got, want, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            assert_trees_equal(mine[0], theirs[0])
            assert_trees_close(mine[1], theirs[1], rtol=1e-11)


SCHEMES = {
    "exact": fz.Policy.exact(),
    "compact24": fz.Policy.compact24(),
    "compact16": fz.Policy.compact16(),
    "4-bit": fz.Policy.compact16("4-bit"),
    "bf16": fz.Policy.bf16_states(),
    "masters": fz.Policy(param=torch.float32, grad=torch.bfloat16, compute=torch.bfloat16),
    "by 8-bit": fz.Policy(gather="8-bit"),
}


# a drawn composition has any of them; what a scheme stores is written alike where no slice is gathered
@in_turns(9)
@pytest.mark.parametrize(("scheme", "stage"), [*((scheme, 3) for scheme in SCHEMES), ("exact", 1), ("compact16", 1)])
def test_every_scheme(scheme: str, stage: int) -> None:
    more = stage == 3 and scheme in (("exact", "4-bit") if NIGHTLY else ("exact",))
    others = [fz.lion(1e-3), fz.sgd(0.1, momentum=0.9)] if more else []
    optimizers = [fz.adamw(1e-2), *others]

    def train(transform: Any, optimizer: Any, rank: int) -> Any:
        loss, params = scenarios.tiny_lm(dtype=torch.float32)
        step = transform(exactness.SHARDS[stage](fz.train_step(loss, optimizer, SCHEMES[scheme])))
        state = step.init(params)
        for _ in range(2):
            state, metrics = step(state, *scenarios.token_batches(2)[rank])
        return fz.gather(state.params), fz.gather(state.moments), metrics

    def rank_main(rank: int) -> None:
        for optimizer in optimizers:
            for place, fused in enumerate((lambda step: step, fz.fuse_update)):
                want = train(fused, optimizer, rank)
                for memory in MEMORIES if NIGHTLY else (MEMORIES[(place + len(scheme)) % 2],):
                    away = functools.partial(fz.offload, params=memory, grads=memory, moments=memory)
                    assert_trees_equal(train(lambda step, away=away: away(fused(step)), optimizer, rank), want)

    run_ranks(rank_main, 2 if stage else 1)


def wide(blocks: int = 4, width: int = 64) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(0)
    params = {"blocks": [{"w": torch.randn(width, width, generator=generator) / 8} for _ in range(blocks)]}
    block = fz.unit(lambda p, x: torch.tanh(x @ p["w"]))
    return lambda p, x: functools.reduce(lambda x, q: block(q, x), p["blocks"], x).square().mean(), params


@pytest.mark.parametrize("memory", MEMORIES, ids=NAMES)
def test_what_is_offloaded_lies_there(memory: Any) -> None:
    loss, params = wide()
    step = fz.offload(fz.train_step(loss, fz.adamw(1e-3)), params=memory, grads=memory, moments=memory)
    state, x = step.init(params), torch.ones(2, 64)
    for _ in range(2):
        out, pullback = step.vjp(state, x)
        grads, _ = pullback(torch.ones_like(out))
        kept = step.add_grads(state, grads)
        trees = [state.params, state.moments.mu, state.moments.nu, grads, kept.grads]
        assert all(isinstance(x, Away) for tree in trees for x in tree.entries.values())
        assert all(x.device.type == "cpu" for tree in trees for x in tree.entries.values())
        state, _ = step.update(kept, grads)


@pytest.mark.parametrize("memory", MEMORIES, ids=NAMES)
def test_a_state_is_a_value_wherever_it_lies(memory: Any) -> None:
    """Kept for later, mapped, pickled and donated, as one that lies on the device."""
    import copy
    import pickle

    import optree

    loss, params = wide()
    plain = fz.train_step(loss, fz.adamw(1e-2))
    step, x = fz.offload(plain, params=memory, grads=memory, moments=memory), torch.ones(2, 64)
    first = step.init(params)
    second, _ = step(first, x)
    third, _ = step(second, x)
    reference = plain.init(params)
    for state in (first, second, third):
        assert_trees_equal(fz.gather(state.params), fz.gather(reference.params))
        assert_trees_equal(fz.gather(state.moments.nu), fz.gather(reference.moments.nu))
        reference, _ = plain(reference, x)
    want = fz.gather(reference.params)
    leaves, spec = optree.tree_flatten(cast(Any, third))
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    again = optree.tree_unflatten(spec, [leaf * 1.0 if leaf.is_floating_point() else leaf for leaf in leaves])
    states = [again, copy.deepcopy(third), third.replace(seed=third.seed)]
    for state in states:
        new, _ = step(state, x)
        assert all(isinstance(x, Away) for x in new.params.entries.values()), "they go back at the next update"
        assert_trees_equal(fz.gather(new.params), want)
    assert_trees_equal(pickle.loads(pickle.dumps(fz.gather(third.params))), fz.gather(third.params))

    def constant(t: torch.Tensor) -> torch.Tensor:
        new, _ = step.update(third, want)  # takes grads to the memory, and states from it
        leaves = [leaf for state in (third, new) for leaf in optree.tree_leaves(cast(Any, state))]
        return t * sum(leaf.double().sum() for leaf in leaves)

    one = torch.ones((), dtype=F64)
    assert_trees_equal(torch.func.grad(constant)(one), constant(one))
    donating = fz.donate(step)
    new, _ = donating(third, x)
    assert_trees_equal(fz.gather(new.params), want)
    with pytest.raises(RuntimeError, match="This state was donated to the step"):
        third.params  # noqa: B018
    assert_trees_equal(fz.gather(second.params), fz.gather(step(first, x)[0].params))


def test_states_of_other_memories_are_converted() -> None:
    loss, params = wide()
    plain = fz.train_step(loss, fz.adamw(1e-2))
    steps = [plain, *[fz.offload(plain, params=m, moments=m) for m in MEMORIES]]
    state, _ = plain(plain.init(params), torch.ones(2, 64))
    want = fz.gather((state.params, state.moments))
    for step in (*steps, *steps[::-1]):
        state = fz.convert(state, step)
        assert_trees_equal(fz.gather((state.params, state.moments)), want)
    with pytest.raises(ValueError, match=r"got a state of another step.*fz.convert\(state, step\)"):
        steps[1](state, torch.ones(2, 64))


def test_bad_input_is_refused() -> None:
    step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.adamw(1e-2))
    with pytest.raises(ValueError, match="got nothing to offload, expected params="):
        fz.offload(step)
    for memory in ("cuda", "disk", 3, torch.device("cpu")):
        with pytest.raises((TypeError, ValueError), match=r"offload\(moments=...\): got .*expected 'host', an fz.Disk"):
            fz.offload(step, moments=memory)  # type: ignore[arg-type]
    both = fz.offload(fz.offload(step, params=HOST), params=DISK, pattern="w")
    for ask in (fz.plan, lambda step, params: step.init(params)):
        with pytest.raises(ValueError, match=r"offload\(params=Disk\(.*the pattern 'no' matches no leaf. The leaves"):
            ask(fz.offload(step, params=DISK, pattern="no"), {"w": torch.ones(2)})
        with pytest.raises(ValueError, match=r"'params in' of leaf 'w' is set twice: by offload.*offload.*Keep one"):
            ask(both, {"w": torch.ones(2)})


def test_it_says_once_that_the_host_saves_nothing_here() -> None:
    from fzero.stores import memories

    memories._warn_that_it_saves_nothing.cache_clear()
    step = fz.offload(fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.adamw(1e-2)), moments=HOST)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        state = step.init({"w": torch.ones(2)})
        step(state, torch.ones(2))
    assert len(said) == 1 and "nothing is saved" in str(said[0].message)


@pytest.mark.parametrize("fused", [False, True])
def test_an_update_that_fails_leaves_nothing_on_its_way(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, params = scenarios.stack()
    step = fz.offload(fz.train_step(loss, fz.adamw(1e-2)), params=DISK, moments=DISK)
    step = fz.fuse_update(step, norm="held") if fused else step
    plainly, calls = call_fused, []

    def fails_later(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("the second group")
        return plainly(*args)

    monkeypatch.setattr(_paused, "call_fused", fails_later)
    with fz.testing.hazards(1):  # which asks at its end
        state = step.init(params)
        with pytest.raises(RuntimeError, match="the second group"):
            step(state, *scenarios.vector_batches(1)[0])
