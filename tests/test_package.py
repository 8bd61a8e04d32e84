"""What stands around the code: one version, the public names of each module, and what `python -m fzero` says."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import re
from pathlib import Path

import pytest

import fzero as fz
from fzero import __main__ as report

ROOT = Path(__file__).parent.parent
MODULES = ("fzero", "fzero.compat", "fzero.parallel", "fzero.schedules", "fzero.testing")


def test_there_is_one_version() -> None:
    citation = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    changelog = re.search(r"^## (.+)$", (ROOT / "docs" / "changelog.md").read_text(), re.M)
    assert citation and changelog
    assert fz.__version__ == citation[1] == changelog[1]


@pytest.mark.parametrize("name", MODULES)
def test_all_names_that_a_module_imports_are_its_public_ones(name: str) -> None:
    module = importlib.import_module(name)
    tree = ast.parse(inspect.getsource(module))
    names = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert names == set(module.__all__), f"add the name to __all__ in {name}/__init__.py"
    assert set(dir(module)) - {"__version__"} == names


def test_the_report_says_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    report.main()
    said = capsys.readouterr().out
    assert f"fzero {fz.__version__}" in said
    for words in ("torch ", "optree ", "numpy ", "Python ", "bfloat16 ", "devices: ", "kernels: "):
        assert words in said


def test_the_report_says_what_to_try(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def version(name: str) -> str:
        if name == "ray":
            raise importlib.metadata.PackageNotFoundError
        return "1.0"

    tmp_path.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setattr(importlib.metadata, "version", version)
    report.main()
    said, tries = capsys.readouterr().out.split("to try:\n")
    assert "false, which fails" in said and "kernels: not kept: others can write to" in said and "ray missing" in said
    assert "Set CXX to" in tries and "XDG_CACHE_HOME" in tries and "pip install ray, or in a clone '.[ray]'" in tries
    monkeypatch.setenv("CXX", "/nonexistent")
    report.main()
    assert "Install g++" in capsys.readouterr().out
