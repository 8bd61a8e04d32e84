"""Each script of examples/gallery equals plain torch in one process, and is listed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from nightly import in_turns
from processes import EXAMPLES, example, run_example

from fzero.testing import assert_trees_close, run_ranks

FOLDER = EXAMPLES / "gallery"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "common")
DOCS = EXAMPLES.parent / "docs"


@in_turns(4)
@pytest.mark.usefixtures("hazards")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_gives_what_plain_torch_gives(name: str, ranks: int) -> None:
    module = example(f"gallery/{name}")
    want = module.plain()
    for found in run_ranks(lambda rank: module.main(rank, ranks), ranks):
        assert_trees_close(dict(found), want, rtol=1e-10)


@in_turns(5, "examples as programs")
def test_a_script_as_a_program_says_how_far_it_is_from_plain_torch() -> None:
    stdout = run_example("gallery/uneven_batch.py", "--ranks", "3").stdout
    apart = re.fullmatch(r"3 ranks and plain torch: 4 tensors .*\nthe largest difference is ([\d.e+-]+)\n", stdout)
    assert apart and float(apart[1]) < 1e-10, stdout


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_short_names_reports_and_is_listed(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text()
    assert 30 <= len(text.splitlines()) <= 80
    assert re.search(r"[\w-]+/[\w-]+#\d+", text.split('"""')[1])
    page = Path(DOCS / "examples" / "situations.md").read_text()
    assert f"examples/gallery/{name}.py\n" in page
    heading = re.search(rf"^## (.+)\n\n```{{literalinclude}} \S+/{name}\.py$", page, re.M)
    assert heading
    anchor = re.sub(r"[^\w -]", "", heading[1].lower()).replace(" ", "-")
    assert f"(examples/situations.md#{anchor})" in (DOCS / "gallery.md").read_text()
