"""fz.parallel.register_attention: attention over ranks as an implementation of Hugging Face's own registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fzero.base.arguments import need_str, wrong
from fzero.comm import pieces
from fzero.parallel.attention import Attention
from fzero.parallel.ring import Ring
from fzero.parallel.ulysses import Ulysses
from fzero.parallel.visible import options_of

WHO = "parallel.register_attention"
# arguments that are no attention of fzero's where they are given
OTHERS = ("softcap", "s_aux", "position_bias", "head_mask", "block_mask")
# what sees other tokens through attention only
ALONE = {"full_attention", "sliding_attention", "chunked_attention", "attention", "mlp", "moe", "dense", "sparse"}
LAYERS = ("layer_types", "layers_block_type", "block_types")  # of a config: one kind for each
STATES = ("mamba_", "ssm_", "conv_", "linear_conv", "d_conv", "d_state")  # of a config with state space layers
DOCUMENTS = ("documents", "cu_seq_lens_q")


def register_attention(name: str, attention: Callable[..., torch.Tensor]) -> None:
    """Lets Hugging Face models use an attention over ranks, by a name (extra `hf`).

    Make the model with `attn_implementation=name`, or call `model.set_attn_implementation(name)`. Then call it with
    this rank's tokens: `model(**fz.parallel.shard_sequence(batch, ax))`. Causality and windows are the model's, by
    positions in the whole sequence. For documents give `documents=` or `cu_seq_lens_q=` of the whole sequence.

    The name belongs to the process; registering it again replaces it. Some models, such as Falcon and Bloom, do not
    support it.

    Args:
        name: for `attn_implementation`.
        attention: of `fz.parallel.ulysses` or `fz.parallel.ring`.

    Raises:
        ImportError: transformers is not installed.
        TypeError: another function.
        ValueError: in a call, on every rank: padding, missing positions, positions that do not fit the documents, a
            cache, dropout, or layers that mix tokens otherwise (convolutions, state spaces).

    Example:
        >>> def rank_main(rank):
        ...     attention = fz.parallel.ulysses(None, fz.parallel.axis(None, "sp"))
        ...     fz.parallel.register_attention(f"ulysses of rank {rank}", attention)
        >>> _ = fz.testing.run_ranks(rank_main, 2)
    """
    need_str(name, WHO, "name", "a name")
    if not isinstance(attention, Attention):
        raise wrong(WHO, "attention", attention, "one that fz.parallel.ulysses or fz.parallel.ring made")
    try:
        from transformers.masking_utils import AttentionMaskInterface
        from transformers.modeling_utils import AttentionInterface
    except ModuleNotFoundError as error:
        raise ImportError(f"{WHO} needs transformers: pip install transformers, or in a clone '.[hf]'.") from error
    AttentionInterface.register(name, Registered(name, attention))
    AttentionMaskInterface.register(name, _described)


class Described(NamedTuple):
    """What a model's own mask would have hidden, in place of the mask."""

    padding: torch.Tensor | None  # [b, t], True where there is a token; None without padding
    size: int | None  # of a window or a chunk; None for neither
    ahead: bool  # whether a token sees the one behind it
    special: bool  # whether the model adds rules of its own


def _described(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: object,
) -> Described:
    """Stands where a mask of all scores would be made."""
    ahead = False
    if not use_vmap and q_length == kv_length and q_length > 1:
        rows, place = torch.arange(batch_size, device=device)[:, None], torch.arange(q_length - 1, device=device)[None]
        ahead = bool(torch.as_tensor(mask_function(rows, 0, place, place + 1), device=device).any())
    return Described(attention_mask, local_size, ahead, use_vmap)


class Registered:
    """An attention function as transformers calls it."""

    def __init__(self, name: str, attention: Attention) -> None:
        self.name, self.attention = name, attention

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: object,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        position_ids: torch.Tensor | None = None,
        **more: Any,
    ) -> tuple[torch.Tensor, None]:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        documents = next((more[name] for name in DOCUMENTS if more.get(name) is not None), None)
        window = sliding_window if causal or sliding_window is None else sliding_window + 1  # which counts others only
        options: dict[str, Any] = {"is_causal": bool(causal), "window": window, "scale": scaling}
        who = f"attention {self.name!r} of {type(module).__name__}"
        problem = _refused(bool(causal), sliding_window, attention_mask, dropout, more) or _mixing(module)
        problem = self._misplaced(position_ids, documents, query.shape[2]) or problem
        self._need_none(problem, who)
        out = self.attention(query, key, value, documents=documents, **options)
        return out.transpose(1, 2).contiguous(), None

    def _misplaced(self, position_ids: torch.Tensor | None, documents: Any, count: int) -> str:
        """Tells where positions are not those of the whole sequence; empty if they are. All ranks ask."""
        place = self.attention.places(count)
        if position_ids is None:
            return (
                "no position_ids, expected those of this rank's piece of the sequence. Give the model the piece and "
                "its position_ids from fz.parallel.shard_sequence; one that takes none counts them itself, from 0 on "
                "each rank, and cannot run on pieces."
            )
        if documents is not None:
            try:
                known = options_of(WHO, documents=documents).documents
            except (TypeError, ValueError) as error:  # maybe on this rank only
                return f"other documents than those of the whole sequence: {error}"
            ends = torch.tensor(known, device="cpu")
            place = place - ends[torch.searchsorted(ends, place, right=True) - 1]
        given = position_ids.detach().to("cpu")
        if given.shape[-1] != count or not bool((given == place).all()):
            return (
                f"position_ids {_short(given)}, expected the places in the whole sequence, counted anew in each of "
                f"documents={None if documents is None else list(documents)}, {_short(place)}. Take the piece and its "
                "position_ids from fz.parallel.shard_sequence."
            )
        return ""

    def _need_none(self, problem: str, who: str) -> None:
        """Raises on every rank where there is a problem on one."""
        attention: Attention | None = self.attention
        wrong_ranks: list[str] = []
        while isinstance(attention, (Ulysses, Ring)):
            if attention.ax is not None:
                flags = pieces.told(attention.ax, [bool(problem or wrong_ranks)], "attention of a model")
                wrong_ranks += [f"{rank} of axis {attention.ax.name!r}" for rank, (flag,) in enumerate(flags) if flag]
            attention = attention.inner if isinstance(attention, Ulysses) else None
        if problem:
            raise ValueError(f"{who} got {problem}")
        if wrong_ranks:
            raise ValueError(f"{who} was refused on rank {wrong_ranks[0]}, whose own error says why.")


def _refused(causal: bool, window: int | None, mask: object, dropout: float, more: dict[str, Any]) -> str:
    """What a call asks for that attention over ranks does not have; empty if nothing."""
    if dropout:
        return f"dropout={dropout}, expected 0. Put the model into eval(), or set its attention_dropout to 0."
    for name in OTHERS:
        if more.get(name) is not None:
            return f"{name}, which it does not have."
    if mask is None:
        return ""
    if not isinstance(mask, Described):
        return "a mask of its own, expected none: causality, windows and documents are told as such."
    if mask.special or (mask.ahead and causal):
        return "a mask with rules of the model's own, expected causality, a window or documents."
    if mask.size != window:
        return f"a mask in chunks of {mask.size} and a window of {window}, expected the same."
    if mask.padding is not None and not bool(mask.padding.all()):
        return "an attention_mask with padding, expected none. Pack sequences one after the other: documents=."
    return ""


def _mixing(module: torch.nn.Module) -> str:
    """Names what mixes tokens in a model beside its attention, as its config has it; empty if there is nothing."""
    config = getattr(module, "config", None)
    kinds = [kind for name in LAYERS for kind in getattr(config, name, None) or ()]
    other = next((kind for kind in kinds if isinstance(kind, str) and kind not in ALONE), "")
    states = next((name for name in vars(config or object) if name.startswith(STATES) and getattr(config, name)), "")
    if kinds and not other:
        states = ""
    if not other and not states:
        return ""
    return (
        f"a model with layers that mix tokens beside attention ({other or states}), each of which would see this "
        "rank's only. There are no conversions for them."
    )


def _short(places: torch.Tensor) -> str:
    numbers = places.reshape(-1).tolist()
    return str(numbers if len(numbers) <= 8 else [*numbers[:4], "...", *numbers[-3:]])
