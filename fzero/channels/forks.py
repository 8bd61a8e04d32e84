"""What a forked child does with its parent's sockets: it lets go of them, or the peer would not see the parent end."""

from __future__ import annotations

import os
import weakref
from typing import Any

open_here: weakref.WeakSet[Any] = weakref.WeakSet()  # what has open sockets; `forget` closes them, and nothing else


def _forked() -> None:
    for one in list(open_here):
        one.forget()
    open_here.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
