"""Where a module's params stand, and what is read of them there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from fzero.base import private
from fzero.base.refusals import noted
from fzero.engine.traversal import current, here, read
from fzero.state.sharded import Sharded
from fzero.table.handle import Function, Handle, Valueless, name_of

Leaves = Mapping[str, object]


class Places:
    """Where a module's params are, found once: torch's functional_call looks for them at every call.

    Args:
        apart: name of a param -> where it is read instead of from its module.
        registry: where modules hold them; "_buffers" for buffers.
    """

    def __init__(
        self,
        module: nn.Module,
        apart: Mapping[str, tuple[dict[str, Any], str]] = MappingProxyType({}),
        registry: str = "_parameters",
    ) -> None:
        modules = list(module.named_modules(remove_duplicate=False))
        self.of: dict[str, tuple[dict[str, Any], str]] = {
            (f"{path}.{name}" if path else name): (getattr(owner, registry), name)
            for path, owner in modules
            for name in getattr(owner, registry)
        }
        self.of.update(apart)
        self._lists: list[tuple[str, list[Any], int]] = [  # of recurrent layers, which read their params there
            (name, own._flat_weights, i)
            for path, own in modules
            if isinstance(own, nn.RNNBase)
            for i, key in enumerate(own._flat_weights_names)
            if (name := f"{path}.{key}" if path else key) in self.of
        ]

    def now(self, leaves: Leaves) -> Leaves:
        """Returns what stands for the module's params, if others were put there (torch.func.functional_call)."""
        for name, leaf in leaves.items():
            owner, own = self.of[name]
            if owner.get(own) is not leaf:
                places = [(name, *self.of[name]) for name in leaves]
                return {name: owner[own] for name, owner, own in places if owner.get(own) is not None}
        return leaves

    def call(self, run: Function, leaves: Leaves, args: tuple[object, ...], kwargs: Leaves) -> object:
        """Runs with these leaves for the module's params; every name of a tied one is among them."""
        old = list[tuple[Any, Any, object]]()
        try:
            self._put(leaves, old)
            return run(*args, **kwargs)
        finally:
            for owner, own, leaf in reversed(old):
                owner[own] = leaf

    @contextlib.contextmanager
    def installed(self, leaves: Leaves) -> Iterator[None]:
        """Inside, these leaves are the module's params."""
        old = list[tuple[Any, Any, object]]()
        try:
            self._put(leaves, old)
            yield
        finally:
            for owner, own, leaf in reversed(old):
                owner[own] = leaf

    def _put(self, leaves: Leaves, old: list[tuple[Any, Any, object]]) -> None:
        """Puts leaves in the places of the module's params, and notes what was there."""
        for name, leaf in leaves.items():
            owner, own = self.of[name]
            old.append((owner, own, owner[own]))
            owner[own] = leaf
        for name, held, i in self._lists:
            if name in leaves:
                old.append((held, i, held[i]))
                held[i] = leaves[name]


def need_names(params: Leaves, names: Mapping[str, None]) -> None:
    """Refuses params that are not a module's own."""
    if isinstance(params, Sharded):
        raise TypeError(
            "apply: got the params of a state, which are sharded, expected full ones. Write "
            "step.forward(state, ...), or apply(fz.gather(state.params), ...)."
        )
    missing = [name for name in names if name not in params]
    extra = [name for name in params if name not in names]
    if missing or extra:
        raise ValueError(
            f"apply: the params do not have the module's names: missing {missing[:4]}, unknown {extra[:4]}. "
            "Pass the dict that fz.functional returned, or the subtree of the params that stands for this module."
        )


def full(handle: Handle) -> torch.Tensor:
    """A module's leaf of another unit in full, differentiable."""
    leaves = here.get()
    if leaves is not None:
        own = leaves.get((handle.owner, handle.index))
        if own is None:
            raise noted(handle._refuse("read inside another unit, which is not given it"))
        return own
    if current.get() is not handle.owner:
        raise noted(handle._refuse("read where its step's function is not running"))
    if private.below(handle.primal) or (private.in_function() and handle.primal.requires_grad):
        raise noted(handle._refuse("read inside a torch.autograd.Function, as its argument or not; give it w * 1"))
    return read(handle)


class Absent(Valueless):
    """A module's param or buffer where its function does not put values: nobody is to go on without."""

    path: str

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return Absent.of, (self.shape, self.dtype, self.device, vars(self))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Absent({self.path!r}, {tuple(self.shape)}, {self.dtype})"

    def refusal(self, func: object) -> RuntimeError:
        return RuntimeError(
            f"Leaf {self.path!r} of a module is read, by {name_of(func)!r}, where its values are not. Either something "
            "besides its module holds it (a list, a dict, an object): let that hold its module, or its name. Or the "
            "module's own train() or eval() reads it: let forward do so where self.training is False. Or a unit "
            "runs again and reads a buffer of another module: give it to the unit as an argument. Or the function that "
            "fz.functional made is not running (torch.utils.checkpoint under plain autograd and hooks of a backward "
            "read it then). Leave the checkpoint out (of a model of Hugging Face: "
            "model.gradient_checkpointing_disable()), as fz.remat(step) recomputes units; or pull back by step.vjp in "
            "place of step(...) and fz.tape."
        )
