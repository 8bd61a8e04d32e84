"""The code in every page of the documentation, run from top to bottom as a reader would.

A block that does not run here says why in a comment before it: `% not run: needs two machines`.
"""

from __future__ import annotations

import linecache
import pathlib
import re
import sys
import types

import pytest
from nightly import in_turns

import fzero as fz

DOCS = pathlib.Path(__file__).parent.parent / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts)
NAMES = [str(page.relative_to(DOCS)) for page in PAGES]
_BLOCK = re.compile(
    r"(?P<why>^% not run: [^\n]+\n)?"
    r"^(?P<fence>`{3,}|:{3,})(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=fence)[ \t]*$",
    re.M | re.S,
)
PARTS = (fz, fz.compat, fz.parallel, fz.schedules, fz.testing)
API = re.compile(r"auto(?:function|class|exception|data):: fzero\.([\w.]+)")


def code_of(page: pathlib.Path) -> str:
    """The page's Python that runs, on the lines where it stands."""
    text, lines = page.read_text(), []
    for block in _BLOCK.finditer(text):
        if block["info"].strip() == "python" and not block["why"]:
            start = text.count("\n", 0, block.start("body"))
            lines += [""] * (start - len(lines)) + block["body"].splitlines()
    return "\n".join([*lines, ""])


@in_turns(3)
@pytest.mark.filterwarnings("default::UserWarning")  # a page may show one
@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_runs(page: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = code_of(page)
    if not code.strip():
        pytest.skip("no code")
    monkeypatch.chdir(tmp_path)
    name = f"page_{page.stem.replace('-', '_')}"
    module = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    linecache.cache[str(page)] = (len(code), None, code.splitlines(keepends=True), str(page))
    exec(compile(code, str(page), "exec"), module.__dict__)


def test_every_public_name_is_in_the_reference_once() -> None:
    public = {
        name for name in dir(fz) if not name.startswith("_") and not isinstance(getattr(fz, name), types.ModuleType)
    }
    reference = [name for page in (DOCS / "api").glob("*.md") for name in API.findall(page.read_text())]
    assert len(reference) == len(set(reference))
    assert public == {name for name in reference if "." not in name}
    parts = {name for name in fz.__all__ if isinstance(getattr(fz, name), types.ModuleType)}
    text = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    assert parts == set(re.findall(r'<span id="fzero\.(\w+)">', text))


def test_every_public_name_is_in_a_guide() -> None:
    """In a sentence or in code, as `fz.name` or as a link; the reference, the glossary and the changelog are none."""
    pages = [page for page in PAGES if page.parent.name != "api" and page.stem not in ("glossary", "changelog")]
    said = {name for page in pages for name in re.findall(r"\b(?:fz|fzero)\.(\w+(?:\.\w+)?)", page.read_text())}
    said |= {name.partition(".")[0] for name in said}
    for part in PARTS:
        own = {name for name in part.__all__ if not isinstance(getattr(part, name), types.ModuleType)}
        names = {f"{part.__name__}.{name}".removeprefix("fzero.") for name in own}
        assert not names - said, f"in no guide: {sorted(names - said)}"
