"""What plans, steps and states show in a notebook: a table that folds, escaped, and nothing is computed for it."""

from __future__ import annotations

import html.parser

import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero as fz
from fzero.base.display import MOST, counted, folded, in_bytes
from fzero.testing import run_ranks

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\r\0", exclude_categories=["Cs", "Cc"]), max_size=12)
STEP = fz.train_step(lambda p, x: (p["<b>"] * x).sum(), fz.chain(fz.clip_by_global_norm(1.0), fz.adamw(0.1)))
PARAMS = {"<b>": torch.ones(4, 3), "c": torch.ones(2)}


class Read(html.parser.HTMLParser):
    """Rows of cells, and all that opens."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows, self.opened, self.title, self.notes = list[list[str]](), list[str](), "", ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.opened.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.opened[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        elif self.opened[-1] in ("summary", "pre"):
            name = "title" if self.opened[-1] == "summary" else "notes"
            setattr(self, name, getattr(self, name) + data)


@given(TEXTS, st.lists(st.tuples(TEXTS, TEXTS), max_size=3), TEXTS)
def test_texts_stay_what_they_are(title: str, rows: list[tuple[str, str]], notes: str) -> None:
    read = Read(folded(title, ("a", "<i>"), rows, notes))
    assert (read.title, read.notes) == (title, notes)
    assert read.rows == [["a", "<i>"], *map(list, rows)]
    assert set(read.opened) <= {"div", "style", "details", "summary", "table", "tr", "th", "td", "pre"}


def test_long_tables_are_folded_and_cut() -> None:
    text = folded("t", ("a",), [(i,) for i in range(MOST + 5)])
    assert "<details>" in text and "5 more rows" in text and len(Read(text).rows) == MOST + 1
    assert "<details open>" in folded("t", ("a",), [(1,)])
    words = [counted(1, "leaf"), counted(2, "leaf"), counted(1, "rank"), counted(1234, "rank")]
    assert words == ["1 leaf", "2 leaves", "1 rank", "1,234 ranks"]
    assert [in_bytes(n) for n in (3, 2048, 3 << 19)] == ["3 B", "2.00 KiB", "1.50 MiB"]


def test_a_state_shows_what_this_rank_stores_without_reading_it() -> None:
    def shown(rank: int) -> tuple[Read, str]:
        state = fz.shard_zero3(STEP).init(PARAMS)
        donated = fz.donate(fz.shard_zero3(STEP))
        donated(state, torch.ones(4, 3))
        return Read(fz.shard_zero3(STEP).init(PARAMS)._repr_html_()), Read(state._repr_html_()).title

    both = run_ranks(shown, 2)
    rows = [read.rows[1:] for read, _ in both]
    assert [row[:4] for row in rows[0]] == [["<b>", "4×3", "fp32", "fp32"], ["c", "2", "fp32", "fp32"]]
    assert [sum(int(own[i][4]) for own in rows) for i in range(2)] == [12, 2]
    assert all("params 256 B, moments 512 B" in read.notes and "donated" in dead for read, dead in both)


def test_a_rank_shows_its_state_alone() -> None:
    def shown(rank: int) -> bool:
        state = fz.shard_zero3(STEP).init(PARAMS)
        return "2 leaves" in state._repr_html_() if rank else True

    assert all(run_ranks(shown, 2))


def test_steps_and_plans_show_their_table_and_are_short_in_words() -> None:
    step = fz.accumulate(fz.shard_zero3(STEP), 4)
    read = Read(step._repr_html_())
    assert read.rows[1:] == [["policy", "*", "Policy()"], ["axis", "*", "shard_zero3(axis='dp')"]]
    assert "chain(clip_by_global_norm, adamw)" in read.notes and "accumulate: 4 microbatches" in read.notes
    assert len(repr(fz.whole(fz.sgd(0.1)))) < 60
    assert repr(fz.GradientTransformation(lambda p: (), sum)) == "GradientTransformation(sum)"  # type: ignore[arg-type]
    plan = fz.plan(step, PARAMS, world_size=2)
    read = Read(plan._repr_html_())
    assert read.title == "Plan: 2 leaves, 14 parameters, 1 unit, 2 ranks"
    assert [row[0] for row in read.rows] == ["leaf", "<b>", "c"]
    assert "sent per step without accumulation" in read.notes and len(repr(plan)) < 80
    assert "sent per step 0 B" in str(fz.plan(STEP, PARAMS)) and ", 1 rank\n" in str(fz.plan(STEP, PARAMS))
