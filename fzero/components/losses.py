"""Losses: what a pipeline's step keeps of the last stage's outputs, and how their cotangent is split."""

from __future__ import annotations

from typing import Any

import torch

from fzero.base import pytree
from fzero.base.follow import follows
from fzero.comm.axis import Axis
from fzero.comm.linear import meaned
from fzero.components.remote.component import fetch
from fzero.components.remote.handle import Value
from fzero.components.shares import Shares
from fzero.engine.outcome import need_structure, scalar_loss
from fzero.table.microbatch import Microbatches, Part, mean_of, parts_of

WHO = "pipeline(state, *inputs)"


class Losses:
    """What a step keeps of the last stage's outputs: their losses, or how their cotangent is split.

    Attributes:
        times: by what to divide the sum of the gradients.
    """

    def __init__(self, micro: Microbatches, cotangent: object, shares: int) -> None:
        self._micro, self._cotangent = micro, Shares(shares, micro).apart(cotangent, "the outputs' cotangent")
        self._losses: dict[int, Any] = {}  # by microbatch
        self._pieces: dict[int, object] = {}
        self.times = 1.0

    def note(self, microbatch: int, output: object) -> object:
        """Takes the loss of an output, or notes its form; returns what else is to be kept of it."""
        if isinstance(output, Value) and self._cotangent is None:
            # nothing is waited for: that it is a loss shows at the end
            self._losses[microbatch] = output
            self._pieces[microbatch] = torch.full_like(output, 1 / self._micro.count)  # type: ignore[arg-type]
            return None
        alone = isinstance(output, torch.Tensor) and output.ndim == 0 and output.is_floating_point()
        if self._cotangent is None or alone:
            self._losses[microbatch] = scalar_loss(output, WHO)
        if not self._pieces:
            several, cotangent = self._micro.count > 1, self._cotangent
            if cotangent is not None:
                need_structure(cotangent, pytree.flatten(output)[1])
            if cotangent is None:
                cotangent = torch.ones_like(mean_of([output]) if several else output)  # type: ignore[arg-type]
            pieces, self.times = self._micro.split_cotangent(cotangent, [known_parts(output)] * self._micro.count)
            self._pieces = dict(enumerate(pieces))
        return None

    def piece(self, microbatch: int) -> object:
        """The cotangent of a microbatch's outputs."""
        return self._pieces[microbatch]

    def mean(self, axis: Axis | None) -> torch.Tensor | None:
        """Over microbatches and ranks; None where the outputs are none.

        Args:
            axis: of the last stage's ranks; None where it has taken means itself.
        """
        if not self._losses:
            return None
        losses = [fetch(self._losses[i]) for i in sorted(self._losses)]
        if axis is None:
            for loss in losses:
                self._need_exact(scalar_loss(loss, WHO))
            return mean_of(losses)
        loss = mean_of(losses)
        return meaned(axis, loss) if follows(loss) else axis.mean(loss, "the loss")

    def _need_exact(self, loss: torch.Tensor) -> None:
        """Refuses a loss whose cotangent its dtype does not hold, which was a fraction of it all the same."""
        count = self._micro.count
        if loss.dtype.itemsize < 4 and count & (count - 1):
            raise ValueError(
                f"pipeline: got a loss of {loss.dtype} from a component on ranks of its own, in {count} microbatches; "
                f"expected one of float32, which holds 1 / {count} nearly, or a power of two of microbatches. Return "
                "loss.float()."
            )


def known_parts(output: object) -> list[Part]:
    """`parts_of` outputs, of which handles are waited for."""
    return parts_of(pytree.map_leaves(lambda x: _form(x) if isinstance(x, Value) else x, output))


def _form(value: Value) -> torch.Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device="meta")
