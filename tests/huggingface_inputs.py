"""Inputs for a tiny model of transformers: what its processor would return for a batch, and labels."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from huggingface_tiny import IMAGE, PATCH, PLACEHOLDER, VOCABULARY, WIDTH, parts_of
from torch import nn

TOKENS = 12
Batch = dict[str, Any]


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
    """Runs copies of the module with the first: it may keep what it computes. With hidden states, where it has some."""
    if batches[0].get("output_hidden_states"):
        return
    try:
        copy.deepcopy(module)(**batches[0], output_hidden_states=True)
    except TypeError:
        copy.deepcopy(module)(**batches[0])
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
    return [vars(own)[name] for own in parts_of(config) if name in vars(own)]


def _has(config: Any, *names: str) -> bool:
    return any(all(name in vars(own) for name in names) for own in parts_of(config))


def _first(config: Any, *names: str) -> Any:
    return next((x for name in names for x in _all(config, name) if isinstance(x, int)), None)
