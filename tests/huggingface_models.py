"""Small models of Hugging Face, and a plan for the one that has none of its own."""

from __future__ import annotations

import pytest
from torch import nn


def llama(keys: int, tied: bool) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=17,
        hidden_size=16,
        intermediate_size=11,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=keys,
        tie_word_embeddings=tied,
        use_cache=not tied,  # which is their default
    )
    return transformers.LlamaForCausalLM(config)


def mixtral() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=17,
        hidden_size=16,
        intermediate_size=10,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=3,
        num_experts_per_tok=2,
        use_cache=False,
    )
    config._experts_implementation = "eager"
    return transformers.MixtralForCausalLM(config)


def vit() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=10,
        image_size=8,
        patch_size=4,
        num_labels=5,
    )
    return transformers.ViTForImageClassification(config)


VIT = {
    "*.[qkv]_proj": "column",
    "*.o_proj": "row",
    "*.fc1": "column",
    "*.fc2": "row",
    "*.projection": "column_gather",
    "classifier": "column_gather",
}
