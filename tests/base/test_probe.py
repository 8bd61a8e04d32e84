"""A version of torch that lacks what fzero stands on is told by name, and no name is forgotten."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from nightly import at_length, in_turns

import fzero
from fzero.base import probe

BASE = Path(fzero.__file__).parent / "base"
LATE = ("torch._dynamo", "torch._functorch", "torch._inductor", "torch._subclasses")  # torch loads these when asked
PRIVATE = r"\._[a-zA-Z]"


def chains(file: str) -> set[str]:
    """What a file reads of torch, by whole names: `_C.x` is `torch._C.x` where the file says `_C = torch._C`."""
    tree = ast.parse((BASE / file).read_text())
    short = {}
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Attribute):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            short[ast.unparse(target)] = ast.unparse(node.value)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.fullmatch(r"[\w.]+", text := ast.unparse(node)):
            first, dot, rest = text.partition(".")
            found.add(short.get(first, first) + dot + rest)
    return {name for name in found if name.startswith("torch.") and re.search(PRIVATE, name)}


@pytest.mark.parametrize("file", ["private.py", "hooks.py", "thread_state.py", "random.py", "flash.py"])
def test_every_private_name_is_looked_up(file: str) -> None:
    listed = {f"{place}.{name}" for place, names in probe.NAMES.items() for name in names.split()}
    wanted = {name for name in chains(file) if not name.startswith((*LATE, "torch.ops.mkldnn"))}
    assert len(wanted) >= 2
    related = lambda a, b: f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.")  # one is the other's part
    assert [name for name in sorted(wanted) if not any(related(name, own) for own in listed)] == []


@in_turns(10, "interpreters of their own")
@pytest.mark.parametrize(
    "name",
    [
        "torch._C._functorch.maybe_get_level",
        pytest.param("torch._C._will_engine_execute_node", marks=at_length),
        pytest.param("torch.overrides._push_mode", marks=at_length),
    ],
)
def test_a_version_that_lacks_a_name_is_told_so(name: str) -> None:
    """In a process whose torch has lost it before fzero is imported."""
    program = f"import torch\ndel {name}\nimport fzero"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    (last,) = done.stderr.splitlines()[-1:]
    assert last == (
        f"ImportError: torch {torch.__version__} has no {name}, which fzero needs. fzero is tested with torch 2.11, "
        "2.13, 2.15: install one of these, or a version between them, or a newer fzero."
    )


def test_all_that_is_missing_is_named() -> None:
    with pytest.raises(ImportError, match=r"has no torch\._C\._gone, torch\.overrides\._away\.far, which"):
        probe.need({"torch._C": "_gone _InferenceMode", "torch.overrides": "_away.far"})
