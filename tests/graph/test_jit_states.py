"""fz.jit over policies, further state and modules with buffers: the bits of the step without it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import scenarios
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fzero as fz
from fzero.testing import assert_trees_equal, run_ranks, strategies

pytestmark = pytest.mark.usefixtures("hazards")
POLICIES = {
    "none": None,
    "bf16 states": fz.Policy.bf16_states(),
    "exact": fz.Policy.exact(),
    "compact24": fz.Policy.compact24(),
    "compact16": fz.Policy.compact16(),
    "4-bit": fz.Policy.compact16("4-bit"),
    "stochastic": fz.Policy(param=torch.bfloat16, rounding="stochastic"),
    "by 8-bit": fz.Policy(gather="8-bit"),
}
MORE: dict[str, Callable[[fz.Step], fz.Step]] = {
    "autocast": lambda step: fz.autocast(step, torch.bfloat16),
    "ema": lambda step: fz.ema(step, 0.9),
    "lookahead": lambda step: fz.lookahead(step, 2),
    "freeze": lambda step: fz.freeze(step, "blocks.1.*|embed*"),
    "accumulate": lambda step: fz.accumulate(step, 2),
    "loss_scale": lambda step: fz.loss_scale(step),
    "remat": lambda step: fz.remat(step),
    "fuse_update": lambda step: fz.fuse_update(step),
    "donate": lambda step: fz.donate(step),
}
def trained(step: fz.Step, params: Any, batch: Callable[[int], Sequence[Any]], calls: int = 3) -> tuple[Any, ...]:
    state, seen = step.init(params), []
    for i in range(calls):
        state, metrics = step(state, *batch(i))
        seen.append({name: x.clone() for name, x in metrics.items() if isinstance(x, torch.Tensor)})
    return seen, [fz.gather(tree) for tree in (state.params, state.moments)], state.extra.get("carry")


@settings(max_examples=8)
@given(
    policy=st.sampled_from(sorted(POLICIES)),
    more=st.lists(st.sampled_from(sorted(MORE)), unique=True, max_size=4),
    stage=st.integers(0, 3),
    copies=st.booleans(),
    data=st.data(),
)
def test_drawn_policies_and_states(policy: str, more: list[str], stage: int, copies: bool, data: Any) -> None:
    names = data.draw(st.permutations([*more, "jit", *(["shard"] if stage else [])]))
    ranks = (4 if copies else 2) if stage else 1

    def main(rank: int) -> None:
        sizes = (ranks // 2 or 1, min(ranks, 2))
        mesh = torch.distributed.init_device_mesh("cpu", sizes, mesh_dim_names=("copies", "dp"))
        shard = functools.partial(getattr(fz, f"shard_zero{stage or 1}"), mesh=mesh, replicate="copies")
        every = {**MORE, "shard": shard, "jit": lambda step: fz.jit(step, backend="graph")}
        loss, params = scenarios.tiny_lm()
        optimizer = fz.chain(fz.clip_by_global_norm(0.5), fz.adamw(1e-2))
        step = fz.train_step(loss, optimizer, POLICIES[policy])
        params = {name: x.float() for name, x in params.items()}
        batch = scenarios.token_batches(ranks)[rank]
        fast, plain = [[(name, every[name]) for name in names if jit or name != "jit"] for jit in (True, False)]
        got, want = [trained(strategies.apply(step, own), params, lambda _: batch) for own in (fast, plain)]
        assert_trees_equal(got, want)

    run_ranks(main, ranks)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()) for _ in range(2)])
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def drawn(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for x in module.parameters():
        nn.init.normal_(x, std=0.2, generator=generator)


def test_batch_norm_with_a_carry() -> None:
    def main(rank: int) -> None:
        net = Net()
        drawn(net)
        apply, params, buffers = fz.functional(net, buffers=True)

        def loss(p: Any, carry: Any, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
            out, carry = apply(p, carry, x)
            return F.mse_loss(out, x), carry

        step = fz.shard_zero3(fz.carry(fz.train_step(loss, fz.adamw(1e-2)), buffers))
        generator = torch.Generator().manual_seed(rank)
        batches = torch.randn(3, 6, 4, generator=generator, dtype=torch.float64)
        got, want = [trained(own, params, lambda i: (batches[i],)) for own in (fz.jit(step, backend="graph"), step)]
        assert_trees_equal(got, want)

    run_ranks(main, 2)


def test_a_model_of_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    drawn(model)
    apply, params = fz.functional(model)
    step = fz.train_step(lambda p, ids: apply(p, input_ids=ids, labels=ids).loss, fz.adamw(1e-2))
    fast = fz.jit(step, backend="graph")
    batches = torch.randint(0, 16, (3, 2, 6), generator=torch.Generator().manual_seed(1))
    got, want = [trained(own, params, lambda i: (batches[i],)) for own in (fast, step)]
    assert_trees_equal(got, want)
    assert fast.traces == 1
