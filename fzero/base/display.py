"""What people read: counts and bytes in words, and for notebooks a table that folds."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

MOST = 100  # rows of a table


def counted(count: int, word: str) -> str:
    """`1 leaf`, `2 leaves`."""
    many = "leaves" if word == "leaf" else f"{word}s"
    return f"{count:,} {word if count == 1 else many}"


def in_bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def folded(
    title: str, head: Sequence[str], rows: Sequence[Sequence[object]], notes: str = "", unfolds: int = 12
) -> str:
    """HTML of a title that folds a table, with text below it; a table of few rows is unfolded at first."""
    body = "".join([_line("th", head), *[_line("td", row) for row in rows[:MOST]]])
    more = [f"{len(rows) - MOST:,} more rows"] if len(rows) > MOST else []
    below = escape("\n".join([*more, *([notes] if notes else [])]))
    return (
        "<div class='fzero'><style>.fzero.fzero td, .fzero.fzero th {text-align: left}</style>"
        f"<details{' open' if len(rows) <= unfolds else ''}><summary>{escape(title)}</summary>"
        f"<div style='overflow-x:auto'><table>{body}</table></div>"
        f"<pre style='white-space:pre-wrap'>{below}</pre></details></div>"
    )


def _line(tag: str, cells: Sequence[object]) -> str:
    return f"<tr>{''.join([f'<{tag}>{escape(str(cell))}</{tag}>' for cell in cells])}</tr>"
