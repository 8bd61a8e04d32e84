"""fz.load_safetensors and fz.save_safetensors: others' files, the same bits, and nobody holds the model."""

from __future__ import annotations

import functools
import json
import os
import random
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from nightly import in_turns
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

import fzero as fz
from fzero.testing import assert_trees_equal, run_ranks

SHARDS = (lambda step: step, fz.shard_zero1, fz.shard_zero2, fz.shard_zero3)
POLICIES: dict[str, Any] = {
    "plain": None,
    "exact": fz.Policy.exact(),
    "compact24": fz.Policy.compact24(),
    "bf16": fz.Policy.bf16_states(),
}


def tree(draw: random.Random) -> Any:
    """Leaves of any sizes, in the dtypes that one group may not share."""
    sizes = lambda: tuple(draw.choice((1, 2, 3, 9, 64, 65)) for _ in range(draw.randint(0, 3)))
    generator = torch.Generator().manual_seed(draw.randint(0, 99))
    kinds = (torch.float32, torch.float32, torch.bfloat16)
    leaf = lambda: torch.randn(sizes(), dtype=draw.choice(kinds), generator=generator)
    return {"a": {f"a{number}": leaf() for number in range(draw.randint(1, 3))}, "b": {"c": leaf(), "d e": leaf()}}


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([(leaf.float() * x).square().mean() for leaf in optree.tree_leaves(p)]).sum()


def read(folder: Path) -> dict[str, torch.Tensor]:
    names = [name for name in os.listdir(folder) if name.endswith(".safetensors")]
    return {name: x for own in names for name, x in load_file(folder / own).items()}


def names_of(tree: Any) -> dict[str, torch.Tensor]:
    paths, leaves, _ = optree.tree_flatten_with_path(tree)
    return {".".join(map(str, path)): leaf for path, leaf in zip(paths, leaves, strict=True)}


def there_and_back(rank: int, folder: str, seed: int) -> Any:
    draw = random.Random(seed)
    step = draw.choice(SHARDS)(fz.train_step(loss, fz.adamw(1e-2), POLICIES[draw.choice([*POLICIES])]))
    params, most = tree(draw), draw.choice((100, 1000, 10**9))
    state, _ = step(step.init(params), torch.tensor(1.0 + rank))
    fz.save_safetensors(folder, state, shard_bytes=most)
    again = fz.load_safetensors(step, folder, like=params, lossy=True)
    assert again.step == 0 and again.signature == state.signature
    return names_of(fz.gather(state.params)), names_of(fz.gather(again.params))


@in_turns(4)
@pytest.mark.parametrize("seed", range(20))
def test_the_same_bits(tmp_path: Path, seed: int) -> None:
    draw = random.Random(-seed)
    ranks, backend = draw.randint(1, 4), "processes" if seed in (0, 6) else "threads"
    job = functools.partial(there_and_back, folder=str(tmp_path), seed=seed)
    (before, after), *_ = run_ranks(job, ranks, backend=backend)
    assert_trees_equal(read(tmp_path), before)
    assert_trees_equal(after, before)
    assert not [name for name in os.listdir(tmp_path) if not name.startswith("model")]


def model(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 67, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {
        "gpt2": lambda: transformers.GPT2Config(vocab_size=67, n_embd=16, n_layer=2, n_head=2, n_positions=16),
        "llama": lambda: transformers.LlamaConfig(**sizes, intermediate_size=24),
        "tied": lambda: transformers.LlamaConfig(**sizes, intermediate_size=24, tie_word_embeddings=True),
    }[kind]()
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def without_values(kind: str) -> Any:
    """The model with params on the meta device, and the buffers that its constructor computes."""
    meta: Any = lambda module, name, p: None if p is None or p.is_meta else nn.Parameter(p.to("meta"), p.requires_grad)
    hook = register_module_parameter_registration_hook(meta)
    try:
        return model(kind)
    finally:
        hook.remove()


@in_turns(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["gpt2", "llama", "tied"])
def test_models_of_transformers(tmp_path: Path, kind: str) -> None:
    original = model(kind)
    original.save_pretrained(tmp_path / "in", max_shard_size="4KB")
    apply, like = fz.functional(without_values(kind))
    assert all(leaf.is_meta for leaf in like.values())
    tokens = torch.arange(8)[None]

    def rank_main(rank: int) -> Any:
        step = fz.shard_zero3(fz.train_step(lambda p, x: apply(p, x).logits.float().mean(), fz.adamw(1e-3)))
        state = fz.load_safetensors(step, tmp_path / "in", like=like)
        expected = original(tokens).logits.float().mean()
        torch.testing.assert_close(step.forward(state, tokens), expected)
        fz.save_safetensors(tmp_path / "out", state)
        state, _ = step(state, tokens)
        fz.save_safetensors(tmp_path / "trained", state, shard_bytes=4000)
        return fz.gather(state.params)

    trained = run_ranks(rank_main, 2)[0]
    for name, expected in (("out", dict(original.named_parameters())), ("trained", trained)):
        original.config.save_pretrained(tmp_path / name)
        again, said = type(original).from_pretrained(tmp_path / name, output_loading_info=True)
        assert not any(said.values())
        assert_trees_equal({n: p.detach() for n, p in again.named_parameters()}, {n: expected[n] for n in trained})


def plain() -> fz.Step:
    return fz.train_step(loss, fz.sgd(0.1))


ANYTHING: Any = lambda path: 3
PARAMS: Any = {"v": torch.arange(1.0, 71.0), "w": torch.ones(3, 2)}


def test_files_and_names(tmp_path: Path) -> None:
    state = plain().init(PARAMS)
    also = {"steps": torch.tensor(3), "mask": torch.ones(2, 2, dtype=torch.bool)}
    one = tmp_path / "deep" / "one.safetensors"
    fz.save_safetensors(one, state, names=lambda path: f"net.{path}", also=also, dtype=torch.bfloat16)
    assert os.listdir(one.parent) == [one.name]
    half = {f"net.{path}": leaf.bfloat16() for path, leaf in PARAMS.items()}
    assert_trees_equal(load_file(one), {**also, **half})
    with pytest.raises(ValueError, match=r"leaf 'v': got none there.*and 5 more"):
        fz.load_safetensors(plain(), one, like=PARAMS)
    renamed = functools.partial(fz.load_safetensors, plain(), one, like=PARAMS, names=lambda path: f"net.{path}")
    with pytest.raises(ValueError, match=r"leaf 'steps' of shape \(\) is there, and not in like"):
        renamed()
    with pytest.warns(UserWarning, match=r"leaf 'mask' of shape \(2, 2\) is there"):
        assert_trees_equal(fz.gather(renamed(lenient=True).params), PARAMS)  # bf16 holds these numbers
    save_file(half, tmp_path / "some.safetensors")
    flat = fz.load_safetensors(plain(), [tmp_path / "some.safetensors"], seed=5)
    assert [*flat.params] == ["net.v", "net.w"] and flat.seed == 5
    average = plain().with_state(fz.Extra("ema", "ema", lambda params: params.map(lambda p: p * 2), lambda v, p, a: v))
    fz.save_safetensors(tmp_path / "ema", average.init(PARAMS).extra["ema"])
    assert_trees_equal(read(tmp_path / "ema"), optree.tree_map(lambda p: p * 2, PARAMS))


def flipped(folder: Path, name: str, change: Any) -> None:
    text = (folder / name).read_bytes()
    (folder / name).write_bytes(change(text))


def header(text: bytes, change: Any) -> bytes:
    said = json.loads(text[8 : 8 + int.from_bytes(text[:8], "little")])
    change(said)
    new = json.dumps(said).encode()
    return len(new).to_bytes(8, "little") + new + text[8 + int.from_bytes(text[:8], "little") :]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda text: text[:-1], r"got \d+ bytes, expected \d+, where its last tensor ends"),
        (lambda text: text + b"\0", r"got \d+ bytes, expected \d+, where its last tensor ends"),
        (lambda text: text[:20], "end within its header"),
        (lambda text: b"", "end within its header"),
        (lambda text: text[:8] + b"?" + text[9:], "a header that is no safetensors file's"),
        (lambda text: header(text, lambda h: h["w"].update(data_offsets=[0, 24])), "has bytes"),
        (lambda text: header(text, lambda h: h["w"].update(shape=[3, 3])), "has bytes"),
        (lambda text: header(text, lambda h: h["w"].pop("shape")), "no safetensors file's"),
        (lambda text: header(text, lambda h: h["w"].update(dtype="F8_E4M3", shape=[24])), "stored as F8_E4M3"),
        (lambda text: header(text, lambda h: h["w"].update(dtype="I32")), "stored as I32"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_damaged_files(tmp_path: Path, change: Any, match: str, ranks: int) -> None:
    save_file(PARAMS, tmp_path / "model.safetensors")
    flipped(tmp_path, "model.safetensors", change)

    def rank_main(rank: int) -> None:
        step = plain() if ranks == 1 else fz.shard_zero3(plain())
        with pytest.raises((fz.DamagedCheckpoint, ValueError), match=f"model.safetensors: .*{match}"):
            fz.load_safetensors(step, tmp_path)

    run_ranks(rank_main, ranks)


def test_other_bad_input(tmp_path: Path) -> None:
    load = functools.partial(fz.load_safetensors, plain())
    with pytest.raises(FileNotFoundError, match="with neither"):
        load(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such file"):
        load(tmp_path / "none.safetensors")
    fz.save_safetensors(tmp_path, plain().init(PARAMS), shard_bytes=100)
    os.remove(tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(FileNotFoundError, match="model-00002-of-00002"):
        load(tmp_path)
    save_file(PARAMS, tmp_path / "a.safetensors")
    save_file(PARAMS, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match=r"b.safetensors: has a tensor 'v', as .*a.safetensors has"):
        load([tmp_path / "a.safetensors", tmp_path / "b.safetensors"])
    meta = {"v": torch.empty(70, device="meta"), "w": torch.empty(3, 3, device="meta")}
    with pytest.raises(ValueError, match=r"leaf 'w' is not read from .* meta device"):
        load(tmp_path / "a.safetensors", like=meta, lenient=True)
    mixed = {"v": meta["v"], "w": torch.full((3, 3), 2.0)}
    with pytest.warns(UserWarning, match=r"leaf 'w': got shape \(3, 2\) there"):
        state = load(tmp_path / "a.safetensors", like=mixed, lenient=True)
    assert_trees_equal(fz.gather(state.params), {"v": PARAMS["v"], "w": mixed["w"]})
    with pytest.raises(ValueError, match="rounded to bf16"):
        fz.load_safetensors(fz.train_step(loss, fz.sgd(0.1), fz.Policy.compact16()), tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="got two tensors of the name 'x'"):
        fz.save_safetensors(tmp_path, plain().init(PARAMS), names=lambda path: "x")
    with pytest.raises(TypeError, match=r"names\('v'\): got"):
        fz.save_safetensors(tmp_path, plain().init(PARAMS), names=ANYTHING)


def test_every_rank_is_told(tmp_path: Path) -> None:
    def rank_main(rank: int) -> None:
        step = fz.shard_zero3(plain())
        state = step.init(PARAMS)
        with pytest.raises(ValueError, match="ranks"):
            fz.save_safetensors(tmp_path / str(rank), state)
        with pytest.raises(ValueError, match="ranks"):
            fz.save_safetensors(tmp_path, state, also={"x": torch.ones(1)} if rank else None)
        with pytest.raises(OSError, match="not a folder"):
            fz.save_safetensors(__file__, state)
        fz.save_safetensors(tmp_path, state)
        with pytest.raises(ValueError, match="The files differ"):
            fz.load_safetensors(step, tmp_path, seed=rank)

    run_ranks(rank_main, 2)
    assert os.listdir(tmp_path) == ["model.safetensors"]
