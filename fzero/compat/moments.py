"""Others' words for an optimizer's moments: torch's, which DeepSpeed shares."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fzero.state.items import Item
from fzero.state.origin import TREES

WORDS = {"mu": "exp_avg", "nu": "exp_avg_sq", "momentum": "momentum_buffer", "count": "step"}


def word_of(item: str) -> str:
    """What others call an item of the moments: "moments.1.mu" is an `exp_avg`."""
    own = item.rpartition(".")[2]
    return WORDS.get(own, own)


def kinds_of(moments: Sequence[Item], words: Collection[str]) -> dict[str, str]:
    """The kinds of those items that others' files have, and of what no item stands for.

    Args:
        words: what the files have of each leaf, without `step`.
    """
    kinds, met = dict[str, str](), set[str]()
    for item in moments:
        word = word_of(item.name)
        if item.kind not in TREES:
            kinds[item.name] = item.kind
        elif word in words:
            kinds[item.name] = item.kind
            met.add(word)
    return {**kinds, **{f"moments.{word}": "values" for word in words if word not in met}}
