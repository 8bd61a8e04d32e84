"""The memories that state is offloaded to in tests, with a disk that is a folder of these tests alone."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

import fzero as fz

HOST = "host"
_folder = Path(tempfile.gettempdir()) / f"fzero-tests-{os.getuid()}-{os.getpid()}"
DISK = fz.Disk(_folder / "threads")
MEMORIES = (HOST, DISK)
OF_PROCESSES = (HOST, fz.Disk(_folder / "processes"))  # which are another run than the process that starts them
_owner = os.getpid()


def _remove() -> None:
    if os.getpid() == _owner:
        shutil.rmtree(_folder, ignore_errors=True)


atexit.register(_remove)
