"""What tells functions apart that would be traced alike: the same code over equal constants, modules of one make."""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable

import torch
from torch import nn

from fzero.base import pytree
from fzero.graph.numbers import number_of

_NUMBERS = int, float, complex, bool
_VALUES = (*_NUMBERS, str, bytes, type(None), torch.dtype, torch.device, type, types.BuiltinFunctionType)
_OWN = {"_parameters", "_buffers", "_modules", "forward"}


def meta_of(x: torch.Tensor) -> tuple[object, ...]:
    """What a trace depends on of a tensor."""
    return tuple(x.shape), x.stride(), x.dtype, x.device, number_of(x)


def ambient_of(device: str) -> tuple[object, ...]:
    """What a trace depends on of what is set around it."""
    casts = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return *casts, torch.get_default_dtype(), torch.is_grad_enabled()


def exact(value: object) -> tuple[type, object]:
    """A value and its type, by which 1 is not True, and 0.0 is not -0.0."""
    return type(value), repr(value) if isinstance(value, (float, complex)) else value


class Identity:
    """Equal to itself alone; it keeps its object alive."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.value is self.value


@functools.lru_cache(64)
def order_of(structure: Identity) -> pytree.Spec:
    """A structure in the order of its dicts' entries, which equal ones may have in another."""
    spec: pytree.Spec = structure.value  # type: ignore[assignment]
    return pytree.ordered(pytree.unflatten(spec, range(spec.num_leaves)))[1]


def form_of(value: object) -> Hashable:
    """What a function, or what it closes over, is; equal forms are traced alike."""
    if isinstance(value, _VALUES):
        return exact(value)
    if type(value) in (tuple, list):
        return type(value), *map(form_of, value)  # type: ignore[call-overload]
    if type(value) is dict:
        return dict, *[(form_of(k), form_of(v)) for k, v in value.items()]  # type: ignore[attr-defined]
    if type(value) in (set, frozenset):
        return type(value), frozenset(map(form_of, value))  # type: ignore[call-overload]
    module = getattr(value, "module", None)
    if isinstance(value, functools.partial) and isinstance(module, nn.Module):  # a module's call as a unit
        return "unit", _of_module(module)
    if isinstance(value, types.FunctionType) and not value.__defaults__ and not value.__kwdefaults__:
        return "function", value.__code__, closed_over(value), Identity(value.__globals__)
    return Identity(value)


def _contents(fn: types.FunctionType) -> list[object]:
    """What a function closes over; the cell of a variable that is not set."""
    out: list[object] = []
    for cell in fn.__closure__ or ():
        try:
            out.append(cell.cell_contents)
        except ValueError:
            out.append(cell)
    return out


def _of_module(module: nn.Module) -> Hashable:
    own = vars(module)
    if any(own[name] for name in own if name.endswith("_hooks") and isinstance(own[name], dict)):
        return Identity(module)
    attributes = [(name, form_of(value)) for name, value in own.items() if name not in _OWN and not _is_hooks(name)]
    buffers = [(name, Identity(value)) for name, value in module._buffers.items()]
    children = [(name, None if x is None else _of_module(x)) for name, x in module._modules.items()]
    forward: object = own.get("forward")
    while (inner := getattr(forward, "__wrapped__", None)) is not None:  # the unit's own, around that of its class
        forward = inner
    usual = forward is None or getattr(forward, "__func__", None) is type(module).forward
    return type(module), usual or Identity(forward), tuple(module._parameters), *attributes, *buffers, *children


def _is_hooks(name: str) -> bool:
    return name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))


def closed_over(fn: object, seen: set[int] | None = None) -> Hashable:
    """What a function, and functions that it closes over, close over now: another value or tensor is traced anew."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = getattr(fn, "__func__", fn)
    seen = set() if seen is None else seen  # once each, as functions may call themselves
    out: list[Hashable] = []
    for value in _contents(fn) if isinstance(fn, types.FunctionType) else ():
        if isinstance(value, _VALUES):
            out.append(exact(value))
        else:
            again = id(value) in seen
            seen.add(id(value))
            out.append((Identity(value), () if again else closed_over(value, seen)))
    return tuple(out)
