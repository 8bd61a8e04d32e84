"""The ranks that run one loop, as its state says; they take the same number of steps."""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Callable, Mapping
from typing import TypeVar

from fzero.base import pytree
from fzero.checkpoint.fill import Everyone, agreed
from fzero.comm import backend
from fzero.comm.pieces import most
from fzero.components.parts import PipelineState
from fzero.state.train_state import TrainState

T = TypeVar("T")


class Ranks:
    """All ranks of a state: of one step, of a pipeline, or of several components in any pytree.

    A state of another kind is of this process alone.
    """

    def __init__(self, state: object) -> None:
        nodes = pytree.flatten(state, is_leaf=lambda x: isinstance(x, (TrainState, PipelineState)))[0]
        self._pipelines = [node for node in nodes if isinstance(node, PipelineState)]
        own = [*nodes, *[part for node in self._pipelines for part in node]]
        axes = [node.params.axis for node in own if isinstance(node, TrainState)]
        self._axes = [axis for i, axis in enumerate(axes) if axis not in axes[:i]]

    @property
    def leads(self) -> bool:
        """Whether this one writes for all."""
        own = all(Everyone(axis).leads for axis in self._axes)
        return own and all(state.places.leads for state in self._pipelines)

    def most(self, *numbers: int) -> list[int]:
        """The largest of all ranks' numbers, one by one."""
        own = list(numbers)
        for axis in self._axes:
            own = most(axis, own, "what a loop's ranks want")
        for state in self._pipelines:
            said = state.places.of_all({c: own for c, part in enumerate(state) if part is not None}, None)
            own = [max(each) for each in zip(own, *said.values(), strict=True)]
        return own

    def alike(self, text: str) -> bool:
        """Whether all ranks say the same."""
        own = zlib.crc32(text.encode())
        most, least = self.most(own, -own)
        return most == -least

    def means(self, own: Mapping[str, float]) -> Mapping[str, float]:
        """Means over all ranks that share an axis, not over places of a pipeline.

        Where ranks have other names, this rank's own numbers, so that they are not alike.
        """
        every = {str(backend.rank_in(backend.world())): own}
        for axis in self._axes if not self.alike(repr(own)) else ():
            for text in Everyone(axis).exchange(json.dumps(every), "what ranks have evaluated"):
                every |= json.loads(text)
        if any([*each] != [*own] for each in every.values()):
            return own
        return {name: sum(each[name] for _, each in sorted(every.items())) / len(every) for name in own}

    def asked(self, stop: Callable[[], bool] | None) -> bool:
        """Whether a rank was to end, as something failed on one: what tells it so ends the workers of batches, too."""
        try:
            own = stop is not None and bool(stop())
        except Exception:  # what failed before counts
            own = False
        return any(self.most(own))

    def all_well(self, error: BaseException | None) -> None:
        """Raises on all ranks if one has failed."""

        def own() -> None:
            if error is not None:
                raise error

        self.by_all(own)

    def by_all(self, job: Callable[[], T]) -> T:
        """Does a job on every rank; where it fails on one, all raise: each axis and each pipeline hears of it."""
        around = [functools.partial(agreed, axis) for axis in self._axes]
        for agree in [*around, *[state.places.agree for state in self._pipelines]]:
            job = functools.partial(agree, job)
        return job()
