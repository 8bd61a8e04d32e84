"""The house: which wing may know which, one place for torch.distributed and one for private torch, small files."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import mutants

import fzero as fz

ROOT = Path(fz.__file__).parent
# each wing imports from those before it, and from itself
WINGS = (
    *("base", "channels", "comm", "formats", "kernels", "stores", "table", "schedules", "state", "transforms", "optim"),
    *("purity", "engine", "graph", "parallel", "modules", "update", "checkpoint", "compat", "components", "loops"),
    *("explaining", "planning"),
)
TOP = ("step", "jit", "scan", "unit", "functional", "derivatives", "convert", "pipeline", "remote", "loop", "explain")
FILES = sorted(ROOT.rglob("*.py"))
NODES = (ast.Import, ast.ImportFrom, ast.Attribute, ast.Call)
# testing is beside the house: it looks at comm, and its strategies at everything
MODULES = {
    ".".join(("fzero", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path for path in FILES
}


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Those of a file that a test looks at."""
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, NODES)]


@functools.cache
def attributes_of(path: Path) -> set[str]:
    """What a file imports and the attributes that it reads, as text."""
    return {ast.unparse(node) for node in nodes_of(path) if not isinstance(node, ast.Call)}


def imported(path: Path) -> list[tuple[int, str]]:
    """Every module of the package that a file imports anywhere, also for types alone, with the line."""
    found = []
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            while name.startswith("fzero") and name not in MODULES:
                name = name.rpartition(".")[0]
            if name.startswith("fzero"):
                found.append((node.lineno, name))
    return found


def rank(module: str) -> int:
    """How far down a module lies: those of a wing alike."""
    parts = module.split(".")
    if len(parts) == 1:
        return len(WINGS) + len(TOP)  # the table of contents
    if parts[1] in WINGS:
        return WINGS.index(parts[1])
    return len(WINGS) + (TOP.index(parts[1]) if parts[1] in TOP else len(TOP))


def test_every_file_has_its_wing() -> None:
    beside = {path.name for path in ROOT.iterdir() if path.suffix == ".py"}
    assert beside == {"__init__.py", "__main__.py", *(f"{name}.py" for name in TOP)} and len(beside) <= 16
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == {*WINGS, "testing"}
    for wing in WINGS:
        assert ast.get_docstring(ast.parse((ROOT / wing / "__init__.py").read_text())), wing


def test_arrows_go_down() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for module, path in MODULES.items()
        if not module.startswith("fzero.testing")
        for line, name in imported(path)
        if rank(name) > rank(module)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_imports_go_round() -> None:
    graph = {module: {name for _, name in imported(path)} - {module} for module, path in MODULES.items()}
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join((*way[way.index(module) :], module))
        if module not in done:
            for name in sorted(graph[module]):
                visit(name, (*way, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_files_are_small() -> None:
    long = {str(path.relative_to(ROOT)): lines for path in FILES if (lines := path.read_text().count("\n")) > 400}
    assert not long and (ROOT / "__init__.py").read_text().count("\n") <= 110


def _places(pattern: str) -> set[str]:
    """The files whose code, comments and texts aside, matches."""
    own = re.compile(pattern)
    return {str(path.relative_to(ROOT)) for path in FILES if any(map(own.search, attributes_of(path)))}


def test_one_place_for_torch_distributed() -> None:
    assert _places(r"\btorch\.distributed\b(?!\.checkpoint)") == {"comm/backend.py", "testing/_ranks.py"}


def test_one_place_for_private_torch() -> None:
    """What torch keeps to itself; the fused kernels and foreach functions are told by their names alone."""
    private = r"\btorch\._(?!_file__|foreach|fused)[a-zC]|\btorch\.(?!testing)[a-z_.]*\._[a-z]"
    random, pytrees = {"base/random.py"}, {"base/pytree.py"}  # dispatch keys
    kernels = {"base/flash.py"}
    testing = {"planning/live.py", "testing/_ranks.py"}  # a dispatch mode, and ranks that are threads
    operators = {f"base/{name}.py" for name in ("operators", "replay")}  # and dispatch modes
    private_files = {
        "base/private.py",
        "graph/of_torch.py",
        "base/carriers.py",  # pytrees of torch
        "base/hooks.py",
        "base/thread_state.py",
        "base/ambient.py",
        "base/as_written.py",
    }
    assert _places(private) <= {*private_files, *random, *pytrees, *testing, *kernels, *operators}


MAKES = "empty zeros ones full tensor as_tensor arange linspace rand randn randint eye".split()


def test_what_makes_a_tensor_says_where() -> None:
    """Around a call the user may have another default device."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in FILES
        if path.parent.name != "testing"
        for node in nodes_of(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in MAKES
        and ast.unparse(node.func) == f"torch.{node.func.attr}"
        and not any(keyword.arg == "device" for keyword in node.keywords)
    ]
    assert not wrong, wrong


def test_the_import_is_quick_and_says_nothing() -> None:
    """Three times in forks of a process with torch: the first one compiles what was changed.

    A look of the garbage collector at all that torch has made takes a tenth of a second, and comes at any time. What is
    quick is told by torch's own import, as machines differ, and one machine from hour to hour.
    """
    code = """
        import gc, os, sys, time
        begun = time.process_time()
        import torch
        print(time.process_time() - begun, flush=True)
        gc.freeze()
        for _ in range(3):
            if not os.fork():
                begun = time.process_time()
                import fzero
                print(time.process_time() - begun, flush=True)
                os._exit("hypothesis" in sys.modules or torch.distributed.is_initialized())
            assert os.wait()[1] == 0
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert not done.stderr
    of_torch, *times = [float(line) for line in done.stdout.split()]
    assert len(times) == 3 and min(times) < 0.3 * of_torch, (times, of_torch)


def test_any_is_rare() -> None:
    """Where nothing better can be said."""
    count = sum(len(re.findall(r"\bAny\b", path.read_text())) for path in FILES)
    assert count <= 570, count


def test_every_wait_that_may_be_left_out_is_there() -> None:
    """`make mutants` breaks each in turn, which takes too long for every day."""
    for own in mutants.MUTANTS:
        mutants.mutated((ROOT / own.file).read_text(), own)
