"""Interleaved 1F1B: every place has several stages, so that the pipeline fills in smaller steps."""

from __future__ import annotations

from fzero.base.arguments import need_int
from fzero.schedules.task import Kind, Schedule, Task, need_counts


def interleaved(stages: int, microbatches: int, places: int) -> Schedule:
    """Interleaved 1F1B: every place has several stages, so it idles less. Stage s is at place s % places.

    With p places of v stages each, and F and B the times of a stage's forward and backward: every place idles for (p -
    1)(F + B), a v-th of what `one_f_one_b` idles. Place r holds min(v * microbatches, (v - 1) p + 2 (p - 1 - r) + 1)
    pullbacks at once. Both hold if p divides the number of microbatches. Otherwise it idles at most as long as with the
    next multiple.

    Source: Narayanan et al., 2021 (arXiv 2104.04473), Megatron-LM.

    Args:
        stages: number of stages, a multiple of `places`.
        microbatches: number of microbatches, at least 1.
        places: number of places, at least 1.

    Raises:
        ValueError: `stages` is no multiple of `places`.

    Example:
        >>> print(fz.schedules.interleaved(stages=4, microbatches=2, places=2))
        interleaved: stages 4, microbatches 2, places 2
        place 0 | stages 0, 2 | F0.0  F0.1  F2.0  F2.1  B2.0  B2.1  B0.0  B0.1
        place 1 | stages 1, 3 | F1.0  F1.1  F3.0  B3.0  F3.1  B3.1  B1.0  B1.1
    """
    need_counts("interleaved", stages, microbatches)
    chunks, rest = divmod(stages, need_int(places, "interleaved", "places", least=1))
    if rest:
        raise ValueError(f"interleaved: got stages={stages} for {places} places, expected a multiple of {places}.")
    turns = [
        (chunk, first + microbatch)
        for first in range(0, microbatches, places)
        for chunk in range(chunks)
        for microbatch in range(places)
    ]
    own = [_place(place, places, chunks, turns) for place in range(places)]
    there = [[task for task in tasks if task.microbatch < microbatches] for tasks in own]
    return Schedule("interleaved", stages, microbatches, there)


def _place(place: int, places: int, chunks: int, turns: list[tuple[int, int]]) -> list[Task]:
    """Forward by turns of (chunk, microbatch), back by the same with chunks from the last; 1F1B between the two."""
    forward = [Task(Kind.FORWARD, chunk * places + place, microbatch) for chunk, microbatch in turns]
    ahead = (chunks - 1) * places + 2 * (places - 1 - place) + 1
    tasks = forward[:ahead]
    for turn, (chunk, microbatch) in enumerate(turns):
        tasks.append(Task(Kind.BACKWARD, (chunks - 1 - chunk) * places + place, microbatch))
        tasks += forward[turn + ahead : turn + ahead + 1]
    return tasks
