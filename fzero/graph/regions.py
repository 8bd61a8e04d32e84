"""The regions of a trace: the call of one is a node of autograd, and so is its pullback. Here: those of a function.

Each step that a traced function calls is a region of its graph, and those that are alike share one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from fzero.base import private
from fzero.base.context import during, jitting
from fzero.base.follow import follows
from fzero.base.pytree import is_real
from fzero.base.rebound import rebound, tensors_held
from fzero.graph import of_torch, operators
from fzero.graph.operators import Effects, like
from fzero.graph.signatures import Flat, Identity, ambient_of, closed_over, meta_of
from fzero.graph.trace import Traceable, Traced, result_of, trace
from fzero.state.train_state import TrainState

T = TypeVar("T")


class Inline(Exception):
    """The function differentiates a region itself: its operators are to be part of the function's own graph."""


class Differentiated(Exception):
    """The function differentiates by outputs of a region that its pullback is not given the cotangents of."""


By = dict[int, set[int]]  # of regions, by number, places of outputs


def with_regions(run: Callable[[bool, By], T]) -> T:
    """`run(inline, by)`.

    `inline` says whether what would be regions is part of the function's own graph; `by`, which of a step's metrics it
    differentiates by. That is seen where it does so: then the function is traced once more.
    """
    inline, by = False, By()
    while True:
        try:
            return run(inline, by)
        except Inline:
            inline = True
        except Differentiated as error:
            number, places = error.args
            by.setdefault(number, set()).update(places)


class Regions:
    """Those of one trace, by number.

    Args:
        mode: in which tensors have no values.
        inline: whether what would be a region is part of the function's own graph.

    Attributes:
        left: of a region the places of outputs that are differentiable, and whose cotangents its pullback leaves out.
    """

    def __init__(self, mode: AbstractContextManager[object], decompositions: of_torch.Table, inline: bool) -> None:
        self.mode, self.decompositions, self.inline = mode, decompositions, inline
        self.traced: list[Traced] = []
        self.left: By = {}

    def called(self, region: int) -> list[torch.Tensor]:
        return [like(x.meta["val"]) for x in result_of(self.traced[region].forward)]

    def pulled(self, region: int) -> list[torch.Tensor]:
        """Nothing stands in the places of cotangents that are not there."""
        nothing, result = torch.empty(0, device="cpu"), result_of(self.traced[region].pullback)
        return [nothing if x is None else like(x.meta["val"]) for x in result]

    def call_region(
        self, number: int, wanted: Sequence[int], operands: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """The outputs of a region, differentiable by the operands in the places `wanted`."""
        return _Called.apply(self, number, tuple(wanted), *operands)[: self.traced[number].outputs]


class _Called(torch.autograd.Function):
    """`apply(regions, number, wanted, *operands)`: outputs, and what the pullback is given of the forward."""

    @staticmethod
    def forward(  # type: ignore[override]
        regions: Regions, number: int, wanted: Sequence[int], *operands: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return tuple(operators.REGION([*operands], number))

    @staticmethod
    def setup_context(ctx: private.Context, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.regions, ctx.number, ctx.wanted, *operands = inputs
        traced: Traced = ctx.regions.traced[ctx.number]
        ctx.count = len(operands)
        ctx.save_for_backward(*[output[i] if i >= 0 else operands[-1 - i] for i in traced.saved])
        ctx.metas = [(output[i].shape, output[i].dtype, output[i].device) for i in traced.real]
        ctx.left = ctx.regions.left.get(ctx.number, set())
        ctx.mark_non_differentiable(*[x for i, x in enumerate(output) if i not in {*traced.real, *ctx.left}])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: private.Context, *cotangents: torch.Tensor | None) -> object:  # type: ignore[override]
        levels = of_torch.grad_levels()
        mapped = any([x is not None and private.is_mapped(x) for x in cotangents])  # as in torch.func.jacrev
        if levels > 2 or (levels == 0 and torch.is_grad_enabled()) or mapped:
            raise Inline
        if missed := {i for i in ctx.left if cotangents[i] is not None}:
            raise Differentiated(ctx.number, missed)
        traced: Traced = ctx.regions.traced[ctx.number]
        given = [
            torch.zeros(shape, dtype=dtype, device=device) if x is None else x.contiguous()
            for x, (shape, dtype, device) in zip([cotangents[i] for i in traced.real], ctx.metas, strict=True)
        ]
        found = operators.PULL([*ctx.saved_tensors, *given], ctx.number)
        out: list[torch.Tensor | None] = [None] * ctx.count
        for i, reached, own in zip(ctx.wanted, traced.reached, found, strict=True):
            out[i] = own if reached else None
        return None, None, None, *out

    @staticmethod
    def vmap(  # type: ignore[override]
        info: Any,
        in_dims: Sequence[int | None],
        regions: Any,  # of steps: units are none under a map
        number: int,
        wanted: Sequence[int],
        *operands: torch.Tensor,
    ) -> object:
        every, dims = regions.mapped(number, in_dims[3:], operands, wanted, info.randomness)
        return regions.call_region(every, wanted, operands), tuple(dims)


class StepRegions(Regions):
    """The regions of one trace of a function.

    Args:
        effects: what the graph calls besides torch's operators.
        by: the metrics of each region that the function differentiates by.
    """

    def __init__(self, mode: Any, decompositions: of_torch.Table, inline: bool, effects: Effects, by: By) -> None:
        super().__init__(mode, decompositions, inline)
        self.effects, self.by = effects, by
        self.sent, self.begun = effects.sent, effects.begun
        self._known: dict[object, tuple[int, Flat]] = {}
        self._runs: list[Traceable] = []
        self._maps: dict[object, tuple[int, Sequence[int | None]]] = {}

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
        flat = Flat((state, given))
        operands = [*flat.tensors, *held.values()]
        moving = [is_real(x) and private.level_of(x) > 1 and x.requires_grad for x in map(_member, operands)]
        wanted = [i for i, moves in enumerate(moving) if moves and i not in flat.counts]
        metas = tuple(map(meta_of, operands))
        places = tuple([axis.identity for axis in flat.axes])
        now = closed_over(step), ambient_of("cpu")
        of = Identity(step), Identity(verb), flat.form, places, metas, tuple(wanted), now
        key = *of, *map(Identity, held.values())
        if key not in self._known:
            results: list[Flat] = []
            count = len(flat.tensors)

            def run(tensors: Sequence[torch.Tensor]) -> Any:
                new = dict(zip(held, tensors[count:], strict=True))
                optimizer, fn, extras = rebound(own, lambda x: new.get(id(x), x))
                made = dataclasses.replace(step, optimizer=optimizer, fn=fn, extras=extras) if held else step
                state, given = flat.made(tensors[:count], values=False)
                updated = verb(made, state, *given)
                results[:] = [Flat(updated)]
                outs, counts = results[0].tensors, results[0].counts
                moving = {i for i, x in enumerate(outs) if is_real(x) and i not in counts}
                of_state = range(len(Flat(updated[0]).tensors))
                return outs, self._pulled_by(moving, {*of_state}), ()

            self._known[key] = self._add(run, operands, wanted), results[0]
        number, result = self._known[key]
        return result.made(self.call_region(number, wanted, operands), values=False)

    def _pulled_by(self, moving: set[int], usual: set[int]) -> list[int]:
        """The outputs of the next region whose cotangents its pullback is given, of those that are differentiable."""
        number = len(self.traced)
        self.left[number] = moving - usual - self.by.get(number, set())
        return sorted(moving - self.left[number])

    def _add(self, run: Traceable, operands: Sequence[torch.Tensor], wanted: Sequence[int]) -> int:
        inner = StepRegions(self.mode, self.decompositions, True, self.effects, self.by)
        with private.below_transforms(), of_torch.untraced(), self.mode, during(jitting, inner):
            given = [like(x if private.is_mapped(x) else private.unwrapped(x)) for x in operands]
            traced = trace(run, given, wanted, self.decompositions, level=True)
        self.traced.append(traced)
        self._runs.append(run)
        return len(self.traced) - 1

    def mapped(
        self,
        number: int,
        dims: Sequence[int | None],
        operands: Sequence[torch.Tensor],
        wanted: Sequence[int],
        randomness: str,
    ) -> tuple[int, Sequence[int | None]]:
        """The region that is a map over a region, and the dims of its outputs that it maps over.

        Args:
            dims: of the operands.
        """
        key = number, tuple(dims), tuple(map(meta_of, operands)), tuple(wanted), randomness
        known = self._maps.get(key)
        if known is None:
            out_dims: list[int | None] = []
            usual, count = {*self.traced[number].real}, self.traced[number].outputs
            moving = usual | self.left[number]

            def run(tensors: Sequence[torch.Tensor]) -> Any:
                alike: dict[int, torch.Tensor] = {}

                def member(*own: torch.Tensor) -> Sequence[torch.Tensor]:
                    outs, *_ = self._runs[number](own)
                    here = private.level()
                    alike.update((i, x) for i, x in enumerate(outs) if private.level_of(x) != here)
                    return tuple([x for i, x in enumerate(outs) if i not in alike])

                every = iter(torch.vmap(member, tuple(dims), randomness=randomness)(*tensors))
                out_dims[:] = [None if i in alike else 0 for i in range(count)]
                outs = [alike[i] if i in alike else next(every) for i in range(count)]
                return outs, self._pulled_by(moving, usual), ()

            known = self._maps[key] = self._add(run, operands, wanted), out_dims
        return known


def _member(x: torch.Tensor) -> torch.Tensor:
    """What a map has one of its members' tensors from."""
    while private.is_mapped(x):
        x = private.inner(x)
    return x
