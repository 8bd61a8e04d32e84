"""examples/multimodal.py: the same numbers wherever its components are, and images of any number of patches."""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nightly import at_length, in_turns
from processes import EXAMPLES
from safetensors.torch import load_file

import fzero as fz

TINY = "--width 16 --vision-blocks 1 --text-blocks 1 --heads 2 --longest 4 --batch 5 --steps 2 --save-every 1".split()


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))  # it imports from the examples beside it
        import multimodal

        patch.setattr(multimodal, "TRACED", 1)
        patch.setattr(multimodal, "text_lines", functools.cache(multimodal.text_lines))  # each run reads the same
        yield multimodal


@pytest.fixture(scope="module")
def threads(example: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on threads."""
    out = tmp_path_factory.mktemp("threads")
    run(example, out, "--on", "threads")
    return out


def losses_of(out: Path) -> list[float]:
    return json.loads((out / "losses.json").read_text())


def run(example: Any, out: Path, *options: str) -> list[float]:
    example.train(example.options([*TINY, "--out", str(out), *options]), threading.Event())
    return losses_of(out)


def check_same_bits(first: Path, second: Path) -> None:
    """Of the states of both components in two checkpoints."""
    for name in ("vision", "text"):
        files = [sorted((folder / name).glob("*.safetensors")) for folder in (first, second)]
        assert len(files[0]) == len(files[1]) == 2
        for one, other in zip(*files, strict=True):
            tensors, others = load_file(one), load_file(other)
            assert tensors.keys() == others.keys() and tensors
            assert all(torch.equal(tensors[key], others[key]) for key in tensors)


@in_turns(5, "examples as programs")
@pytest.mark.parametrize("on", ["processes", pytest.param("ray", marks=at_length)])  # test_remote_ray.py is smaller
def test_the_same_bits_as_on_threads(
    on: str, example: Any, threads: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if on == "ray":
        pytest.importorskip("ray")
    assert run(example, tmp_path, "--on", on) == losses_of(threads) and len(losses_of(threads)) == 2
    stdout, stderr = capsys.readouterr()
    assert "Traceback" not in stderr, stderr
    check_same_bits(*(out / "checkpoints" / "update-000002" for out in (tmp_path, threads)))
    for phrase in ("images of", "held-out loss", "is read as"):
        assert phrase in stdout
    assert (tmp_path / "multimodal.png").read_bytes().startswith(b"\x89PNG")


def attend(q: Any, k: Any, v: Any, documents: list[int], is_causal: bool = False) -> torch.Tensor:
    assert documents == [0, q.shape[2]]
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)


def plain_losses(example: Any, args: argparse.Namespace) -> list[float]:
    """Of plain torch in one process, which takes one image after the other."""
    seeds = [torch.Generator().manual_seed(args.seed + place) for place in range(2)]
    vision = example.VisionTransformer(args.width, args.vision_blocks, args.heads, seeds[0], attend)
    text = example.Decoder(args.width, args.text_blocks, args.heads, seeds[1])
    params = [*vision.parameters(), *text.parameters()]
    optimizer = torch.optim.AdamW(params, betas=(0.9, 0.98))
    rate = fz.warmup_cosine(args.lr, args.steps, args.steps, args.lr / 20)  # the warm-up is longer than the run
    lines, losses = example.text_lines(args.longest)[0], list[float]()
    for done in range(args.steps):
        images, tokens = example.random_batch(lines, args.batch, (args.seed << 32) + done)
        loss, first, start = torch.zeros(()), 0, 0
        for patches, length in zip(images.lengths.tolist(), tokens.lengths.tolist(), strict=True):
            own = {name: rows[first : first + patches] for name, rows in images.values.items()}
            line = tokens.values[start : start + length]
            image = vision(fz.Ragged(own, torch.tensor([patches])))
            logits = text(fz.Ragged(line, torch.tensor([length])), image)
            loss = loss + F.cross_entropy(logits[:-1], line[1:]) / args.batch
            first, start = first + patches, start + length
        optimizer.zero_grad()
        loss.backward()
        norm = torch.stack([param.grad.norm() for param in params]).norm()  # of both models
        for param in params:
            param.grad *= (1 / norm).clamp(max=1)
        optimizer.param_groups[0]["lr"] = rate(done)
        optimizer.step()
        losses.append(loss.item())
    return losses


@in_turns(5, "examples as programs")
def test_the_losses_of_plain_torch_however_they_are_cut(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, where all states are: nothing cut, and both axes of both components, of which a batch has a few."""
    monkeypatch.setattr(example, "COMPACT", fz.Policy())
    torch.set_default_dtype(torch.float64)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(fz.parallel, "attention", attend)
            expected = plain_losses(example, example.options([*TINY, "--out", str(tmp_path)]))
        for name, options in (("here", "--on here"), ("threads", "--on threads --vision-dp 2 --text-dp 2")):
            losses = run(example, tmp_path / name, *options.split())
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-10, atol=0.0)
    finally:
        torch.set_default_dtype(torch.float32)


@in_turns(5, "examples as programs")
def test_a_run_that_is_resumed_has_the_bits_of_one_that_was_not(
    example: Any, threads: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where it was killed as it wrote a checkpoint, of which one component's part is there."""
    shutil.copytree(threads, tmp_path, dirs_exist_ok=True)
    last = Path("checkpoints", "update-000002")
    shutil.rmtree(tmp_path / last / "text")
    assert run(example, tmp_path, "--on", "threads", "--resume") == losses_of(threads)
    assert "going on after update 1 of 2" in capsys.readouterr().out
    check_same_bits(tmp_path / last, threads / last)


@pytest.mark.usefixtures("terminal")
def test_ctrl_c_keeps_what_was_trained(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn, batch = list[int](), example.random_batch

    def random_batch(lines: Any, count: int, seed: int) -> Any:
        drawn.append(seed)
        if len(drawn) == 3:
            signal.raise_signal(signal.SIGINT)
        return batch(lines, count, seed)

    monkeypatch.setattr(example, "random_batch", random_batch)
    example.main(example.options([*TINY, "--on", "here", "--steps", "1000000", "--out", str(tmp_path)]))
    assert "stopped after" in capsys.readouterr().out and 0 < len(losses_of(tmp_path)) <= 3
    assert fz.load_extra(max((tmp_path / "checkpoints").iterdir()) / "text")["losses"] == losses_of(tmp_path)


def test_bad_options_are_named(example: Any, threads: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, named in (
        ("--heads 3", "--heads"),
        ("--width 30", "--width"),
        ("--longest 3", "--longest"),
        ("--on nowhere", "--on"),
        ("--seed -1", "--seed"),
        (f"--out {threads}", "holds a run"),
        (f"--out {threads} --resume --batch 6", "--batch 6, but"),
    ):
        with pytest.raises(SystemExit):
            example.options([*TINY, "--out", str(tmp_path), *options.split()])
        assert named in capsys.readouterr().err


def test_images_differ_in_how_many_patches_they_have(example: Any) -> None:
    from line_images import CHARACTER, PATCH

    lines = ["x = 1", "return", "pass", "def f(x):"]
    batch = example.random_batch(lines, 16, 0)
    counts = batch.images.lengths.tolist()
    assert batch.images.values["patches"].shape == (sum(counts), PATCH**2) and len({*counts}) > 3
    assert set(batch.lines) == set(lines) and batch.count == sum(counts) + sum(len(line) + 2 for line in batch.lines)
    for line, places in zip(batch.lines, batch.images.values["places"].split(counts), strict=True):
        assert len(places.unique(dim=0)) == len(places)
        assert len(line) * CHARACTER <= int(places[:, 0].max()) + CHARACTER <= (len(line) + 4) * CHARACTER
    again, other = example.random_batch(lines, 16, 0), example.random_batch(lines, 16, 1)
    assert torch.equal(again.images.values["patches"], batch.images.values["patches"]) and again.lines != other.lines
