"""A module's param where its unit is not running: `self.blocks[0].weight` in the parent's forward can be read."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from fzero.base import private
from fzero.base.context import during
from fzero.base.refusals import noted
from fzero.capture.again import Again, Facts
from fzero.capture.handle import Handle, Valueless, name_of, reading
from fzero.engine.traversal import current, here, read


def full(handle: Handle) -> torch.Tensor:
    """A module's leaf of another unit in full, differentiable. Inside a unit it becomes one of that unit's leaves."""
    leaves = here.get()
    if leaves is not None:
        own = leaves.get((id(handle.owner), handle.index))
        if own is None:
            raise noted(Again(Facts(more=(handle.index,))))
        return own
    if current.get() is not handle.owner:
        raise noted(handle._refuse("read where its step's function is not running"))
    # under plain autograd nothing tells a Function's forward from a block without gradients
    constant = handle.owner.records and not torch.is_grad_enabled() and handle.primal.requires_grad
    if private.below(handle.primal) or (constant and private.level() == 0):
        where = "a torch.autograd.Function, as its argument or otherwise; give it w * 1"
        block = " (or inside torch.no_grad(); read it before, as w.detach())" if constant else ""
        raise noted(handle._refuse(f"read inside {where}{block}"))
    return read(handle)


def readable() -> AbstractContextManager[None]:
    """Inside, handles are what can be read."""
    return during(reading, full)


class Absent(Valueless):
    """A module's param where its function is not running: its values are not there, and nobody is to go on without."""

    path: str

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Absent({self.path!r}, {tuple(self.shape)}, {self.dtype})"

    def refusal(self, func: object) -> RuntimeError:
        return RuntimeError(
            f"Leaf {self.path!r} of a module is read, by {name_of(func)!r}, when the function that fz.functional made "
            "of it is not running, so that its values are not there (torch.utils.checkpoint under plain autograd and "
            "hooks of a backward do so). Use step.vjp in place of fz.tape, and fz.remat(step) in place of the "
            "checkpoint."
        )
