"""DualPipeV: stages go down the places and up again; forward of one way beside backward of the other."""

from __future__ import annotations

from collections import Counter

from fzero.schedules.task import Kind, Schedule, Task, need_counts


def dual_pipe_v(stages: int, microbatches: int) -> Schedule:
    """DualPipeV: two stages at every place, down the places and up again. Place r has stages r and stages - 1 - r.

    With p stages, and F, I and W the times of a forward, of the inputs' cotangents and of the params' gradients: every
    place idles for (p/2 - 1)(F + I - W), if F = I and W is at most F. Each place holds p + 1 pullbacks at once. Both
    need at least p microbatches.

    A place runs one task after the other. The paper overlaps a forward with a backward (F&B), and idles for (p/2 -
    1)(F&B + B - 3 W), with B = I + W.

    Source: DeepSeek-V3, 2024 (arXiv 2412.19437): DualPipe, cut in half.

    Args:
        stages: number of stages, even.
        microbatches: number of microbatches, at least 1.

    Raises:
        ValueError: an odd number of stages.

    Example:
        >>> print(fz.schedules.dual_pipe_v(stages=2, microbatches=2))
        dual_pipe_v: stages 2, microbatches 2, places 1
        place 0 | stages 0, 1 | F0.0  F1.0  F0.1  B1.0  F1.1  B0.0  B1.1  I0.1  W0.1
    """
    need_counts("dual_pipe_v", stages, microbatches)
    if stages % 2:
        raise ValueError(f"dual_pipe_v: got stages={stages}, expected an even number, two for each place.")
    places = [_place(place, stages // 2, max(stages, microbatches)) for place in range(stages // 2)]
    there = [[task for task in tasks if task.microbatch < microbatches] for tasks in places]
    return Schedule("dual_pipe_v", stages, microbatches, there)


def _place(place: int, places: int, microbatches: int) -> list[Task]:
    """By letters: capitals for the stage on the way down, small ones on the way up, w for params that wait longest."""
    behind, last = places - 1 - place, "bB" * (place + 1)
    letters = "FF" * behind + "Ff" * (place + 1) + "iwf" * behind  # fill
    letters += "FbfB" * (microbatches - 2 * places + place + 1) + "bfB" * behind  # pairs that may overlap
    letters += last[: place + 1] + last[place + 1 :].replace("b", "i").replace("B", "I")
    letters += "wI" * behind + "w" * (place + 1)  # what waited fills the end
    done, waiting, tasks = Counter[str](), list[Task](), list[Task]()
    for letter in letters:
        if letter == "w":
            tasks.append(waiting.pop(0))
            continue
        way = letter.replace("I", "B").replace("i", "b")  # microbatches go either way in order
        tasks.append(Task(Kind(letter.upper()), place if letter.isupper() else 2 * places - 1 - place, done[way]))
        done[way] += 1
        if letter in "Ii":
            waiting.append(tasks[-1]._replace(kind=Kind.PARAMS))
    return tasks
