"""A module's param where its unit is not running: `self.blocks[0].weight` in the parent's forward can be read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fzero import _private, _tree
from fzero._call import Again, here
from fzero._handle import READABLE, Handle, name_of
from fzero._traversal import current, read
from fzero._watch import writes


class ModuleLeaf(Handle):
    """A leaf of a unit in its module: an operator that takes it is given the full tensor, gathered for this one use.

    What reads it many times had better be a unit itself. Inside another unit it becomes one of that unit's leaves.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READABLE:
            return super().__torch_function__(func, types, args, kwargs)
        leaves, spec = _tree.flatten((args, kwargs or {}))
        if writes(func, kwargs) and isinstance(leaves[0], ModuleLeaf):
            raise leaves[0]._refuse(f"got {name_of(func)!r}, which writes to it")
        args, kwargs = _tree.unflatten(spec, [x.full() if isinstance(x, ModuleLeaf) else x for x in leaves])
        return func(*args, **kwargs)

    def full(self) -> torch.Tensor:
        """The full leaf, differentiable."""
        leaves = here.get()
        if leaves is not None:
            own = leaves.get((id(self.traversal), self.index))
            if own is None:
                raise Again(more=self)
            return own
        if current.get() is not self.traversal:
            raise self._refuse("read where its step's function is not running")
        # under plain autograd nothing tells a Function's forward from a block without gradients
        constant = self.traversal.records and not torch.is_grad_enabled() and self.primal.requires_grad
        if _private.below(self.primal) or (constant and _private.level() == 0):
            where = "a torch.autograd.Function, as its argument or otherwise; give it w * 1"
            block = " (or inside torch.no_grad(); read it before, as w.detach())" if constant else ""
            raise self._refuse(f"read inside {where}{block}")
        return read(self)


class Absent(torch.Tensor):
    """A module's param where its function is not running: its values are not there, and nobody is to go on without."""

    path: str

    @staticmethod
    def __new__(cls, path: str, param: torch.Tensor) -> Any:
        self = torch.Tensor._make_wrapper_subclass(cls, param.shape, dtype=param.dtype, device=param.device)
        self.path = path
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Absent({self.path!r}, {tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READABLE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        path = next(x.path for x in _tree.flatten((args, kwargs))[0] if isinstance(x, Absent))
        raise RuntimeError(
            f"Leaf {path!r} of a module is read, by {name_of(func)!r}, when the function that fz.functional made of it "
            "is not running, so that its values are not there (torch.utils.checkpoint under plain autograd and hooks "
            "of a backward do so). Use step.vjp in place of fz.tape, and fz.remat(step) in place of the checkpoint."
        )


def in_module(leaves: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leaves as a module is to have them: handles as what can be read."""
    return {name: _readable(leaf) if isinstance(leaf, Handle) else leaf for name, leaf in leaves.items()}


def _readable(handle: Handle) -> ModuleLeaf:
    """One for each handle, as ties are told by identity."""
    known = vars(handle).get("readable")
    if not isinstance(known, ModuleLeaf):
        known = ModuleLeaf(handle.traversal, handle.key, handle.index, handle.primal)
        vars(handle)["readable"] = known
    return known
