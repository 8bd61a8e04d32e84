"""fz.load and fz.load_extra: a checkpoint as a state of any step, over any ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, cast

from fzero.base.arguments import need_bool
from fzero.checkpoint.files import path_of
from fzero.checkpoint.fill import Wanted, loaded
from fzero.checkpoint.manifest import read_manifest, read_together
from fzero.checkpoint.read import Checkpoint
from fzero.state.beyond import Loadable
from fzero.state.metrics import Component, State
from fzero.state.train_state import TrainState
from fzero.table.spec import Spec, need_step


def load(
    path: str | os.PathLike[str],
    step: Component[State],
    *,
    like: object = None,
    pattern: str = "*",
    params_only: bool = False,
    lossy: bool = False,
    lenient: bool = False,
) -> State:
    """Loads a checkpoint as a state of a step, to the bit.

    All ranks call it, and each one reads its own slices. The step may have another sharding, mesh, number of ranks,
    policy or units than the saved one. Everything that is read is compared with its checksums.

    A leaf that was frozen, and is now trained, begins with moments of zero and counts its updates from here; if it kept
    moments, it goes on with them.

    Args:
        path: folder or URL that `fz.save` has written.
        step: has the optimizer of the save (any with `params_only`), and the transforms of the save that keep state.
            For a pipeline's checkpoint: a pipeline with as many components.
        like: a tree of params as for `init`. It gives the containers, and the values of leaves that are not read. By
            default the containers are those of the save.
        pattern: which leaves are read (fnmatch over dotted paths). The others come from `like`, with moments of zero.
        params_only: begin moments, `state.extra`, kept grads and the number of updates anew.
        lossy: allow rounding to what the step stores. By default that is an error.
        lenient: a leaf of `like` that has another shape in the checkpoint, or is missing there, keeps its value, with a
            warning. Leaves that only the checkpoint has are left out.

    Returns:
        The state.

    Raises:
        FileNotFoundError: there is no checkpoint.
        DamagedCheckpoint: a file is missing, cut or changed. It is named, on every rank.
        ValueError: leaves, shapes or the optimizer differ from the saved ones, or a value would be rounded or lost.

    Example:
        >>> import tempfile
        >>> loss = lambda p, x: (p["w"] * x).sum()
        >>> state = fz.train_step(loss, fz.adamw(0.1)).init({"w": torch.ones(3)})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fz.save(folder, state)
        ...     small = fz.load(folder, fz.train_step(loss, fz.adamw(0.1), fz.Policy.exact(torch.float32)))
        >>> fz.gather(small.params)["w"]
        tensor([1., 1., 1.])
    """
    if isinstance(step, Loadable):
        options = {"like": like, "pattern": pattern, "params_only": params_only, "lossy": lossy, "lenient": lenient}
        return step.load_from(path_of(path, "load"), options)
    need_step(step, "load")
    asked = lambda: Wanted("fz.load", path_of(path, "load"), like, pattern, lossy, lenient)
    return cast(State, load_both(asked, cast(Spec, step), params_only)[0])


def load_both(asked: Callable[[], Wanted], step: Spec, params_only: bool) -> tuple[TrainState, object]:
    """The state of a checkpoint and its `extra`."""

    def check() -> Wanted:
        need_bool(params_only, "fz.load", "params_only")
        return asked()

    state, files = loaded(step, check, lambda wanted, _: Checkpoint(wanted.place), lambda: params_only, 4)
    return state, files.manifest.extra


def load_extra(path: str | os.PathLike[str]) -> Any:
    """Reads the `extra` of a checkpoint, without the state.

    Args:
        path: folder or URL that `fz.save` has written.

    Returns:
        What `fz.save` was given as `extra`; None if it was given nothing.

    Raises:
        FileNotFoundError: there is no checkpoint.
        DamagedCheckpoint: its manifest is damaged.

    Example:
        >>> import tempfile
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fz.save(folder, step.init({"w": torch.ones(3)}), extra={"seen": 3})
        ...     fz.load_extra(folder)
        {'seen': 3}
    """
    folder = path_of(path, "load_extra")
    found = read_together(folder)
    return read_manifest(folder).extra if found is None else found.extra
