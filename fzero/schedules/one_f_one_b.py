"""1F1B: one forward, one backward, after as many forwards as there are stages behind."""

from __future__ import annotations

from fzero.schedules.task import Kind, Schedule, Task, need_counts


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """1F1B: one forward and one backward in turn. Every stage has a place of its own.

    With p stages, and F and B the times of a forward and a backward: every place idles for (p - 1)(F + B), as in
    `gpipe`. But stage s holds only min(microbatches, p - s) pullbacks at once.

    Source: Narayanan et al., 2020 (arXiv 2006.09503), PipeDream-Flush; the default of Megatron-LM (arXiv 2104.04473).

    Args:
        stages: number of stages, at least 1.
        microbatches: number of microbatches, at least 1.

    Example:
        >>> print(fz.schedules.one_f_one_b(stages=2, microbatches=3))
        one_f_one_b: stages 2, microbatches 3, places 2
        place 0 | stage 0 | F0.0  F0.1  B0.0  F0.2  B0.1  B0.2
        place 1 | stage 1 | F1.0  B1.0  F1.1  B1.1  F1.2  B1.2
    """
    need_counts("one_f_one_b", stages, microbatches)
    places = [_place(stage, microbatches, ahead=min(microbatches, stages - stage)) for stage in range(stages)]
    return Schedule("one_f_one_b", stages, microbatches, places)


def _place(stage: int, microbatches: int, ahead: int) -> list[Task]:
    """The tasks of a stage that has `ahead` microbatches forward before the first one comes back."""
    tasks = [Task(Kind.FORWARD, stage, microbatch) for microbatch in range(ahead)]
    for microbatch in range(microbatches):
        tasks.append(Task(Kind.BACKWARD, stage, microbatch))
        if microbatch + ahead < microbatches:
            tasks.append(Task(Kind.FORWARD, stage, microbatch + ahead))
    return tasks
