"""GPipe: all forward, then all backward."""

from __future__ import annotations

from fzero.schedules.task import Kind, Schedule, Task, need_counts


def gpipe(stages: int, microbatches: int) -> Schedule:
    """GPipe: all microbatches forward, then all backward. Every stage has a place of its own.

    With p stages, and F and B the times of a forward and a backward: every place idles for (p - 1)(F + B). Each place
    holds the pullbacks of all microbatches at once. Backward tasks are in microbatch order; the paper has them from
    last to first, which takes as long.

    Source: Huang et al., 2018 (arXiv 1811.06965).

    Args:
        stages: number of stages, at least 1.
        microbatches: number of microbatches, at least 1.

    Example:
        >>> print(fz.schedules.gpipe(stages=2, microbatches=3))
        gpipe: stages 2, microbatches 3, places 2
        place 0 | stage 0 | F0.0  F0.1  F0.2  B0.0  B0.1  B0.2
        place 1 | stage 1 | F1.0  F1.1  F1.2  B1.0  B1.1  B1.2
    """
    need_counts("gpipe", stages, microbatches)
    places = [
        [Task(kind, stage, microbatch) for kind in (Kind.FORWARD, Kind.BACKWARD) for microbatch in range(microbatches)]
        for stage in range(stages)
    ]
    return Schedule("gpipe", stages, microbatches, places)
