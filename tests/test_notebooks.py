"""The notebooks run from their first cell to their last, in a kernel of their own."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from nightly import NIGHTLY, at_length

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
# what takes most of the time, and the same of fewer updates; nightly, all are made
FEWER = {
    "bytes_per_parameter": {"steps=25": "steps=3", "updates=200": "updates=40", "updates=250": "updates=40"},
    "step_is_a_function": {"DESCENTS, ROUNDS = 20, 12": "DESCENTS, ROUNDS = 2, 2"},
}


LONG = {"axes", "bytes_per_parameter"}  # what they show tests/parallel, tests/formats and examples run, too


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=at_length if path.stem in LONG else ()) for path in NOTEBOOKS],
    ids=lambda p: p.stem,
)
def test_runs(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Jupyter's own
        import nbformat
        from nbclient import NotebookClient

        text = path.read_text()
        for usual, fewer in FEWER.get(path.stem, {}).items() if not NIGHTLY else ():
            assert text.count(usual) == 1, usual
            text = text.replace(usual, fewer)
        notebook = nbformat.reads(text, as_version=4)
        NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(path.parent)}}).execute()
    assert all(cell.outputs is not None for cell in notebook.cells if cell.cell_type == "code")


def test_committed_with_their_pictures() -> None:
    assert NOTEBOOKS
    for path in NOTEBOOKS:
        assert "image/png" in path.read_text()
