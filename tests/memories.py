"""The memories that state is offloaded to in tests, with a disk that is a folder of these tests alone."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

import fzero as fz

HOST = "host"
_folder = Path(tempfile.gettempdir()) / f"fzero-tests-{os.getuid()}-{os.environ.get('PYTEST_XDIST_WORKER', '')}-{os.getpid()}"
DISK = fz.Disk(_folder)
MEMORIES = (HOST, DISK)
atexit.register(shutil.rmtree, _folder, ignore_errors=True)
