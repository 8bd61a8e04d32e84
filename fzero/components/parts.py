"""What a pipeline has of each of its components, the states of all of them as one pytree, and their checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from fzero.base import pytree
from fzero.base.arguments import named
from fzero.checkpoint.files import NAME as NAME_OF_ONE
from fzero.checkpoint.files import path_of
from fzero.checkpoint.fill import Everyone
from fzero.checkpoint.load import load
from fzero.checkpoint.manifest import TOGETHER, DamagedCheckpoint, Together, read_manifest, read_together, sealed
from fzero.checkpoint.remote import folder_at
from fzero.checkpoint.save import as_json, save
from fzero.components.places import AllPlaces, tried
from fzero.state.beyond import Loadable
from fzero.state.gather import measured
from fzero.state.train_state import TrainState
from fzero.table.spec import Spec

SLOTS = ("a", "b")  # the subfolder that the next save goes to is the one that the last did not


def save_parts(path: str, states: Sequence[TrainState | None], extra: object, places: AllPlaces) -> None:
    """Writes the states that are here; what lay there before is whole until all are written, and then goes.

    Args:
        states: of every component, None of those that other places write.
    """
    folder = path_of(path, "save")

    def begin() -> tuple[str, object]:
        known = json.loads(as_json(extra, "fz.save: extra"))
        if NAME_OF_ONE in folder_at(folder).names():
            raise FileExistsError(
                f"{folder}: got a folder with a checkpoint of one step, expected one of a pipeline, or none. Save into "
                "a folder of its own."
            )
        before = read_together(folder)
        return SLOTS[1 if before is not None and before.slot == SLOTS[0] else 0], known

    slot, known = places.agree(begin)

    def write() -> None:
        for c, state in enumerate(states):
            if state is not None:
                save(f"{folder}/{slot}/{c}", state)

    def end() -> None:
        # of several lines of places the one that leads in its components
        if places.leads and all(Everyone(own.params.axis).leads for own in states if isinstance(own, TrainState)):
            tokens = [read_manifest(f"{folder}/{slot}/{c}").token for c in range(len(states))]
            there = folder_at(folder)
            there.replace(TOGETHER, sealed("components", Together(slot, tokens, known)))
            if (old := next(own for own in SLOTS if own != slot)) in there.folders():
                there.discard(old)
            there.tidy()

    places.agree(write)
    places.agree(end)
    for state in states:  # of other lines of places, too
        if isinstance(state, TrainState):
            Everyone(state.params.axis).exchange("whole", "save")


def load_parts(path: object, steps: Mapping[int, Spec | Loadable], count: int, options: Mapping[str, Any]) -> list[Any]:
    """The states of the components that are here, None of the others.

    Args:
        count: of all components.
        options: of `fz.load`; `like` is a list with one tree for each component.

    Raises:
        FileNotFoundError: there is no checkpoint of a pipeline.
        DamagedCheckpoint: it is not what was written.
        ValueError: it is of another number of components.
    """
    folder = path_of(path, "load")
    found = read_together(folder)
    if found is None:
        raise FileNotFoundError(
            f"{folder}: got no checkpoint of a pipeline, expected one that fz.save has written, with its {TOGETHER}."
        )
    if len(found.tokens) != count:
        raise ValueError(
            f"{folder}: got a checkpoint of {len(found.tokens)} components, expected one of {count}, as many as the "
            "pipeline has."
        )
    like = options.get("like")
    if like is not None and not (isinstance(like, (list, tuple)) and len(like) == count):
        raise TypeError(f"fz.load: got like={type(like).__name__}, expected a list of {count} trees, one a component.")
    states: list[Any] = [None] * count
    for c, step in cast(Mapping[int, Any], steps).items():
        own = f"{folder}/{found.slot}/{c}"
        states[c] = load(own, step, **{**options, "like": None if like is None else like[c]})
        if read_manifest(own).token != found.tokens[c]:
            raise DamagedCheckpoint(
                f"{own}: got another checkpoint than the one that belongs to {folder}/{TOGETHER}: another save has "
                "written there. Load it again, or load an older checkpoint."
            )
    return states


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
