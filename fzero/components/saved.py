"""Checkpoints of a pipeline: one of every component, and a file, written last, that says which belong together."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from fzero.checkpoint.everyone import Everyone
from fzero.checkpoint.folder import NAME as NAME_OF_ONE
from fzero.checkpoint.folder import path_of
from fzero.checkpoint.load import load
from fzero.checkpoint.manifest import TOGETHER, DamagedCheckpoint, Together, read_manifest, read_together, sealed
from fzero.checkpoint.remote import folder_at
from fzero.checkpoint.save import as_json, save
from fzero.components.places import AllPlaces
from fzero.state.beyond import Loadable
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
