"""Pieces of batches, and Hugging Face's models on them, against the whole batch in one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from attentions import F64
from hypothesis import given
from hypothesis import strategies as st

import fzero as fz
from fzero.testing import run_ranks

transformers = pytest.importorskip("transformers")
from transformers.masking_utils import AttentionMaskInterface  # noqa: E402, F401
from transformers.modeling_utils import AttentionInterface  # noqa: E402, F401

pytestmark = pytest.mark.usefixtures("hazards")


def pieces_of(rank: int, sizes: tuple[int, ...], batch: dict[str, Any], order: str) -> dict[str, Any]:
    names = ("ring", "sp")[: len(sizes)]
    mesh = torch.distributed.init_device_mesh("cpu", sizes, mesh_dim_names=names)
    axes = [fz.parallel.axis(mesh, name) for name in names]
    return fz.parallel.shard_sequence(batch, axes, order=order)


@given(
    st.sampled_from([(1,), (2,), (3,), (4,), (2, 2), (1, 3)]),
    st.sampled_from(["contiguous", "zigzag"]),
    st.lists(st.integers(0, 6), min_size=1, max_size=4).filter(any),
    st.booleans(),
)
def test_every_token_once_with_its_label_and_position(
    sizes: tuple[int, ...], order: str, documents: list[int], packed: bool
) -> None:
    total = sum(documents)
    ids = torch.arange(2 * total).reshape(2, total)
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids + 100, "more": {"weights": torch.rand(2, total, 3)}}
    ends = torch.tensor([0, *documents]).cumsum(0)
    if packed:
        batch["documents"] = ends
    labels, positions = torch.full((2, total), -100), torch.arange(total)
    spans = list(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)) if packed else [(0, total)]
    for start, stop in spans:
        labels[:, start : stop - 1] = ids[:, start + 1 : stop] + 100
        positions[start:stop] = torch.arange(stop - start)
    ranks = sizes[0] * (sizes[1] if len(sizes) > 1 else 1)
    found = run_ranks(functools.partial(pieces_of, sizes=sizes, batch=batch, order=order), ranks)
    places = torch.cat([piece["input_ids"][0] for piece in found])
    assert sorted(places.tolist()) == list(range(total))
    if order == "contiguous":
        assert places.tolist() == list(range(total))
    for piece in found:
        own = piece["input_ids"][0]
        assert torch.equal(piece["input_ids"], ids[:, own])
        assert torch.equal(piece["shift_labels"], labels[:, own])
        assert torch.equal(piece["position_ids"], positions[own].expand(2, -1))
        assert torch.equal(piece["more"]["weights"], batch["more"]["weights"][:, own])
        assert set(piece) == {*batch, "shift_labels", "position_ids"} - {"labels"}


def test_embeddings_get_their_cotangents_from_all_ranks() -> None:
    def grad(rank: int) -> torch.Tensor:
        ax = fz.parallel.axis(None, "sp")

        def loss(x: torch.Tensor) -> torch.Tensor:
            own = fz.parallel.shard_sequence({"inputs_embeds": x}, ax, order="zigzag")
            return (own["inputs_embeds"] * (own["position_ids"][..., None] + 1)).sum()

        return torch.func.grad(loss)(torch.ones(1, 5, 1, dtype=F64))

    for found in run_ranks(grad, 2):
        assert found.flatten().tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("batch", "error", "words"),
    [
        ({}, ValueError, "without tensors"),
        ({"input_ids": [1, 2]}, TypeError, r"batch\['input_ids.0'\]=1, expected a tensor"),
        (
            {"input_ids": torch.ones(1, 4), "image": torch.ones(3, 1)},
            ValueError,
            r"got input_ids of shape \(1, 4\) and image of shape",
        ),
        ({"input_ids": torch.ones(1, 4), "documents": [0, 3]}, ValueError, "end at 3, expected 4"),
        ({"labels": torch.ones(1, 4)}, TypeError, "a tensor of integers"),
    ],
)
def test_mistakes(batch: dict[str, Any], error: type[Exception], words: str) -> None:
    def caught(rank: int) -> None:
        with pytest.raises(error, match=words):
            fz.parallel.shard_sequence(batch, fz.parallel.axis(None, "sp"))

    run_ranks(caught, 2)


# ---- models


def model_of(kind: str, implementation: str) -> Any:
    shape: dict[str, Any] = {
        "vocab_size": 13,
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attn_implementation": implementation,
    }
    if kind == "mistral":
        config: Any = transformers.MistralConfig(**shape, sliding_window=3)
    else:
        config = transformers.LlamaConfig(**shape)
    model, generator = transformers.AutoModelForCausalLM.from_config(config).to(F64), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=F64) / 4)
    return model


def whole_batch(total: int, documents: tuple[int, ...] | None) -> dict[str, Any]:
    ids = torch.randint(13, (1 if documents else 2, total), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids, **({"documents": documents} if documents else {})}


def loss_of(model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the losses of tokens, and their number."""
    labels = batch.pop("shift_labels")
    logits = model(**batch, use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return losses, (labels != -100).sum()


def grads_on(rank: int, kind: str, which: str, total: int, documents: tuple[int, ...] | None) -> list[torch.Tensor]:
    """The loss and its gradients, of this rank's piece of the sequence."""
    ax = fz.parallel.axis(None, "sp")
    order = "zigzag" if which == "zigzag" else "contiguous"
    attention = fz.parallel.ulysses(None, ax, 2) if which == "ulysses" else fz.parallel.ring(ax, order)
    fz.parallel.register_attention(f"{which} {rank}", attention)
    model = model_of(kind, f"{which} {rank}")
    batch = fz.parallel.shard_sequence(whole_batch(total, documents), ax, order=order)
    loss, count = loss_of(model, batch)
    mean = fz.parallel.sum(loss, ax) / fz.parallel.sum(count, ax)
    grads = torch.autograd.grad(mean, list(model.parameters()))
    return [mean.detach(), *[fz.parallel.sum(grad, ax) for grad in grads]]


@pytest.mark.parametrize(
    ("kind", "which", "ranks", "total", "documents"),
    [
        ("llama", "ulysses", 3, 7, None),
        ("llama", "zigzag", 2, 9, (0, 4, 9)),
        ("mistral", "ring", 3, 8, None),
        ("mistral", "ulysses", 2, 7, (0, 2, 7)),
    ],
)
def test_a_model_on_pieces(kind: str, which: str, ranks: int, total: int, documents: tuple[int, ...] | None) -> None:
    model = model_of(kind, "sdpa")  # whose softmax is in float64, too
    batch = run_ranks(
        lambda rank: fz.parallel.shard_sequence(whole_batch(total, documents), fz.parallel.axis(None, "sp")), 1
    )[0]
    batch.pop("documents", None)  # transformers reads them from positions
    loss, count = loss_of(model, batch)
    expected = [loss / count, *torch.autograd.grad(loss / count, list(model.parameters()))]
    for found in run_ranks(
        functools.partial(grads_on, kind=kind, which=which, total=total, documents=documents), ranks
    ):
        for got, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)


def refused(rank: int, which: str) -> str:
    ax = fz.parallel.axis(None, "sp")
    fz.parallel.register_attention(f"refusing {rank}", fz.parallel.ulysses(None, ax))
    model = model_of("llama", f"refusing {rank}")
    if which == "bert":  # which counts positions itself
        config = transformers.BertConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=16
        )
        model = transformers.BertModel._from_config(config, attn_implementation=f"refusing {rank}").eval()
    elif which == "mamba":
        model.config.layer_types = ["full_attention", "linear_attention"]
    batch = fz.parallel.shard_sequence(whole_batch(6, None), ax)
    del batch["shift_labels"]
    if which in ("positions", "bert"):
        del batch["position_ids"]
    elif which == "mamba":
        pass
    elif which == "documents":
        batch["documents"] = [3, 1] if rank else [0, 6]
    elif which == "padding":
        batch["attention_mask"] = torch.ones_like(batch["input_ids"]).index_fill(1, torch.tensor([2]), 1 - rank)
    elif which == "dropout":
        model.train()
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.5
    else:
        batch["attention_mask"] = torch.zeros(2, 1, 3, 3, dtype=F64)
    with pytest.raises(ValueError) as info:
        model(**batch, **({} if which == "bert" else {"use_cache": False}))
    return str(info.value)


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ("positions", "expected the places in the whole sequence"),
        ("padding", "an attention_mask with padding"),
        ("dropout", "dropout=0.5, expected 0"),
        ("mask", "a mask of its own"),
        ("documents", "got other documents than those of the whole sequence"),
        ("bert", "got no position_ids, expected those of this rank's piece"),
        ("mamba", "layers that mix tokens beside attention (linear_attention)"),
    ],
)
def test_what_a_model_asks_for_and_does_not_get(which: str, words: str) -> None:
    said = run_ranks(functools.partial(refused, which=which), 2)
    assert words in said[1]
    assert words in said[0] or "refused on rank 1" in said[0]


def test_only_attention_over_ranks_is_registered() -> None:
    with pytest.raises(TypeError, match="got attention=function, expected one that"):
        fz.parallel.register_attention("plain", fz.parallel.attention)
