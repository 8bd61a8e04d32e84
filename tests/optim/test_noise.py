"""fz.gradient_noise: N(0, eta / (1 + t)^gamma), the same for every sharding, and right under transforms."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import scenarios
import torch
import whole_runs
from hypothesis import given
from hypothesis import strategies as st
from nightly import by_day, by_turns, in_turns
from torch.utils import _pytree as pytree

import fzero as fz
from fzero.testing import assert_trees_close, assert_trees_equal, run_ranks, strategies

F32, F64 = torch.float32, torch.float64
NAN, INF = float("nan"), float("inf")
ETA, GAMMA, SEED = 0.3, 0.55, 7
SHARDS = {0: lambda step: step, 1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}


def mapped(fn: Any, *trees: Any) -> Any:
    return pytree.tree_map(fn, *trees)


def clipped(g: Any) -> Any:
    return whole_runs.clipped(g, torch.tensor(0.5, dtype=F64))


# where the noise comes in: (by fzero, by hand)
PLACES: dict[str, Any] = {
    "alone": (lambda noise, last: fz.chain(noise, last), lambda g, noisy: noisy(g)),
    "clipped": (
        lambda noise, last: fz.chain(noise, fz.clip_by_global_norm(0.5), last),
        lambda g, noisy: clipped(noisy(g)),
    ),
    "behind": (
        lambda noise, last: fz.chain(fz.clip_by_global_norm(0.5), noise, last),
        lambda g, noisy: noisy(clipped(g)),
    ),
}


def by_hand(loss: Any, params: Any, batches: Any, place: str, steps: int) -> Any:
    moments, noise = (mapped(torch.zeros_like, params),) * 2, fz.gradient_noise(ETA, GAMMA, SEED)
    state, norms = noise.init(params), []
    for count in range(1, steps + 1):
        g = torch.func.grad(lambda p: torch.stack([loss(p, *batch) for batch in batches]).mean())(params)
        norms.append(torch.cat([x.flatten() for x in pytree.tree_leaves(g)]).norm())  # of the mean, without noise
        added, state = noise.update(mapped(torch.zeros_like, params), state)
        g = PLACES[place][1](g, functools.partial(mapped, torch.add, added))
        params, moments = whole_runs.plain_adamw(params, g, moments, count, 0.05, 0.1, None)
    return params, norms


@pytest.mark.usefixtures("hazards")
@by_day(6)
@given(
    chosen=strategies.transforms(stages=(0, 1, 2, 3), patterns=scenarios.BLOCKS),
    world=st.integers(1, 4),
    place=st.sampled_from([*PLACES]),
)
def test_the_same_noise_for_any_transforms(chosen: Any, world: int, place: str) -> None:
    loss, params = scenarios.stack()
    optimizer = PLACES[place][0](fz.gradient_noise(ETA, GAMMA, SEED), whole_runs.adamw(0.05, 0.1))
    step = strategies.apply(fz.train_step(loss, optimizer), chosen)
    world = world if any(name.startswith("shard") for name, _ in chosen) else 1
    batches = scenarios.vector_batches(world)
    want, norms = by_hand(loss, params, batches, place, 3)

    def rank_main(rank: int) -> None:
        state = step.init(params)
        for _ in range(3):
            state, metrics = step(state, *batches[rank])
        assert_trees_close(fz.gather(state.params), want, rtol=1e-10)
        assert_trees_close(metrics["grad_norm"], norms[-1], rtol=1e-10)

    run_ranks(rank_main, world)


def test_is_normal_with_a_variance_that_fades() -> None:
    noise, zeros = fz.gradient_noise(ETA, GAMMA), {"a": torch.zeros(200_000, dtype=F64), "b": torch.zeros(999, 200)}
    state, found = noise.init(None), []
    for t in range(3):
        updates, state = noise.update(zeros, state)
        found.append(updates["a"] / math.sqrt(ETA / (1 + t) ** GAMMA))
    every = [*found, updates["b"].double().flatten() / math.sqrt(ETA / 3**GAMMA)]
    for x in every:
        below = 0.5 * (1 + torch.erf(x.sort().values / math.sqrt(2)))  # Kolmogorov and Smirnov, at 1e-4
        rank = torch.arange(1, x.numel() + 1, dtype=F64) / x.numel()
        assert (below - rank).abs().max() * math.sqrt(x.numel()) < 2.23
        for lag in (1, 32, 64):
            assert abs((x[:-lag] * x[lag:]).mean()) * math.sqrt(x.numel()) < 4.5
    for i, x in enumerate(every):
        for y in every[:i]:
            size = min(x.numel(), y.numel())
            assert abs((x[:size] * y[:size]).mean()) * math.sqrt(size) < 4.5
    one, other = (fz.gradient_noise(ETA, GAMMA, seed).update(zeros, noise.init(None))[0]["a"] for seed in (0, 1))
    assert torch.equal(one, found[0] * math.sqrt(ETA)) or torch.allclose(one, found[0] * math.sqrt(ETA))
    assert abs((one * other).mean()) / ETA * math.sqrt(one.numel()) < 4.5


# ---- the same bits, wherever the state is


def trained(rank: int, transform: Any, policy: Any = None, dtype: torch.dtype = F32) -> Any:
    stacked, params = scenarios.stack(dtype=dtype)
    batch = scenarios.vector_batches(1, dtype=dtype)[0]

    def loss(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        like = p["head"]["w"].dtype
        return stacked(p, x.to(like), y.to(like)).to(dtype)

    step = transform(fz.train_step(loss, fz.chain(fz.gradient_noise(ETA), fz.adamw(1e-2)), policy))
    state = step.init(params, seed=5)
    for _ in range(3):
        state, _ = step(state, *batch)
    return fz.gather(state.params)


@in_turns(2)
@pytest.mark.usefixtures("hazards")
@pytest.mark.parametrize("policy", [None, fz.Policy.compact16()], ids=["plain", "compact16"])
def test_bits_do_not_depend_on_where_state_lies(policy: Any, tmp_path: Path) -> None:
    want = trained(0, lambda step: step, policy)
    disk = fz.Disk(tmp_path)
    ways = [
        (1, fz.fuse_update),
        (1, lambda step: fz.donate(fz.fuse_update(step, norm="held"))),
        (1, lambda step: fz.offload(fz.donate(step), params="host", moments="host")),
        (1, lambda step: fz.offload(fz.fuse_update(step), params=disk, grads=disk, moments=disk)),
        *[(2, SHARDS[stage]) for stage in (1, 2, 3)],
        (4, lambda step: fz.donate(fz.fuse_update(fz.shard_zero2(step)))),
        (2, lambda step: fz.offload(fz.shard_zero3(step), moments="host")),
    ]
    for world, transform in ways:
        for found in run_ranks(functools.partial(trained, transform=transform, policy=policy), world):
            assert_trees_equal(found, want)
    if policy is None:
        wide = trained(0, lambda step: step, None, F64)
        for found in run_ranks(functools.partial(trained, transform=fz.shard_zero3, dtype=F64), 3):
            assert_trees_close(found, wide, rtol=1e-13)
        with pytest.raises(AssertionError):
            assert_trees_close(wide, trained(0, other_seed, None, F64), rtol=1e-3)


def other_seed(step: Any) -> Any:
    class Other:
        def init(self, params: Any, seed: int) -> Any:
            return step.init(params, seed=seed + 1)

        def __call__(self, *given: Any) -> Any:
            return step(*given)

    return Other()


def losses(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (p["w"] * x).sum() + (p["b"] ** 2).sum()


PARAMS = {"w": torch.arange(70.0, dtype=F64), "b": torch.ones(3, dtype=F64)}
ONES = torch.ones(70, dtype=F64)


def noisy_step(last: Any = None) -> fz.Step:
    return fz.train_step(losses, fz.chain(fz.gradient_noise(ETA, GAMMA), last or fz.adamw(0.1)))


def test_an_update_that_is_skipped_counts_as_none() -> None:
    step = noisy_step()
    state = step(step.init(PARAMS), ONES)[0]
    again = step(state, ONES * torch.inf)[0]
    assert_trees_equal(fz.gather(step(again, ONES)[0].params), fz.gather(step(state, ONES)[0].params))


def test_goes_on_after_save_load_and_convert(tmp_path: Path) -> None:
    def rank_main(rank: int) -> None:
        step = fz.shard_zero3(noisy_step())
        state, _ = step(step.init(PARAMS, seed=3), ONES)
        want = fz.gather(step(state, ONES)[0].params)
        fz.save(tmp_path / "it", state)
        away = fz.offload(fz.shard_zero1(fz.fuse_update(noisy_step())), moments="host")
        for own, again in (
            (step, fz.load(tmp_path / "it", step)),
            (away, fz.load(tmp_path / "it", away)),
            (away, fz.convert(state, away)),
        ):
            assert_trees_close(fz.gather(own(again, ONES)[0].params), want, rtol=1e-13)

    run_ranks(rank_main, 2)


def test_in_a_part_of_the_leaves_and_of_whole_ones() -> None:
    noise = fz.gradient_noise(ETA, GAMMA)
    added = noise.update(mapped(torch.zeros_like, PARAMS), noise.init(None))[0]
    part = fz.train_step(losses, fz.partition({"w": fz.chain(noise, fz.sgd(1.0)), "*": fz.sgd(1.0)}))
    found = fz.gather(part(part.init(PARAMS), ONES)[0].params)
    assert_trees_close(found["w"], PARAMS["w"] - (1.0 + added["w"]), rtol=1e-12)
    assert_trees_equal(found["b"], -PARAMS["b"])

    def rank_main(rank: int) -> None:
        step = fz.shard_zero3(fz.train_step(losses, fz.whole(fz.chain(noise, fz.sgd(1.0)))))
        found = fz.gather(step(step.init(PARAMS), ONES)[0].params)
        assert_trees_close(found, {"w": PARAMS["w"] - (1.0 + added["w"]), "b": -PARAMS["b"] - added["b"]}, rtol=1e-12)

    run_ranks(rank_main, 2)


# ---- transforms


def run(batch: Any, transform: Any, p: Any, eta: Any, gamma: Any, lr: Any) -> torch.Tensor:
    loss, _ = scenarios.stack(blocks=2, width=3)
    optimizer = fz.chain(fz.gradient_noise(eta, gamma), fz.sgd(lr, momentum=0.8))
    step = transform(fz.train_step(loss, optimizer))
    state = step.init(p)
    for _ in range(3):
        state, _ = step(state, *batch)
    return whole_runs.cubes(fz.gather(state.params))


def run_by_hand(batches: Any, p: Any, eta: Any, gamma: Any, lr: Any) -> torch.Tensor:
    loss, _ = scenarios.stack(blocks=2, width=3)
    moved, unit = mapped(torch.zeros_like, p), fz.gradient_noise(1.0, 0.0)
    state, zeros = unit.init(p), mapped(torch.zeros_like, scenarios.stack(blocks=2, width=3)[1])
    for t in range(3):
        grads = torch.func.grad(lambda p: torch.stack([loss(p, *batch) for batch in batches]).mean())(p)
        noise, state = unit.update(zeros, state)
        size = (eta / (1 + t) ** gamma).sqrt()
        moved = mapped(lambda b, g, n, size=size: 0.8 * b + g + size * n, moved, grads, noise)
        p = mapped(lambda p, b: p - lr * b, p, moved)
    return whole_runs.cubes(p)


NUMBERS = tuple(torch.tensor(x, dtype=F64) for x in (ETA, GAMMA, 0.05))
TRANSFORMS: dict[str, Any] = {
    "grad": lambda f, p: torch.func.grad(f, (0, 1, 2, 3))(p, *NUMBERS),
    "jvp": lambda f, p: torch.func.jvp(f, (p, *NUMBERS), mapped(torch.ones_like, (p, *NUMBERS))),
    "grad of grad": lambda f, p: torch.func.grad(lambda *a: torch.func.grad(f, 1)(*a), (0, 1, 2))(p, *NUMBERS),
    "vmap": lambda f, p: torch.func.vmap(lambda eta: f(p, eta, *NUMBERS[1:]), randomness="same")(
        torch.tensor([0.1, 0.4], dtype=F64)
    ),
}


@in_turns(5)
@pytest.mark.parametrize(("name", "on"), by_turns(TRANSFORMS, [(0, 1), (1, 2), (3, 3)]))
def test_transforms_go_on_through_it(name: str, on: tuple[int, int]) -> None:
    stage, world = on
    _, params = scenarios.stack(blocks=2, width=3)
    batches = scenarios.vector_batches(world, width=3)
    want = TRANSFORMS[name](functools.partial(run_by_hand, batches), params)

    def rank_main(rank: int) -> None:
        found = TRANSFORMS[name](functools.partial(run, batches[rank], SHARDS[stage]), params)
        size = max(x.abs().max().item() for x in pytree.tree_leaves(want))
        assert_trees_close(found, want, rtol=1e-10, atol=1e-11 * size)

    run_ranks(rank_main, world)


@in_turns(2)
@pytest.mark.parametrize(("stage", "world"), [(0, 1), (3, 2)])
def test_members_draw_as_a_map_says(stage: int, world: int) -> None:
    def rank_main(rank: int) -> None:
        step = SHARDS[stage](noisy_step(fz.sgd(1.0)))
        state = step.init(PARAMS)
        alone, states = step(state, ONES)[0], fz.stack([state] * 400)
        same = fz.unstack(torch.vmap(step, (0, None), randomness="same")(states, ONES)[0])
        assert_trees_close(fz.gather(same[-1].params), fz.gather(alone.params), rtol=1e-13)
        many = fz.unstack(torch.vmap(step, (0, None), randomness="different")(states, ONES)[0])
        noise = torch.stack([fz.gather(each.params)["w"] - PARAMS["w"] + 1.0 for each in many]) / math.sqrt(ETA)
        assert abs(noise.mean()) < 0.03 and abs(noise.std() - 1.0) < 0.03
        assert abs((noise[1:] * noise[:-1]).mean()) < 0.03 and abs((noise[:, 1:] * noise[:, :-1]).mean()) < 0.03
        with pytest.raises(RuntimeError, match="randomness"):
            torch.vmap(step, (0, None))(states, ONES)

    run_ranks(rank_main, world)


@pytest.mark.parametrize("gamma", [2000.0, 2000, -16, torch.tensor(2000.0)])
def test_with_the_largest_and_the_least_gamma(gamma: Any) -> None:
    """Noise that is gone behind update 0, and the one that grows fastest, late in a run: neither overflows."""
    late, zeros = 1 << 50, {"w": torch.zeros(50, dtype=F64)}

    def drawn(eta: Any, gamma: Any, count: int) -> torch.Tensor:
        noise = fz.gradient_noise(eta, gamma)
        state = noise.init(None)._replace(count=type(noise.init(None).count)(count))
        return noise.update(zeros, state)[0]["w"]

    assert_trees_equal(drawn(0.04, gamma, 0), drawn(0.04, 0.0, 0))
    want = drawn(1.0, 0.0, late) * (0.0 if gamma > 0 else 0.2 * (1.0 + late) ** 8)
    assert_trees_close(drawn(0.04, gamma, late), want, rtol=1e-12)
    for number in (0, 1):
        numbers = [torch.tensor(0.04, dtype=F64), torch.as_tensor(gamma, dtype=F64)]
        slope = torch.func.grad(lambda eta, gamma: drawn(eta, gamma, late).sum(), number)(*numbers)
        assert slope == 0 if gamma > 0 else slope.isfinite()


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"eta": -0.1}, ValueError, r"gradient_noise\(eta=...\): got -0.1, expected a finite number of at least 0"),
        ({"eta": NAN}, ValueError, r"gradient_noise\(eta=...\): got nan, expected a finite number of at least 0"),
        ({"eta": torch.tensor(INF)}, ValueError, r"gradient_noise\(eta=...\): got inf, expected a finite number"),
        ({"gamma": torch.tensor(NAN)}, ValueError, r"gradient_noise\(gamma=...\): got nan, expected a finite number"),
        ({"gamma": INF}, ValueError, r"gradient_noise\(gamma=...\): got inf, expected a finite number"),
        ({"gamma": -2000}, ValueError, r"gamma=...\): got -2000, expected a finite number of at least -16"),
        ({"gamma": "0.5"}, TypeError, r"gradient_noise"),
        ({"seed": 0.5}, TypeError, r"gradient_noise: got seed=0.5, expected an int"),
    ],
)
def test_other_numbers_are_refused(given: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        fz.gradient_noise(**given)
