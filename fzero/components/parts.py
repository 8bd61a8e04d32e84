"""PerStage: what a pipeline has of each of its components; and the states of all of them as one pytree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fzero.base import pytree
from fzero.base.arguments import named
from fzero.components.places import AllPlaces, tried
from fzero.components.saved import save_parts
from fzero.state.gather import measured
from fzero.state.train_state import TrainState


class PerStage:
    """A value for each component of a pipeline, stages first: params, grads or moments.

    It is a sequence and a pytree, whose children are the components' own trees. None stands for one in another place.

    Attributes:
        parts: the components' values, in order.
    """

    __slots__ = ("parts", "places")

    def __init__(self, parts: Sequence[Any], places: AllPlaces) -> None:
        self.parts, self.places = tuple(parts), places

    def __getitem__(self, component: int) -> Any:
        return self.parts[component]

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.parts)

    def squares_by_leaf(self) -> list[torch.Tensor]:
        """The sum of squares of every leaf, stage by stage, over all places: 0-d float64 tensors."""
        here = {c: tree for c, tree in enumerate(self.parts) if tree is not None}
        every = self.places.of_all(*tried(lambda: {c: next(measured([x])) for c, x in here.items()}))
        return [square for c in sorted(every) for square in every[c].unbind()]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join('elsewhere' if own is None else repr(own) for own in self.parts)})"


class PipelineState(PerStage):
    """The states of a pipeline's components: `state[0]` is the first stage's. Immutable, and a pytree.

    Attributes:
        params: those of every component, a `PerStage`.
        grads: the same, or None if none are kept.
        moments: the same.
        step: the number of applied updates.
    """

    __slots__ = ()

    def _each(self, name: str) -> PerStage:
        return PerStage([None if own is None else getattr(own, name) for own in self.parts], self.places)

    @property
    def params(self) -> PerStage:
        return self._each("params")

    @property
    def grads(self) -> PerStage | None:
        kept = self._each("grads")
        return kept if any(own is not None for own in kept) else None

    @property
    def moments(self) -> PerStage:
        return self._each("moments")

    @property
    def step(self) -> int:
        return max(own.step for own in self.parts if own is not None)

    def replace(self, component: int, state: TrainState) -> PipelineState:
        """A new pipeline state, with another state for one component.

        Args:
            component: its number, stages first.
            state: its new state.
        """
        if not isinstance(component, int) or not 0 <= component < len(self) or self.parts[component] is None:
            raise ValueError(
                f"PipelineState.replace: got component={named(component)}, expected one of "
                f"{[i for i, own in enumerate(self.parts) if own is not None]}, whose states lie here."
            )
        return PipelineState([state if i == component else own for i, own in enumerate(self.parts)], self.places)

    def save_to(self, path: str, extra: object) -> None:
        """Writes a checkpoint of all components. Use `fz.save(path, state)`."""
        save_parts(path, self.parts, extra, self.places)


def _flatten(node: PerStage) -> tuple[tuple[object, ...], tuple[tuple[bool, ...], pytree.Unseen]]:
    # torch's pytrees would take None for a leaf
    here = tuple(own is not None for own in node.parts)
    return tuple(own for own in node.parts if own is not None), (here, pytree.Unseen(node.places))


def _unflatten(kind: type[PerStage], metadata: Any, children: tuple[Any, ...]) -> Any:
    (here, unseen), left = metadata, iter(children)
    return kind([next(left) if is_here else None for is_here in here], unseen.value)


pytree.register(PerStage, _flatten, lambda here, children: _unflatten(PerStage, here, children))
pytree.register(PipelineState, _flatten, lambda here, children: _unflatten(PipelineState, here, children))
