"""The graph's own operators: gathers and reductions of groups, calls of regions and their pullbacks.

They run while a step is traced only, on tensors without values: the code that is made of a graph calls what they stand
for. `gather(k)` is the full buffer of group `k`; `reduce(x, k)` adds to the gradient of group `k`; `region(xs, n)` and
`pull(xs, n)` call the `n`-th region; `tangent(x)` is the cotangent of `x`. `send(xs, m)` begins the `m`-th message of
a step's function, `arrived(sent, m)` is what has come of it, and `aside(m)` does what has no tensors. `host(xs, n)` is
the `n`-th call that a function's graph makes besides (`graph/hosts.py`), and runs as it is.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch.fx.node import has_side_effect

from fzero.base.context import jitting, variable


class Metas(Protocol):
    """What a trace knows of its groups and regions: tensors without values."""

    @property
    def messages(self) -> Sequence[Message]: ...
    def gathered(self, group: int) -> torch.Tensor: ...
    def called(self, region: int) -> list[torch.Tensor]: ...
    def pulled(self, region: int) -> list[torch.Tensor]: ...


class Message(NamedTuple):
    """A message of the function's own: what runs, and the tensors without values that come. Or what is done aside."""

    start: Callable[..., object]
    like: Sequence[torch.Tensor] = ()


tracing: contextvars.ContextVar[Metas | None] = variable("tracing", None)


def now() -> Metas:
    metas = tracing.get()
    assert metas is not None
    return metas


def _arrived(message: int) -> list[torch.Tensor]:
    return [torch.empty_like(x) for x in now().messages[message].like]


_LIBRARY = torch.library.Library("fzero", "DEF")
for _schema, _fake in (
    ("tangent(Tensor x) -> Tensor", lambda x: torch.empty_like(x, memory_format=torch.contiguous_format)),
    ("gather(int group) -> Tensor", lambda group: now().gathered(group)),
    ("reduce(Tensor x, int group) -> Tensor", lambda x, group: x.new_empty(())),
    ("region(Tensor[] xs, int region) -> Tensor[]", lambda xs, region: now().called(region)),
    ("pull(Tensor[] xs, int region) -> Tensor[]", lambda xs, region: now().pulled(region)),
    ("send(Tensor[] xs, int message) -> Tensor", lambda xs, message: xs[0].new_empty(())),
    ("arrived(Tensor sent, int message) -> Tensor[]", lambda sent, message: _arrived(message)),
    ("named(Tensor x, str name) -> Tensor", lambda x, name: x.new_empty(())),
    ("aside(int message) -> Tensor", lambda message: torch.empty((), device="cpu")),
    ("host(Tensor[] xs, int call) -> Tensor[]", lambda xs, call: jitting.get().hosts.without_values(call)),
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
ASIDE = torch.ops.fzero.aside.default
HOST = torch.ops.fzero.host.default
SENT = {SEND, ARRIVED}
MESSAGES = {*SENT, ASIDE}
EFFECTS = {*MESSAGES, HOST}  # other ranks wait for them, whether or not their values are used here
OWN = {GATHER, REDUCE, REGION, PULL, *EFFECTS}
NAMED = torch.ops.fzero.named.default  # a value has this name, until the graph is cut
for _each in (*EFFECTS, NAMED):
    has_side_effect(_each)
Hosting = Callable[[Sequence[torch.Tensor], int], Sequence[torch.Tensor]]
hosting: contextvars.ContextVar[Hosting | None] = variable("hosting", None)  # runs the host's calls of a graph


def call(region: int, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return REGION(list(operands), region)


def pull(region: int, held: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return PULL(list(held), region)


def host(number: int, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return HOST(list(operands), number)


def _hosted(xs: Sequence[torch.Tensor], number: int) -> list[torch.Tensor]:
    run = hosting.get()
    assert run is not None
    return list(run(xs, number))


_LIBRARY.impl("host", _hosted, "CompositeExplicitAutograd")
