"""Others' trees: leaves that are whole, and words for moments, torch's, which DeepSpeed shares."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from fzero.formats.formats import ALIGN, Format, zeros
from fzero.state.items import Item
from fzero.state.origin import TREES

WORDS = {
    "mu": "exp_avg",
    "nu": "exp_avg_sq",
    "largest": "max_exp_avg_sq",
    "momentum": "momentum_buffer",
    "count": "step",
}


class WholeLeaves:
    """A source of leaves that are not cut, of which a subclass fills any range."""

    def format(self, path: str) -> Format | None:
        raise NotImplementedError

    def fill(self, path: str, start: int, stop: int, out: torch.Tensor) -> None:
        """Fills a flat tensor with elements [start, stop) of a leaf."""
        raise NotImplementedError

    def sliced(self, path: str) -> None:
        return None

    def read(
        self, path: str, start: int, stop: int, into: Sequence[torch.Tensor] | None, rank: int = 0
    ) -> Sequence[torch.Tensor]:
        form = self.format(path)
        assert form is not None
        out = into or zeros(form, -(-(stop - start) // ALIGN) * ALIGN, "cpu")
        if start < stop:
            self.fill(path, start, stop, out[0][: stop - start])
        return out


def word_of(item: str) -> str:
    """What others call an item of the moments: "moments.1.mu" is an `exp_avg`."""
    own = item.rpartition(".")[2]
    return WORDS.get(own, own)


def one_count(place: str, counts: Mapping[str, int], other: int, anew: str) -> int:
    """How many updates all leaves have seen; `other` where none says it.

    Args:
        anew: the argument that begins the moments anew.
    """
    if len({*counts.values()}) > 1:
        first, last = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
        raise ValueError(
            f"{place}: leaf {first!r} has seen {counts[first]} updates, leaf {last!r} {counts[last]}; expected one "
            f"count for all. Say {anew} to begin the moments anew."
        )
    return next(iter(counts.values()), other)


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
