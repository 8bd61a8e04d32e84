"""The graph's own operators: gathers and reductions of groups, calls of regions and their pullbacks.

They run while a step is traced only, on tensors without values: the code that is made of a graph calls what they stand
for. `gather(k)` is the full buffer of group `k`; `reduce(x, k)` adds to the gradient of group `k`; `region(xs, n)` and
`pull(xs, n)` call the `n`-th region; `tangent(x)` is the cotangent of `x`. `send(xs, m)` begins the `m`-th message, and
`arrived(sent, m)` is what has come of it. `host(xs, m)` does both, or anything else that is none of torch's operators.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx.node import has_side_effect

from fzero.base.context import variable
from fzero.graph.numbers import marked, number_of


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
for _each in (*EFFECTS, NAMED, torch.ops.aten._assert_async.default):  # of torch's own checks it would drop this one
    has_side_effect(_each)
