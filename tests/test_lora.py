"""examples/lora.py: factors over a frozen base, with no gradient or moment of the base anywhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import optree
import processes
import pytest
import torch
from nightly import at_length, in_turns
from safetensors.torch import load_file

import fzero as fz
from fzero.testing import assert_trees_equal, run_ranks

transformers = pytest.importorskip("transformers")
TINY = "--width 16 --blocks 2 --heads 2 --context 16 --batch 2 --lora-rank 2 --eval-every 2 --eval-batches 1".split()
SHARDS: dict[int, Any] = {1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}


@pytest.fixture(scope="module")
def lora() -> Any:
    return processes.example("lora")


def options(lora: Any) -> Any:
    return lora.options([*TINY, "--ranks", "1", "--stage", "0"])


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    tokens = torch.randint(256, (count, 2, 17), generator=torch.Generator().manual_seed(0))
    return [(part[:, :-1], part[:, 1:]) for part in tokens]


def adapted(lora: Any) -> tuple[fz.Step, dict[str, torch.Tensor]]:
    """The step and the params of the example."""
    args = options(lora)
    module = lora.llama(args)
    return lora.adapt(module, fz.functional(module)[1], args)


def test_the_factors_start_as_nothing(lora: Any) -> None:
    step, params = adapted(lora)
    apply, base = fz.functional(lora.llama(options(lora)))
    (batch,) = batches(1)
    want = lora.loss_of(apply)({name: leaf.bfloat16() for name, leaf in base.items()}, *batch)
    assert_trees_equal(step.forward(step.init(params), *batch), want)


@in_turns(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_the_base_keeps_its_bits_and_has_no_state(lora: Any, stage: int) -> None:
    plain, params = adapted(lora)
    step = SHARDS[stage](plain)

    def rank_main(rank: int) -> None:
        state = step.init(params)
        for _ in range(3):
            state, _ = step(state, *batches(2)[rank])
        after, (_, adam) = fz.gather(state.params), state.moments
        moments = fz.gather(adam.mu), fz.gather(adam.nu)
        for name, leaf in params.items():
            if lora.is_factor(name):
                assert after[name].dtype == torch.float32 and not torch.equal(after[name], leaf)
                assert all(tree[name].dtype == torch.float32 for tree in moments)
            else:
                assert after[name].dtype == torch.bfloat16 and torch.equal(after[name], leaf.bfloat16())
                assert all(tree[name] is None for tree in moments)
                with pytest.raises(KeyError, match="frozen"):
                    adam.mu[name]
        lora.check_nothing_of({name for name in params if not lora.is_factor(name)}, step, state, batches(2)[rank])

    run_ranks(rank_main, 2)


def test_the_plan_has_no_bytes_for_the_base(lora: Any) -> None:
    step, params = adapted(lora)
    plan = fz.plan(step, params, world_size=1)
    factors = sum(leaf.numel() for name, leaf in params.items() if lora.is_factor(name))
    padding = 64 * 4 * sum(lora.is_factor(name) for name in params)
    assert 4 * factors <= plan.grads <= 4 * factors + padding
    assert 8 * factors <= plan.moments <= 8 * factors + 2 * padding
    tensors = [leaf for leaf in optree.tree_leaves(step.init(params).moments) if isinstance(leaf, torch.Tensor)]
    assert sum(leaf.numel() * leaf.element_size() for leaf in tensors) == plan.moments
    shown = lora.describe(plan)
    total = sum(leaf.numel() for leaf in params.values())
    assert f"trained: {factors:,} parameters, stored in float32" in shown and "layers.1" not in shown
    assert f"no grads, no moments: {total - factors:,} parameters, stored in bfloat16" in shown


def test_biases_are_frozen_and_factors_lie_with_their_base(lora: Any) -> None:
    config = transformers.Qwen2Config(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    config.num_key_value_heads = 2
    with torch.device("meta"):
        module = transformers.Qwen2ForCausalLM(config)
    step, params = lora.adapt(module, fz.functional(module)[1], options(lora))
    rows = fz.plan(step, params).rows
    assert any(row.path.endswith("q_proj.base.bias") for row in rows)
    assert all(row.frozen is not lora.is_factor(row.path) for row in rows)
    assert all(leaf.is_meta for leaf in params.values())


def test_the_global_generator_is_left_alone(lora: Any) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(123)  # a state that the example's own seed can not have left
        before = torch.get_rng_state()
        first, second = adapted(lora)[1], adapted(lora)[1]
        assert torch.equal(torch.get_rng_state(), before)
    assert_trees_equal(first, second)


def test_no_paragraph_is_both_trained_on_and_held_out(lora: Any) -> None:
    paragraphs = lora.language_reference().split("\n\n")
    assert len(paragraphs) == len(set(paragraphs)) > 1000


def test_without_transformers_it_says_what_to_install(lora: Any, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(sys, "argv", ["lora.py"])
    assert lora.main() == 1
    assert "pip install '.[hf]'" in capsys.readouterr().err


def run_example(out: Path, *more: str) -> tuple[str, dict[str, torch.Tensor]]:
    """Its output, and the factors that it saved."""
    stdout = processes.run_example("lora.py", *TINY, "--out", str(out), "--steps", "3", *more).stdout
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    return stdout, load_file(out / "adapter.safetensors")


@at_length
def test_end_to_end(lora: Any, tmp_path: Path) -> None:
    stdout, factors = run_example(tmp_path, "--base-steps", "2", "--remat")
    for words in ("frozen, remat", "no grads and no moments", "after 3 of 3 updates", "with the factors"):
        assert words in stdout
    assert len(factors) == 28
    assert all(lora.is_factor(name) and leaf.dtype == torch.float32 for name, leaf in factors.items())


def test_a_base_from_a_folder(lora: Any, tmp_path: Path, capsys: Any) -> None:
    """On a rank that is a thread."""
    args = options(lora)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.GemmaConfig(
            vocab_size=384,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            head_dim=8,
            num_key_value_heads=1,
        )
        transformers.GemmaForCausalLM(config).save_pretrained(tmp_path / "base")  # its head is tied to its embedding
    transformers.ByT5Tokenizer().save_pretrained(tmp_path / "base")  # the one tokenizer that needs no vocabulary
    more = ["--out", str(tmp_path), "--steps", "3", "--base", str(tmp_path / "base"), "--ranks", "1", "--stage", "0"]
    given = lora.options([*TINY, *more])
    run_ranks(lambda rank: lora.train(rank, 1, given, lambda: False), 1)
    stdout, factors = capsys.readouterr().out, load_file(tmp_path / "adapter.safetensors")
    assert "nats per token" in stdout and "base:" not in stdout
    assert len(factors) == 14 and all(leaf.shape.numel() and args.lora_rank in leaf.shape for leaf in factors.values())


def test_a_folder_without_a_model_is_named(lora: Any, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        lora.options(["--base", str(tmp_path)])
    assert f"--base {tmp_path}: no config.json" in capsys.readouterr().err
