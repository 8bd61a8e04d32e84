"""ZB-H1: 1F1B with backward in two halves; the params' gradients fill what would be idle."""

from __future__ import annotations

from fzero.schedules.task import Kind, Schedule, Task, need_counts


def zero_bubble(stages: int, microbatches: int) -> Schedule:
    """ZB-H1: 1F1B with backward in two halves. Gradients of params fill time that would be idle.

    Every stage has a place of its own. With p stages, and F, I and W the times of a forward, of the inputs' cotangents
    and of the params' gradients: every place idles for (p - 1)(F + I - W), if W is at most F and at most I and there
    are at least p microbatches. Each place holds min(microbatches, p) pullbacks at once, the peak of `one_f_one_b`.

    Source: Qi et al., 2023 (arXiv 2401.10241), whose T_B and T_W are I and W.

    Args:
        stages: number of stages, at least 1.
        microbatches: number of microbatches, at least 1.

    Example:
        >>> print(fz.schedules.zero_bubble(stages=2, microbatches=3))
        zero_bubble: stages 2, microbatches 3, places 2
        place 0 | stage 0 | F0.0  F0.1  I0.0  W0.0  F0.2  I0.1  W0.1  I0.2  W0.2
        place 1 | stage 1 | F1.0  I1.0  F1.1  I1.1  W1.0  F1.2  I1.2  W1.1  W1.2
    """
    need_counts("zero_bubble", stages, microbatches)
    places = [_place(stage, microbatches, ahead=min(microbatches, stages - stage)) for stage in range(stages)]
    return Schedule("zero_bubble", stages, microbatches, places)


def _place(stage: int, microbatches: int, ahead: int) -> list[Task]:
    """The tasks of a stage: a params' gradient comes as many microbatches later as there are stages before."""
    tasks = [Task(Kind.FORWARD, stage, microbatch) for microbatch in range(ahead)]
    for microbatch in range(microbatches + stage):
        if microbatch < microbatches:
            tasks.append(Task(Kind.INPUTS, stage, microbatch))
        if 0 <= microbatch - stage < microbatches:
            tasks.append(Task(Kind.PARAMS, stage, microbatch - stage))
        if microbatch + ahead < microbatches:
            tasks.append(Task(Kind.FORWARD, stage, microbatch + ahead))
    return tasks
