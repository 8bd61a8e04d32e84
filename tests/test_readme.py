"""README is short, runs as it is pasted, and links to what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")


def blocks(language: str) -> list[str]:
    return [body for name, body in _FENCED.findall(README) if name == language]


def run(code: str) -> dict[str, object]:
    names: dict[str, object] = {"__name__": "pasted"}
    exec(compile(code, "README.md", "exec"), names)
    return names


def anchors(text: str) -> set[str]:
    """Of a page's headings, as GitHub and MyST make them."""
    titles = re.findall(r"^#+ (.+)$", _FENCED.sub("", text), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_it_is_short() -> None:
    assert README.count("\n") <= 150
    assert len(README.split()) <= 1200


@pytest.mark.parametrize("code", blocks("python"))
def test_every_block_runs_alone(code: str) -> None:
    run(code)


def test_both_sides_of_the_diff_run_and_agree() -> None:
    (diff,) = [block.splitlines() for block in blocks("diff")]
    before, after = ("\n".join(line[2:] for line in diff if line[:1] != sign) for sign in "+-")
    assert after + "\n" == blocks("python")[0], "what is pasted is not the new side of the diff"
    torch.testing.assert_close(run(after)["loss"], run(before)["loss"])


def test_its_results_are_those_of_the_benchmarks_page() -> None:
    row = lambda line: [cell.strip() for cell in line.strip("|").split("|")]
    measured = [row(line) for line in (ROOT / "docs/benchmarks.md").read_text().splitlines() if line.startswith("|")]
    results = [row(line) for line in README.splitlines() if line.startswith("|")][2:]
    for label, *numbers in results:
        assert any(cells[0] == label and {*numbers} <= {*cells} for cells in measured), (label, numbers)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_lead_somewhere(name: str) -> None:
    text = (ROOT / name).read_text()
    links = {first or second for first, second in _LINK.findall(text)}
    for link in sorted(link for link in links if not re.match(r"[a-z]+:", link)):
        path, _, anchor = link.partition("#")
        target = ROOT / path if path else ROOT / name
        assert target.exists(), f"{name} links to {path!r}, which is not there"
        assert not anchor or anchor in anchors(target.read_text()), f"{name} links to {link!r}: no such heading"


def test_contributing_names_files_that_exist() -> None:
    tables = [line for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if line.startswith("|")]
    named = set(re.findall(r"`([\w/]+\.py)`", "\n".join(tables)))
    files = [f"/{path.relative_to(ROOT)}" for part in ("fzero", "tests") for path in (ROOT / part).rglob("*.py")]
    assert not {name for name in named if not any(file.endswith(f"/{name}") for file in files)}
