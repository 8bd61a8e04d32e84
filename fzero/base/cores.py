"""The cores that a process may take: those of its machine, divided by the processes that one launcher has started."""

from __future__ import annotations

import os


def share() -> int:
    """How many cores this process may keep busy, at least one (LOCAL_WORLD_SIZE processes share a machine)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
