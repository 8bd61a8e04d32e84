"""The notebooks run from their first cell to their last: by day in this process, nightly in a kernel of their own."""

from __future__ import annotations

import json
import sys
import types
import warnings
from pathlib import Path

import pytest
from nightly import at_length, in_turns

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
# what takes most of the time, and the same of fewer updates; nightly, all are made
FEWER = {"step_is_a_function": {"DESCENTS, ROUNDS = 20, 12": "DESCENTS, ROUNDS = 2, 2"}}
LONG = {"axes", "bytes_per_parameter"}  # what they show tests/parallel, tests/formats and examples run, too


@in_turns(2)
@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path.stem not in LONG], ids=lambda p: p.stem)
def test_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    text = "\n".join("".join(cell["source"]) for cell in cells)
    for usual, fewer in FEWER.get(path.stem, {}).items():
        assert text.count(usual) == 1, usual
        text = text.replace(usual, fewer)
    module = types.ModuleType(f"notebook_{path.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a picture that nobody is shown
        exec(compile(text, str(path), "exec"), module.__dict__)


@at_length
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_runs_in_a_kernel(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Jupyter's own
        import nbformat
        from nbclient import NotebookClient

        notebook = nbformat.reads(path.read_text(), as_version=4)
        NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(path.parent)}}).execute()
    assert all(cell.outputs is not None for cell in notebook.cells if cell.cell_type == "code")


def test_committed_with_their_pictures() -> None:
    assert NOTEBOOKS
    for path in NOTEBOOKS:
        assert "image/png" in path.read_text()
