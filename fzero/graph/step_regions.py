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
from fzero.graph import of_torch
from fzero.graph.effects import Effects
from fzero.graph.operators import like
from fzero.graph.regions import Regions
from fzero.graph.signatures import Flat, Identity, ambient_of, closed_over, meta_of
from fzero.graph.trace import Traceable, is_real, trace
from fzero.state.train_state import TrainState


class StepRegions(Regions):
    """The regions of one trace of a function.

    Args:
        effects: what the graph calls besides torch's operators.
    """

    def __init__(self, mode: Any, decompositions: of_torch.Table, inline: bool, effects: Effects) -> None:
        super().__init__(mode, decompositions, inline)
        self.effects = effects
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
        places = tuple(map(self.effects.place_of, flat.axes))
        now = closed_over(step.fn), ambient_of("cpu")
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
                results[:] = [Flat(verb(made, state, *given))]
                outs, counts = results[0].tensors, results[0].counts
                return outs, [i for i in range(len(outs)) if i not in counts], ()

            self._known[key] = self._add(run, operands, wanted), results[0]
        number, result = self._known[key]
        return result.made(self.call_region(number, wanted, operands), values=False)

    def _add(self, run: Traceable, operands: Sequence[torch.Tensor], wanted: Sequence[int]) -> int:
        inner = StepRegions(self.mode, self.decompositions, True, self.effects)
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
            real, count = self.traced[number].real, self.traced[number].outputs

            def run(tensors: Sequence[torch.Tensor]) -> Any:
                alike: dict[int, torch.Tensor] = {}

                def member(*own: torch.Tensor) -> Sequence[torch.Tensor]:
                    outs, *_ = self._runs[number](own)
                    here = private.level()
                    alike.update((i, x) for i, x in enumerate(outs) if private.level_of(x) != here)
                    return tuple([x for i, x in enumerate(outs) if i not in alike])

                every = iter(torch.vmap(member, tuple(dims), randomness=randomness)(*tensors))
                out_dims[:] = [None if i in alike else 0 for i in range(count)]
                return [alike[i] if i in alike else next(every) for i in range(count)], real, ()

            known = self._maps[key] = self._add(run, operands, wanted), out_dims
        return known


def _member(x: torch.Tensor) -> torch.Tensor:
    """What a map has one of its members' tensors from."""
    while private.is_mapped(x):
        x = private.inner(x)
    return x
