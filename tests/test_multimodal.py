"""examples/multimodal.py: the same numbers wherever its components are, and images of any number of patches."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nightly import NIGHTLY
from processes import EXAMPLES, interrupt, start_example
from safetensors.torch import load_file

import fzero as fz
from fzero.testing import run_ranks

TINY = "--width 16 --vision-blocks 1 --text-blocks 1 --heads 2 --longest 6 --batch 5 --steps 4 --save-every 2".split()


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))  # it imports from the examples beside it
        import multimodal

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


@pytest.mark.parametrize("on", ["processes", "ray"])
def test_the_same_bits_as_on_threads(on: str, threads: Path, tmp_path: Path) -> None:
    if on == "ray":  # half a minute; tests/components/remote/test_remote_ray.py has a smaller loop
        pytest.importorskip("ray")
        if not NIGHTLY:
            pytest.skip("runs with HYPOTHESIS_PROFILE=nightly")
    process = start_example("multimodal.py", *TINY, "--on", on, "--out", str(tmp_path))
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0 and "Traceback" not in stderr, stderr
    assert losses_of(tmp_path) == losses_of(threads) and len(losses_of(threads)) == 4
    check_same_bits(*(out / "checkpoints" / "update-000004" for out in (tmp_path, threads)))
    for phrase in ("images of", "held-out loss", "is read as"):
        assert phrase in stdout
    assert (tmp_path / "multimodal.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_losses_but_for_rounding_however_they_are_cut(example: Any, threads: Path, tmp_path: Path) -> None:
    """Nothing cut, and uneven shares of the batch."""
    shares = "--on threads --vision-dp 2 --sp 1 --text-dp 2 --tp 1".split()
    for name, options in (("here", ["--on", "here"]), ("shares", shares)):
        losses = run(example, tmp_path / name, *options)
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(losses_of(threads)), rtol=1e-3, atol=0.0)


def test_a_run_that_is_resumed_has_the_bits_of_one_that_was_not(
    example: Any, threads: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where it was killed as it wrote a checkpoint, of which one component's part is there."""
    shutil.copytree(threads, tmp_path, dirs_exist_ok=True)
    last = Path("checkpoints", "update-000004")
    shutil.rmtree(tmp_path / last / "text")
    assert run(example, tmp_path, "--on", "threads", "--resume") == losses_of(threads)
    assert "going on after update 2 of 4" in capsys.readouterr().out
    check_same_bits(tmp_path / last, threads / last)


def test_ctrl_c_keeps_what_was_trained(tmp_path: Path) -> None:
    options = [*TINY, "--on", "here", "--steps", "1000000", "--out", str(tmp_path)]
    interrupt(start_example("multimodal.py", *options), once="images of")
    assert fz.load_extra(next((tmp_path / "checkpoints").iterdir()) / "text")["losses"] == losses_of(tmp_path)


def test_bad_options_are_named(example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = tmp_path / "run"
    run(example, held, "--on", "here")
    for options, named in (
        ("--heads 3", "--heads"),
        ("--width 30", "--width"),
        ("--longest 3", "--longest"),
        ("--on nowhere", "--on"),
        ("--seed -1", "--seed"),
        (f"--out {held}", "holds a run"),
        (f"--out {held} --resume --batch 6", "--batch 6, but"),
    ):
        with pytest.raises(SystemExit):
            example.options([*TINY, "--out", str(tmp_path), *options.split()])
        assert named in capsys.readouterr().err


def test_images_differ_in_how_many_patches_they_have(example: Any) -> None:
    from line_images import CHARACTER, NOWHERE, PAD, PATCH, random_batch

    lines = ["x = 1", "return", "pass", "def f(x):"]
    batch = random_batch(lines, 16, 0)
    patches, places = batch.images["patches"], batch.images["places"]
    counts = (places[..., 0] != NOWHERE).sum(1)
    assert patches.shape == (*places.shape[:2], PATCH**2) and len(counts.unique()) > 3
    assert batch.count == int(counts.sum() + (batch.tokens != PAD).sum())
    for own, at, count, tokens in zip(patches, places, counts.tolist(), batch.tokens, strict=True):
        assert not own[count:].any() and bool((at[count:] == NOWHERE).all()) and len(at[:count].unique(dim=0)) == count
        characters = int((tokens != PAD).sum()) - 2  # without both ENDs
        assert characters * CHARACTER <= int(at[:count, 0].max()) + CHARACTER <= (characters + 4) * CHARACTER
    again, other = random_batch(lines, 16, 0), random_batch(lines, 16, 1)
    assert torch.equal(again.images["patches"], patches) and not torch.equal(again.tokens, other.tokens)


def test_what_an_image_is_read_as_does_not_depend_on_those_beside_it(example: Any) -> None:
    """Padding is not seen, and patches of all images are cut over ranks wherever it comes."""
    from line_images import random_batch
    from line_models import Decoder, VisionTransformer

    batch = random_batch(["x = 1", "return", "pass", "def f(x):"], 7, 0)
    encode, params = fz.functional(VisionTransformer(16, 2, 4, torch.Generator().manual_seed(0)))
    decode, text_params = fz.functional(Decoder(16, 2, 4, torch.Generator().manual_seed(1)))
    image = encode(params, batch.images)
    whole, logits = image["embeddings"], decode(text_params, batch.tokens, image)
    rows = zip(whole, logits, batch.tokens, *batch.images.values(), strict=True)
    for own, written, tokens, patches, places in rows:
        count, length = int((places[:, 0] >= 0).sum()), int((tokens != 0).sum())
        alone = encode(params, {"patches": patches[None, :count], "places": places[None, :count]})
        torch.testing.assert_close(own[:count], alone["embeddings"][0], rtol=1e-4, atol=1e-5)
        assert not own[count:].any()
        again = decode(text_params, tokens[None, :length], alone)[0]
        torch.testing.assert_close(written[:length], again, rtol=1e-4, atol=1e-4)

    def rank_main(rank: int) -> Any:
        sp = fz.parallel.axis(None, "sp")
        return fz.functional(VisionTransformer(16, 2, 4, torch.Generator().manual_seed(0), sp))[0](params, batch.images)

    for own in run_ranks(rank_main, 3):
        torch.testing.assert_close(own["embeddings"], whole, rtol=1e-4, atol=1e-5)
