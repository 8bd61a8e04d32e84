"""The graph's own operators: gathers and reductions of groups, calls of regions and their pullbacks.

They run while a step is traced only, on tensors without values: the code that is made of a graph calls what they stand
for. `gather(k)` is the full buffer of group `k`; `reduce(x, k)` adds to the gradient of group `k`; `region(xs, n)` and
`pull(xs, n)` call the `n`-th region; `tangent(x)` is the cotangent of `x`. `send(xs, m)` begins the `m`-th message, and
`arrived(sent, m)` is what has come of it. `host(xs, m)` does both, or anything else that is none of torch's operators.
"""

from __future__ import annotations

import contextlib
import contextvars
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx.node import has_side_effect

from fzero.base import private
from fzero.base.context import during, variable
from fzero.base.random import seeded
from fzero.comm import pieces
from fzero.comm.axis import Axis
from fzero.comm.pieces import Came, Start
from fzero.graph import of_torch
from fzero.graph.numbers import marked, number_of

Tensors = Sequence[torch.Tensor]
Told = list[tuple[int, ...]]


class Effect(NamedTuple):
    """What a run does besides torch's operators: `start(tensors)`.

    Attributes:
        like: tensors without values like those that come.
        streams: how many streams of random numbers begin there, or end.
    """

    start: Callable[[Sequence[torch.Tensor]], object]
    like: Sequence[torch.Tensor] = ()
    streams: int = 0


tracing: contextvars.ContextVar[Any] = variable("tracing", None)  # the `Regions` of a trace
_axes: contextvars.ContextVar[Mapping[object, Axis]] = variable("axes_of_run", {})  # of the run that is under way


def like(x: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return marked(made, kind) if (kind := number_of(x)) else made


def _come(effect: int) -> list[torch.Tensor]:
    return [like(x) for x in tracing.get().effects[effect].like]


_LIBRARY = torch.library.Library("fzero", "DEF")
for _schema, _fake in (
    ("tangent(Tensor x) -> Tensor", lambda x: torch.empty_like(x, memory_format=torch.contiguous_format)),
    ("gather(int group) -> Tensor", lambda group: tracing.get().gathered(group)),
    ("reduce(Tensor x, int group) -> Tensor", lambda x, group: x.new_empty(())),
    ("region(Tensor[] xs, int region) -> Tensor[]", lambda xs, region: tracing.get().called(region)),
    ("pull(Tensor[] xs, int region) -> Tensor[]", lambda xs, region: tracing.get().pulled(region)),
    ("send(Tensor[] xs, int effect) -> Tensor", lambda xs, effect: xs[0].new_empty(())),
    ("arrived(Tensor sent, int effect) -> Tensor[]", lambda sent, effect: _come(effect)),
    ("named(Tensor x, str name) -> Tensor", lambda x, name: x.new_empty(())),
    ("host(Tensor[] xs, int effect) -> Tensor[]", lambda xs, effect: _come(effect)),
):
    _LIBRARY.define(_schema)
    torch.library.register_fake(f"fzero::{_schema.partition('(')[0]}", _fake, lib=_LIBRARY)

tangent = torch.ops.fzero.tangent.default
GATHER = torch.ops.fzero.gather.default
REDUCE = torch.ops.fzero.reduce.default
REGION = torch.ops.fzero.region.default
PULL = torch.ops.fzero.pull.default
SEND = torch.ops.fzero.send.default
ARRIVED = torch.ops.fzero.arrived.default
HOST = torch.ops.fzero.host.default
SENT = {SEND, ARRIVED}
EFFECTS = {*SENT, HOST}  # other ranks wait for them, whether or not their values are used here
OWN = {GATHER, REDUCE, REGION, PULL, *EFFECTS}
NAMED = torch.ops.fzero.named.default  # a value has this name, until the graph is cut
for _each in (*EFFECTS, NAMED, *of_torch.CHECKS):
    has_side_effect(_each)


class Effects(list[Effect]):
    """Those of one trace, by their numbers, which the operators have, and the axes that a function's are sent over.

    Args:
        given: the axes of the states that a function is given.
    """

    def __init__(self, given: Sequence[Axis] = ()) -> None:
        super().__init__()
        self.axes: dict[object, Axis] = {axis.identity: axis for axis in given}
        self._given = [*self.axes]
        self._origins: dict[object, Axis] = {}  # of components that begin in the function
        self._streams: list[seeded] = []  # that a run is in

    def host(self, run: Callable[[Tensors], object], xs: Tensors, likes: Tensors, streams: int = 0) -> Tensors:
        """What `run` makes of tensors, in the forms of others, as a node of the graph.

        Args:
            streams: how many streams of random numbers begin there, or end.
        """
        self.append(Effect(run, likes, streams))
        own = [of_torch.unknown(x) for x in xs]  # what is known in a trace would be computed with there
        return HOST(own, len(self) - 1)

    def begin(self, start: Start, send: Tensors, like: Tensors) -> Came:
        self.append(Effect(start, [torch.empty_like(x) for x in like]))
        number = len(self) - 1
        sent = SEND([*send], number)
        return lambda: ARRIVED(sent, number)

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
                    f"jit: {tag}: the ranks of axis {axis.name!r} have pieces of other sizes than when this was "
                    f"traced: got {_without_end(got)}, expected {_without_end(expected)}. Cut into equal pieces (pad "
                    "the batch), give the sizes (sizes=), or leave jit out."
                )

        self.host(compare, (), ())
        return expected

    @contextlib.contextmanager
    def stream(self, draw: Callable[..., seeded], given: Tensors = ()) -> Iterator[None]:
        """Inside, random numbers are those of another stream, which `draw(*given)` begins in each run."""

        def begin(xs: Tensors) -> None:
            self._streams.append(draw(*xs))
            self._streams[-1].__enter__()

        self.host(begin, given, (), streams=1)
        yield
        self.host(lambda _: self._streams.pop().__exit__(), (), (), streams=-1)

    # ---- of a function's graph

    def begun(self, axis: Axis, origin: Axis) -> Axis:
        """The axis of a component that begins in the function: in each run it is another one."""
        self._origins[axis.identity] = origin
        self.axes[axis.identity] = axis
        return axis

    @contextlib.contextmanager
    def running(self, given: Sequence[Axis], updates: Sequence[int]) -> Iterator[Mapping[object, Axis]]:
        """Around a run, which all ranks begin; its axes, by the identities of those of the trace.

        Args:
            given: those of the states that it is given; `updates`, how many each has had.
        """
        axes = self.axes | dict(zip(self._given, given, strict=True))
        counts = dict(zip(self._given, updates, strict=True))
        axes |= {key: origin.of_component(axes[key].component) for key, origin in self._origins.items()}
        own = {key: axis.of_next_run(counts.get(key, 0)) for key, axis in axes.items()} if self else {}
        try:
            with during(_axes, own):
                yield axes
        finally:
            while self._streams:  # where it has failed inside of one
                self._streams.pop().__exit__()

    def sent(
        self, axis: Axis, verb: str, x: torch.Tensor, rows: int | None, tag: object, *dtype: torch.dtype
    ) -> torch.Tensor:
        """The result of `axis.verb(x, tag, *dtype)`, a message between ranks.

        Args:
            rows: its leading dim; None where it has the shape of `x`.
        """
        assert private.in_function() or not private.is_differentiated(x), "a message without its derivative"
        key, whole = axis.identity or id(axis), axis.group is None
        self.axes.setdefault(key, axis)

        def run(xs: Tensors) -> Tensors:
            own = _axes.get()[key].uncut if whole else _axes.get()[key]
            return [getattr(own, verb)(xs[0], tag, *dtype).contiguous()]

        with of_torch.untraced():
            out = x.new_empty(x.shape if rows is None else (rows, *x.shape[1:]), dtype=(*dtype, x.dtype)[0])
        return self.host(run, [x], [out])[0]

    def drawing(self, seed: Any) -> contextlib.AbstractContextManager[None]:
        """Around operators that draw random numbers by a seed."""
        given = [private.unwrapped(x) for x in getattr(seed, "numbers", ()) if isinstance(x, torch.Tensor)]
        return self.stream(lambda *xs: seeded(seed.of(*map(int, xs)) if xs else seed), given)


def _without_end(told: Told) -> Told:
    """The numbers without the zeros that all end with, which stand for dims that there are not."""
    most = max(i for each in told for i, number in enumerate((1, *each)) if number)
    return [each[:most] for each in told]
