"""On a GPU: every placement, form and order against the plain float64 step on the CPU. Skipped where there is none."""

from __future__ import annotations

import functools
from typing import Any

import exactness
import pytest
import scenarios
import torch
from exactness import SCENARIOS, SHARDS
from hypothesis import given
from hypothesis import strategies as st

import fzero as fz
from fzero.base import pytree
from fzero.testing import assert_trees_equal, run_ranks, strategies

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
GPU = torch.device("cuda", 0)


there = functools.partial(exactness.there, device=GPU)
here = functools.partial(exactness.there, device="cpu")
check = functools.partial(exactness.check, device="cuda:0", rtol=1e-9)


@given(
    scenario=st.sampled_from(sorted(SCENARIOS)),
    chosen=strategies.transforms(stages=(1, 2, 3), patterns=scenarios.BLOCKS),
    world=st.integers(1, 3),
)
def test_drawn_transforms(scenario: str, chosen: Any, world: int) -> None:
    check(scenario, chosen, world)


@given(
    scenario=st.sampled_from(sorted(SCENARIOS)), chosen=strategies.transforms(stages=(0,), patterns=scenarios.BLOCKS)
)
def test_drawn_transforms_unsharded(scenario: str, chosen: Any) -> None:
    check(scenario, chosen, 1)


@pytest.mark.parametrize("stage", [0, 3])
def test_disk(stage: int, tmp_path: Any) -> None:
    disk = fz.Disk(str(tmp_path))
    offload = lambda step: fz.offload(step, params=disk, moments=disk)
    check("unit", [("offload", offload), ("shard", SHARDS[stage])], 1)


POLICIES = [
    fz.Policy(param=torch.bfloat16, rounding="compensated", moment="8-bit", grad=torch.bfloat16),
    fz.Policy(param=torch.bfloat16, rounding="stochastic", moment="4-bit"),
    fz.Policy(compute=torch.bfloat16, gather="8-bit"),
]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_low_precision_states(stage: int, policy: fz.Policy) -> None:
    """The same losses as on the CPU, as far as bfloat16 and 8 bits say them."""

    def losses(device: torch.device) -> list[float]:
        generator = torch.Generator().manual_seed(0)
        w = torch.randn(257, 64, generator=generator) / 16
        x = torch.randn(16, 257, generator=generator)
        step = fz.train_step(lambda p, x: torch.tanh(x @ p["w"].to(x.dtype)).square().mean(), fz.adamw(1e-2), policy)
        step = SHARDS[stage](step)
        state, out = step.init({"w": w.to(device)}), []
        for _ in range(4):
            state, metrics = step(state, x.to(device))
            out.append(metrics["loss"].item())
        return out

    for got, want in run_ranks(lambda rank: (losses(GPU), losses(torch.device("cpu"))), 2):
        torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=2e-2, atol=1e-4)


def test_a_pipeline_in_one_process() -> None:
    """The bits of one step, and the halves of a pullback."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    weights = [{"w": draw(6, 6)} for _ in range(3)]
    x, y = draw(8, 6).to(GPU), draw(8, 6).to(GPU)

    def hidden(p: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ p["w"])

    def last(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x @ p["w"] - y).square().mean()

    for schedule in (fz.schedules.gpipe, fz.schedules.zero_bubble):
        stages = [fz.train_step(fn, fz.sgd(0.1)) for fn in (hidden, hidden, last)]
        line = fz.pipeline(stages, schedule(3, 4))
        state = line.init([there(w) for w in weights])
        loss, pullback = line.vjp(state, x, y)
        grads, _ = pullback(torch.ones_like(loss))
        leaves = [w["w"].clone().to(GPU).requires_grad_() for w in weights]
        whole = (torch.tanh(torch.tanh(x @ leaves[0]) @ leaves[1]) @ leaves[2] - y).square().mean()
        whole.backward()
        torch.testing.assert_close(loss, whole.detach(), rtol=1e-12, atol=0.0)
        for got, leaf in zip(pytree.flatten(fz.gather(grads))[0], leaves, strict=True):
            torch.testing.assert_close(got, leaf.grad, rtol=1e-10, atol=1e-14)


def test_random_numbers_are_those_of_the_seed() -> None:
    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x @ p["w"], 0.5, True).square().mean()

    step = fz.remat(fz.train_step(fn, fz.adamw(1e-2)))
    params, x = there({"w": torch.ones(4, 4)}), torch.ones(5, 4, device=GPU)

    def losses() -> list[float]:
        state, out = step.init(params, seed=3), []
        for _ in range(3):
            state, metrics = step(state, x)
            out.append(metrics["loss"].item())
        return out

    first = losses()
    torch.rand(7, device=GPU)
    assert losses() == first and len({*first}) > 1


def test_checkpoints(tmp_path: Any) -> None:
    loss, params = scenarios.tiny_lm()
    step = fz.shard_zero3(fz.train_step(loss, fz.adamw(1e-2)))

    def rank_main(rank: int) -> None:
        state = step.init(there(params))
        state, _ = step(state, *there(scenarios.token_batches(2)[rank]))
        fz.save(str(tmp_path / "kept"), state)
        again = fz.load(str(tmp_path / "kept"), step, like=there(params))
        assert_trees_equal(here(fz.gather(again.params)), here(fz.gather(state.params)))

    run_ranks(rank_main, 2)


# ---- components: values go from one process's memory on the GPU to another's


def build_part(rank: int, last: bool, device: str = "cuda") -> Any:
    generator = torch.Generator().manual_seed(int(last))
    w = torch.randn(3000, 40, generator=generator, dtype=torch.float64) / 40
    step = fz.train_step(scored if last else embedded, fz.chain(fz.clip_by_global_norm(1.0), fz.adamw(1e-2)))
    return fz.shard_zero2(step), {"w": w.to(device)}


def embedded(p: Any, x: torch.Tensor) -> Any:
    assert x.device == p["w"].device
    h = torch.tanh(x @ p["w"])  # [batch, 40]
    return {"wide": h @ p["w"].T, "counts": (h > 0).sum(1), "none": h[:, :0], "mean": h.mean()}


def scored(p: Any, image: Any, y: torch.Tensor) -> torch.Tensor:
    assert {x.device for x in pytree.leaves((image, y))} == {p["w"].device}
    return ((image["wide"] @ p["w"] - y) * image["counts"][:, None]).square().mean() + image["mean"]


def two(on: str, device: str) -> tuple[list[Any], list[float]]:
    """The params of two components and the losses, after three updates."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(700, 3000, generator=generator, dtype=torch.float64)
    y = torch.randn(700, 40, generator=generator, dtype=torch.float64)
    losses = []
    with (
        fz.remote(functools.partial(build_part, last=False, device=device), 1, on, name="first") as one,
        fz.remote(functools.partial(build_part, last=True, device=device), 1, on, name="last") as other,
    ):
        states = [one.init(), other.init()]
        for _ in range(3):
            image, back = one.vjp(states[0], x)
            loss, pullback = other.vjp(states[1], image, y)
            grads, (ct, _) = pullback(torch.ones_like(loss))
            first, _ = back(ct)
            norm = fz.global_norm(first, grads)
            states = [
                component.update(state, own, grad_norm=norm)[0]
                for component, state, own in zip((one, other), states, (first, grads), strict=True)
            ]
            losses.append(float(fz.fetch(loss)))
        return [fz.gather(state.params)["w"].cpu() for state in states], losses


@pytest.mark.parametrize("on", ["threads", "processes"])
def test_components(on: str) -> None:
    """Tensors of many pieces' size, odd ones and empty ones, and cotangents on their way home."""
    (got, losses), (want, expected_losses) = two(on, "cuda"), two("threads", "cpu")
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected_losses), rtol=1e-10, atol=0.0)
    for own, other in zip(got, want, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-8, atol=1e-11)


def made_at_once(p: Any, count: torch.Tensor) -> torch.Tensor:
    return torch.arange(int(count), device=p["w"].device).to(p["w"].dtype) + p["w"][0]


def build_made(rank: int) -> Any:
    return fz.train_step(made_at_once, fz.sgd(0.1)), {"w": torch.ones(1, device="cuda", dtype=torch.float64)}


def build_summed(rank: int) -> Any:
    from fzero.components.remote import gpus

    taken: list[int] = []
    take = gpus.Reader.take

    def noted(self: Any, offer: Any, *rest: Any) -> Any:
        taken.append(offer.nbytes)
        return take(self, offer, *rest)

    gpus.Reader.take = noted  # type: ignore[assignment]

    def summed(p: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(x * torch.arange(1, len(x) + 1, device=x.device)).sum(), x.new_tensor(len(taken))])

    return fz.train_step(summed, fz.sgd(0.1)), {"w": torch.ones(1, device="cuda", dtype=torch.float64)}


def test_values_go_by_cuda_ipc() -> None:
    """In pieces that are used again and again, whatever their sizes; every element arrives."""
    with fz.remote(build_made, 1, name="made") as one, fz.remote(build_summed, 1, name="summed") as other:
        states = one.init(), other.init()
        for turn, count in enumerate((1, 1000, 20_000_001, 3, 8 << 20, 80_000_000), 1):
            x = one.forward(states[0], torch.tensor(count))
            total, taken = fz.fetch(other.forward(states[1], x)).tolist()
            whole = float(torch.arange(1.0, count + 1, dtype=torch.float64).square().sum())
            assert total == pytest.approx(whole, rel=1e-12) and taken == turn


def test_a_rank_that_dies_as_others_read_its_gpu() -> None:
    with fz.remote(build_made, 1, name="made", timeout=30.0) as one, fz.remote(build_summed, 1, name="summed") as other:
        states = one.init(), other.init()
        x = one.forward(states[0], torch.tensor(30_000_000))
        fz.fetch(other.forward(states[1], one.forward(states[0], torch.tensor(10))))
        one.group.links[0]._process.kill()  # type: ignore[attr-defined]
        with pytest.raises(fz.ComponentDied, match="made"):
            fz.fetch(other.forward(states[1], x))
        total, _ = fz.fetch(other.forward(states[1], torch.ones(4, dtype=torch.float64))).tolist()
        assert total == 10.0
