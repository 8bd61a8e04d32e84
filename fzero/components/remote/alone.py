"""Whether ranks wait for one that has failed in a call, and will not come: they would until the group's timeout.

A rank that fails says so, and the others are asked what they do in that call. Where all of them have ended it or wait
in collectives, one of them for a rank that has failed, nothing will go on. A rank that computes may yet come to what
others wait for: it is left to it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from fzero.comm.waits import Waits
from fzero.components.remote.failure import Failure

STUCK = 2.0  # seconds at most that a rank may wait for what others have sent already


class Standing(NamedTuple):
    """What a rank does in a call: "computes", "waits" or is "over".

    Attributes:
        members: the ranks that it waits for.
        words: in which collective.
    """

    what: str
    members: tuple[int, ...] = ()
    words: str = ""


def tell(
    waits: Waits,
    runs: Callable[[], bool | None],
    report: Callable[[Standing], None],
    patience: float,
) -> None:
    """Reports what a rank does in a call, whenever that changes, until it is over.

    Args:
        runs: whether it runs that call; None once it is over.
        patience: seconds that a collective may take.
    """
    stuck, told = min(STUCK, patience / 4), "computes"
    while (running := runs()) is not None:
        now = waits.now
        waiting = running and now is not None and time.monotonic() - now.since > stuck
        if waiting and told == "computes":
            assert now is not None
            report(Standing("waits", now.members, now.words()))
        elif told == "waits" and not waiting:
            report(Standing("computes"))
        told = "waits" if waiting else "computes"
        time.sleep(stuck / 20)
    report(Standing("over"))


@dataclass
class _Call:
    failed: dict[int, Failure] = field(default_factory=dict)  # by rank
    others: dict[int, Standing] = field(default_factory=dict)


class Failing:
    """Calls in which some rank has failed, and what the others do in them.

    Args:
        ranks: of the component.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._calls: dict[int, _Call] = {}
        self._lock = threading.Lock()

    def failed(self, call: int, rank: int, failure: Failure) -> bool:
        """Notes a rank's failure; True of the first in a call: then the others are to be asked."""
        with self._lock:
            first = call not in self._calls
            self._calls.setdefault(call, _Call()).failed[rank] = failure
            return first

    def stands(self, call: int, rank: int, standing: Standing) -> tuple[int, str, str] | None:
        """Notes what a rank does; of a call that will never end the rank that failed, the cause and the traceback."""
        with self._lock:
            own = self._calls.get(call)
            if own is None:
                return None
            own.others[rank] = standing
            left = {other for other in range(self._ranks) if other not in own.failed}
            known = {other: own.others[other] for other in left if other in own.others}
            if all(other in known and known[other].what == "over" for other in left):
                del self._calls[call]
                return None
            if any(other not in known or known[other].what == "computes" for other in left):
                return None
            for waiting, each in sorted(known.items()):
                lost = [other for other in each.members if other in own.failed]
                if each.what == "waits" and lost:
                    return lost[0], _cause(own.failed[lost[0]], waiting, each.words), own.failed[lost[0]].trace
            return None


def _cause(failure: Failure, waiting: int, words: str) -> str:
    return (
        f"failed in a call ({failure.kind}: {failure.message}), for which rank {waiting} waited in {words}: their "
        "process group is of no use any more. With fz.remote(checked=True) it costs the call alone"
    )
