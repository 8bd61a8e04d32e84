"""Ranks that are Ray's actors, one each in a placement group; calls and values go by the same channels as elsewhere.

Ray places and starts them, carries `build`, and tells how one has ended.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fzero.channels import Address, Listener
from fzero.comm import backend
from fzero.components.remote.link import Link, Settings
from fzero.components.remote.processes import ChannelLink, Heard, serve, take_all, weakly

OPTIONS = {"resources", "strategy", "runtime_env"}


def _ray() -> Any:
    """Ray, which is imported where it is asked for."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ImportError("fz.remote(on='ray') needs ray: pip install ray, or in a clone '.[ray]'.") from error


class RayLink(ChannelLink):
    """A rank in an actor."""

    def __init__(self, settings: Settings, rank: int, actor: Any, running: object, group: object) -> None:
        super().__init__(settings, rank)
        self._actor, self._running, self._group = actor, running, group  # which lives as long as the ranks

    def gone(self) -> tuple[str, str] | None:
        ray = _ray()
        if not ray.is_initialized():  # any other call would start it again
            return "has ended with Ray", ""
        done, _ = ray.wait([self._running], timeout=0)
        if not done:
            return None
        try:
            ray.get(self._running)
        except ray.exceptions.RayError as error:
            return f"has ended, as Ray says ({type(error).__name__})", str(error)
        return "has ended", ""

    def end(self) -> None:
        ray = _ray()
        if ray.is_initialized():
            with contextlib.suppress(Exception):  # or it has been shut down meanwhile
                ray.kill(self._actor)
                if self.rank == 0:
                    ray.util.remove_placement_group(self._group)
        super().end()

    def join(self, timeout: float) -> None:
        ray = _ray()
        if ray.is_initialized():
            with contextlib.suppress(Exception):
                ray.wait([self._running], timeout=max(timeout, 1e-3))


def start(
    build: Callable[[int], object], settings: Settings, heard: Heard, options: Mapping[str, Any]
) -> Sequence[Link]:
    """Starts the ranks of a component; see `threads.start`."""
    ray = _ray()
    if not ray.is_initialized():
        ray.init()
    token, reachable = secrets.token_bytes(32), ray.util.get_node_ip_address()
    resources = dict(options.get("resources", {"CPU": 1}))
    bundles, strategy = [resources] * settings.ranks, options.get("strategy", "PACK")
    group = ray.util.placement_group(bundles, strategy=strategy, name=f"fzero-{settings.identity}")
    links: list[RayLink] = []
    try:
        if not group.wait(settings.timeout):
            raise TimeoutError(
                f"fz.remote(on='ray'): Ray had no room for {settings.ranks} ranks with {resources} each in "
                f"{settings.timeout:g} seconds; free are {_some(ray.available_resources(), resources)} of "
                f"{_some(ray.cluster_resources(), resources)}. Let ranks share, by "
                "options={'resources': {'CPU': 0.5}} for each component, close a component, or take a larger cluster."
            )
        with Listener(token, reachable, f"the control of {settings.component!r}") as listener:
            job, store = ray.cloudpickle.dumps(build), None
            kind = ray.remote(_Rank)
            for rank in range(settings.ranks):
                place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, rank)
                others = {name: count for name, count in resources.items() if name not in ("CPU", "GPU", "memory")}
                actor = kind.options(
                    name=f"fzero-{settings.identity}-{rank}",
                    num_cpus=resources.get("CPU", 0),
                    num_gpus=resources.get("GPU", 0),
                    memory=resources.get("memory"),
                    resources=others or None,
                    scheduling_strategy=place,
                    runtime_env=options.get("runtime_env"),
                    max_restarts=0,
                ).remote()
                if store is None:
                    store = actor.store.remote()
                running = actor.run.remote(job, settings, rank, listener.address, token, store, list(sys.path))
                links.append(RayLink(settings, rank, actor, running, group))
            take_all(listener, links, token, settings.timeout, weakly(heard))
    except BaseException:
        for link in links:
            link.end()
        ray.util.remove_placement_group(group)
        raise
    return links


def _some(every: Mapping[str, float], names: Mapping[str, object]) -> dict[str, float]:
    return {name: every.get(name, 0.0) for name in names}


class _Rank:
    """An actor that is one rank."""

    def store(self) -> tuple[str, int]:
        """Begins the store of the process group, on the first rank: ranks of one component reach one another."""
        host = _ray().util.get_node_ip_address()
        self._store = backend.dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def run(
        self,
        job: bytes,
        settings: Settings,
        rank: int,
        address: Address,
        token: bytes,
        store: tuple[str, int],
        path: list[str],
    ) -> None:
        """Runs calls until the component is closed, or its controlling process is gone."""
        ray = _ray()
        sys.path[:] = [*path, *[entry for entry in sys.path if entry not in path]]
        build = lambda: ray.cloudpickle.loads(job)
        try:
            serve(build, settings, rank, address, token, store, ray.util.get_node_ip_address())
        except Exception:
            raise
        except BaseException:  # after which Ray would go on with the actor, and nobody would run its calls
            traceback.print_exc()
            os._exit(1)
