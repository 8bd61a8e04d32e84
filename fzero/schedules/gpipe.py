"""GPipe: all forward, then all backward."""

from __future__ import annotations

from fzero.schedules.task import Kind, Schedule, Task, need_counts


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All microbatches forward, then all backward; every stage has a place of its own.

    Huang et al., GPipe (arXiv 1811.06965). With p stages of equal times, forward F and backward B, every place idles
    for (p - 1)(F + B). All microbatches have their pullbacks alive at once, at each place. The backward tasks are in
    microbatch order, where the paper draws them from the last one to the first: it takes as long.

    Args:
        stages: how many, at least 1.
        microbatches: how many, at least 1.

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
