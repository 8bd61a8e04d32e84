"""Where a listener is found: plain values, which can be sent to others."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from pathlib import Path

Address = tuple[str, str, str, int]
"""(the machine, name of a unix socket there or "", TCP host, TCP port): a value that messages can hold."""


def machine() -> str:
    """Names this machine as processes that reach one another by unix sockets see it: its boot and network namespace."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    return ""  # cannot be told: only TCP


def has_unix_sockets() -> bool:
    """Tells whether unix sockets can have names that are no files, which nobody must remove."""
    return sys.platform == "linux" and hasattr(socket, "AF_UNIX") and bool(machine())
