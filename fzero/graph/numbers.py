"""Numbers of Python in a trace: 0-d tensors, of which operators make what they make of Python's numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.overrides import TorchFunctionMode

from fzero.base import private, pytree
from fzero.base.as_written import uncompiled
from fzero.base.operators import Operator
from fzero.base.refusals import place_of
from fzero.graph.of_torch import TorchDispatchMode

Value: TypeAlias = Any  # an operator, what it is given, or what it returns
_aten = torch.ops.aten
NUMBERS = bool, int, float, complex
_WIDE = dict(zip(NUMBERS, (torch.bool, torch.int64, torch.float64, torch.complex128), strict=True))
_SAME = _aten.detach.default, _aten.alias.default
_MADE = torch.tensor, torch.as_tensor, torch.asarray
_TEXTS = torch.Tensor.__format__, torch.Tensor.__repr__
_OF_BOOLS = ("bitwise_", "__and", "__or", "__xor", "logical_")  # which Python has for bools, too


def written_out(x: object) -> object:
    """A tensor, as of a conjugate, with its values in memory."""
    return x.resolve_conj().resolve_neg() if isinstance(x, torch.Tensor) and (x.is_conj() or x.is_neg()) else x


def as_tensor(x: Value) -> Value:
    """An int or a float as a tensor that is known for one; a tensor with its values in memory."""
    if type(x) not in (int, float):
        return written_out(x)
    if type(x) is int and not -(2**63) <= x < 2**63:
        raise ValueError(f"jit: got {x}, expected at most 64 bits. Give a float, a static int or another seed.")
    return marked(torch.tensor(x, dtype=_WIDE[type(x)], device="cpu"), type(x))


def marked(x: torch.Tensor, kind: type | None) -> torch.Tensor:
    """The same tensor, which is known for a number of Python."""
    setattr(private.unwrapped(x), "_number", kind)  # noqa: B010, it is no attribute of torch's
    return x


def number_of(x: torch.Tensor) -> type | None:
    """The type of the number of Python that a tensor is; None of others."""
    return getattr(private.unwrapped(x), "_number", None)


def _type_of(dtype: torch.dtype) -> type:
    if dtype.is_complex:
        return complex
    return float if dtype.is_floating_point else bool if dtype == torch.bool else int


def _default(kind: type) -> torch.dtype:
    own = torch.get_default_dtype()
    return own if kind is float else own.to_complex() if kind is complex else _WIDE[kind]


def _constant(x: complex, least: type) -> torch.Tensor:
    kind = max(least, type(x), key=NUMBERS.index)
    return marked(torch.full((), x, dtype=_WIDE[kind], device="cpu"), kind)


class Made(TorchFunctionMode):
    """Inside, `torch.tensor(n)` and `1 / n` are what they are of a number."""

    def __torch_function__(
        self, func: Value, types: object, args: Sequence[Value] = (), kwargs: Mapping[str, Value] | None = None
    ) -> Value:
        kwargs = dict(kwargs or {})
        if func in _MADE and args and isinstance(args[0], torch.Tensor) and (kind := number_of(args[0])) is not None:
            args = args[0].to(kwargs.pop("dtype", None) or _default(kind), copy=True), *args[1:]
            func = torch.as_tensor
        elif func is torch.Tensor.__rtruediv__ and number_of(args[0]) and type(args[1]) in NUMBERS:
            args, func = (_constant(args[1], float), args[0]), torch.div  # torch would multiply by the reciprocal
        elif func in _TEXTS and number_of(args[0]):
            raise ValueError(
                f"jit: the function{place_of()} makes text of a number among its inputs, which has no value there. "
                "Make it static (static_argnums=)."
            )
        elif func is torch.where and any(isinstance(x, torch.Tensor) and number_of(x) for x in args[1:]):
            args = args[0], *[_constant(x, type(x)) if type(x) in NUMBERS else x for x in args[1:]]
        return func(*args, **kwargs)


@uncompiled
class Numbers(TorchDispatchMode):
    """Inside, operators take what is marked for numbers of Python, and what they make of numbers alone is one, too."""

    def __torch_dispatch__(
        self, func: Operator, types: object, args: tuple[Value, ...] = (), kwargs: dict[str, Value] | None = None
    ) -> Value:
        kwargs = kwargs or {}
        flat, spec = pytree.flatten((args, kwargs))
        kinds = {i: kind for i, x in enumerate(flat) if isinstance(x, torch.Tensor) and (kind := number_of(x))}
        name = func.overloadpacket.__name__
        if not kinds or not (torch.Tag.pointwise in func.tags or name.startswith("floor_divide") or func in _SAME):
            return func(*args, **kwargs)
        if name.startswith("pow"):
            _need_one_type(*args[:2])
        others = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor) and i not in kinds]

        def call(new: Mapping[int, torch.Tensor]) -> Value:
            own, named = pytree.unflatten(spec, [new.get(i, x) for i, x in enumerate(flat)])
            return func(*own, **named)

        if not others:
            return _of_numbers(name, flat, kinds, call)
        if name in ("mul", "div") and len(args) == 2 and not kwargs and 0 in kinds:
            # as x.__rmul__(number) and x.__rtruediv__(number): a first operand would be rounded to the dtype
            first = args[1] if name == "mul" else _aten.reciprocal.default(args[1])
            return self.__torch_dispatch__(_aten.mul.Tensor, types, (first, args[0]))
        return _of_both(name, flat, kinds, others, call)


def _of_numbers(name: str, flat: Sequence[Value], kinds: Mapping[int, type], call: Value) -> Value:
    """What Python would make of them: of integers alone integers, but for `/`; else 64 bits."""
    kind = max([*kinds.values(), *[type(x) for x in flat if type(x) in NUMBERS]], key=NUMBERS.index)
    if kind is bool and not name.startswith(_OF_BOOLS):
        kind = int
    if kind is int and name.startswith("pow") and type(flat[1]) is int and flat[1] < 0:
        kind = float
    for own in (kind, float):
        cast = {i: flat[i].to(_WIDE[own]) for i in kinds if flat[i].dtype != _WIDE[own]}
        out = call(cast)
        if not out.is_floating_point() or own in (float, complex):  # else of integers, in the default dtype
            break
    return marked(out, _type_of(out.dtype))


def _of_both(name: str, flat: Sequence[Value], kinds: Mapping[int, type], others: Sequence[int], call: Value) -> Value:
    """What torch makes of tensors and numbers: a number changes no dtype but that of tensors of a lower kind."""
    given = {i: flat[i] for i in others[name == "where" :]} or {i: flat[i] for i in others}
    types = {i: NUMBERS.index(_type_of(x.dtype)) for i, x in given.items()}
    highest = max(types.values())
    new: dict[int, torch.Tensor] = {}
    for i, kind in kinds.items():
        if NUMBERS.index(kind) > max(highest, 1):
            wide = [x.dtype for x in given.values() if x.is_floating_point()]
            dtype = wide[0].to_complex() if wide else _default(kind)
            new[i] = flat[i].to(dtype)
    if not any(x.dim() and types[i] == highest for i, x in given.items()):  # else 0-d tensors alone have a say
        new.update({i: x.unsqueeze(0) for i, x in given.items() if not x.dim()})
    out = call(new)
    if name.endswith("_") and not name.endswith("__"):
        return flat[0]
    shape = torch.broadcast_shapes(*[x.shape for x in flat if isinstance(x, torch.Tensor)])
    return out if out.shape == shape else out.reshape(shape)


def _need_one_type(base: Value, exponent: Value) -> None:
    """Refuses powers of integers whose type, or whether they are there, an exponent decides."""
    number = isinstance(exponent, torch.Tensor) and number_of(exponent) is int
    kind = _type_of(base.dtype) if isinstance(base, torch.Tensor) else type(base)
    if number and kind in (int, bool):
        raise ValueError(
            f"jit: the function{place_of()} raises integers to the power of an int among its inputs, whose sign would "
            "decide the dtype. Write 2.0 ** n in the place of 2 ** n, or make it static (static_argnums=)."
        )
