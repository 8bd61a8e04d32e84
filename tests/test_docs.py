"""Every public name has a docstring, and every example in one runs."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil

import pytest
import torch
from nightly import in_turns

import fzero as fz

MODULES = sorted(
    module.name for module in pkgutil.walk_packages(fz.__path__, "fzero.") if not module.name.endswith("py.typed")
)
PUBLIC = [name for name in dir(fz) if not name.startswith("_") and not inspect.ismodule(getattr(fz, name))]
VERBS = [name for name in PUBLIC if inspect.isfunction(getattr(fz, name))]


@in_turns(14)
@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} has no docstring"
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in finder.find(module, extraglobs={"fz": fz, "torch": torch}):
        report: list[str] = []
        runner.run(test, out=report.append)
        assert not report, "".join(report)


def test_public_names_are_documented_and_verbs_have_an_example() -> None:
    docs = {name: inspect.getdoc(getattr(fz, name)) or "" for name in PUBLIC}
    assert not [name for name, text in docs.items() if not text]
    assert not [name for name in VERBS if ">>>" not in docs[name]]
