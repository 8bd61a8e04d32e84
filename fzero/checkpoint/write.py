"""The writing of a checkpoint: each rank its file, then the manifest, then what lay there before goes; by notes."""

from __future__ import annotations

import contextlib
import json
import re
import time
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

from fzero.checkpoint import chunks
from fzero.checkpoint.contents import Copies, described, difference
from fzero.checkpoint.files import NAME, Folder
from fzero.checkpoint.fill import Everyone
from fzero.checkpoint.manifest import File, Manifest, Piece, is_foreign, read_manifest
from fzero.checkpoint.snapshot import Snapshot
from fzero.comm import backend
from fzero.state.items import CARRY, entry_of

_LINGER = 60.0  # seconds that rank 0 stays for ranks that still read; they may have been killed


@contextlib.contextmanager
def _reached(who: Callable[[], str]) -> Iterator[None]:
    """Says whose end it was where the store that the notes go through is gone."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(f"{who()}, and the process that keeps the ranks' store has ended ({error})") from error


class Board:
    """Notes of one save, by name, that every rank can read in the process group's own store."""

    def __init__(self, token: str, ranks: int, timeout: float, rank: int) -> None:
        self.token, self._rank, self._shown = token, rank, time.monotonic()
        self._prefix, self._timeout = f"fzero/save/{token}/", timeout
        self._store = backend.store() if ranks > 1 else None

    def post(self, name: str, text: str) -> None:
        if self._store is not None:
            self._store.set(self._prefix + name, text)

    def go_on(self) -> None:
        """Shows now and then that this rank is getting on, as whoever waits for it otherwise gives up."""
        now = time.monotonic()
        if self._store is not None and now - self._shown > self._timeout / 8:
            self._shown = now
            self._store.add(f"{self._prefix}signs of {self._rank}", 1)

    def read(self, name: str, of: int, who: Callable[[], str]) -> str:
        """The note of a rank, once it is there."""
        assert self._store is not None
        pause, signs, end = 0.0005, 0, time.monotonic() + self._timeout
        with _reached(who):
            while not self._store.check([self._prefix + name]):
                if time.monotonic() > end:
                    before, signs = signs, self._store.add(f"{self._prefix}signs of {of}", 0)
                    end += self._timeout
                    if signs == before:
                        self.post("gone", f"rank {self._rank} has given up waiting")
                        raise TimeoutError(f"{who()} within {self._timeout:.0f} s, the timeout of the process group")
                self.go_on()
                time.sleep(pause)
                pause = min(pause * 1.5, 0.05)
            return self._store.get(self._prefix + name).decode()

    def need_all(self) -> None:
        """Raises OSError where a rank has given up waiting: the save must end on every rank as it did there."""
        if self._store is not None and self._store.check([f"{self._prefix}gone"]):
            raise OSError(self._store.get(f"{self._prefix}gone").decode())

    def leave(self, rank: int, ranks: int) -> None:
        """This rank needs no note any more; rank 0 takes them away once none does, as the store may end with it."""
        if self._store is None:
            return
        left, end = f"{self._prefix}left", time.monotonic() + min(self._timeout, _LINGER)
        if rank > 0:
            with contextlib.suppress(RuntimeError):  # rank 0 has ended, and with it the store
                self._store.add(left, 1)
            return
        while self._store.add(left, 0) < ranks - 1 and time.monotonic() < end:
            time.sleep(0.001)
        signs = [f"signs of {rank}" for rank in range(ranks)]
        for name in ("begun", "ended", "left", "gone", *map(str, range(1, ranks)), *signs):
            self._store.delete_key(self._prefix + name)


_FILE = re.compile(r"\d+-of-\d+\.[0-9a-f]{12}\.safetensors|" + re.escape(NAME) + r"(\.[0-9a-f]{12})?\.new")
_WELL = "well"


class _Written(NamedTuple):
    """One rank's file, which is on the disk: its name in the folder, its size, the SHA-256 of its chunks, its pieces.
    """

    name: str
    nbytes: int
    sha256: list[str]
    pieces: list[Piece]
    shared: dict[str, str]  # what the rank holds as all must
    copies: Copies  # the checksums of what it holds as some others must


def write(folder: Folder, snapshot: Snapshot, board: Board, then: Callable[[], None] | None) -> None:
    """One rank's part of a save, which ends on every rank in the same way."""
    rank, ranks = Everyone(snapshot.axis).number, Everyone(snapshot.axis).count
    try:
        _lead(folder, snapshot, board, then) if rank == 0 else _follow(folder, snapshot, board, rank, ranks)
    finally:
        board.leave(rank, ranks)


def _follow(folder: Folder, snapshot: Snapshot, board: Board, rank: int, ranks: int) -> None:
    lead = lambda: f"{folder.path}: rank 0 of this save has not been heard of"
    if (said := board.read("begun", 0, lead)) != _WELL:
        raise OSError(said)
    try:
        board.post(str(rank), json.dumps([_WELL, *_write_own(folder, snapshot, board)]))
    except BaseException as error:
        board.post(str(rank), json.dumps([_words(error, folder)]))
        raise
    finally:
        if (said := board.read("ended", 0, lead)) != _WELL:
            _drop(folder, _name(rank, ranks, board.token))
    if said != _WELL:
        raise OSError(said)


def _lead(folder: Folder, snapshot: Snapshot, board: Board, then: Callable[[], None] | None) -> None:
    """What rank 0 does besides: it begins, and writes the manifest once every rank has written its file."""
    ranks, begun = Everyone(snapshot.axis).count, False
    try:
        folder.make()
        with folder.only_writer(board.token) as still:
            before = _names_before(folder)
            if before is None and is_foreign(folder.read(NAME)):
                raise FileExistsError(
                    f"{folder.path}/{NAME}: got a file that no save has written, expected none or a checkpoint's. Move "
                    "it elsewhere, or save into a folder of your own."
                )
            if then is not None and before != set():
                raise FileExistsError(
                    f"{folder.path}: another run has saved there at the same time. Give each run its own folder, and "
                    "each rank, if its step is not sharded."
                )
            if folder.guarded:
                _clear(folder, before)
            board.post("begun", _WELL)
            begun = True
            written = [_write_own(folder, snapshot, board)]
            for rank in range(1, ranks):
                late = lambda rank=rank: f"{folder.path}: rank {rank} has not written its file"
                said, *record = json.loads(board.read(str(rank), rank, late))
                if said != _WELL:
                    raise OSError(f"rank {rank}: {said}")
                written.append(_Written(*record))
                _compare(folder, written[0].shared, rank, written[-1].shared)
            if said := difference([own.copies for own in written]):
                raise OSError(f"{folder.path}: {said}")
            _look(folder, written)
            manifest = _manifest(snapshot, board.token, written)
            still()
            board.need_all()
            folder.replace(NAME, manifest.text())
            with contextlib.suppress(OSError):  # it is whole; what is left over goes with the next save
                if folder.guarded:
                    _clear(folder, {own.name for own in written})
                else:  # all but the old one's may be of another run, which is still at it
                    for name in before or ():
                        folder.remove(name)
        if then is not None:
            with contextlib.suppress(OSError):
                then()
    except BaseException as error:
        said = _words(error, folder)  # told first: the others wait for it
        if not begun:
            board.post("begun", said)
        board.post("ended", said)
        _drop(folder, _name(0, ranks, board.token))
        raise
    board.post("ended", _WELL)


def _words(error: BaseException, folder: Folder) -> str:
    said = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.strerror and folder.path not in error.strerror:
        said = f"{error.filename or folder.path}: {error.strerror}"
    return said


def _name(rank: int, ranks: int, token: str) -> str:
    return f"{rank:05d}-of-{ranks:05d}.{token}.safetensors"


def _write_own(folder: Folder, snapshot: Snapshot, board: Board) -> _Written:
    """Writes this rank's file."""
    snapshot.unfold()
    shared = snapshot.shared()
    pieces = snapshot.pieces()
    header = snapshot.header(pieces)
    everyone = Everyone(snapshot.axis)
    name = _name(everyone.number, everyone.count, board.token)
    nbytes = len(header) + sum(piece.nbytes for piece, _ in pieces)
    with folder.writing(name, nbytes) as put:

        def put_next(piece: memoryview) -> None:
            put(piece)
            board.go_on()

        put(memoryview(header))
        said = [chunks.digest(header), *chunks.hashed(snapshot.data(), put_next, snapshot.workers)]
    placed = [own._replace(offset=own.offset + len(header)) for own, _ in pieces]
    return _Written(name, nbytes, said, placed, shared, snapshot.copies)


def _look(folder: Folder, written: list[_Written]) -> None:
    """Refuses files that this rank does not see: those of a folder that only another machine has."""
    for rank, own in enumerate(written):
        try:
            got = str(folder.size(own.name))
        except FileNotFoundError:
            got = "none"
        if got != str(own.nbytes):
            raise OSError(
                f"{folder.path}/{own.name}: rank {rank} has written {own.nbytes} bytes, of which rank 0 sees {got}. "
                "Save into a folder that all ranks share."
            )


_OTHERS_CARRY = (
    "fz.save: the ranks' carries (fz.carry) differ, and a checkpoint keeps rank 0's: a run that goes on from it begins "
    "with that one on all ranks, and gives other numbers than one that never ended. Batch norms have the same on all "
    "by fz.functional(module, sync_batch_norm=True); of others save each rank's own beside it, if they matter."
)


def _compare(folder: Folder, shared: dict[str, str], rank: int, theirs: dict[str, str]) -> None:
    """Refuses what only rank 0's would be kept of."""
    for name in {**shared, **theirs}:
        ours, other = shared.get(name, "none"), theirs.get(name, "none")
        if ours != other and entry_of(name) == CARRY:
            warnings.warn(_OTHERS_CARRY, stacklevel=2)
        elif ours != other:
            raise OSError(
                f"{folder.path}: the ranks hold different values of state.{name}: rank 0 has {ours}, rank {rank} has "
                f"{other}. A save keeps one of them, so they must be equal. Keep what differs by rank in a tree like "
                "the params, or outside of the state."
            )


def _manifest(snapshot: Snapshot, token: str, written: list[_Written]) -> Manifest:
    return Manifest(
        token=token,
        step=snapshot.step,
        seed=snapshot.seed,
        ranks=Everyone(snapshot.axis).count,
        axis=snapshot.axis.place,
        extras=snapshot.extras,
        structure=described(snapshot.structure),
        leaves=snapshot.leaves(),
        items=tuple(snapshot.kept),
        files=tuple(
            File(own.name, own.nbytes, tuple(own.sha256), tuple(Piece(*piece) for piece in own.pieces))
            for own in written
        ),
        extra=snapshot.extra,
    )


def _names_before(folder: Folder) -> set[str] | None:
    """The files of the checkpoint that lies there; None where its manifest cannot be read."""
    try:
        return {file.name for file in read_manifest(folder.path).files}
    except FileNotFoundError:
        return set()
    except (OSError, ValueError):
        return None


def _drop(folder: Folder, name: str) -> None:
    """Removes a file of a save that has failed; not where the manifest names it, as it failed too late to matter."""
    with contextlib.suppress(Exception):  # the next save removes it
        keep = _names_before(folder)
        if keep is not None and name not in keep:
            folder.remove(name)


def _clear(folder: Folder, keep: set[str] | None) -> None:
    """Removes the files of saves that never ended, and of the one before."""
    if keep is None:
        return
    for name in folder.names():
        if _FILE.fullmatch(name) and name not in keep:
            folder.remove(name)
