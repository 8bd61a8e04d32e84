"""The cases of DeepSpeed's tests of a user's own backward (its test_zero_user_backward.py and others), by intent.

But for those that others draw: losses and numbers of pullbacks before an update, several models in one loss
(`test_programs`), accumulation, outputs of any shape, a list of modules as one unit, checkpoints in units and gradient
penalties (`test_drawn`), one pullback called twice (`engine/test_op`), a loss scale (`test_precision`), factors over a
frozen base (`test_lora`).

Each at every stage, with and without recomputation, by day at stage 3 only with both, on two ranks, against the same
mathematics in one process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import optree
import pytest
import reference
import scenarios
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from nightly import NIGHTLY, in_turns
from torch import nn

import fzero as fz
from fzero.testing import LiveBytes, assert_trees_close, assert_trees_equal, run_ranks

pytestmark = pytest.mark.usefixtures("hazards")  # races show

F64 = torch.float64
ONE = torch.ones((), dtype=F64)
WORLD = 2
SHARDS: dict[int, Any] = {1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}
close = functools.partial(assert_trees_close, rtol=1e-10)


ALL = [f"{stage}{form}" for stage in SHARDS for form in ("", "-remat")]


@pytest.fixture(params=ALL if NIGHTLY else ["1", "2-remat", "3", "3-remat"])
def sharded(request: pytest.FixtureRequest) -> Callable[[fz.Step], fz.Step]:
    stage, _, form = request.param.partition("-")
    return lambda step: SHARDS[int(stage)](fz.remat(step) if form else step)


class Model(nn.Module):
    """Blocks and a head; some blocks and heads may be left out of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(scenarios.Block(5, F64) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(5, 3, dtype=F64) for _ in range(2))

    def forward(self, x: torch.Tensor, use: tuple[int, ...] = (0, 1, 2), heads: tuple[int, ...] = (0, 1)) -> Any:
        for i in use:
            x = self.blocks[i](x)
        return sum(self.heads[i](x) for i in heads)


def made(seed: int = 0) -> tuple[Any, Any]:
    apply, params = fz.functional(Model())
    generator = torch.Generator().manual_seed(seed)
    return apply, {k: 0.5 * torch.randn(v.shape, generator=generator, dtype=F64) for k, v in params.items()}


def batches(count: int = WORLD, size: int = 4, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 5, generator=generator, dtype=F64), torch.randint(0, 3, (size,), generator=generator))
        for _ in range(count)
    ]


def mean_grads(fn: Any, params: Any, data: Any, scale: float = 1.0) -> Any:
    """The mean over ranks of the gradient of scale * fn."""
    grads = [torch.func.grad(lambda p: scale * fn(p, *batch))(params) for batch in data]  # type: ignore[misc]
    return optree.tree_map(lambda *g: torch.stack(g).mean(0), *grads)


# ---- accumulation


def test_inputs_without_gradients_under_accumulation() -> None:
    """Integer inputs, frozen first blocks: nothing to differentiate enters a unit; its params are freed too."""
    width, blocks = 64, 12
    generator = torch.Generator().manual_seed(0)
    params = {
        "table": torch.randn(10, width, generator=generator),
        "blocks": [{"w": torch.randn(width, width, generator=generator)} for _ in range(blocks)],
    }
    block = fz.unit(lambda p, x: torch.tanh(x @ p["w"]))

    def fn(p: Any, tokens: torch.Tensor) -> torch.Tensor:
        x = p["table"][tokens]
        for q in p["blocks"]:
            x = block(q, x)
        return x.mean()

    def rank_main(rank: int) -> None:
        step = fz.freeze(fz.train_step(fn, fz.sgd(0.1)), "table|blocks.?.*")
        step = fz.accumulate(fz.shard_zero3(step), 2)
        state, tokens = step.init(params), torch.arange(8)
        with LiveBytes() as live:
            out, pullback = step.vjp(state, tokens)
            assert live.now() < 4 * width * width, "no unit's params stay gathered"
            pullback(torch.ones_like(out))
            # two gathered, the grads of one, one that is reduced, and the reduced grads of both microbatches
            assert live.peak < 5.5 * 4 * width * width

    with fz.testing.hazards(None):  # which keep what is given back, to poison it
        run_ranks(rank_main, WORLD)


# ---- several models


@in_turns(4)
def test_a_parameter_shared_between_components(sharded: Any) -> None:
    """What two components share is a component of its own, whose outputs are its params: its cotangents are summed."""
    generator = torch.Generator().manual_seed(0)
    table = {"table": torch.randn(7, 5, generator=generator, dtype=F64)}
    models = [made(seed) for seed in range(2)]
    data = batches()
    tokens = [torch.arange(4) + rank for rank in range(WORLD)]

    def one(apply: Any) -> Any:
        return lambda p, table, tokens, x, y: F.cross_entropy(apply(p, table[tokens] + x), y)

    def joint(p: Any, tokens: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return sum(one(apply)(q, p["table"], tokens, x, y) for (apply, _), q in zip(models, p["models"], strict=True))  # type: ignore[return-value]

    params = {**table, "models": [params for _, params in models]}
    want, _, _ = reference.adamw_steps(joint, params, [(t, *b) for t, b in zip(tokens, data, strict=True)], 3, lr=1e-2)

    def rank_main(rank: int) -> None:
        shared = sharded(fz.train_step(lambda p: p["table"], fz.adamw(1e-2)))
        steps = [sharded(fz.train_step(one(apply), fz.adamw(1e-2))) for apply, _ in models]
        state = shared.init(table)
        states = [step.init(params) for step, (_, params) in zip(steps, models, strict=True)]
        for _ in range(3):
            full, pull = shared.vjp(state)
            cotangent = torch.zeros_like(full)
            for i, step in enumerate(steps):
                _, pullback = step.vjp(states[i], full, tokens[rank], *data[rank], argnums=0)
                grads, (ct, *_) = pullback(ONE)
                states[i], _ = step.update(states[i], grads)
                cotangent += ct
            state, _ = shared.update(state, pull(cotangent)[0])
        close(fz.gather(state.params)["table"], want["table"])
        for i in range(2):
            close(fz.gather(states[i].params), want["models"][i])

    run_ranks(rank_main, WORLD)


# ---- frozen params, parts that are left out


@in_turns(4)
def test_inactive_heads_and_disabled_blocks_on_some_steps(sharded: Any) -> None:
    """What was not used has a zero gradient, and AdamW still moves it by its momentum, as in one process."""
    apply, params = made()
    data = batches()
    plans: list[Any] = [((0, 1, 2), (0,)), ((0, 2), (1,)), ((1,), (0, 1)), ((), (1,))]

    def fn(use: Any, heads: Any) -> Any:
        return lambda p, x, y: F.cross_entropy(apply(p, x, use, heads), y)

    def rank_main(rank: int) -> None:
        step = sharded(fz.train_step(fn(*plans[0]), fz.adamw(1e-2)))
        plain = fz.train_step(fn(*plans[0]), fz.adamw(1e-2))
        state, expected = step.init(params), plain.init(params)
        for use, heads in plans:
            now = fz.with_fn(step, fn(use, heads))
            grads, _ = now.vjp(state, *data[rank])[1](ONE)
            want = mean_grads(fn(use, heads), fz.gather(expected.params), data)
            close(fz.gather(grads), want)
            unused = [f"blocks.{i}." for i in range(3) if i not in use]
            full = fz.gather(grads)
            assert all(not full[k].any() for k in full if k.startswith(tuple(unused) or ("-",)))
            state, _ = now.update(state, grads)
            x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
            expected, _ = fz.with_fn(plain, fn(use, heads))(expected, x, y)
        close(fz.gather(state.params), fz.gather(expected.params))

    run_ranks(rank_main, WORLD)


# ---- what DeepSpeed does not do


def losses_of(stage: int, params: Any, data: Any, fn: Any, policy: Any) -> tuple[list[torch.Tensor], Any]:
    def rank_main(rank: int) -> Any:
        step = fz.train_step(fn, fz.adamw(1e-2), policy)
        step = SHARDS[stage](step)
        state, losses = step.init(params), []
        for _ in range(10):
            state, metrics = step(state, *data[rank])
            losses.append(metrics["loss"])
        return losses, fz.gather(state.params)

    return run_ranks(rank_main, WORLD)[0]


@in_turns(2)
@pytest.mark.parametrize("policy", ["fp32", "bf16 states"])
def test_all_stages_agree_to_the_bit(policy: str) -> None:
    """Losses and params over ten steps, in float32 and with bf16 params, grads and moments."""
    dtype = torch.float32 if policy == "fp32" else torch.bfloat16
    fn, params = scenarios.stack(dtype=torch.float32)
    data = scenarios.vector_batches(WORLD, dtype=dtype)
    first, *others = [
        losses_of(stage, params, data, fn, None if policy == "fp32" else fz.Policy.bf16_states()) for stage in (1, 2, 3)
    ]
    for other in others:
        assert_trees_equal(other, first)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_states_follow_torch_over_many_steps(stage: int) -> None:
    """Multi-step parity of params for bf16 params, grads and moments: torch.optim.AdamW on a bf16 model, to the bit."""
    fn, params = scenarios.stack(dtype=torch.bfloat16)
    batch = scenarios.vector_batches(1, dtype=torch.bfloat16)[0]
    leaves, spec = optree.tree_flatten(params)
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    optimizer = torch.optim.AdamW(leaves, lr=1e-2, fused=True)
    for _ in range(10):
        optimizer.zero_grad()
        fn(optree.tree_unflatten(spec, leaves), *batch).backward()
        optimizer.step()

    def rank_main(rank: int) -> None:
        step = fz.train_step(fn, fz.adamw(1e-2), fz.Policy.bf16_states())
        step = SHARDS[stage](step) if stage else step
        state = step.init(params)
        for _ in range(10):
            state, _ = step(state, *batch)
        assert_trees_equal(fz.gather(state.params), optree.tree_unflatten(spec, [leaf.detach() for leaf in leaves]))

    run_ranks(rank_main, 1)
