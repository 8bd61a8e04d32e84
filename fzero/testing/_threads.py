"""The private parts of torch.testing that ranks on threads need, in one place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


@contextlib.contextmanager
def threaded_world() -> Iterator[Any]:
    """Inside, every thread may start a process group of its own with backend "threaded"; yields `fail(error)`."""
    from torch.testing._internal.distributed import multi_threaded_pg as pg

    isolate = torch._C._distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]
    isolate(True)
    pg._install_threaded_pg()
    pg.ProcessLocalGroup.reset()
    try:
        yield pg.ProcessLocalGroup.exception_handle
    finally:
        pg._uninstall_threaded_pg()
        pg.ProcessLocalGroup.reset()
        isolate(False)


def new_store() -> Any:
    return dist.HashStore()
