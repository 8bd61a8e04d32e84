"""What each microbatch of a call counts in its means, and whether it adds to gradients at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Mask:
    """Whether a run adds anything to gradients: one whose weight is 0 does not, be its own not finite.

    Where the function exchanges values between ranks of other data, what it adds belongs to their losses, too.

    Args:
        counts: whether its weight on this rank is above 0.
        anywhere: whether it is on some rank.
    """

    def __init__(self, counts: bool = True, anywhere: bool = True) -> None:
        self.counts, self._anywhere, self._exchanged = counts, anywhere, False

    def exchanges(self) -> None:
        """Notes that the function exchanges values between the ranks that its step takes means over."""
        self._exchanged = True

    @property
    def masked(self) -> bool:
        return not self.counts and not (self._anywhere and self._exchanged)


class Weights(NamedTuple):
    """What each microbatch counts, where they do not all count the same.

    Attributes:
        factors: by what its scalar outputs are multiplied, so that the mean over ranks of their sum is the weighted
            mean; NaN where nothing counts.
        of_rank: the same for the mean over this rank's microbatches alone.
        anywhere: whether it counts on some rank.
    """

    factors: tuple[float, ...]
    of_rank: tuple[float, ...]
    anywhere: tuple[bool, ...]

    def mask(self, microbatch: int) -> Mask:
        return Mask(self.factors[microbatch] > 0, self.anywhere[microbatch])


def weights_of(own: Sequence[float], means: Sequence[float]) -> Weights:
    """What microbatches count, by their weights here, and the means of these over ranks."""
    factors, of_rank = [
        tuple([w / total for w in own]) if total > 0 else (math.nan,) * len(own) for total in (sum(means), sum(own))
    ]
    return Weights(factors, of_rank, tuple([mean > 0 for mean in means]))
