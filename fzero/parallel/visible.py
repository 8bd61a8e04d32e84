"""Which tokens a token sees: by causality, windows and documents always an interval, whose ends never go back."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, ParamSpec, TypeVar

import torch

from fzero.base import private, thread_state
from fzero.base.arguments import by_new_names, named, need_bool, need_int, need_number, wrong
from fzero.comm import pieces

P = ParamSpec("P")
T = TypeVar("T")
Documents = Sequence[int] | torch.Tensor
SHORTEST = 32  # tokens on average that regions are worth their while for


@dataclass(frozen=True)
class Options:
    """What an attention function is told beside its tensors, the same on all ranks."""

    is_causal: bool = False  # a token sees itself and those before it
    window: int | None = None  # the number of tokens that one sees in each direction, itself included; None for all
    # cumulative lengths: where each document begins, and where the last one ends; None for one
    documents: tuple[int, ...] | None = None
    scale: float | None = None  # of the scores; None takes 1 / sqrt(d)
    enable_gqa: bool | None = None  # whether heads may share a KV head; None for whether they do


def torchs(who: str, given: Mapping[str, object]) -> dict[str, object]:
    """Options by torch's names: `causal` is `is_causal`, until 1.0. What is None there is not said."""
    out = {name: x for name, x in given.items() if not (x is None and name in ("is_causal", "attn_mask"))}
    return by_new_names(who, out, causal="is_causal")


def options_of(who: str, **given: object) -> Options:
    """The options of a call, held against what they may be."""
    given = torchs(who, given)
    if given.pop("attn_mask", None) is not None:
        raise ValueError(
            f"{who}: got attn_mask, expected is_causal, window or documents. fz.parallel.attention takes one on one "
            "rank, and fz.parallel.ulysses(F.scaled_dot_product_attention, ax) one of the whole sequence."
        )
    if (dropout := given.pop("dropout_p", 0.0)) != 0.0:
        raise ValueError(
            f"{who}: got dropout_p={named(dropout)}, expected 0.0, as it has no dropout. "
            "fz.parallel.ulysses(F.scaled_dot_product_attention, ax) has torch's."
        )
    if more := sorted(set(given) - set(Options.__dataclass_fields__)):
        known = "is_causal, window, documents, scale and enable_gqa"
        raise TypeError(f"{who}: got {', '.join(more)}, expected no options but {known}.")
    options = Options(**given)  # type: ignore[arg-type]
    need_bool(options.is_causal, who, "is_causal")
    need_bool(options.enable_gqa, who, "enable_gqa", or_none=True)
    window = options.window
    if window is not None:
        window = need_int(window, who, "window", "a number of tokens", least=1)
    scale = options.scale if options.scale is None else float(need_number(options.scale, who, "scale"))
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"{who}: got scale={scale}, expected a finite number.")
    documents = _need_documents(options.documents, who)
    return Options(options.is_causal, window, documents, scale, options.enable_gqa)


def _need_documents(documents: Documents | None, who: str) -> tuple[int, ...] | None:
    if documents is None:
        return None
    given = documents.tolist() if isinstance(documents, torch.Tensor) else documents
    expected = "cumulative lengths, such as [0, 5, 9] for two documents of 5 and 4 tokens"
    if not isinstance(given, (list, tuple)):
        raise wrong(who, "documents", documents, expected)
    out = tuple(need_int(each, who, "documents", expected) for each in given)
    if out[:1] != (0,) or list(out) != sorted(out):
        raise ValueError(f"{who}: got documents={list(out)}, expected {expected}.")
    return out


def with_values(fn: Callable[P, T]) -> Callable[P, T]:
    """A function of what tokens see, which is known where the rest is traced, too."""

    @functools.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        traced = pieces.graph.get() is not None
        with thread_state.without_dispatch_modes() if traced else contextlib.nullcontext():
            return fn(*args, **kwargs)

    return run


class Visible(NamedTuple):
    """What some tokens see: all from `low[i]` to before `high[i]`, by places in the whole sequence; neither falls."""

    low: torch.Tensor
    high: torch.Tensor

    @with_values
    def of(self, start: int, stop: int) -> Visible:
        """The same of some of the tokens."""
        return Visible(self.low[start:stop], self.high[start:stop])

    @with_values
    def any(self, start: int, stop: int) -> bool:
        """Tells whether any of the tokens, which lie one after the other, sees any from `start` to before `stop`."""
        if not len(self.low) or start >= stop:
            return False
        return int(self.low[0]) < stop and int(self.high[-1]) > start  # each sees itself: there is no gap between

    @with_values
    def ends(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Where what the first token and the last one see begins, and where it ends."""
        return (int(self.low[0]), int(self.low[-1])), (int(self.high[0]), int(self.high[-1]))

    def hidden(self, places: torch.Tensor) -> torch.Tensor:
        """True where a token does not see that of a place: [tokens, places]."""
        low, high = [each.to(places.device)[:, None] for each in self]
        return (places < low) | (places >= high)


@with_values
@private.below_transforms()  # what belongs to a level of a derivative cannot be used in another one
def visible(total: int, options: Options) -> Visible:
    """What each token of a sequence sees."""
    place = torch.arange(total, device="cpu")
    low, high = torch.zeros_like(place), torch.full_like(place, total)
    if options.documents is not None:
        ends = torch.tensor(options.documents, dtype=torch.int64, device="cpu")
        starts, ends = ends[:-1], ends[1:]  # none on a rank of a batch that is too small for all of them
        which = torch.searchsorted(ends, place, right=True)
        low, high = starts[which], ends[which]
    if options.window is not None:
        window = min(options.window, max(total, 1))  # or sums could be too large
        low = torch.maximum(low, place - (window - 1))
        high = torch.minimum(high, place + window)
    if options.is_causal:
        high = torch.minimum(high, place + 1)
    return Visible(low, high)


class Region(NamedTuple):
    """Tokens that see all of some others; where it is causal, the first sees the first, the second the first two."""

    rows: slice
    columns: slice
    causal: bool


@with_values
def regions(seen: Visible, place: int, start: int, width: int) -> list[Region] | None:
    """What some tokens see of a block of others, from `start` on, as a few regions; None where it has another shape.

    Args:
        seen: what the tokens see, which lie one after the other, from `place` on in the whole sequence.
    """
    count, end = len(seen.low), start + width
    if not count or not width or not seen.any(start, end):
        return []
    if int(seen.low[-1]) <= start and int(seen.high[0]) >= end:
        return [Region(slice(0, count), slice(0, width), False)]
    firsts = [0, *(seen.low.diff().nonzero().view(-1) + 1).tolist(), count]
    if len(firsts) > 2 and (len(firsts) - 1) * SHORTEST > count:
        return None
    out: list[Region] = []
    for first, last in itertools.pairwise(firsts):
        low, high = max(int(seen.low[first]), start), seen.high[first:last]
        if int(high[0]) == int(high[-1]):
            stop = min(int(high[0]), end)
            out.append(Region(slice(first, last), slice(low - start, stop - start), False))
            continue
        own, last_own = place + first, place + last
        if not torch.equal(high, torch.arange(own + 1, last_own + 1, device="cpu")):
            return None
        before = slice(low - start, min(own, end) - start)  # what lies before the first of these tokens
        out.append(Region(slice(first, last), before, False))
        begin = max(own, low)
        out.append(Region(slice(begin - place, last), slice(begin - start, min(last_own, end) - start), True))
    return [each for each in out if each.rows.start < each.rows.stop and each.columns.start < each.columns.stop]
