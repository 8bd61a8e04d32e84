"""What each microbatch of a call counts in its means, and whether it adds to gradients at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(eq=False)
class Mask:
    """Whether a run adds anything to gradients: one whose weight is 0 does not, be its own not finite.

    Where the function exchanges values between ranks of other data, what it adds belongs to their losses, too; and so
    does what it is given a cotangent of, where its outputs go on to others.
    """

    counts: bool = True  # its weight on this rank is above 0
    anywhere: bool = True  # it is on some rank
    given: bool = False  # the cotangents of its outputs are not zero, as that of its own loss is
    exchanged: bool = False

    def exchanges(self) -> None:
        """Notes that the function exchanges values between the ranks that its step takes means over."""
        self.exchanged = True

    @property
    def partial(self) -> bool:
        """Whether it may be masked."""
        return not self.counts

    @property
    def masked(self) -> bool:
        return not (self.counts or self.given or (self.exchanged and self.anywhere))


@dataclass
class Counts:
    """What each microbatch of a call counts."""

    sizes: Sequence[int] | None = None  # its examples; None where no input is split
    # by what its scalar outputs are multiplied, so that the mean over ranks of their sum is the weighted mean;
    # NaN where nothing counts. None where all count the same
    factors: Sequence[float] | None = None
    of_rank: Sequence[float] | None = None  # the same for the mean over this rank's microbatches alone
    anywhere: Sequence[bool] = ()  # whether each counts on some rank

    def split(self, sizes: Sequence[int] | None) -> None:
        """They have so many examples, and count by them, where ranks count the same."""
        self.sizes = sizes
        if sizes is not None and len({*sizes}) > 1:
            self.weigh(sizes, [sum(sizes) / len(sizes)] * len(sizes))

    def weigh(self, own: Sequence[float], means: Sequence[float]) -> None:
        """They have these weights here, and these are their means over ranks."""
        self.factors, self.of_rank = [
            [w / total for w in own] if total > 0 else [math.nan] * len(own) for total in (sum(means), sum(own))
        ]
        self.anywhere = [mean > 0 for mean in means]

    def mask(self, microbatch: int) -> Mask | None:
        """Whether a run of one adds anything to gradients; None where all do."""
        return None if self.factors is None else Mask(self.factors[microbatch] > 0, self.anywhere[microbatch])
