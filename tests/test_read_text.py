"""examples/read_text.py: two components train as one, and the images that they learn from."""

from __future__ import annotations

import functools
import itertools
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nightly import at_length, in_turns
from processes import EXAMPLES, start_example
from safetensors.torch import load_file

from fzero.testing import run_ranks

TINY = "--width 32 --text-blocks 1 --heads 2 --longest 8 --batch 2 --eval-every 2 --eval-batches 1".split()


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))  # it imports from the examples beside it
        import read_text

        patch.setattr(read_text, "text_lines", functools.cache(read_text.text_lines))  # each run reads the same
        yield read_text


def start(*options: str, out: Path) -> subprocess.Popen[str]:
    return start_example("read_text.py", *TINY, "--out", str(out), *options)


def check_files(example: Any, out: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, module in (
        ("vision", example.Encoder(32, 1, 2, generator)),
        ("text", example.Decoder(32, 1, 2, generator)),
    ):
        module.load_state_dict(load_file(out / f"{name}.safetensors"), strict=True)
    for name in ("curves", "reading"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def check_said(stdout: str) -> None:
    for phrase in (
        "lines to train on",
        "blocks.0.mlp.up.weight",
        "stem.0.weight",
        "state per rank",
        "reading.png",
        "from the image alone",
        "without the image",
    ):
        assert phrase in stdout


@at_length  # by day on ranks that are threads
def test_end_to_end(example: Any, tmp_path: Path) -> None:
    process = start("--steps", "3", out=tmp_path)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0 and "Traceback" not in stderr, stderr
    check_files(example, tmp_path)
    check_said(stdout)


@in_turns(2)
@pytest.mark.parametrize(
    ("ranks", "options"), [(1, "--steps 3 --vision-stage 0 --text-stage 0 --batch 9"), (2, "--steps 1000000")]
)
def test_on_ranks_that_are_threads(
    example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: int, options: str
) -> None:
    """One that shards nothing, and two that are asked to stop."""
    args = example.options([*TINY, "--ranks", str(ranks), "--out", str(tmp_path), *options.split()])
    counts = [itertools.count() for _ in range(ranks)]
    run_ranks(lambda rank: example.train(rank, ranks, args, lambda: ranks == 2 and next(counts[rank]) >= 2), ranks)
    check_files(example, tmp_path)
    said = capsys.readouterr().out
    check_said(said)
    assert ("stopped after" in said) == (ranks == 2)


def test_bad_options_are_named(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for options, named in (
        ("--vision-stage 0", "--ranks 1"),
        ("--lr nan", "--lr"),
        ("--text-stage 0", "--ranks 1"),
        ("--width 30", "--width"),
        ("--steps 0", "--steps"),
        ("--longest 3", "--longest"),
    ):
        with pytest.raises(SystemExit):
            example.options(options.split())
        assert named in capsys.readouterr().err


def test_images_differ_by_text_and_by_seed_only(example: Any) -> None:
    def render(*lines: str, seed: int = 0) -> torch.Tensor:
        return example.render(list(lines), 8, torch.Generator().manual_seed(seed))

    images = render("x = 1", "x = 1", "x = 7")
    assert images.shape == (3, 1, example.HEIGHT, 10 * example.GLYPH)
    assert torch.equal(images, render("x = 1", "x = 1", "x = 7"))
    assert not torch.equal(images[0], images[1])  # the noise is each image's own
    assert not torch.equal(images, render("x = 1", "x = 1", "x = 7", seed=1))
    # same seed, same noise: what differs is the ink of the one character that differs
    ink = (render("x = 1") - render("x = 7")).abs().amax((0, 1, 2)) > 0.1
    columns = ink.nonzero().flatten()
    assert 4 * example.GLYPH <= columns.min() and columns.max() < 5 * example.GLYPH + example.SHIFT


def test_held_out_lines_are_not_trained_on(example: Any) -> None:
    train, held_out = example.text_lines(12)
    assert len(train) > 1000 and len(held_out) > 50 and not set(train) & set(held_out)
    assert all(4 <= len(line) <= 12 and line.isascii() and line.isprintable() for line in train + held_out)
    batch = example.random_batch(
        held_out, torch.Generator().manual_seed(0), example.options(["--longest", "12"]), torch.device("cpu")
    )
    assert all(line in held_out for line in example.lines_of(batch[1][:, 1:]))
