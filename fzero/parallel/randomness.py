"""Random numbers of one rank's own, where the ranks of an axis otherwise draw the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from fzero.base import private
from fzero.base.random import Seeds, seeded
from fzero.comm import pieces
from fzero.comm.axis import Axis
from fzero.parallel.axis import need_axis
from fzero.parallel.types import running


@contextlib.contextmanager
def own_stream(ax: Axis) -> Iterator[None]:
    """A context in which each rank of an axis draws its own random numbers. Elsewhere all ranks draw the same.

    Use it in a pure function for dropout on tensors that differ between ranks. Modules that `fz.shard_tensor` cuts need
    none. The seed is drawn from the stream outside, so a repeated run repeats it.

    Args:
        ax: an axis, from `fz.parallel.axis`.

    Example:
        >>> def rank_main(rank):
        ...     with fz.parallel.own_stream(fz.parallel.axis(None, "tp")):
        ...         return torch.rand(()).item()
        >>> first, second = fz.testing.run_ranks(rank_main, 2)
        >>> first == second
        False
    """
    need_axis(ax, "own_stream")
    if running.get() is not None:  # a dry run, whose numbers are nobody's
        yield
        return

    def draw() -> seeded:
        with private.below_transforms():
            drawn = torch.randint(1 << 62, (), device="cpu")
        return seeded(Seeds(int(drawn), ax.rank).next())

    traced = pieces.graph.get()
    with draw() if traced is None else traced.stream(draw):
        yield
