"""The graph's own operators: gathers and reductions of groups, calls of regions and their pullbacks.

They run while a step is traced only, on tensors without values: the code that is made of a graph calls what they stand
for. `gather(k)` is the full buffer of group `k`; `reduce(x, k)` adds to the gradient of group `k`; `region(xs, n)` and
`pull(xs, n)` call the `n`-th region; `tangent(x)` is the cotangent of `x`. `host(xs, n)` is the `n`-th call that a
function's graph makes besides (`graph/hosts.py`), and runs as it is.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch.fx.node import has_side_effect

from fzero.base.context import jitting, variable


class Metas(Protocol):
    """What a trace knows of its groups and regions: tensors without values."""

    def gathered(self, group: int) -> torch.Tensor: ...
    def called(self, region: int) -> list[torch.Tensor]: ...
    def pulled(self, region: int) -> list[torch.Tensor]: ...


tracing: contextvars.ContextVar[Metas | None] = variable("tracing", None)


def _now() -> Metas:
    metas = tracing.get()
    assert metas is not None
    return metas


_LIBRARY = torch.library.Library("fzero", "DEF")
for _schema, _fake in (
    ("tangent(Tensor x) -> Tensor", lambda x: torch.empty_like(x, memory_format=torch.contiguous_format)),
    ("gather(int group) -> Tensor", lambda group: _now().gathered(group)),
    ("reduce(Tensor x, int group) -> Tensor", lambda x, group: x.new_empty(())),
    ("region(Tensor[] xs, int region) -> Tensor[]", lambda xs, region: _now().called(region)),
    ("pull(Tensor[] xs, int region) -> Tensor[]", lambda xs, region: _now().pulled(region)),
    ("host(Tensor[] xs, int call) -> Tensor[]", lambda xs, call: jitting.get().hosts.without_values(call)),
):
    _LIBRARY.define(_schema)
    torch.library.register_fake(f"fzero::{_schema.partition('(')[0]}", _fake, lib=_LIBRARY)

tangent = torch.ops.fzero.tangent.default
GATHER = torch.ops.fzero.gather.default
REDUCE = torch.ops.fzero.reduce.default
REGION = torch.ops.fzero.region.default
PULL = torch.ops.fzero.pull.default
HOST = has_side_effect(torch.ops.fzero.host.default)  # or a trace would drop what nobody reads
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
