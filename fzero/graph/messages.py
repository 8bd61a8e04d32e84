"""The messages of a step's own function, those of `fz.parallel`, as operators of its graph."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence

import torch

from fzero.base.random import seeded
from fzero.comm import pieces
from fzero.comm.axis import Axis
from fzero.comm.pieces import Came, Start
from fzero.graph import of_torch, operators
from fzero.graph.operators import Message

Told = list[tuple[int, ...]]


class Messages(list[Message]):
    """Those of one trace, by their numbers, which the operators have."""

    def host(
        self, run: Callable[[Sequence[torch.Tensor]], object], xs: Sequence[torch.Tensor], likes: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """What `run` makes of tensors, in the forms of others, as a node of the graph."""
        self.append(Message(run, likes))
        own = [of_torch.unknown(x) for x in xs]  # what is known in a trace would be computed with there
        return operators.HOST(own, len(self) - 1)

    def begin(self, start: Start, send: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> Came:
        self.append(Message(start, [torch.empty_like(x) for x in like]))
        number = len(self) - 1
        sent = operators.SEND([*send], number)
        return lambda: operators.ARRIVED(sent, number)

    def told(self, axis: Axis, numbers: tuple[int, ...], tag: Hashable) -> Told:
        """What ranks told each other in a run without a graph; else that all have the same. Each run compares it."""
        known = pieces.heard.get() or {}
        expected = known.get((axis.members, tag, numbers), [numbers] * axis.size)

        def compare(_: object) -> None:
            own = zlib.crc32(repr(expected).encode())
            told = pieces.told(axis, (*numbers, own), tag)  # so that all find the same
            got = [each[:-1] for each in told]
            if got != expected or any(each[-1] != own for each in told):
                raise ValueError(
                    f"jit: {tag}: the ranks of axis {axis.name!r} have pieces of other sizes, {got}, than when this "
                    "was traced. Cut into equal pieces (pad the batch), give the sizes (sizes=), or leave jit out."
                )

        self.host(compare, (), ())
        return expected

    @contextlib.contextmanager
    def stream(self, draw: Callable[[], seeded]) -> Iterator[None]:
        """Inside, random numbers are those of another stream, whose seed each run draws."""
        streams: list[seeded] = []

        def begin(_: object) -> None:
            streams.append(draw())
            streams[-1].__enter__()

        self.host(begin, (), ())
        yield
        self.host(lambda _: streams.pop().__exit__(None, None, None), (), ())
