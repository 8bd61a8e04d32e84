"""A tensor whose values lie on several ranks: what knows it works on this rank's, anything else finds it whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fzero.base import private, pytree
from fzero.base.carriers import flatten_first
from fzero.base.refusals import noted
from fzero.table.handle import (
    OF_THE_GRAPH,
    REQUIRES_GRAD,
    Function,
    Named,
    Operands,
    StandIn,
    name_of,
    storage_of,
    writes,
)

# what this rank's part answers as the whole tensor would
_OF_EITHER = {
    *(getattr(torch.Tensor, name).__get__ for name in ("grad_fn", "is_leaf", "_version")),
    torch.Tensor.is_inference,
}


class Spread(StandIn):
    """Stands for the whole tensor. Whoever reads it gets that from all ranks, the same values on each.

    Once it was written to, or views of it were made, it is the whole tensor from then on, as others may see that.

    Attributes:
        local: what lies on this rank; None once it is the whole tensor.
        value: the whole tensor, once it was read.
    """

    local: torch.Tensor | None
    value: torch.Tensor | None
    version: int  # of the whole tensor, when it was read first
    level: int  # functorch's, that it was made at

    def joined(self, local: torch.Tensor) -> torch.Tensor:
        """The whole tensor, from all ranks."""
        raise NotImplementedError

    def own(self) -> torch.Tensor:
        """The whole tensor as each rank's own, whose cotangents are summed."""
        raise NotImplementedError

    @classmethod
    def known(cls, func: Function, args: Operands, kwargs: Named) -> object:
        """What a function makes of tensors that lie on several ranks; NotImplemented where it must see them whole."""
        raise NotImplementedError

    def whole(self) -> torch.Tensor:
        """The whole tensor, differentiable."""
        if self.value is None:
            assert self.local is not None
            # as where it was made, as others may read it there, too
            with private.outside_inference(), torch.enable_grad(), private.below_transforms(self.level):
                self.value = self.joined(self.local)
            self.version = private.version(private.unwrapped(self.value))
        return self.value

    def outside(self) -> torch.Tensor:
        return self.whole()

    def held(self) -> torch.Tensor | None:
        return self.value if self.local is None else None

    def need_level(self) -> None:
        """Refuses to be read where what is computed has no derivative."""
        own = self.value if self.local is None else self.local
        assert own is not None
        if private.below(own) or (private.in_function() and own.requires_grad):
            raise noted(self.refusal("a torch.autograd.Function, as its argument"))
        self.need_untracked()

    def need_untracked(self) -> None:
        """Refuses what an autograd Function returned (a reentrant checkpoint): this stands for it without its graph."""
        with private.without_subclasses():
            tracked = self.requires_grad
        if tracked:
            raise noted(self.refusal("a torch.autograd.Function that returned it"))

    def refusal(self, func: object) -> RuntimeError:
        return RuntimeError(
            f"A tensor of shape {tuple(self.shape)}, of which each rank has a piece (shard_tensor(sequence=True)), is "
            f"read by or inside {func}, where its derivative would be lost. Give it x.view_as(x), which is whole, in "
            "place of x; or leave sequence=True out."
        )

    @classmethod
    def __torch_function__(cls, func: Function, types: object, args: Operands = (), kwargs: Named = None) -> object:
        if func == REQUIRES_GRAD or func in _OF_EITHER:
            (self,) = args
            assert isinstance(self, Spread)
            own = self.whole() if self.local is None else self.local
            return func(own) if func in _OF_EITHER else private.is_differentiated(own)
        if func in cls.readable:
            return super().__torch_function__(func, types, args, kwargs)
        if func in OF_THE_GRAPH:
            raise noted(cls.first(args, kwargs).refusal(repr(name_of(func))))
        for x in pytree.flatten((args, kwargs or {}))[0]:
            if isinstance(x, Spread):
                x.need_level()
        out = cls.known(func, args, kwargs)
        return _plainly(func, args, kwargs) if out is NotImplemented else out

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype})"


def whole(x: torch.Tensor) -> torch.Tensor:
    """A tensor with all of its values."""
    return x.whole() if isinstance(x, Spread) else x


def wholes(value: object) -> Any:
    """A value with whole tensors."""
    leaves, spec = flatten_first(value)
    if not any(isinstance(x, Spread) for x in leaves):
        return value
    return pytree.unflatten(spec, [whole(x) if isinstance(x, Spread) else x for x in leaves])


def _plainly(func: Callable[..., object], args: Operands, kwargs: Named) -> object:
    """A function of whole tensors."""
    leaves, spec = pytree.flatten((args, kwargs or {}))
    own = [x for x in leaves if isinstance(x, Spread)]
    args, kwargs = pytree.unflatten(spec, [whole(x) if isinstance(x, Spread) else x for x in leaves])
    before = [private.version(private.unwrapped(x.whole())) for x in own]
    out = func(*args, **(kwargs or {}))
    storages = {storage_of(x) for x in pytree.flatten(out)[0] if isinstance(x, torch.Tensor)}
    for x, version in zip(own, before, strict=True):
        value = x.whole()
        written = writes(func, kwargs) or private.version(private.unwrapped(value)) != version
        if written or storage_of(value) in storages:
            x.local = None
    return out
