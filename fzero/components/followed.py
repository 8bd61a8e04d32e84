"""Whether a transform goes on through all components of a pipeline, and what is refused where it cannot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fzero.base.rebound import tensors_held
from fzero.components.parts import PipelineState
from fzero.components.stages import Stage
from fzero.state.checks import constants, goes_on
from fzero.table.spec import Spec


def _may(stages: Mapping[int, Stage], state: PipelineState, trees: object) -> bool:
    return all(stage.follows(state[c], trees) for c, stage in stages.items())


def goes_on_through(
    stages: Mapping[int, Stage], steps: Sequence[object], state: PipelineState, trees: Sequence[object]
) -> bool:
    """Tells whether a transform goes on through components, by their state, some trees, or their optimizers.

    Args:
        stages: component -> stage, all of them in this process.
        steps: the components.
    """
    held = [tensors_held(step.optimizer) for step in steps if isinstance(step, Spec)]
    return _may(stages, state, trees) and goes_on(state, held, *trees)


def constants_of(
    stages: Mapping[int, Stage], alone: bool, who: str, state: PipelineState, arguments: Mapping[str, object]
) -> list[Any]:
    """State and arguments: as they are where a transform may go on through all components, otherwise as constants.

    Args:
        alone: whether all components run in this place.

    Raises:
        TypeError: a transform goes on through what has to be a constant.
    """
    if alone and _may(stages, state, tuple(arguments.values())):
        return [state, *arguments.values()]
    own = constants(who, state=state, **arguments)
    for stage in stages.values():
        stage.check_captured(who)
    return own
