"""What a file holds, and whether somebody still wants it: what its transfers and its handle know together."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from dataclasses import dataclass, field

from fzero.stores import blocks
from fzero.stores.disk import Disk
from fzero.stores.handle import Opener
from fzero.stores.pool import Pool, Room


@dataclass(frozen=True)
class Shared:
    """What the transfers of one folder share. It does not hold the folder, which may end while they run."""

    path: str
    pid: int = field(default_factory=os.getpid)
    pool: Pool = field(default_factory=Pool)
    room: Room = field(default_factory=Room)
    opener: Opener = field(default_factory=Opener)
    failing: threading.Event = field(
        default_factory=threading.Event
    )  # since a failed write was told of, none went well

    def need_own_process(self) -> None:
        """Raises RuntimeError in a child that was forked: the threads are not there, nor are the files its own."""
        if os.getpid() != self.pid:
            raise RuntimeError(
                f"State in {self.path} belongs to process {self.pid}, and this one ({os.getpid()}) was forked from "
                "it. Use the state where it was made, or start the process by another method "
                "(multiprocessing.get_context('spawn'))."
            )


class Content:
    """The bytes of one tensor in a file, whole or not yet.

    Attributes:
        what: it is, in words, for errors.
        path: of the whole file; one that is being written has another name, `part`.
        over: the file of as many bytes that it is written over, as that is quicker than to free and allocate blocks.
        sums: the checksum of each chunk, where the disk verifies.
        whole: whether it is written.
        dropped: whether nobody wants it any more.
        repeated: how many chunks were read a second time.
    """

    def __init__(self, path: str, nbytes: int, what: str, disk: Disk, over: str | None = None) -> None:
        self.path, self.part, self.nbytes, self.what, self.disk = path, f"{path}.part", nbytes, what, disk
        self.over = over
        self.sums = [0] * math.ceil(nbytes / blocks.CHUNK) if disk.verify else []
        self.whole = self.dropped = False
        self.repeated = 0
        self._lock = threading.Lock()

    @property
    def room(self) -> int:
        """Bytes that the file takes."""
        return blocks.rounded(self.nbytes)

    def count_repeated(self) -> None:
        with self._lock:
            self.repeated += 1

    def stopped(self, shared: Shared) -> str:
        """Why it is no longer worth the while to move it; "" where it is."""
        if self.dropped:
            return "nobody refers to it any more"
        return "the folder was closed" if shared.pool.closed else ""

    def drop(self, shared: Shared) -> None:
        """Frees the file, maybe while it is being written or read. Takes no lock, as it may run anywhere.

        Names are removed in the order in which a write gives them, so that none is missed: what is removed is not
        renamed any more, and a part that is made afterwards its write removes, as it looks at `dropped` then.
        """
        if os.getpid() != shared.pid:  # a forked child's copy
            return
        self.dropped = True
        for path in (self.over, self.part, self.path):
            if path is not None:
                remove(path)


def remove(path: str) -> None:
    """Removes a file, or an empty folder that somebody has put in its place, if it is there."""
    try:
        os.unlink(path)
    except IsADirectoryError:
        with contextlib.suppress(OSError):
            os.rmdir(path)
    except OSError:
        pass
