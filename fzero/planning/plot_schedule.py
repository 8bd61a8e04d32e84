"""fz.plot_schedule: pictures of pipeline schedules, simulated and as measured, one row a place."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from fzero.base.arguments import need_path, wrong
from fzero.planning.plot_plan import LINES, TEXT, Axes, add_frame, new_axes
from fzero.schedules.simulate import Durations, Times, simulate
from fzero.schedules.task import Kind, Schedule
from fzero.schedules.timeline import Span, Timeline

# told apart by readers who see fewer colours, too (Okabe and Ito)
HUES = {Kind.FORWARD: "#0072b2", Kind.BACKWARD: "#d55e00", Kind.INPUTS: "#e69f00", Kind.PARAMS: "#009e73"}
MEANS = {
    Kind.FORWARD: "F forward",
    Kind.BACKWARD: "B backward",
    Kind.INPUTS: "I gradients of inputs",
    Kind.PARAMS: "W gradients of params",
}
EDGE = "#00000066"  # of bars, on white and on black
HEAD, ROW, BAR = 0.9, 1.0, 0.76  # in rows
INCHES, DIGIT, SIZE = 0.42, 0.062, 7  # of a row's height, of a digit's width; points
Drawn = Schedule | Timeline


def plot_schedule(
    schedule: Drawn | Sequence[Drawn] | Mapping[str, Drawn],
    times: Times | Mapping[str, Durations] | None = None,
    path: str | os.PathLike[str] | None = None,
    axes: Axes = None,
) -> object:
    """Draws who computes what and when in a pipeline: a row for each place, a bar for each task.

    The number in a bar is the microbatch. Paler bars are later stages of the same place. A thin line is a place that
    waits for a message. Beside each row is the share of time in which the place is idle.

    Args:
        schedule: an `fz.schedules.Schedule`, which is simulated, or an `fz.schedules.Timeline`. Or several of them, as
            a list or as label -> schedule, drawn over the same time.
        times: durations for the simulation: an `fz.schedules.Times`, or a mapping with `forward`, `inputs` and
            `params`. By default 1 each. Use seconds beside measured timelines.
        path: a file to write the picture to. Its ending is the format, such as `.png`.
        axes: matplotlib axes to draw into. By default new ones.

    Returns:
        The axes, which a notebook shows as a picture where they are new.

    Raises:
        TypeError: neither a schedule nor a timeline.
        ValueError: the schedule cannot run, or there is nothing to draw.

    Example:
        >>> axes = fz.plot_schedule(fz.schedules.one_f_one_b(stages=2, microbatches=3))
        >>> [label.get_text() for label in axes.get_yticklabels()]
        ['place 0   25 % idle', 'place 1   25 % idle']
    """
    if axes is not None and not hasattr(axes, "broken_barh"):
        raise wrong("plot_schedule", "axes", axes, "axes of matplotlib or None")
    file = None if path is None else need_path(path, "plot_schedule", what="the path of a picture, or None")
    timelines = _timelines(schedule, times)
    rows = sum(HEAD + ROW * timeline.places for timeline in timelines.values())
    if axes is None:
        most = max(sum(1 for _ in timeline.computing(0)) for timeline in timelines.values())
        axes = new_axes(min(18.0, max(7.0, 1.7 + 0.26 * most)), 1.0 + INCHES * rows)
    parts = schedule.values() if isinstance(schedule, Mapping) else schedule
    parts = [parts] if isinstance(parts, (Schedule, Timeline)) else parts
    ones = times is None and not any(isinstance(part, Timeline) for part in parts)
    _draw(axes, timelines, rows, "time; a forward run of a microbatch takes 1" if ones else "time")
    if file is not None:
        axes.figure.savefig(file, dpi=150)
    return axes


def _timelines(drawn: object, times: object) -> dict[str, Timeline]:
    """What is drawn, by label."""
    single = isinstance(drawn, (Schedule, Timeline))
    several = isinstance(drawn, Mapping) or (isinstance(drawn, Sequence) and not isinstance(drawn, str))
    if not single and not several:
        raise wrong("plot_schedule", "schedule", drawn, "an fz.schedules.Schedule or Timeline, or several of them")
    if isinstance(drawn, Mapping):
        parts = [(str(label), part) for label, part in drawn.items()]
    else:
        parts = [(None, part) for part in ([drawn] if single else drawn)]  # type: ignore[union-attr]
    out: dict[str, Timeline] = {}
    for at, (label, part) in enumerate(parts):
        if not isinstance(part, (Schedule, Timeline)):
            raise wrong("plot_schedule", f"schedule {at}", part, "an fz.schedules.Schedule or an fz.schedules.Timeline")
        given = Times() if times is None else times
        timeline = simulate(part, given) if isinstance(part, Schedule) else part  # type: ignore[arg-type]
        name = label if label is not None else timeline.name or "timeline"
        out[name if name not in out else f"{name} ({at + 1})"] = timeline
    if not out:
        raise ValueError("plot_schedule: got no schedules; give at least one, such as fz.schedules.gpipe(2, 4).")
    return out


def _draw(axes: Axes, timelines: Mapping[str, Timeline], rows: float, unit: str) -> None:
    longest = max(timeline.total for timeline in timelines.values()) or 1.0
    width = axes.figure.get_size_inches()[0] * axes.get_position().width / longest  # inches for 1 of time
    kinds, ticks, paler, waits, top = set[Kind](), dict[float, str](), False, False, 0.0
    for label, timeline in timelines.items():
        share = _share(timeline.bubble, timeline.total)
        head = f"{label}: total {timeline.total:.4g}, bubble {timeline.bubble:.4g} ({share})"
        axes.text(0, top + HEAD * 0.62, head, va="center", color=TEXT, fontsize=9, weight="bold")
        top += HEAD
        for place, idle in enumerate(timeline.idle):
            middle = top + ROW / 2
            ticks[middle] = f"place {place}   {_share(idle, timeline.total)} idle"
            spans = list(timeline.computing(place))
            stages = sorted({span.task.stage for span in spans})
            paler |= len(stages) > 1
            kinds |= {span.task.kind for span in spans}
            waits |= _wait(axes, timeline, place, middle)
            for kind in HUES:
                for number, stage in enumerate(stages):
                    own = [span for span in spans if span.task.kind is kind and span.task.stage == stage]
                    hue = _mixed(HUES[kind], 0.55 * number / max(1, len(stages) - 1))
                    _bars(axes, own, timeline.start, middle, hue, width)
            top += ROW
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.set_xlim(0, longest)
    axes.set_ylim(rows + 0.1, 0)
    add_frame(axes, unit, _legend(kinds, paler, waits))


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole if whole else 0:.0f} %"


def _wait(axes: Axes, timeline: Timeline, place: int, middle: float) -> bool:
    """Draws where a place waits for messages; whether it does."""
    from matplotlib.collections import LineCollection

    spans = [span for span in timeline.spans if span.place == place and span.task.is_message and span.end > span.start]
    if spans:
        pieces = [[(span.start - timeline.start, middle), (span.end - timeline.start, middle)] for span in spans]
        axes.add_collection(LineCollection(pieces, colors=LINES, linewidths=0.8))
    return bool(spans)


def _bars(axes: Axes, spans: Sequence[Span], begun: float, middle: float, hue: str, width: float) -> None:
    """Draws tasks of one colour; `width` is how many inches a time of 1 is wide."""
    pieces = [(span.start - begun, span.end - span.start) for span in spans]
    # edges are a part of what is narrow
    edge = min([0.6, *(0.08 * 72 * length * width for _, length in pieces)])
    axes.broken_barh(pieces, (middle - BAR / 2, BAR), facecolor=hue, edgecolor=EDGE, linewidth=edge)
    for span, (start, length) in zip(spans, pieces, strict=True):
        number = str(span.task.microbatch)
        if length * width >= DIGIT * len(number) + 0.02:
            look = {"ha": "center", "va": "center_baseline", "fontsize": SIZE, "color": _readable(hue)}
            axes.text(start + length / 2, middle, number, **look)


def _legend(kinds: set[Kind], paler: bool, waits: bool) -> list[object]:
    """What the colours mean."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries: list[object] = [Patch(facecolor=HUES[kind], label=MEANS[kind]) for kind in HUES if kind in kinds]
    if paler:
        entries.append(Patch(facecolor=_mixed(HUES[Kind.FORWARD], 0.55), label="paler: a later stage of the place"))
    if waits:
        entries.append(Line2D([], [], color=LINES, linewidth=0.8, label="waits for a message"))
    return entries


def _mixed(hue: str, white: float) -> str:
    """The colour with this share of white."""
    from matplotlib.colors import to_hex, to_rgb

    red, green, blue = [part + (1 - part) * white for part in to_rgb(hue)]
    return to_hex((red, green, blue))


def _readable(hue: str) -> str:
    """The colour of letters on this one."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(hue)
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.55 else "black"
