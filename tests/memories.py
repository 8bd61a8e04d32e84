"""The memories that state is offloaded to in tests, with a disk that is a folder of these tests alone."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

import fzero as fz

HOST = "host"
_own = Path(tempfile.gettempdir()) / f"fzero-tests-{os.getuid()}-{os.getpid()}"
_all = Path(os.environ.setdefault("TESTS_FOLDER", str(_own)))  # processes that this one starts are in it, if killed too
_folder = _all / str(os.getpid())
DISK = fz.Disk(_folder / "threads")
MEMORIES = (HOST, DISK)
OF_PROCESSES = (HOST, fz.Disk(_folder / "processes"))  # which are another run than the process that starts them
_owner = os.getpid() if _all == _own else None


def _remove() -> None:
    if os.getpid() == _owner:
        shutil.rmtree(_all, ignore_errors=True)


atexit.register(_remove)
