"""The messages of a function's own, those of `fz.parallel`, as operators of its graph."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Sequence

import torch

from fzero.comm import pieces
from fzero.comm.axis import Axis
from fzero.comm.pieces import Came, Start
from fzero.graph import operators
from fzero.graph.operators import Message

Told = list[tuple[int, ...]]


class Messages(list[Message]):
    """Those of one trace, by their numbers, which the operators have."""

    def begin(self, start: Start, send: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> Came:
        self.append(Message(start, [torch.empty_like(x) for x in like]))
        number = len(self) - 1
        sent = operators.SEND([*send], number)
        return lambda: operators.ARRIVED(sent, number)

    def told(self, axis: Axis, numbers: tuple[int, ...], tag: Hashable) -> Told:
        """What ranks told each other in a run without a graph; else that all have the same. Each run compares it."""
        known = pieces.heard.get() or {}
        expected = known.get((axis.members, tag, numbers), [numbers] * axis.size)

        def compare() -> None:
            own = zlib.crc32(repr(expected).encode())
            told = pieces.told(axis, (*numbers, own), tag)  # so that all find the same
            got = [each[:-1] for each in told]
            if got != expected or any(each[-1] != own for each in told):
                raise ValueError(
                    f"jit: {tag}: the ranks of axis {axis.name!r} have pieces of other sizes, {got}, than when this "
                    "was traced. Cut into equal pieces (pad the batch), give the sizes (sizes=), or leave jit out."
                )

        self.append(Message(compare))
        operators.TOLD(len(self) - 1)
        return expected
