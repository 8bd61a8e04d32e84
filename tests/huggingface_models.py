"""Small models of Hugging Face, and a plan for the one that has none of its own."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn


def small(name: str, **more: Any) -> nn.Module:
    """A model of a class of transformers, of one layer where nothing else is said."""
    kind = getattr(pytest.importorskip("transformers"), name)
    sizes = {"vocab_size": 17, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = kind.config_class(**{**sizes, "num_key_value_heads": 2, "use_cache": False, **more})
    if "num_local_experts" in more:
        config._experts_implementation = "eager"
    return kind(config)  # type: ignore[no-any-return]


def llama(keys: int, tied: bool) -> nn.Module:
    own = {"num_key_value_heads": keys, "tie_word_embeddings": tied, "use_cache": not tied}  # which is their default
    return small("LlamaForCausalLM", intermediate_size=11, num_hidden_layers=2, **own)


def mixtral() -> nn.Module:
    return small("MixtralForCausalLM", intermediate_size=10, num_local_experts=3, num_experts_per_tok=2)


def vit() -> nn.Module:
    sizes = {"intermediate_size": 10, "image_size": 8, "patch_size": 4, "num_labels": 5}
    return small("ViTForImageClassification", num_hidden_layers=2, **sizes)


VIT = {
    "*.[qkv]_proj": "column",
    "*.o_proj": "row",
    "*.fc1": "column",
    "*.fc2": "row",
    "*.projection": "column_gather",
    "classifier": "column_gather",
}
