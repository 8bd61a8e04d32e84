"""examples/lora.py: factors over a frozen base, with no gradient or moment of the base anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from safetensors.torch import load_file

import fzero as fz
from fzero.testing import assert_trees_close, assert_trees_equal, run_ranks

pytest.importorskip("transformers")
EXAMPLES = Path(__file__).parent.parent / "examples"
TINY = "--width 16 --blocks 2 --heads 2 --context 16 --batch 2 --lora-rank 2 --eval-every 2 --eval-batches 1".split()


@pytest.fixture(scope="module")
def lora() -> Any:
    sys.path.insert(0, str(EXAMPLES))
    try:
        import lora
    finally:
        sys.path.remove(str(EXAMPLES))
    return lora


def adapted(lora: Any, dtype: torch.dtype | None = None) -> tuple[fz.Step, dict[str, torch.Tensor], Any]:
    """(step, params, batch); all in float64 where the dtype says so, for comparisons."""
    args = lora.options([*TINY, "--ranks", "1", "--stage", "0"])
    base = dict(lora.llama(args).named_parameters())
    step, params = lora.adapt(lora.llama(args), {name: leaf.detach() for name, leaf in base.items()}, args)
    if dtype is not None:
        generator = torch.Generator().manual_seed(0)
        params = {
            name: 0.3 * torch.randn(leaf.shape, generator=generator, dtype=dtype) for name, leaf in params.items()
        }
        step = fz.freeze(fz.train_step(step.fn, fz.adamw(1e-2)), "*.weight")
    tokens = torch.arange(32).reshape(2, 16)
    return step, params, (tokens, tokens.roll(-1, 1))


def test_the_factors_start_as_nothing(lora: Any) -> None:
    step, params, batch = adapted(lora)
    args = lora.options([*TINY, "--ranks", "1", "--stage", "0"])
    apply, base = fz.functional(lora.llama(args).bfloat16())
    want = lora.loss_of(apply)(base, *batch)
    assert_trees_close(step.forward(step.init(params), *batch), want, rtol=1e-6)


@pytest.mark.parametrize("stage", [1, 3])
def test_grads_of_the_factors_and_nothing_of_the_base(lora: Any, stage: int) -> None:
    step, params, batch = adapted(lora, torch.float64)
    base = {name: leaf for name, leaf in params.items() if not lora.is_factor(name)}
    factors = {name: leaf for name, leaf in params.items() if lora.is_factor(name)}
    assert factors and base
    want = torch.func.grad(lambda f: step.fn({name: {**base, **f}[name] for name in params}, *batch))(factors)

    def rank_main(rank: int) -> None:
        own = {1: fz.shard_zero1, 3: fz.shard_zero3}[stage](step)
        state = own.init(params)
        loss, pullback = own.vjp(state, *batch)
        grads, _ = pullback(torch.ones_like(loss))
        full = fz.gather(grads)
        assert_trees_close({name: full[name] for name in factors}, want, rtol=1e-6)  # Llama's norms compute in float32
        for _ in range(3):
            state, _ = own(state, *batch)
        for tree in (full, fz.gather(state.moments.mu), fz.gather(state.moments.nu)):
            assert all((tree[name] is None) is (name in base) for name in params)
        after = fz.gather(state.params)
        assert_trees_equal({name: after[name] for name in base}, base)
        assert not any(torch.equal(after[name], params[name]) for name in factors)

    run_ranks(rank_main, 2)


def test_the_plan_has_no_bytes_for_the_base(lora: Any) -> None:
    step, params, _ = adapted(lora)
    plan = fz.plan(step, params, world_size=1)
    factors = sum(leaf.numel() for name, leaf in params.items() if lora.is_factor(name))
    padding = 64 * 4 * sum(lora.is_factor(name) for name in params)
    assert 4 * factors <= plan.grads <= 4 * factors + padding
    assert 8 * factors <= plan.moments <= 8 * factors + 2 * padding
    leaves = optree.tree_leaves(step.init(params).moments)
    assert all(leaf.dtype == torch.float32 for leaf in leaves if isinstance(leaf, torch.Tensor))


def test_end_to_end(lora: Any, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *[sys.executable, "-W", "error", str(EXAMPLES / "lora.py"), *TINY, "--out", str(tmp_path)],
            *["--base-steps", "2", "--steps", "3", "--remat"],
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert "after 3 updates" in done.stdout and "with the factors" in done.stdout and "none" in done.stdout
    factors = load_file(tmp_path / "adapter.safetensors")
    assert factors and all(lora.is_factor(name) and leaf.dtype == torch.float32 for name, leaf in factors.items())
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
