"""A unit where nothing is gathered or recomputed: a plain call, or a node where functorch refuses what it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fzero.base import private, texts
from fzero.base.random import seeded
from fzero.base.refusals import first_words, place_of
from fzero.capture.handle import HandleError
from fzero.capture.second_run import SecondRun
from fzero.capture.surroundings import Reach, Surroundings
from fzero.capture.watch import elsewhere
from fzero.engine.traversal import current, here, inside

CHECKPOINTED = (
    "A unit is called by torch.utils.checkpoint, which runs it again in the pullback, or by another thread: its params "
    "are not gathered for it there. Leave the checkpoint out, fz.remat(step) recomputes units; or call the checkpoint "
    "inside it; and call units on the thread that runs the step's function."
)

# what functorch refuses, and what runs in a node
_NAMES = frozenset(
    "checkpoint checkpoint_sequential apply requires_grad_ backward deepcopy data saved_tensors_hooks save_on_cpu "
    "ctc_loss to_sparse_csr to_sparse_csc to_sparse_bsr to_sparse_bsc sparse_csr_tensor sparse_csc_tensor "
    "sparse_bsr_tensor sparse_bsc_tensor sparse_compressed_tensor".split()
)


class _Undo:
    """What a plain call has done by the time that functorch refuses something in it: it is then run as a node."""

    def __init__(self, arguments: Sequence[object], surroundings: Surroundings) -> None:
        self._refusal: TypeError | None = None
        try:
            self.reach = Reach(arguments, surroundings)
        except TypeError as error:  # of what another run could not do, should there be one
            self._refusal = error
            return
        self._second, self._versions = SecondRun(self.reach), [*map(private.version, self.reach.tensors)]
        self._second.begin(True, False)

    @property
    def may_be(self) -> bool:
        """Whether the unit's code names something that functorch refuses, or the unit reaches such a tensor."""
        if self._refusal is not None or self.reach.names(_NAMES):
            return True
        return any(x.layout in texts.COMPRESSED for x in (*self.reach.tensors, *self.reach.constants))

    def __call__(self, error: BaseException) -> None:
        if self._refusal is not None:
            raise self._refusal
        what = f"A unit{place_of(error)}"
        for x, version in zip(self.reach.tensors, self._versions, strict=True):
            if private.version(x) != version:
                raise ValueError(
                    f"{what} changes one of its inputs in place, of shape {tuple(x.shape)}, and does then what "
                    f"torch.func refuses ({first_words(error)}), so that it runs again. Change a copy: x = x.clone()."
                ) from error
        self.reach.restore()
        self._second.look()
        self._second.refuse(place_of(error).strip(" ()"))
        self._second.rewind()


def plain_call(
    fn: Callable[[], object], node: Callable[[int], object], arguments: Sequence[object], surroundings: Surroundings
) -> object:
    """A unit whose leaves are full tensors already is a plain call, which costs least.

    Where its function does what functorch refuses (torch.utils.checkpoint, old-style Functions, requires_grad_), it
    runs as a node, as it does when it is sharded: `node(seed)`.

    Args:
        arguments: and what it reaches besides: what it has changed there until it is refused is put back.
    """
    traversal = current.get()
    if traversal is None:
        try:
            return fn()
        except HandleError as error:
            if here.get() is not None:
                raise
            raise TypeError(CHECKPOINTED) from error
    seed, record = traversal.next_seed(), traversal.schedule.record
    code = getattr(surroundings.of, "__code__", id(surroundings.of))
    if code not in record.as_nodes:
        undo = None
        if record.may_be.get(code, True):
            with elsewhere():
                undo = _Undo(arguments, surroundings)
            record.may_be[code] = undo.may_be
        try:
            with seeded(seed), inside(None):
                return fn()
        except RuntimeError as error:
            if not texts.says(error, *texts.REFUSED):
                raise
            record.as_nodes.add(code)
            if undo is None:
                raise TypeError(
                    f"A unit{place_of(error)} does what torch.func refuses ({first_words(error)}), in code of a "
                    "library's, which it did not when it was called before: what it had done until then was not noted. "
                    "Call the step again with the same state: it is dealt with from now on."
                ) from error
            undo(error)
    return node(seed)
