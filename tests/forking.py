"""`python forking.py SCRIPT ...` runs a script as `python SCRIPT ...` does, but forks what it would spawn.

So its ranks begin at once, where each would import torch for seconds. They are processes like any others. `program` is
the same in a process that has been forked itself.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import runpy
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

get_context: Any = multiprocessing.get_context


def forks(method: str | None = None) -> Any:
    if method != "spawn":
        return get_context(method)
    importlib.import_module("torch._dynamo")  # torch.func's first pullback would do so in each
    return get_context("fork")


def program(folder: str, environment: dict[str, str], *command: str) -> None:
    """`python -W error SCRIPT ...`, or `-c CODE ...`, as a target: what it says is then in two files of the folder."""
    os.setsid()
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    warnings.resetwarnings()
    warnings.simplefilter("error")
    sys.path[:] = [path for path in ["", *sys.path] if Path(path) != Path(__file__).parent]
    sys.argv = [*command]
    try:
        if sys.argv[0] == "-c":
            exec(compile(sys.argv.pop(1), "<string>", "exec"), {"__name__": "__main__"})
        else:
            run()
    finally:
        atexit._run_exitfuncs()


def run() -> None:
    sys.path[0] = str(Path(sys.argv[0]).parent)
    multiprocessing.get_context = forks
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    del sys.argv[0]
    run()
