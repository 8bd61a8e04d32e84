"""The steps that a traced function calls: each is a region of its graph, and those that are alike share one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fzero.base import private
from fzero.base.context import during, jitting
from fzero.base.follow import follows
from fzero.base.rebound import rebound, tensors_held
from fzero.graph import of_torch, operators
from fzero.graph.alike import Identity
from fzero.graph.hosts import Hosts
from fzero.graph.opened import Opened
from fzero.graph.trace import Traced, is_real, like, result_of, trace
from fzero.graph.tracer import Inline
from fzero.state.train_state import TrainState
from fzero.table.spec import Spec


class Bodies:
    """The regions of one trace of a function.

    Args:
        inline: whether each step's operators are part of the function's own graph.
        hosts: what the graph calls besides torch's operators.
    """

    messages: Sequence[operators.Message] = ()

    def __init__(self, mode: Any, decompositions: of_torch.Table, inline: bool, hosts: Hosts) -> None:
        self.mode, self.decompositions, self.inline, self.hosts = mode, decompositions, inline, hosts
        self.sent, self.begun = hosts.sent, hosts.begun
        self.regions: list[Traced] = []
        self.silent: dict[int, set[int]] = {}  # places of a region's cotangents that are zero in each pullback
        self._known: dict[object, tuple[int, Opened]] = {}

    def gathered(self, group: int) -> torch.Tensor:
        raise NotImplementedError

    def called(self, region: int) -> list[torch.Tensor]:
        return [like(x.meta["val"]) for x in result_of(self.regions[region].forward)]

    def pulled(self, region: int) -> list[torch.Tensor]:
        return [like(x.meta["val"]) for x in result_of(self.regions[region].pullback) if x is not None]

    def takes(self) -> bool:
        """Whether a step that is called now is a region: at most one derivative of first order goes through it."""
        return not self.inline and of_torch.grad_levels() in (1, 2)

    def call(self, step: Any, verb: Callable[..., Any], state: TrainState, *given: object) -> Any:
        """`verb(step, state, *given)` as a region.

        Args:
            verb: what runs, with the same step made of other tensors.
        """
        own = step.optimizer, step.fn, step.extras
        held = {id(x): x for x in tensors_held(own) if follows(x)}
        opened = Opened((state, given), numbers=False)
        operands = [*opened.tensors, *held.values()]
        moving = [is_real(x) and private.level_of(x) > 1 and x.requires_grad for x in operands]
        wanted = [i for i, own in enumerate(moving) if own and i not in opened.counts]
        metas = tuple((tuple(x.shape), x.stride(), x.dtype, x.device) for x in operands)
        places = tuple(map(self.hosts.place_of, opened.axes))
        key = Identity(step), Identity(verb), opened.form, places, metas, tuple(wanted), *map(Identity, held.values())
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._traced(step, verb, opened, list(held), operands, wanted)
        number, result = known
        outs = _Called.apply(number, self.regions[number], tuple(wanted), *operands)
        return result.made(outs[: self.regions[number].outputs], values=False)

    def _traced(
        self,
        step: Spec,
        verb: Callable[..., Any],
        opened: Opened,
        held: Sequence[int],
        operands: Sequence[torch.Tensor],
        wanted: Sequence[int],
    ) -> tuple[int, Opened]:
        results: list[Opened] = []
        count = len(opened.tensors)

        def run(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            new = dict(zip(held, tensors[count:], strict=True))
            own = step.optimizer, step.fn, step.extras
            optimizer, fn, extras = rebound(own, lambda x: new.get(id(x), x))
            made = dataclasses.replace(step, optimizer=optimizer, fn=fn, extras=extras) if held else step
            state, given = opened.made(tensors[:count], values=False)
            results[:] = [Opened(verb(made, state, *given), numbers=False)]
            return results[0].tensors

        inner = Bodies(self.mode, self.decompositions, True, self.hosts)
        with private.below_transforms(), of_torch.untraced(), self.mode, during(jitting, inner):
            given = [like(private.unwrapped(x)) for x in operands]
            still = lambda: results[0].counts
            traced = trace(run, given, wanted, self.decompositions, level=True, still=still)
        self.regions.append(traced)
        return len(self.regions) - 1, results[0]


class _Called(torch.autograd.Function):
    """`apply(number, traced, wanted, *operands)`: a region under torch.func, with its pullback as another node."""

    @staticmethod
    def forward(  # type: ignore[override]
        number: int, traced: Traced, wanted: Sequence[int], *operands: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return tuple(operators.call(number, operands))

    @staticmethod
    def setup_context(ctx: private.Context, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.number, ctx.traced, ctx.wanted, *operands = inputs
        traced: Traced = ctx.traced
        ctx.count = len(operands)
        ctx.save_for_backward(
            *[output[i] if i >= 0 else operands[-1 - i] for i in traced.saved if -1 - i < len(operands)]
        )
        ctx.metas = [(output[i].shape, output[i].dtype, output[i].device) for i in traced.real]
        ctx.mark_non_differentiable(*[x for i, x in enumerate(output) if i not in traced.real])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: private.Context, *cotangents: torch.Tensor | None) -> object:  # type: ignore[override]
        traced: Traced = ctx.traced
        moving = [x for x in cotangents if x is not None]
        if of_torch.grad_levels() > 2 or any(map(private.is_mapped, moving)):  # as in torch.func.jacrev
            raise Inline
        given, metas = [], operators.tracing.get()
        assert isinstance(metas, Bodies)
        silent = {place for place, i in enumerate(traced.real) if cotangents[i] is None}
        metas.silent[ctx.number] = metas.silent.get(ctx.number, silent) & silent
        for i, (shape, dtype, device) in zip(traced.real, ctx.metas, strict=True):
            own = cotangents[i]
            given.append(torch.zeros(shape, dtype=dtype, device=device) if own is None else own.contiguous())
        held = ctx.saved_tensors
        found = iter(operators.pull(ctx.number, [*held, *given]))
        out: list[torch.Tensor | None] = [None] * ctx.count
        for i, reached in zip(ctx.wanted, traced.reached, strict=True):
            out[i] = next(found) if reached else None
        return None, None, None, *out
