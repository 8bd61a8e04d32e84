"""Tiny models of any architecture that transformers has.

A configuration's own defaults, with each size cut down by what its name says that it is; what then does not build, or
does not run by itself, is no model to compare.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

HEADS, HEAD_DIM, VOCABULARY, EXPERTS, IMAGE, PATCH = 4, 8, 96, 4, 32, 8
WIDTH = HEADS * HEAD_DIM
PLACEHOLDER = 90  # the token that stands for a part of an image

# (pattern of a field's name, what it becomes); the first that fits says it
SIZES: list[tuple[str, int]] = [
    (r"vocab_size.*|.*_vocab_size", VOCABULARY),
    (r".*(kv|key_value).*heads|multi_query_group_num|num_query_groups|linear_num_key_heads", 2),
    (r".*num_.*heads|.*n_heads?|.*attention_heads|num_heads|linear_num_value_heads", HEADS),
    (r".*rope_head_dim|rotary_dim|qk_rope.*", HEAD_DIM // 2),
    (r"qk_nope_head_dim", HEAD_DIM // 2),
    (r".*head_dim|d_kv|dim_head|d_head|.*head_size|kv_channels|mamba_d_head|attention_head_dim|head_dim_.*", HEAD_DIM),
    (r"n_routed_experts|num_experts|num_local_experts|moe_num_experts|.*num_.*experts", EXPERTS),
    (r".*num_experts_per_tok|moe_k|num_experts_per_token|.*top_?k.*experts?|moe_topk|num_selected_experts", 2),
    (r"n_group|topk_group|num_expert_group|first_k_dense_replace", 1),
    (r".*(num_.*layers|n_layers?|encoder_layers|decoder_layers)|layers|depth|num_blocks|num_.*blocks|num_layers", 2),
    (r"max_position_embeddings|n_positions|max_seq_len|max_.*positions|max_2d_position_embeddings|block_size", 128),
    (r"image_size|input_image_size|img_size", IMAGE),
    (r"patch_size", PATCH),
    (r"num_mel_bins|n_mels|input_feat_per_channel|feature_size", 16),
    (r"num_position_embeddings|num_patches", (IMAGE // PATCH) ** 2),
    (r".*num_groups|num_conv_pos_embedding_groups|upsample_groups|decoder_attention_num_groups", 2),
    (r"num_conv_pos_embeddings", 8),
    (r".*sliding_window.*|local_attention|attention_window|attention_chunk_size|index_topk", 8),
    (r"chunk_size|mamba_chunk_size|.*_chunk_size", 4),
    (r".*state_size|mamba_d_state|d_state|ssm_state_size|time_step_rank|mamba_dt_rank", 8),
    (r".*(lora_rank|_rank)", 8),
    (r"max_window_layers|num_kv_shared_layers", 0),
    (r"mamba_n_heads|mamba_num_heads", 8),
    (r".*(intermediate_size|ffn_dim|d_ff|d_inner|ffn_hidden_size|mlp_dim|inner_dim|n_inner)(_mlp)?", 48),
    (r".*(d_model|n_embd|dim|width|channels|_size|num_filters).*|query_pre_attn_scalar", WIDTH),
]
# fields that are no size, whatever their name says
KEPT = re.compile(
    r"(.*_)?(stride|kernel)(_.*)?|.*kernel_size|conv_.*|window_size|num_channels|in_channels|in_chans|.*dropout.*|"
    r"type_vocab_size|spatial_merge_size|temporal_patch_size|merge_size|.*_ratio.*|.*scale.*|num_labels|max_new_tokens|"
    r"image_mean|.*num_types|.*patch_stride|sampling_rate|encoder_stride|output_stride|pretraining_tp"
)
# a model that draws numbers, or has no state of its own between calls, in as far as a configuration says it
ZEROS = re.compile(r".*(drop|dropout|jitter|mask_time_prob|mask_feature_prob)(_.*)?")
SPECIAL = re.compile(r".*(token_id|token_index|_idx)")
IMAGES = re.compile(r"(image|img|video|audio)_token_(id|index)")
# of stages, one number each
DEPTHS = re.compile(r"depths?|num_layers|layers|.*block_repeats")
WIDTHS = re.compile(r".*(hidden_sizes|channels|dims?|neck_hidden_sizes)")


# what is None by default, and then asked for or taken from sizes that change
NONE = {
    "head_dim": HEAD_DIM,
    "num_key_value_heads": HEADS,
    "pad_token_id": 1,
    "decoder_start_token_id": 2,
    "bos_token_id": 2,
    "num_experts_per_tok": 2,
}
MIXED = ["linear_attention", "full_attention"]
SWIN = {"embed_dim": 24, "hidden_size": 48, "depths": (1, 1), "num_heads": (3, 6), "num_layers": 2, "window_size": 2}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64, "mamba_n_groups": 1}
# what no name of a field tells, by the model type
OVERRIDES: dict[str, dict[str, Any]] = {
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1], **MAMBA},
    "falcon_h1": MAMBA,
    "granitemoehybrid": {"layer_types": MIXED, **MAMBA},
    "mobilebert": {"embedding_size": 16},  # a head of it has as many rows as a hidden state is wider
    "recurrent_gemma": {"num_hidden_layers": 3, "block_types": ["recurrent", "recurrent", "attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1},
    "zamba2": {"n_mamba_heads": 8, "mamba_headdim": 8, "attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba": {"n_mamba_heads": 2, "attention_hidden_size": 64, "attention_head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "reformer": {"is_decoder": True},
    "swin": SWIN,
    "swinv2": SWIN,
    "donut-swin": SWIN,
    "cvt": {"embed_dim": (16, 24, 48), "num_heads": (1, 3, 6), "depth": (1, 1, 1), "drop_path_rate": (0.0, 0.0, 0.0)},
    "efficientnet": {"width_coefficient": 0.25, "hidden_dim": 64, "drop_connect_rate": 0.0},
    "hgnet_v2": {"hidden_sizes": [32, 64, 64, 64], "stem_channels": (3, 8, 12), "stage_in_channels": (12, 32, 64, 64)}
    | {"stage_mid_channels": (8, 8, 8, 8), "stage_out_channels": (32, 64, 64, 64)},
    "levit": {"hidden_sizes": (16, 32, 48), "num_attention_heads": (2, 4, 6), "key_dim": (4, 4, 4), "image_size": 64}
    | {"patch_size": 4, "down_ops": [["Subsample", 4, 4, 4, 2, 2], ["Subsample", 4, 8, 4, 2, 2]]},
    "mobilevit": {"hidden_sizes": (16, 24, 32), "patch_size": 2, "image_size": 64},
    "mobilevitv2": {"image_size": 64, "patch_size": 2},
    "poolformer": {"hidden_sizes": (8, 16, 24, 32)},
    "pvt": {"hidden_sizes": (8, 16, 20, 32), "num_attention_heads": (1, 2, 5, 8), "image_size": 64, "patch_size": 4},
    "switch_transformers": {"router_dtype": "float64"},  # a router casts its params in its forward
    "textnet": {"stem_out_channels": 16, "hidden_sizes": (16, 16, 24, 32, 48), "image_size": (64, 64)},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "wav2vec2-bert": {"vocab_size": 96, "feature_projection_input_dim": 16},
    "wav2vec2-conformer": {"vocab_size": 96},
    "sew": {"feat_extract_norm": "group", "conv_dim": (32,) * 13},
    "sew-d": {"feat_extract_norm": "group", "conv_dim": (32,) * 13},
    "seamless_m4t": {"feature_projection_input_dim": 16},
    "seamless_m4t_v2": {"feature_projection_input_dim": 16},
    "xlstm": {"num_heads": 4, "head_dim": 8, "chunk_size": 4},
    "esm": {"vocab_size": 96, "pad_token_id": 1, "mask_token_id": 4},
    "esmc": {"head_dim": 8, "num_key_value_heads": 4},
    "xmod": {"default_language": "en_XX"},
    "gemma3": {"mm_tokens_per_image": 4},
    "t5gemma2_encoder": {"mm_tokens_per_image": 4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
}


def smaller(config: Any) -> Any:
    """A configuration of the same class with small sizes."""
    config = copy.deepcopy(config)
    _shrink(config)
    for name in ("decoder_start_token_id", "pad_token_id"):  # a model that shifts its labels asks for them
        if getattr(config, name, None) is None:
            setattr(config, name, 1)
    return config


def _shrink(config: Any) -> None:
    own = vars(config)
    said = OVERRIDES.get(getattr(config, "model_type", ""), {})
    kept = _shorten(own)
    _fill(own)
    rotary = [name for name in ("qk_rope_head_dim", "qk_head_dim") if own.get(name) == own.get("head_dim")]
    for name, value in list(own.items()):
        if name.startswith("_") or name in kept or name in said:
            continue
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            _shrink(value)
        else:
            own[name] = _smaller(name, value)
    if "qk_rope_head_dim" in own:  # a head is two parts, of which one has positions
        own["qk_head_dim"] = own.get("qk_nope_head_dim", 0) + own["qk_rope_head_dim"]
        own["head_dim"] = own[rotary[0]] if rotary else own.get("head_dim")
    own.update(copy.deepcopy(said))
    pads = own.get("pad_token_id")
    if pads is not None and own.get("vocab_size") is not None:
        own["pad_token_id"] = min(pads, 1) if isinstance(pads, int) else pads


def _smaller(name: str, value: object) -> Any:
    if isinstance(value, float) and ZEROS.fullmatch(name):
        return 0.0
    if isinstance(value, dict):
        sections = {key: _sections(v) if "section" in str(key) else v for key, v in value.items()}
        if "rope_theta" in value:  # which models that have positions in time, height and width have defaults for
            sections.setdefault("mrope_section", _sections([1, 1, 1]))
        return sections
    if isinstance(value, bool) or KEPT.fullmatch(name):
        return value
    if isinstance(value, int):
        if IMAGES.fullmatch(name):
            return PLACEHOLDER
        if SPECIAL.fullmatch(name):  # below those that inputs draw; different ones for different names
            return value if value < VOCABULARY - 8 else 2 + sum(map(ord, name)) % 6
        return min([value, *(size for pattern, size in SIZES if re.fullmatch(pattern, name))][:2])
    if isinstance(value, (list, tuple)) and value and all(type(x) is int for x in value):
        if "section" in name:
            return type(value)(_sections(list(value)))
        if SPECIAL.fullmatch(name):
            return type(value)(min(x, 2) for x in value)
        if DEPTHS.fullmatch(name):
            return type(value)(min(x, 1 if len(value) > 2 else 2) for x in value)
        if WIDTHS.fullmatch(name) and min(value) > 3:
            return type(value)(min(x, 16 * x // min(value)) for x in value)
    return value


def _sections(value: Any) -> Any:
    """Of the half of a head's dims."""
    if not isinstance(value, (list, tuple)):
        return value
    half, count = HEAD_DIM // 2, len(value)
    return [half - (count - 1) * (half // count), *[half // count] * (count - 1)]


def _fill(own: dict[str, Any]) -> None:
    """What is None, and taken from sizes that change."""
    for name, value in NONE.items():
        if own.get(name, value) is None:
            own[name] = value


def _shorten(own: dict[str, Any]) -> list[str]:
    """Keeps as many layers as there are kinds of them, in lists that say one thing of each layer; what it has set."""
    names = [n for n in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers") if n in own]
    if not names or not isinstance(own[names[0]], int):
        return []
    count = own[names[0]]
    lists = {k: v for k, v in own.items() if isinstance(v, (list, tuple)) and len(v) == count and count > 2}
    if not lists:
        return []
    kept: list[int] = []
    for i in range(count):
        told = [str(v[i]) for v in lists.values() if isinstance(v[i], str)]
        before = {tuple(str(v[j]) for v in lists.values() if isinstance(v[j], str)) for j in kept}
        if tuple(told) not in before:
            kept.append(i)
    kept = (kept * 2)[:2] if len(kept) < 2 else kept
    for name, value in lists.items():
        own[name] = type(value)(value[i] for i in kept)
    own[names[0]] = len(kept)
    return [names[0], *lists]


def parts_of(config: Any) -> Iterator[Any]:
    """A configuration and all those in it."""
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            yield from parts_of(value)


def built(
    kind: type[nn.Module], config: Any, dtype: torch.dtype = torch.float64, seed: int = 0, most: int = 4_000_000
) -> nn.Module:
    """A model in a dtype, in training mode, that draws nothing.

    Raises:
        ValueError: it has more params than a tiny one.
    """
    with torch.device("meta"):
        count = sum(p.numel() for p in kind(config).parameters())
    if count > most:
        raise ValueError(f"it still has {count:,} params")
    torch.manual_seed(seed)
    module = kind(config).to(dtype).train()
    for child in module.modules():
        for name in ("p", "drop_prob", "dropout", "attention_dropout"):
            if isinstance(vars(child).get(name), float):
                setattr(child, name, 0.0)
    return module
