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
from fzero.graph.alike import Identity, meta_of
from fzero.graph.hosts import Hosts
from fzero.graph.opened import Opened
from fzero.graph.operators import like
from fzero.graph.regions import Regions
from fzero.graph.trace import is_real, trace
from fzero.state.train_state import TrainState
from fzero.table.spec import Spec


class Bodies(Regions):
    """The regions of one trace of a function.

    Args:
        hosts: what the graph calls besides torch's operators.
    """

    def __init__(self, mode: Any, decompositions: of_torch.Table, inline: bool, hosts: Hosts) -> None:
        super().__init__(mode, decompositions, inline)
        self.hosts = self.messages = hosts
        self.sent, self.begun = hosts.sent, hosts.begun
        self._known: dict[object, tuple[int, Opened]] = {}

    def gathered(self, group: int) -> torch.Tensor:
        raise NotImplementedError

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
        metas = tuple(map(meta_of, operands))
        places = tuple(map(self.hosts.place_of, opened.axes))
        key = Identity(step), Identity(verb), opened.form, places, metas, tuple(wanted), *map(Identity, held.values())
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._traced(step, verb, opened, list(held), operands, wanted)
        number, result = known
        return result.made(self.call_region(number, wanted, operands), values=False)

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
