"""What a graph calls besides torch's operators: messages between ranks, and what draws random numbers."""

from __future__ import annotations

import contextlib
import contextvars
import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence

import torch

from fzero.base import private
from fzero.base.context import during, variable
from fzero.base.random import Later, note_regions, seeded
from fzero.comm import pieces
from fzero.comm.axis import Axis
from fzero.comm.pieces import Came, Start
from fzero.graph import of_torch, operators
from fzero.graph.operators import Effect

Tensors = Sequence[torch.Tensor]
Told = list[tuple[int, ...]]

# the axes of the run that is under way
_axes: contextvars.ContextVar[Sequence[Axis]] = variable("axes_of_run", ())


class Effects(list[Effect]):
    """Those of one trace, by their numbers, which the operators have, and the axes that a function's are sent over.

    Args:
        given: the axes of the states that a function is given.
    """

    def __init__(self, given: Sequence[Axis] = ()) -> None:
        super().__init__()
        self.axes = [*given]
        self._given = len(given)
        self._origins: dict[int, Axis] = {}  # of components that begin in the function

    def host(self, run: Callable[[Tensors], object], xs: Tensors, likes: Tensors, streams: int = 0) -> Tensors:
        """What `run` makes of tensors, in the forms of others, as a node of the graph.

        Args:
            streams: how many streams of random numbers begin there, or end.
        """
        self.append(Effect(run, likes, streams))
        own = [of_torch.unknown(x) for x in xs]  # what is known in a trace would be computed with there
        return operators.HOST(own, len(self) - 1)

    def begin(self, start: Start, send: Tensors, like: Tensors) -> Came:
        self.append(Effect(start, [torch.empty_like(x) for x in like]))
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
    def stream(self, draw: Callable[..., seeded], given: Tensors = ()) -> Iterator[None]:
        """Inside, random numbers are those of another stream, which `draw(*given)` begins in each run."""
        streams: list[seeded] = []

        def begin(xs: Tensors) -> None:
            streams.append(draw(*xs))
            streams[-1].__enter__()

        self.host(begin, given, (), streams=1)
        yield
        self.host(lambda _: streams.pop().__exit__(None, None, None), (), (), streams=-1)

    # ---- of a function's graph

    def begun(self, axis: Axis, origin: Axis) -> Axis:
        """The axis of a component that begins in the function: in each run it is another one."""
        self._origins[len(self.axes)] = origin
        self.axes.append(axis)
        return axis

    def place_of(self, axis: Axis) -> int:
        """The number of an axis."""
        for place, own in enumerate(self.axes):
            if own is axis or (axis.identity and own.identity == axis.identity):
                return place
        self.axes.append(axis)
        return len(self.axes) - 1

    def axes_of_run(self, given: Sequence[Axis]) -> list[Axis]:
        """The axes of one run, which all ranks begin."""
        out = [*given, *self.axes[self._given :]]
        for place, origin in self._origins.items():
            out[place] = origin.of_component(self.axes[place].component)
        return out

    @contextlib.contextmanager
    def running(self, axes: Sequence[Axis], updates: Sequence[int]) -> Iterator[None]:
        """Around a run.

        Args:
            updates: of each state that is given, how many it has had.
        """
        counts, end_streams = [*updates, *[0] * (len(axes) - len(updates))], note_regions()
        own = [axis.of_next_run(count) for axis, count in zip(axes, counts, strict=True)] if self else []
        try:
            with during(_axes, own):
                yield
        finally:
            end_streams()  # where it has failed inside of one

    def sent(
        self, axis: Axis, verb: str, x: torch.Tensor, rows: int | None, tag: object, *dtype: torch.dtype
    ) -> torch.Tensor:
        """The result of `axis.verb(x, tag, *dtype)`, a message between ranks.

        Args:
            rows: its leading dim; None where it has the shape of `x`.
        """
        assert private.in_function() or not private.is_differentiated(x), "a message without its derivative"
        place, whole = self.place_of(axis), axis.group is None

        def run(xs: Tensors) -> Tensors:
            own = _axes.get()[place].uncut if whole else _axes.get()[place]
            return [getattr(own, verb)(xs[0], tag, *dtype).contiguous()]

        with of_torch.untraced():
            out = x.new_empty(x.shape if rows is None else (rows, *x.shape[1:]), dtype=(*dtype, x.dtype)[0])
        return self.host(run, [x], [out])[0]

    def drawing(self, seed: int) -> contextlib.AbstractContextManager[None]:
        """Around operators that draw random numbers by a seed."""
        counts = [private.unwrapped(x) for x in getattr(seed, "numbers", ()) if isinstance(x, torch.Tensor)][:1]
        return self.stream(lambda *xs: seeded(seed.of(int(xs[0])) if isinstance(seed, Later) else seed), counts)
