"""The examples do what they say."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import exactness
import optree
import pytest
import scenarios
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import NIGHTLY, at_length, in_turns
from processes import example, run_example, start_example
from safetensors.torch import load_file

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks

ROOT = Path(__file__).parent.parent
TINY = (
    "--width 32 --blocks 1 --heads 2 --context 16 --batch 2 --eval-every 2 --eval-batches 1 --sample-bytes 4 --warmup 1"
).split()


# ---- my_transform.py


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_average_of_ones_own_is_that_of_the_transform(stage: int) -> None:
    """Which is drawn in transforms/test_ema.py."""
    loss, params = scenarios.stack()

    def rank_main(rank: int) -> None:
        batch, found = scenarios.vector_batches(2)[rank], []
        for ema in (example("my_transform").ema, fz.ema):
            step = fz.donate(ema(exactness.SHARDS[stage](fz.train_step(loss, fz.adamw(1e-2))), 0.7))
            state = step.init(params)
            for _ in range(3):
                state, _ = step(state, *batch)
            average = state.replace(params=state.extra["ema"])
            found.append((fz.gather(average.params), step.forward(average, *batch)))
        assert_trees_close(*found, rtol=1e-12)

    run_ranks(rank_main, 2)


# ---- my_optimizer.py


@settings(max_examples=10)
@given(kind=st.sampled_from(["spectral", "signum"]), stage=st.integers(0, 3), world=st.integers(1, 4))
def test_optimizers_of_ones_own_are_what_they_are_in_plain_torch(kind: str, stage: int, world: int) -> None:
    module, (loss, params) = example("my_optimizer"), scenarios.stack()
    world = world if stage else 1

    def rank_main(rank: int) -> Any:
        step = exactness.SHARDS[stage](fz.train_step(loss, getattr(module, kind)(0.1)))
        state = step.init(params)
        for _ in range(3):
            state, _ = step(state, *scenarios.vector_batches(world)[rank])
        return fz.gather(state.params)

    leaves, spec = optree.tree_flatten(params)
    momentum = [torch.zeros_like(p) for p in leaves]
    whole = [torch.cat(parts) for parts in zip(*scenarios.vector_batches(world), strict=True)]
    for count in range(3):
        grads = optree.tree_leaves(torch.func.grad(loss)(optree.tree_unflatten(spec, leaves), *whole))
        momentum = [0.9 * m + g for m, g in zip(momentum, grads, strict=True)]
        for i, m in enumerate(momentum):
            if kind == "signum" or m.ndim != 2:
                way = m.sign() if kind == "signum" else m.sign() / (1 + count) ** 0.5
            else:
                u, _, v = torch.linalg.svd(m, full_matrices=False)
                way = u @ v / (1 + count) ** 0.5
            leaves[i] = leaves[i] - 0.1 * way
    for found in run_ranks(rank_main, world):
        assert_trees_close(found, optree.tree_unflatten(spec, leaves), rtol=1e-10, atol=1e-10)


def test_the_losses_of_optimizers_of_ones_own_are_those_of_any_number_of_ranks() -> None:
    module = example("my_optimizer")
    for optimizer in (module.spectral(0.1), module.signum(0.01)):
        losses = [
            run_ranks(functools.partial(module.train, optimizer, ranks=ranks, steps=20), ranks)[0] for ranks in (1, 2)
        ]
        assert losses[0][-1] < 0.8 * losses[0][0]
        assert losses[1] == pytest.approx(losses[0], rel=1e-3)


# ---- bigger_than_memory.py


@in_turns(5, "examples as programs")
def test_a_state_larger_than_a_limit_that_the_system_enforces(tmp_path: Path) -> None:
    tiny = "--width 64 --heads 2 --context 16 --batch 1 --steps 2 --times 0.001 --limit".split()
    folders = "--folder", str(tmp_path / "state"), "--out", str(tmp_path)
    stdout = run_example("bigger_than_memory.py", *tiny, "4096", *folders).stdout
    assert "loss" in stdout and "times less than the state" in stdout
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG") and not list((tmp_path / "state").iterdir())
    if not NIGHTLY:
        return
    stdout, stderr = start_example("bigger_than_memory.py", *tiny, "64", *folders).communicate(timeout=240)
    assert "llocate memory" in stderr or "MemoryError" in stderr or "can't start new thread" in stderr, stderr


# ---- long_context.py


@at_length
def test_documents_that_one_rank_has_no_memory_for(tmp_path: Path) -> None:
    tiny = "--length 4096 --shortest 4096 --blocks 6 --memory 102 --steps 2 --eval-every 2 --eval-documents 1".split()
    stdout = run_example("long_context.py", *tiny, "--out", str(tmp_path)).stdout
    assert "it does not fit" in stdout and "llocate memory" in stdout and "of 102 MiB were taken" in stdout, stdout
    assert len(re.findall(r"^ +[02] +4,096 bytes( +\d+%){4}$", stdout, re.M)) == 2, stdout
    assert (tmp_path / "answers.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("count", "length"), [(1, 12), (3, 13), (2, 200), (2, 400)])
def test_needles_stand_where_their_digits_are_asked_for(count: int, length: int) -> None:
    needles = example("needles")
    text = torch.full((1000,), ord("x"), dtype=torch.uint8)
    whole = needles.documents(text, count, length, 0.1, torch.Generator().manual_seed(0))
    tokens, (rows, places) = whole["tokens"], (whole["needle"] >= 0).nonzero(as_tuple=True)
    said = whole["needle"][rows, places]
    assert len(said) == count * needles.needles_in(length) > 0
    assert torch.equal(tokens[rows, said], tokens[rows, places + 1]) and bool((said < places).all())
    assert torch.equal(tokens[rows, said - 1], tokens[rows, places])
    assert int((tokens == ord("x")).sum()) == tokens.numel() - 6 * len(said)


# ---- maml.py

FEW_TASKS = "--width 4 --tasks 3 --shots 2 --inner-steps 2 --steps 2 --eval-tasks 3".split()


@in_turns(5)
@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (1, 3), (2, 1), (2, 2), (2, 3)])
def test_meta_gradients_are_those_of_plain_torch(ranks: int, stage: int) -> None:
    """Also after an update of both."""
    module = example("maml")
    args = module.options([*FEW_TASKS, "--ranks", str(ranks), "--stage", str(stage)])
    draw = lambda seed: module.random_tasks(3, 2, torch.Generator().manual_seed(seed), torch.device("cpu"))

    def rank_main(rank: int) -> None:
        regressor = module.regressor(4, torch.Generator().manual_seed(0))
        maml, plain = module.Maml(regressor, args), module.PlainMaml(regressor, args)
        state = maml.outer.init(maml.params)
        for seed in (0, 1):
            grads, _ = maml.grads(state, draw(seed).share(rank, ranks))
            want, _ = plain.grads(draw(seed))
            assert any(grad.abs().max() > 0.01 for grad in want.values())
            assert_trees_close(dict(fz.gather(grads)), want, rtol=1e-10)
            state, _ = maml.update(state, draw(seed).share(rank, ranks))
            plain.update(draw(seed))
        assert_trees_close(dict(fz.gather(state.params)), plain.params, rtol=1e-10)

    run_ranks(rank_main, ranks)


@in_turns(5, "examples as programs")
def test_maml_says_how_far_it_is_from_plain_torch() -> None:
    stdout = run_example("maml.py", *FEW_TASKS, "--no-jit").stdout
    losses = re.findall(r"^(?:random weights|meta-trained) .*? ([\d.]+) +([\d.]+)$", stdout, re.M)
    assert len(losses) == 4 and losses[0] == losses[1] != losses[2] == losses[3], stdout
    apart = re.findall(r"largest difference.* is ([\d.e+-]+)", stdout)
    assert len(apart) == 2 and all(float(each) < 1e-12 for each in apart), stdout


def test_shares_of_points_must_be_equal(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        example("maml").options(["--ranks", "3"])
    assert info.value.code == 2 and "got 10, 3" in capsys.readouterr().err


# ---- generate.py


@in_turns(5, "examples as programs")
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_answers_get_better_as_weights_go_to_the_engine(ranks: str) -> None:
    pytest.importorskip("transformers")
    few = "--steps 30 --blocks 1 --answer 4 --samples 16 --prompts 16".split()
    stdout = run_example("generate.py", *few, "--ranks", ranks).stdout
    rewards = [float(each) for each in re.findall(r"^after +\d+ updates: reward ([\d.]+)$", stdout, re.M)]
    assert len(rewards) == 4 and rewards[-1] > 2 * rewards[0], stdout
    assert float(re.findall(r"are those of the trained state, to ([\d.e+-]+)$", stdout, re.M)[0]) < 1e-6, stdout


# ---- ensemble.py


@in_turns(5, "examples as programs")
def test_members_of_an_ensemble_are_single_runs(tmp_path: Path) -> None:
    tiny = "--rates 3 --seeds 2 --width 4 --batch 8 --steps 5 --eval-every 2".split()
    stdout = run_example("ensemble.py", *tiny, "--no-jit", "--out", str(tmp_path)).stdout
    rows = re.findall(r"^ +([\d.e-]+) +([01]) +([\d.]+) +([\d.e+-]+) +([\d.e+-]+)$", stdout, re.M)
    assert len(rows) == 6 and len({loss for _, _, loss, *_ in rows}) == 6, stdout
    assert all(float(params) < 1e-12 and float(losses) < 1e-12 for *_, params, losses in rows), stdout
    assert "6 models at once" in stdout and (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


# ---- train_lm.py


def check_weights(out: Path) -> None:
    module = example("transformer").Transformer(32, 1, 2, torch.Generator().manual_seed(1))
    module.load_state_dict(load_file(out / "weights.safetensors"), strict=True)
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


@in_turns(5, "examples as programs")
def test_train_lm_end_to_end(tmp_path: Path) -> None:
    stdout = run_example("train_lm.py", *TINY, "--out", str(tmp_path), "--steps", "4").stdout
    check_weights(tmp_path)
    check_computed_in_what_is_quick(stdout)
    for word in ("blocks.0.mlp.up.weight", "per rank: params", "held-out loss", "byte frequencies alone", "def "):
        assert word in stdout


def check_computed_in_what_is_quick(stdout: str) -> None:
    """A line says in what is computed, and why."""
    said = re.search(r"computing in (\w+): a small matmul takes ([\d.]+) ms in bf16 and ([\d.]+) ms in fp32", stdout)
    assert said, stdout
    assert said[1] == ("bf16" if float(said[2]) <= float(said[3]) else "fp32")
    compute = re.search(r"^blocks\.0\.mlp\.up\.weight +\S+ +\S+ +fp32, dp +fp32, dp +fp32, dp +(\w+)", stdout, re.M)
    assert compute and compute[1] == said[1], stdout


@pytest.mark.parametrize(
    ("bf16", "steps", "expected"), [(9.0, 400, ("fp32", 300)), (9.0, 7, ("fp32", 7)), (0.1, 400, ("bf16", 400))]
)
def test_train_lm_takes_fewer_updates_where_it_is_slow(
    bf16: float, steps: int, expected: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = example("train_lm")
    monkeypatch.setattr(module, "matmul_ms", lambda dtype: bf16 if dtype == torch.bfloat16 else 0.3)
    chosen = run_ranks(lambda rank: module.chosen_dtype(rank, steps, torch.device("cpu")), 2)
    assert chosen[0] == chosen[1] and chosen[0][:2] == expected
    assert ("300 updates instead of 400" in chosen[0][2]) == (expected == ("fp32", 300))


def test_a_loss_that_jumps_is_a_spike() -> None:
    is_spike = example("train_lm").is_spike
    assert is_spike(float("nan"), []) and is_spike(float("inf"), [1.0]) and is_spike(2.1, [1.0] * 10)
    assert not is_spike(1.9, [1.0] * 10) and not is_spike(9.0, [1.0] * 9)


def test_bad_options_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # where no run of the example's is kept
    with pytest.raises(SystemExit) as info:
        example("train_lm").options([*TINY, "--stage", "0"])
    assert info.value.code == 2 and "stage 0" in capsys.readouterr().err
