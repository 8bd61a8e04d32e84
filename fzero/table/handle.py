"""A leaf of a unit is a handle where that unit is not running: it knows its unit, and its values cannot be read."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch

from fzero.base import private, pytree
from fzero.base.context import variable
from fzero.base.refusals import noted, place_of, writes_param
from fzero.table.rows import Row

Function = Callable[..., object]
Operands = tuple[object, ...]
Named = Mapping[str, object] | None

BOTH = (torch.Tensor, torch)


def named(names: str, *owners: object) -> list[Function]:
    """The functions of these names, as far as there are any."""
    return [found for name in names.split() for owner in owners if (found := getattr(owner, name, None)) is not None]


class HandleError(AttributeError, ValueError):
    """A leaf of a unit was used where it is not gathered: outside of its unit it has no values.

    Move the use into the unit, or make the code that uses it a unit. It is an AttributeError too, so that `hasattr`
    answers False.
    """


# how a module reads the leaves of its units, while the function that fz.functional made of it runs; None elsewhere
reading: contextvars.ContextVar[Callable[[Handle], torch.Tensor] | None] = variable("reading", None)


REQUIRES_GRAD = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
READABLE = frozenset(
    {
        *(
            getattr(torch.Tensor, name).__get__
            for name in "shape dtype device ndim layout is_cuda is_cpu is_meta is_sparse is_quantized is_nested "
            "itemsize nbytes requires_grad".split()
        ),
        *(getattr(torch.Tensor, name) for name in "size dim numel element_size is_floating_point is_complex".split()),
        *(torch.is_floating_point, torch.is_complex, torch.numel),
    }
)


# told of what is read of leaves outside of their units: (copy, path)
protecting: contextvars.ContextVar[Callable[[torch.Tensor, str], None] | None] = variable("protecting", None)


class StandIn(torch.Tensor):
    """A tensor without values in the place of another one: its shape, dtype and device can be read, and no more."""

    readable = READABLE

    @classmethod
    def like(cls, of: torch.Tensor, **own: object) -> Self:
        return cls.of(of.shape, of.dtype, of.device, own)

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, own: Mapping[str, object]) -> Self:
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        vars(self).update(own)
        return self

    def refusal(self, func: object) -> BaseException:
        """The error where a function or an operator asks for more."""
        raise NotImplementedError

    def outside(self) -> torch.Tensor:
        """What a step's function returns where it returns this."""
        raise self.refusal("what the step's function returns")

    def held(self) -> torch.Tensor | None:
        """The tensor whose memory a view of this would share."""
        return None

    @classmethod
    def first(cls, args: object, kwargs: object) -> Self:
        """The first one among the operands of a function."""
        return next(x for x in pytree.flatten((args, kwargs))[0] if isinstance(x, cls))

    @classmethod
    def __torch_function__(cls, func: Function, types: object, args: Operands = (), kwargs: Named = None) -> object:
        if func in cls.readable:
            with private.without_subclasses():
                return func(*args, **(kwargs or {}))
        raise cls.first(args, kwargs).refusal(func)

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        raise cls.first(args, kwargs).refusal(func)


class Valueless(StandIn):
    """Stands for a leaf where that cannot be read, and is passed on as it is."""


class Handle(Valueless):
    """A leaf of a unit, outside that unit.

    What reaches torch's operators all the same, below Python or under a derivative, is refused there. Not so in a
    module: an operator that takes it there is given the full tensor, gathered for this one use. What reads it many
    times had better be a unit itself.
    """

    __slots__ = ("index", "key", "owner", "path", "primal", "unit")  # there are as many handles as leaves, in each run
    owner: Any
    key: Any
    index: int
    path: str
    unit: str
    primal: torch.Tensor

    @staticmethod
    def __new__(
        cls,
        owner: object,
        key: object,
        index: int,
        row: Row,
        dtype: torch.dtype,
        primal: torch.Tensor,
        shape: Sequence[int] | None = None,
    ) -> Handle:
        self = torch.Tensor._make_wrapper_subclass(
            cls, row.shape if shape is None else shape, dtype=dtype, device=primal.device
        )
        self.owner, self.key, self.index, self.primal = owner, key, index, primal
        self.path, self.unit = row.path, row.unit
        return self

    def refusal(self, func: object) -> HandleError:
        return noted(self._refuse(f"got operator {func}"))

    def _refuse(self, what: str) -> HandleError:
        return HandleError(
            f"{what}: leaf {self.path!r} belongs to unit {self.unit!r} and is gathered, or brought from where it is "
            "offloaded, only inside that unit's call. Pass it to a function wrapped in fz.unit (or let fz.functional "
            "call the module), or say other units= in train_step. A sum over leaves is fz.sum_over(params, fn), which "
            "takes them unit by unit; derivatives over the params are fz.hvp and fz.per_example_grads, not torch.func "
            "over handles."
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.path!r} of unit {self.unit!r}, {tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Function, types: object, args: Operands = (), kwargs: Named = None) -> object:
        if func == REQUIRES_GRAD and isinstance(args[0], Handle):  # which is another object at each look
            return private.is_differentiated(args[0].primal)
        if func in cls.readable:
            return super().__torch_function__(func, types, args, kwargs)
        if func in OF_THE_GRAPH:
            raise noted(cls.first(args, kwargs)._refuse(f"got {name_of(func)!r}, which a copy would answer"))
        read = reading.get()
        if read is None:
            raise noted(cls.first(args, kwargs)._refuse(f"got torch function {name_of(func)!r}"))
        leaves, spec = pytree.flatten((args, kwargs or {}))
        if writes(func, kwargs) and isinstance(leaves[0], Handle):
            raise noted(ValueError(writes_param(f"Leaf {leaves[0].path!r}", name_of(func), place_of())))
        full = [read(x) if isinstance(x, Handle) else x for x in leaves]
        if func is torch.Tensor.__deepcopy__:  # of a result of operations torch makes none
            return full[0].detach().clone()
        args, kwargs = pytree.unflatten(spec, full)
        copied = [(x, own, private.version(own)) for x, own in zip(leaves, full, strict=True) if isinstance(x, Handle)]
        out = func(*args, **(kwargs or {}))
        for leaf, copy, version in copied:
            if private.version(copy) != version:
                raise noted(leaf._refuse(f"got {name_of(func)!r}, which writes to it"))
            protect = protecting.get()
            if protect is not None:  # a write to it, or to a view of it, would be lost
                protect(copy, leaf.path)
        return out


def _missing(handle: Handle, name: str) -> object:
    """An attribute that `hasattr` does not find, as there are no values."""
    raise handle._refuse(f"got .{name}")


for _name in ("numpy", "tolist", "item", "data_ptr", "storage", "untyped_storage", "__array__"):
    setattr(Handle, _name, property(functools.partial(_missing, name=_name)))
OF_THE_GRAPH = {
    *(torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward),
    *(torch.Tensor.register_hook, torch.Tensor.retain_grad, torch.Tensor.register_post_accumulate_grad_hook),
}
SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def writes(func: object, kwargs: Named) -> bool:
    """Tells whether a function changes its first argument, or `out`."""
    name = getattr(func, "__name__", "")
    if name == "requires_grad_":
        return False
    in_place = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    in_place = in_place or (name == "__set__" and func == SET_DATA)
    return in_place or bool(kwargs and (kwargs.get("out") is not None or kwargs.get("inplace") is True))


def storage_of(tensor: torch.Tensor) -> int:
    """The storage below every functorch level; 0 for a tensor without one."""
    held = tensor.held() if isinstance(tensor, StandIn) else tensor
    if held is None:
        return 0
    try:
        return private.unwrapped(held).untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        return 0


def name_of(func: object) -> str:
    """Returns what a user calls a function: a property's getter by the property's name."""
    name = getattr(func, "__name__", str(func))
    own = getattr(getattr(func, "__self__", None), "__name__", name)
    return {"__get__": own, "__set__": f".{own} = ..."}.get(name, name)
