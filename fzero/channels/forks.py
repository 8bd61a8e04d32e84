"""What a forked child does with its parent's sockets: it lets go of them, or the peer would not see the parent end."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forgetting(Protocol):
    """What has open sockets."""

    def forget(self) -> None:
        """Closes them in a forked child, and nothing else: the parent goes on."""
        ...


_open_here: weakref.WeakSet[Forgetting] = weakref.WeakSet()


def opened(one: Forgetting) -> None:
    """From now on a child that is forked lets go of it."""
    _open_here.add(one)


def closed(one: Forgetting) -> None:
    """It has no open sockets any more."""
    _open_here.discard(one)


def _forked() -> None:
    for one in list(_open_here):
        one.forget()
    _open_here.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
