"""Tiny models of any architecture that transformers has, and inputs for them.

A configuration's own defaults, with each size cut down by what its name says that it is; what then does not build, or
does not run by itself, is no model to compare.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

HEADS, HEAD_DIM, VOCABULARY, EXPERTS, TOKENS, IMAGE, PATCH = 4, 8, 96, 4, 12, 32, 8
WIDTH = HEADS * HEAD_DIM
PLACEHOLDER = 90  # the token that stands for an image
Batch = dict[str, Any]

# (pattern of a field's name, what it becomes); the first that fits says it
SIZES: list[tuple[str, int]] = [
    (r"(^|_)vocab_size.*|.*_vocab_size|unpadded_vocab_size|vocab_size_per_layer_input", VOCABULARY),
    (r"(image|img|video|audio)_token_(id|index)|(image|video|audio)_token_index", PLACEHOLDER),
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
    (r".*(hidden_size|d_model|n_embd|embed_dim|hidden_dim|_dim|width|dim|_channels|_size|num_filters|channels).*", WIDTH),
    (r"embedding_size|emb_dim|query_pre_attn_scalar|projection_dim", WIDTH),
]
# fields that are no size, whatever their name says
KEPT = re.compile(
    r"(.*_)?(stride|kernel)(_.*)?|.*kernel_size|conv_.*|window_size|num_channels|in_channels|in_chans|.*dropout.*|"
    r"type_vocab_size|spatial_merge_size|temporal_patch_size|merge_size|.*_ratio.*|.*scale.*|num_labels|max_new_tokens|"
    r"image_mean|.*num_types|.*patch_stride|sampling_rate|encoder_stride|output_stride|pretraining_tp"
)
# a model that draws numbers, or has no state of its own between calls, in as far as a configuration says it
ZEROS = re.compile(r".*(dropout|drop|layerdrop|pdrop|drop_path_rate|mask_time_prob|mask_feature_prob|jitter)(_.*)?|.*_jitter.*")
SPECIAL = re.compile(r".*(token_id|token_index|_idx)$")


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
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64, "mamba_n_groups": 1}
# what no name of a field tells, by the model type
OVERRIDES: dict[str, dict[str, Any]] = {
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1], **MAMBA},
    "falcon_h1": MAMBA,
    "granitemoehybrid": {"layer_types": MIXED, **MAMBA},
    "recurrent_gemma": {"num_hidden_layers": 3, "block_types": ["recurrent", "recurrent", "attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1},
    "zamba2": {"n_mamba_heads": 8, "mamba_headdim": 8, "attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba": {"n_mamba_heads": 2, "attention_hidden_size": 64, "attention_head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "reformer": {"is_decoder": True},
    **dict.fromkeys(
        ("swin", "swinv2", "donut-swin", "maskformer-swin"),
        {"embed_dim": 24, "hidden_size": 48, "depths": (1, 1), "num_heads": (3, 6), "num_layers": 2, "window_size": 2},
    ),
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
    "textnet": {"stem_out_channels": 16, "hidden_sizes": (16, 16, 24, 32, 48), "image_size": (64, 64)},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "wav2vec2-bert": {"vocab_size": 96, "feature_projection_input_dim": 16},
    "wav2vec2-conformer": {"vocab_size": 96},
    **dict.fromkeys(("sew", "sew-d"), {"feat_extract_norm": "group", "conv_dim": (32,) * 13}),
    **dict.fromkeys(("seamless_m4t", "seamless_m4t_v2"), {"feature_projection_input_dim": 16}),
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
        own.update({"head_dim": own[name] for name in rotary[:1]})
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
        if SPECIAL.fullmatch(name) and not re.fullmatch(SIZES[1][0], name):
            return min(value, VOCABULARY - 8) if value < VOCABULARY - 8 else 2 + sum(map(ord, name)) % 6
        for pattern, size in SIZES:
            if re.fullmatch(pattern, name):
                return min(value, size) if not re.fullmatch(SIZES[1][0], name) else size
        return value
    if isinstance(value, (list, tuple)) and value and all(type(x) is int for x in value):
        if SPECIAL.fullmatch(name):
            return type(value)(min(x, 2) for x in value)
        if "section" in name:
            return type(value)(_sections(list(value)))
        if re.fullmatch(r"depths|num_layers|layers|.*block_repeats|depth", name):
            return type(value)(min(x, 1 if len(value) > 2 else 2) for x in value)
        if re.fullmatch(r".*(hidden_sizes|channels|embed_dims?|dims|neck_hidden_sizes|_dim|conv_dim|block_out_channels)", name):
            least = min(value)
            return type(value)(min(x, max(8, 16 * x // max(least, 1))) if least > 3 else x for x in value)
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


def _subs(config: Any) -> Iterator[Any]:
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            yield from _subs(value)


def built(
    kind: type[nn.Module], config: Any, dtype: torch.dtype = torch.float64, seed: int = 0, most: int = 4_000_000
) -> nn.Module:
    """A model in a dtype, in training mode, that draws nothing.

    Raises:
        ValueError: it has more params than a tiny one.
    """
    for own in _subs(config):
        for name in [n for n in vars(own) if n in ("problem_type",)]:
            vars(own)[name] = None
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


# ---- inputs


class Unfit(Exception):
    """None of the inputs that are made is what the module takes."""


def batches_for(module: nn.Module, seeds: Sequence[int], images: bool = True, rows: int = 2) -> list[Batch]:
    """What the documentation calls a model with: what its processor returns, and labels; of each seed one.

    Of the ways in which models take images the first one that this one runs with.

    Raises:
        Unfit: it runs with none; from its own error.
    """
    why: list[Exception] = []
    ways = IMAGES if images else (_no_images,)
    for way in ways:
        tokens = 0
        for _ in range(4):
            batches = [_batch(module, seed, rows, way, tokens) for seed in seeds]
            try:
                _runs(module, batches)
                return batches
            except Exception as error:
                why.append(error)
                found = re.search(r"tokens: (\d+), features:? (\d+)", str(error))
                if found is None or "input_ids" not in batches[0]:
                    break
                own, features = int(found[1]), int(found[2])
                if own == features:  # it counts the features' numbers
                    tokens = max(tokens // WIDTH, 1)
                else:
                    tokens = max(features * tokens // own if own else features // rows, 1)
    said = min(why, key=_is_of_inputs)
    raise Unfit(f"{type(said).__name__}: {said}") from said


def _is_of_inputs(error: Exception) -> bool:
    return isinstance(error, TypeError) or "NoneType" in str(error)


def _runs(module: nn.Module, batches: Sequence[Batch]) -> None:
    """Runs the module with the first; with its hidden states, where it has some."""
    if batches[0].get("output_hidden_states"):
        return
    try:
        module(**batches[0], output_hidden_states=True)
    except TypeError:
        module(**batches[0])
    else:
        for batch in batches:
            batch["output_hidden_states"] = True


def _batch(module: nn.Module, seed: int, rows: int, way: Images, placeholders: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    names = inspect.signature(type(module).forward).parameters
    config: Any = module.config
    vocabulary = min([x for x in _all(config, "vocab_size") if isinstance(x, int)] or [VOCABULARY])
    last, main = min(vocabulary, PLACEHOLDER - 2), getattr(module, "main_input_name", "")
    kind = type(module).__name__
    audio = kind.endswith(("ForCTC", "ForSpeechSeq2Seq")) or main in ("input_features", "input_values")
    batch: Batch = {}

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randint(last // 4, last, shape, generator=generator)

    if "input_ids" in names and not audio:
        ids = drawn(rows, TOKENS + placeholders)
        ids[:, 1 : 1 + placeholders] = PLACEHOLDER
        batch["input_ids"], batch["attention_mask"] = ids, torch.ones_like(ids)
        if "mm_token_type_ids" in names:
            batch["mm_token_type_ids"] = (ids == PLACEHOLDER).long()
    if "pixel_values" in names:
        batch.update(way(module, names, rows, generator))
    if "input_features" in names and audio:
        mels = _first(config, "num_mel_bins", "input_feat_per_channel", "feature_size", "n_mels", "input_dim") or 16
        frames = 2 * (_first(config, "max_source_positions") or 32)
        first = _has(config, "num_mel_bins", "max_source_positions") and "speech" not in config.model_type
        shape = (rows, mels, frames) if first else (rows, 64, mels)
        batch["input_features"] = torch.randn(shape, generator=generator)
        if "attention_mask" in names and not first:
            batch["attention_mask"] = torch.ones(shape[:2], dtype=torch.long)
    if "input_values" in names and (audio or "input_ids" not in names):
        spectrogram = _has(config, "max_length", "frequency_stride")
        shape = (rows, config.max_length, config.num_mel_bins) if spectrogram else (rows, 1600)
        batch["input_values"] = torch.randn(shape, generator=generator)
    if "labels" in names:
        decodes = "decoder_input_ids" in names or "input_ids" not in batch
        if "Classification" in kind:
            batch["labels"] = torch.randint(0, max(config.num_labels, 1), (rows,), generator=generator)
        elif "CTC" in kind:
            batch["labels"] = drawn(rows, 3)
        elif "MaskedImage" not in kind:
            batch["labels"] = drawn(rows, TOKENS) if decodes else batch["input_ids"].clone()
    if "decoder_input_ids" in names and "labels" not in batch:
        batch["decoder_input_ids"] = drawn(rows, TOKENS)
    if "return_loss" in names:
        batch["return_loss"] = True
    dtype = next(module.parameters()).dtype
    return {
        name: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for name, x in batch.items()
    }


def _no_images(module: nn.Module, names: object, rows: int, generator: torch.Generator) -> Batch:
    return {}


def _one_image(module: nn.Module, names: Collection[str], rows: int, generator: torch.Generator) -> Batch:
    """A batch of images, as they are."""
    channels, height, width = _size(module.config)
    batch: Batch = {"pixel_values": torch.randn((rows, channels, height, width), generator=generator)}
    if "image_sizes" in names:
        batch["image_sizes"] = torch.tensor([[height, width]] * rows)
    return batch


def _several_images(module: nn.Module, names: Collection[str], rows: int, generator: torch.Generator) -> Batch:
    """Each example has a list of images."""
    batch = _one_image(module, names, rows, generator)
    return {**batch, "pixel_values": batch["pixel_values"][:, None]}


def _patches(module: nn.Module, names: Collection[str], rows: int, generator: torch.Generator) -> Batch:
    """The patches of all images in a row, and how many each has in time, height and width."""
    channels, *_ = _size(module.config)
    patch = _first(module.config, "patch_size") or PATCH
    time = _first(module.config, "temporal_patch_size") or 1
    length = channels * time * patch * patch
    grids = [name for name in ("image_grid_thw", "image_grid_hw", "grid_thw") if name in names]
    side = 4
    batch: Batch = {"pixel_values": torch.randn((rows * side * side, length), generator=generator)}
    for name in grids:
        batch[name] = torch.tensor([[1, side, side][-len(name.split("_")[-1]) :]] * rows)
    return batch


Images = Callable[[nn.Module, Collection[str], int, torch.Generator], Batch]
IMAGES: tuple[Images, ...] = (_one_image, _several_images, _patches)


def _size(config: Any) -> tuple[int, int, int]:
    """Channels, height and width of an image."""
    sizes = [x for x in _all(config, "image_size") if x is not None] or [IMAGE]
    height, width = (sizes[0], sizes[0]) if isinstance(sizes[0], int) else tuple(sizes[0])[-2:]
    return _first(config, "num_channels", "in_channels", "in_chans") or 3, height, width


def _all(config: Any, name: str) -> list[Any]:
    return [vars(own)[name] for own in _subs(config) if name in vars(own)]


def _has(config: Any, *names: str) -> bool:
    return any(all(name in vars(own) for name in names) for own in _subs(config))


def _first(config: Any, *names: str) -> Any:
    return next((x for name in names for x in _all(config, name) if isinstance(x, int)), None)
