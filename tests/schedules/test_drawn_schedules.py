"""fz.schedules.check accepts every legal schedule and refuses what was changed in one, by name."""

from __future__ import annotations

import graphlib
import itertools
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fzero.schedules import Kind, Schedule, Task, Times, check, one_f_one_b, simulate
from fzero.testing import strategies

SKIPS = [(0, 2), (1, 3), (0, 3)]
drawn = strategies.schedules()
skipping = strategies.schedules(edges=SKIPS)
BACK, DONE = (Kind.BACKWARD, Kind.INPUTS), (Kind.BACKWARD, Kind.PARAMS)


def edges_of(schedule: Schedule) -> list[tuple[int, int]]:
    return [edge for edge in SKIPS if edge[1] < schedule.stages]


def changed(schedule: Schedule, place: int, tasks: list[Task]) -> Schedule:
    return replace(schedule, places=[tasks if at == place else own for at, own in enumerate(schedule.places)])


def needs(schedule: Schedule, edges: list[tuple[int, int]]) -> list[tuple[Task, Task]]:
    """(first, then) of all tasks of which one needs the other, messages too; written down anew."""
    there = {task for tasks in schedule.places for task in tasks}
    back = {(task.stage, task.microbatch): task for task in there if task.kind in BACK}
    pairs = []
    for stage, part in itertools.product(range(schedule.stages), range(schedule.microbatches)):
        pairs.append((Task(Kind.FORWARD, stage, part), back[stage, part]))
        if back[stage, part].kind is Kind.INPUTS:
            pairs.append((back[stage, part], Task(Kind.PARAMS, stage, part)))
    for (source, target), part in itertools.product(edges, range(schedule.microbatches)):
        forward = Task(Kind.FORWARD, source, part), Task(Kind.FORWARD, target, part)
        for first, then in (forward, (back[target, part], back[source, part])):
            if schedule.homes[source] == schedule.homes[target]:
                pairs.append((first, then))
            else:
                send = Task(Kind.SEND, first.stage, part, then.stage)
                receive = Task(Kind.RECEIVE, then.stage, part, first.stage)
                pairs += [(first, send), (send, receive), (receive, then)]
    return pairs


def pullbacks(tasks: tuple[Task, ...]) -> list[tuple[Task, Task]]:
    """(what begins, what ends) each pullback at a place."""
    ends = {(task.stage, task.microbatch): task for task in tasks if task.kind in DONE}
    return [(task, ends[task.stage, task.microbatch]) for task in tasks if task.kind is Kind.FORWARD]


@settings(max_examples=60)
@given(skipping)
def test_every_legal_schedule_is_accepted(schedule: Schedule) -> None:
    edges = edges_of(schedule)
    full = schedule.with_messages(edges)
    report = check(schedule, edges)
    assert report == check(full, edges) == check(full)
    at = {task: number for number, (_, task) in enumerate(report.order)}
    assert len(at) == len(report.order) == sum(map(len, full.places))
    assert all(at[first] < at[then] for first, then in needs(full, list(full.edges(edges))))
    for place, tasks in enumerate(full.places):
        assert [task for where, task in report.order if where == place] == list(tasks)
        alive = [
            sum((first in tasks[:n]) - (last in tasks[:n]) for first, last in pullbacks(tasks))
            for n in range(len(tasks) + 1)
        ]
        assert report.alive[place] == max(alive)
        for stage in full.stages_of(place):
            parts = [task.microbatch for task in tasks if task.stage == stage and task.kind in DONE]
            late = [
                sum(any(other not in parts[:n] for other in range(part)) for part in parts[:n])
                for n in range(len(parts) + 1)
            ]
            assert report.waiting[stage] == max(late)
    assert report.messages == sum(task.kind is Kind.RECEIVE for tasks in full.places for task in tasks)
    assert full.with_messages(edges) == full and full.computes == schedule.computes


@settings(max_examples=60)
@given(skipping)
def test_a_simulation_keeps_what_each_task_needs(schedule: Schedule) -> None:
    full = schedule.with_messages(edges_of(schedule))
    timeline = simulate(full, Times(2, 3, 1), send=0.5)
    spans = {span.task: span for span in timeline.spans}
    for first, then in needs(full, list(full.edges(edges_of(schedule)))):
        late = 0.5 if first.kind is Kind.SEND else 0.0
        assert spans[first].end + late <= (spans[then].end if late else spans[then].start)
    for idle, busy, tasks in zip(timeline.idle, timeline.busy, full.places, strict=True):
        assert idle + busy == timeline.total and 0 <= idle <= timeline.total
        assert busy == sum(Times(2, 3, 1).of(task) for task in tasks)
        assert all(spans[first].end <= spans[then].start for first, then in itertools.pairwise(tasks))


@settings(max_examples=100)
@given(drawn, st.randoms(use_true_random=False), st.integers(1, 6))
def test_the_verdict_is_that_of_a_graph(schedule: Schedule, generator, swaps: int) -> None:
    """Neighbours at a place are exchanged some times: sometimes that can run, sometimes not."""
    places = [list(tasks) for tasks in schedule.computes.places]
    for _ in range(swaps):
        tasks = generator.choice(places)
        at, other = generator.randrange(len(tasks)), generator.randrange(len(tasks))
        tasks[at], tasks[other] = tasks[other], tasks[at]
    mixed = replace(schedule, places=places)
    full = mixed.with_messages()
    graph = graphlib.TopologicalSorter[Task]()
    for first, then in [*needs(full, list(full.edges())), *(p for own in full.places for p in itertools.pairwise(own))]:
        graph.add(then, first)
    try:
        graph.prepare()
    except graphlib.CycleError:
        with pytest.raises(ValueError, match=r"^check: 'drawn' ") as found:
            check(mixed)
        if "wait for each other" in str(found.value):
            need_waits(full, str(found.value))
    else:
        check(mixed)


def need_waits(full: Schedule, said: str) -> None:
    """Each place that waits is named, with what for, which the other place has not come to."""
    heads = dict(re.findall(r"place (\d+) waits at (\S+) for", said))
    assert len(heads) > 1
    for head in map(Task.parse, heads.values()):
        where = full.places[place := full.place_of(head.other_end.stage)]
        assert where.index(head.other_end) > where.index(Task.parse(heads[str(place)]))


@given(drawn, st.data())
def test_a_task_that_is_left_out_is_named(schedule: Schedule, data: st.DataObject) -> None:
    schedule = schedule.computes
    place = data.draw(st.integers(0, len(schedule.places) - 1))
    at = data.draw(st.integers(0, len(schedule.places[place]) - 1))
    tasks = list(schedule.places[place])
    gone = tasks.pop(at)
    # of a pullback in halves, either half may be left out; without its inputs a schedule has half of it left
    with pytest.raises(
        ValueError, match=re.escape(f"check: 'drawn' has no {gone!r} at place {place}, expected it, as")
    ):
        check(changed(schedule, place, tasks))


@given(drawn, st.data())
def test_a_task_that_is_there_twice_is_named(schedule: Schedule, data: st.DataObject) -> None:
    schedule = schedule.computes
    place = data.draw(st.integers(0, len(schedule.places) - 1))
    tasks = list(schedule.places[place])
    twice = data.draw(st.sampled_from(tasks))
    tasks.insert(data.draw(st.integers(0, len(tasks))), twice)
    first, second = [at for at, task in enumerate(tasks) if task == twice]
    said = f"check: 'drawn' has {twice!r} twice at place {place}, as tasks {first} and {second}, expected once"
    with pytest.raises(ValueError, match=re.escape(said)):
        check(changed(schedule, place, tasks))


@given(drawn, st.data())
def test_a_task_before_what_it_needs_is_named(schedule: Schedule, data: st.DataObject) -> None:
    schedule, homes = schedule.computes, schedule.homes
    pairs = [
        (first, then)
        for first, then in needs(schedule, list(schedule.edges()))
        if homes[first.stage] == homes[then.stage] and not (first.is_message or then.is_message)
    ]
    first, then = data.draw(st.sampled_from(pairs))
    place = homes[first.stage]
    tasks = list(schedule.places[place])
    tasks.remove(then)
    tasks.insert(tasks.index(first), then)
    with pytest.raises(
        ValueError, match=r"^check: 'drawn' has .*, expected it behind, as .*; move one of them\.$"
    ) as found:
        check(changed(schedule, place, tasks))
    assert f"has {then!r} before " in str(found.value)


def test_drawn_schedules_are_of_every_kind() -> None:
    found = set()

    @settings(max_examples=150, database=None)
    @given(skipping)
    def look(schedule: Schedule) -> None:
        kinds = {task.kind for own in schedule.places for task in own}
        found.add(("messages", schedule.has_messages))
        found.add(("places", len(schedule.places)))
        found.add(("stages", schedule.stages))
        found.add(("both", {Kind.BACKWARD, Kind.INPUTS} <= kinds))
        found.add(("in order", not any(check(schedule).waiting)))
        found.add(("apart", list(schedule.homes) != sorted(schedule.homes)))

    look()
    flags = {(name, value) for name in ("messages", "both", "in order", "apart") for value in (False, True)}
    assert found >= flags | {(name, count) for name in ("places", "stages") for count in (1, 2, 3, 4)}


def test_generated_ones_keep_skips_too() -> None:
    schedule = one_f_one_b(4, 4).with_messages([(0, 2), (0, 3)])
    assert check(schedule, [(0, 2), (0, 3)]).messages == 2 * 4 * 5
    assert [str(task) for task in schedule.places[0][:4]] == ["F0.0", "S0.0>1", "S0.0>2", "S0.0>3"]
    for edges in ([(0, 3)], [(0, 2), (0, 3), (1, 3)]):
        with pytest.raises(ValueError, match=r"has other messages than those that schedule\.with_messages"):
            check(schedule, edges)
    sent, *others = schedule.places[0]
    with pytest.raises(ValueError, match=r"has other messages .*, expected these or none\. Give it without them"):
        check(changed(schedule, 0, [*others[:1], sent, *others[1:]]))
