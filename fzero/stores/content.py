"""What a file holds, and whether somebody still wants it: what its transfers and its handle know together."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from dataclasses import dataclass, field

from fzero.stores import blocks
from fzero.stores.blocks import Handle, open_file
from fzero.stores.disk import Disk
from fzero.stores.pool import Pool, Room


@dataclass(frozen=True)
class Shared:
    """What the transfers of one folder share. It does not hold the folder, which may end while they run.

    Attributes:
        direct: whether its filesystem takes O_DIRECT.
        failing: set since a failed write was told of, while none has gone well.
    """

    path: str
    direct: bool
    pid: int = field(default_factory=os.getpid)
    pool: Pool = field(default_factory=Pool)
    room: Room = field(default_factory=Room)
    failing: threading.Event = field(default_factory=threading.Event)

    def open(self, path: str, flags: int, disk: Disk) -> Handle:
        return open_file(path, flags, disk.direct, self.direct)

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
    """

    def __init__(self, path: str, nbytes: int, what: str, disk: Disk, over: str | None = None) -> None:
        self.path, self.part, self.nbytes, self.what, self.disk = path, f"{path}.part", nbytes, what, disk
        self.over = over
        self.sums = [0] * math.ceil(nbytes / blocks.CHUNK) if disk.verify else []
        self.whole = self.dropped = False

    @property
    def room(self) -> int:
        """Bytes that the file takes."""
        return blocks.rounded(self.nbytes)

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
    """Removes a file, if it is there."""
    with contextlib.suppress(OSError):
        os.unlink(path)
