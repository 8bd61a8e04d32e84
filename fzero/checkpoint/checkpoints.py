"""fz.Checkpoints: the last few checkpoints of a run in one folder, and the newest of them that is whole."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import time
import warnings
from collections.abc import Sequence
from typing import Any

from fzero.base.arguments import need_int
from fzero.checkpoint.files import LOCK, NAME, is_url, path_of
from fzero.checkpoint.fill import Everyone, Wanted, agreed
from fzero.checkpoint.load import load_both
from fzero.checkpoint.manifest import DamagedCheckpoint, NoCheckpoint
from fzero.checkpoint.read import is_whole
from fzero.checkpoint.remote import folder_at
from fzero.checkpoint.save import Saving, begin
from fzero.comm.axis import Axis
from fzero.state.train_state import TrainState
from fzero.table.spec import Spec, need_step

_GLANCES = 4  # at subfolders of which the newest is empty, or none is a save that has ended
_NAME = re.compile(r"(\d{6,})-update-\d+")


class Checkpoints:
    """The checkpoints of one run: a folder with a numbered subfolder for each save. It keeps the newest ones.

    Give each run its own folder.

    Args:
        folder: path or URL, as for `fz.save`. It is made if it is missing.
        keep: how many checkpoints stay. Older ones are removed when a new one is whole.

    Raises:
        FileExistsError: in a save, if another run has saved into the folder since this one began. Two runs would remove
            each other's checkpoints.

    Example:
        >>> import tempfile
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     kept = fz.Checkpoints(folder, keep=2)
        ...     found = kept.restore(step)
        ...     state = step.init({"w": torch.ones(3)}) if found is None else found[0]
        ...     for seen in range(3):
        ...         state, _ = step(state, torch.ones(3))
        ...         kept.save(state, extra={"seen": seen + 1})
        ...     state, extra = kept.restore(step)
        >>> state.step, extra
        (3, {'seen': 3})
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 3) -> None:
        self.folder = path_of(folder, "Checkpoints")
        self._there = folder_at(self.folder)
        self.keep = need_int(keep, "fz.Checkpoints", "keep", "a number of checkpoints", least=1)
        self._known: set[str] | None = None  # the subfolders that were there as this run began
        self._own = set[str]()  # those that it has begun to save, of which some may not be there yet

    def save(self, state: TrainState, extra: object = None) -> None:
        """Writes one more checkpoint, as `fz.save`, and removes the oldest ones beyond `keep`.

        Args:
            state: of any step. All ranks of it call this.
            extra: anything that JSON can say, the same on every rank.
        """
        self._begin("Checkpoints.save", state, extra, beside=False).wait()

    def save_async(self, state: TrainState, extra: object = None) -> Saving:
        """Begins one more checkpoint in the background, as `fz.save_async`.

        Args:
            state: of any step. All ranks of it call this.
            extra: anything that JSON can say, the same on every rank.

        Returns:
            A `fz.Saving`. Call its `wait()` to know that the checkpoint is whole.
        """
        return self._begin("Checkpoints.save_async", state, extra, beside=True)

    def restore(
        self,
        step: Spec,
        *,
        like: object = None,
        pattern: str = "*",
        params_only: bool = False,
        lossy: bool = False,
        lenient: bool = False,
    ) -> tuple[TrainState, Any] | None:
        """Loads the newest checkpoint that is whole. All ranks call it.

        If the newest one is damaged, or its subfolder empty, it loads the one before, with a warning.

        Args:
            step: the step that goes on with the state. Its sharding, policy and number of ranks may differ from the
                saved ones.
            like: a tree of params as for `init`. It gives the containers, and the values of leaves that are not read.
            pattern: which leaves are read (fnmatch over dotted paths). The others come from `like`.
            params_only: begin moments, `state.extra` and the number of updates anew.
            lossy: allow rounding to what the step stores. By default that is an error.
            lenient: a leaf of `like` that does not fit the checkpoint keeps its value, with a warning.

        Returns:
            The state and the `extra` of its save; None if nothing was ever saved.

        Raises:
            DamagedCheckpoint: there are checkpoints, and none is whole. It never begins anew by itself.
            ValueError: the leaves or the optimizer differ from the saved ones.
        """
        need_step(step, "Checkpoints.restore")
        asked = lambda name: Wanted("fz.load", f"{self.folder}/{name}", like, pattern, lossy, lenient)
        axis, leads = step.axis(), Everyone(step.axis()).leads
        found, damaged = self._found(axis), dict[str, str]()
        if leads and (newest := next(iter(found), None)) is not None and found[newest] is None:
            warnings.warn(
                f"fz.Checkpoints: {self.folder}/{newest} is empty and is skipped. A save was killed as it began, or "
                "its files were removed.",
                stacklevel=2,
            )
        while names := [name for name, ended in found.items() if ended and name not in damaged]:
            try:
                out = load_both(lambda: asked(names[0]), step, params_only)
            except (DamagedCheckpoint, NoCheckpoint) as error:
                damaged[names[0]] = str(error)
                found = self._found(axis)  # in which it is no more, if a run that saves has removed it meanwhile
                continue
            if (newer := [said for name, said in damaged.items() if name in found]) and leads:
                warnings.warn(
                    f"fz.Checkpoints: {names[0]} is restored, as newer ones are damaged. {newer[0]}", stacklevel=2
                )
            return out
        for newest in damaged.values():
            raise DamagedCheckpoint(
                f"{self.folder}: none of {len(damaged)} checkpoints is whole. The newest: {newest} To begin anew, "
                "remove the folder."
            )
        return None

    def _begin(self, who: str, state: TrainState, extra: object, beside: bool) -> Saving:
        return begin(who, functools.partial(self._next, state), state, extra, self.folder, beside, self._tidy)

    def _next(self, state: TrainState) -> str:
        names = self._names()
        number = max((int(name.split("-")[0]) for name in names), default=0) + 1
        name = f"{number:06d}-update-{state.step}"
        if Everyone(state.params.axis).leads:
            known = set(names) if self._known is None else self._known
            if others := [other for other in names if other not in known | self._own]:
                raise FileExistsError(
                    f"{self.folder}: got {others[0]}, which another run has saved there since this one began. Each "
                    "would remove the other's checkpoints. Give each run its own folder. If the other run has "
                    "ended, go on from its state by restore()."
                )
            self._known = known
            self._own.add(name)
        return f"{self.folder}/{name}"

    def _names(self) -> list[str]:
        """The subfolders with a checkpoint, newest first."""
        names = [name for name in self._there.folders() if _NAME.fullmatch(name)]
        return sorted(names, key=lambda name: int(name.split("-")[0]), reverse=True)

    def _found(self, axis: Axis) -> dict[str, bool | None]:
        """The subfolders that rank 0 sees, newest first, and whether each is a save that has ended; None if empty."""

        def look() -> str:
            self._need_folder()
            names = self._look(_GLANCES) if Everyone(axis).leads else {}
            self._known = {*names}
            ended = {name: _has_ended(own) if own else None for name, own in names.items()}
            return json.dumps(ended)

        return json.loads(Everyone(axis).exchange(agreed(axis, look), "restore")[0])

    def _look(self, glances: int) -> dict[str, list[str]]:
        """What lies in each subfolder, newest first, which may be empty for a moment, as a save begins or ends.

        Nor may one have ended yet, and the one before it be gone when one looks there.
        """
        names = {name: self._there.child(name).names() for name in self._names()}
        every = [*names.values()]
        if glances > 1 and every and not (every[0] and any(map(_has_ended, every))):
            time.sleep(0.05)
            return self._look(glances - 1)
        return names

    def _need_folder(self) -> None:
        """Refuses what is no folder of checkpoints: nothing begins anew where there was something."""
        own = self._there.names()
        if NAME in own:
            raise ValueError(
                f"{self.folder}: got a checkpoint of fz.save, expected a folder of such folders. Load it with fz.load, "
                "or give the folder that it lies in."
            )
        if own or is_url(self.folder):
            return
        first = self.folder
        while not os.path.lexists(first):
            first = os.path.dirname(first)
        if not os.path.isdir(first):
            raise NotADirectoryError(f"{first}: got a file or a link to nothing, expected a folder.")

    def _tidy(self) -> None:
        """Removes what is more than `keep`, and what was being removed as a run was killed."""
        names = {name: self._there.child(name).names() for name in self._names()}
        whole = 0
        for name, own in names.items():  # the newest first
            good, there = NAME in own and is_whole(self._there.child(name)), whole
            whole += good
            if NAME in own and there >= self.keep:
                self._there.discard(name)
            elif NAME not in own and (LOCK in own or not own) and there:
                with contextlib.suppress(BlockingIOError), self._there.child(name).only_writer(""):
                    self._there.discard(name)  # nobody saves there any more
        self._there.tidy()


def _has_ended(own: Sequence[str]) -> bool:
    """Tells by what lies in a subfolder whether a save has ended there."""
    return NAME in own or (bool(own) and LOCK not in own)
