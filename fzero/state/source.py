"""The values of one tree that a state is made from, leaf by leaf, wherever they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from fzero.formats.formats import Format
from fzero.state.sliced import Sliced


class Source(Protocol):
    """The values of one tree, by the paths of its leaves."""

    def format(self, path: str) -> Format | None:
        """What a leaf is stored as; None where there is none."""
        ...

    def sliced(self, path: str) -> Sliced | None:
        """How a leaf that there is is cut into slices; None where it is whole."""
        ...

    def read(
        self, path: str, start: int, stop: int, into: Sequence[torch.Tensor] | None, rank: int = 0
    ) -> Sequence[torch.Tensor]:
        """The parts of elements [start, stop) of a slice of a leaf, or of the whole leaf; the range may be empty.

        Every rank asks for its range of every leaf, in the same order; and at least once for something of each slice
        where it needs another one than that of its own number.

        Args:
            start: a multiple of 64 where elements share an entry of a part.
            into: where they may be written, of exactly their sizes, until the origin's `wait` returns; what is
                returned without it has arrived.
            rank: which slice.
        """
        ...
