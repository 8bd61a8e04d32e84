"""DualPipeV: stages go down the places and up again; forward of one way beside backward of the other."""

from __future__ import annotations

from collections import Counter

from fzero.schedules.task import Kind, Schedule, Task, need_counts


def dual_pipe_v(stages: int, microbatches: int) -> Schedule:
    """Two stages at every place, down and up again: place r has stages r and stages - 1 - r.

    DeepSeek's DualPipe (arXiv 2412.19437) cut in half (DualPipeV). With p stages, forward F, backward B = I + W of
    inputs I and params W, and F&B for a forward and a backward that overlap, it is published to idle for
    (p/2 - 1)(F&B + B - 3 W); so does the last place, the one that idles longest, where F = I and W is at most F. Here a
    place does one task after the other, and hands each on when it is done: every place idles for (p/2 - 1)(F + I - W),
    where F = I and W is at most F. Each place has p + 1 pullbacks alive at once. All this holds from p microbatches on;
    for fewer the tasks of p are taken, but for those of microbatches that there are not.

    Args:
        stages: how many, even.
        microbatches: how many, at least 1.

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
