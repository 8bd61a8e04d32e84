"""Losses: what a pipeline's step keeps of the last stage's outputs, and how their cotangent is split."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fzero.comm.axis import Axis
from fzero.engine.run import scalar_loss
from fzero.table.microbatch import Microbatches, mean_of, parts_of


class Losses:
    """What a step keeps of the last stage's outputs: their losses, or how their cotangent is split.

    Attributes:
        times: by what to divide the sum of the gradients.
    """

    def __init__(self, micro: Microbatches, cotangent: object) -> None:
        self._micro, self._cotangent = micro, cotangent
        self._losses: dict[int, torch.Tensor] = {}  # by microbatch
        self._pieces: Sequence[object] = ()
        self.times = 1.0

    def note(self, microbatch: int, output: object) -> object:
        """Takes the loss of an output, or notes its form; returns what else is to be kept of it."""
        alone = isinstance(output, torch.Tensor) and output.ndim == 0 and output.is_floating_point()
        if self._cotangent is None or alone:
            self._losses[microbatch] = scalar_loss(output, "pipeline(state, *inputs)")
        if not self._pieces:
            several, cotangent = self._micro.count > 1, self._cotangent
            if cotangent is None:
                cotangent = torch.ones_like(mean_of([output]) if several else output)  # type: ignore[arg-type]
            self._pieces, self.times = self._micro.split_cotangent(cotangent, [parts_of(output)] * self._micro.count)
        return None

    @property
    def pieces(self) -> Sequence[object]:
        return self._pieces

    def mean(self, axis: Axis | None) -> torch.Tensor | None:
        """Over microbatches and ranks; None where the outputs are none."""
        if not self._losses or axis is None:
            return None
        return axis.mean(mean_of([self._losses[i] for i in sorted(self._losses)]), "the loss")
