"""`python forking.py SCRIPT ...` runs a script as `python SCRIPT ...` does, but forks what it would spawn.

So its ranks begin at once, where each would import torch for seconds. They are processes like any others.
"""

from __future__ import annotations

import importlib
import multiprocessing
import runpy
import sys
from pathlib import Path
from typing import Any

get_context: Any = multiprocessing.get_context


def forks(method: str | None = None) -> Any:
    if method != "spawn":
        return get_context(method)
    importlib.import_module("torch._dynamo")  # torch.func's first pullback would do so in each
    return get_context("fork")


if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    multiprocessing.get_context = forks
    runpy.run_path(sys.argv[0], run_name="__main__")
