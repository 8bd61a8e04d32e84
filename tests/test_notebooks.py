"""The notebooks run from their first cell to their last, in a kernel of their own."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Jupyter's own
        import nbformat
        from nbclient import NotebookClient

        notebook = nbformat.read(path, as_version=4)
        NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(path.parent)}}).execute()
    assert all(cell.outputs is not None for cell in notebook.cells if cell.cell_type == "code")


def test_committed_with_their_pictures() -> None:
    assert NOTEBOOKS
    for path in NOTEBOOKS:
        assert "image/png" in path.read_text()
