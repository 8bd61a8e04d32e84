"""1F1B: one forward, one backward, after as many forwards as there are stages behind."""

from __future__ import annotations

from fzero.schedules.task import Kind, Schedule, Task, need_counts


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """One forward, one backward in turn, after a forward for each stage behind; every stage has a place of its own.

    Narayanan et al., PipeDream-Flush (arXiv 2006.09503), the default of Megatron-LM (arXiv 2104.04473). With p stages
    of equal times, forward F and backward B, every place idles for (p - 1)(F + B), as in `gpipe`; but stage s has only
    min(microbatches, p - s) pullbacks alive at once.

    Args:
        stages: how many, at least 1.
        microbatches: how many, at least 1.

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
