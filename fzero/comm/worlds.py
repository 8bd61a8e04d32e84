"""Process groups of a thread's own: ranks that are threads, several groups of them at once, beside the caller's own.

torch keeps the groups of a process in one object, `_world`, its "experimental extension point", and their names in a
registry that can be each thread's own. While any thread has a world here, both look at who asks.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from fzero.base.thread_state import isolate_group_names
from fzero.comm import backend

_c10d: Any = backend.dist.distributed_c10d

_BY_GROUP = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "tags_to_pg",
    "pg_to_tag",
    "pg_flight_recorder_hooks",  # since torch 2.15
)


class _World:
    """What torch notes of the process groups of one thread."""

    pg_map: dict[backend.Group, object]

    def __init__(self) -> None:
        self.default_pg: backend.Group | None = None
        self.group_count = 0
        for name in _BY_GROUP:
            setattr(self, name, {})
        self.pg_coalesce_state: dict[backend.Group, list[object]] = {}
        self.comms: list[object] = []


class _Worlds:
    """The world of a thread that has its own; that of the process otherwise."""

    _outer: object
    _own: Any

    def __init__(self, outer: object) -> None:
        object.__setattr__(self, "_outer", outer)
        object.__setattr__(self, "_own", threading.local())

    def _world(self) -> Any:
        return getattr(self._own, "world", None) or self._outer

    def __getattr__(self, name: str) -> object:
        return getattr(self._world(), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._world(), name, value)


class _Installed:
    """How many need worlds now, and what was there before."""

    def __init__(self) -> None:
        self.lock, self.count = threading.Lock(), 0
        self.worlds: _Worlds | None = None
        self.names: dict[str, backend.Group] = {}
        self.living: list[_World] = []
        self.left: set[str] = set()  # names that threads' own registries may still have from earlier


_installed = _Installed()


def _names_of(world: object) -> dict[str, backend.Group]:
    names: dict[backend.Group, str] = getattr(world, "pg_names", {})
    return {name: group for group, name in [*names.items()] if isinstance(group, backend.Group)}


def install() -> None:
    """Lets threads have worlds of their own, until as many `uninstall` as `install` were called.

    This thread's groups keep their names; other threads that have none of their own look theirs up in vain meanwhile,
    as a DeviceMesh does that is asked for a group.
    """
    with _installed.lock:
        _installed.count += 1
        if _installed.count > 1:
            return
        outer = _c10d._world
        _installed.worlds, _installed.names = _Worlds(outer), _names_of(outer)
        isolate_group_names(True)
        for name in _installed.left:
            with contextlib.suppress(RuntimeError):
                _c10d._unregister_process_group(name)
        for name, group in _installed.names.items():
            _c10d._register_process_group(name, group)
        _c10d._world = _installed.worlds


def uninstall() -> None:
    """Puts back what was there, once nobody needs worlds any more."""
    with _installed.lock:
        _installed.count -= 1
        if _installed.count:
            return
        worlds, before = _installed.worlds, _installed.names
        assert worlds is not None
        isolate_group_names(False)
        outer = worlds._outer
        now = _names_of(outer)
        for name in before.keys() - now.keys():
            _c10d._unregister_process_group(name)
        for name in now.keys() - before.keys():
            _c10d._register_process_group(name, now[name])
        if _c10d._world is worlds:
            _c10d._world = outer
        _installed.worlds, _installed.names = None, {}
        _installed.left |= before.keys() | now.keys()


@contextlib.contextmanager
def own_world() -> Iterator[None]:
    """Inside, this thread has a world of its own, without any group at first. Between `install` and `uninstall`."""
    worlds = _installed.worlds
    assert worlds is not None
    own = worlds._own
    own.world = world = _World()
    with _installed.lock:
        _installed.living.append(world)
    try:
        yield
    finally:
        own.world = None
        with _installed.lock:
            _installed.living.remove(world)


def has_ended(group: backend.Group) -> bool:
    """Tells whether a group is none of this process's any more, on no thread."""
    here = _c10d._world
    if group in here.pg_map or backend.stands_for_all(group):
        return False
    with _installed.lock:
        return all(group not in world.pg_map for world in (getattr(here, "_outer", here), *_installed.living))
