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


def over_tcp(address: Address) -> Address:
    """The same listener, reached by TCP also from its own machine.

    Example:
        >>> from fzero.channels import over_tcp
        >>> over_tcp(("one boot", "fzero-1a2b", "10.0.0.1", 4000))
        ('one boot', '', '10.0.0.1', 4000)
    """
    return (address[0], "", *address[2:])


def need_address(address: object, who: str) -> Address:
    """An address, also one that has come in a message."""
    if isinstance(address, (tuple, list)) and len(address) == 4:
        where, name, host, port = address
        if all(isinstance(part, str) for part in (where, name, host)) and type(port) is int and 0 < port < 1 << 16:
            return (where, name, host, port)
    raise TypeError(f"{who}: got address={address!r}, expected a listener's, as listener.address gives it.")
