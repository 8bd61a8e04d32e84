"""A size that is read of a rank's slice: good for shapes, where every rank has its own, and refused as a number."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction

import torch

from fzero.parallel.acting import running_mode
from fzero.parallel.types import running
from fzero.table.handle import BOTH, Function, Operands, named
from fzero.table.placements import Cut, Mark, notes

_NBYTES = torch.Tensor.nbytes.__get__  # type: ignore[attr-defined]
SIZES = {torch.Tensor.shape.__get__, *named("size numel nelement stride __len__", torch.Tensor), torch.numel, _NBYTES}  # type: ignore[attr-defined]
SHAPED = frozenset(named("view reshape unflatten expand split __getitem__", *BOTH))  # of slices, by sizes


class OwnSize(int):
    """The size of a dim that is cut, on this rank.

    Shapes may be made of it, of multiples of it and of parts that it consists of. What else is computed with it would
    be another number on one rank than for the whole: it is refused, while the function runs that read it.

    Attributes:
        source: the path of the module whose outputs are cut.
        axis: the name of the axis that they are cut over.
        cut: how a tensor with this size is cut.
    """

    source: str
    axis: str
    cut: Cut

    @classmethod
    def of(cls, size: int, source: str, axis: str, cut: Cut) -> OwnSize:
        self = cls(size)
        self.source, self.axis, self.cut = source, axis, cut
        return self

    def __hash__(self) -> int:
        """Not the number's: what a library keeps by the shapes that it is given knows slices from wholes."""
        return hash((int.__index__(self), self.source, self.axis, self.cut))

    def _like(self, size: int) -> OwnSize:
        cut = self.cut.sized(int.__index__(self), size) if len(self.cut.parts or ()) == 1 else None
        return OwnSize.of(size, self.source, self.axis, cut or self.cut._replace(parts=None))

    def _ratio(self, other: OwnSize) -> int | None:
        """How many go into one, where that is the same on all ranks."""
        parts, others = self.cut.parts or (), other.cut.parts or ()
        if len(parts) != 1 or len(others) != 1:  # what is fused, or not known
            return None
        found = {Fraction(size, beside) if beside else None for size, beside in zip(parts[0], others[0], strict=True)}
        ratio = found.pop() if len(found) == 1 else None
        return int(ratio) if ratio is not None and ratio.denominator == 1 else None

    def need_shape(self, what: str) -> None:
        """Refuses another use than that of a shape; outside of modules values tell (`forms`)."""
        run = running.get()
        if run is not None and running_mode.get() is None:
            run.doubt(what)
        elif notes.get() is not None:
            raise self.refusal(what)

    def refusal(self, what: str) -> ValueError:
        return ValueError(
            f"apply: {what} uses a size that was read of what module {self.source!r} gives, whose outputs are cut over "
            f"axis {self.axis!r}: got {int.__repr__(self)}, this rank's, where another number is needed than that of "
            "its slice, or none is known to be right. Use the whole size (module.out_features, a number of the "
            "config), -1 in a view, torch.zeros_like(x) and x.expand_as(y) for what is as large as a slice, or say "
            "'column_gather' of that module in the plan of fz.shard_tensor."
        )

    def __mul__(self, other: object) -> OwnSize:  # type: ignore[override]
        if type(other) is int:
            return self._like(int.__mul__(self, other))
        if isinstance(other, (int, float, complex)):
            self.need_shape("*")
        return int.__mul__(self, other)  # type: ignore[operator]

    __rmul__ = __mul__  # type: ignore[assignment]

    def __floordiv__(self, other: object) -> int:  # type: ignore[override]
        if type(other) is OwnSize and (ratio := self._ratio(other)) is not None:
            return ratio
        if type(other) is int and other and not int.__mod__(self, other):
            return self._like(int.__floordiv__(self, other))
        if isinstance(other, (int, float)):
            self.need_shape("//")
        return int.__floordiv__(self, other)  # type: ignore[operator]

    def __add__(self, other: object) -> int:  # type: ignore[override]
        if type(other) is OwnSize:
            return self._like(int.__add__(self, other))
        if other == 0 and type(other) is int:  # sum(sizes)
            return self
        if isinstance(other, (int, float, complex)):
            self.need_shape("+")
        return int.__add__(self, other)  # type: ignore[operator]

    __radd__ = __add__  # type: ignore[assignment]

    def __neg__(self) -> OwnSize:
        return self._like(int.__neg__(self))


def _checks(frame: types.FrameType) -> bool:
    """Tells whether a library asks, that looks whether a shape can be: what it does next depends on no more."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] in ("einops", "fzero", "torch")


def _as_number(name: str) -> Callable[..., object]:
    plain, what = getattr(int, name), name.strip("_")

    def method(self: OwnSize, *others: object) -> object:
        if what in ("eq", "ne"):  # whether it is empty may be asked
            refused = type(others[0]) is int and bool(others[0]) and not _checks(sys._getframe(1))
        else:
            refused = what != "mod" or not _checks(sys._getframe(1))
        out = plain(self, *others)
        if refused and (out is not NotImplemented or any(isinstance(x, (float, complex)) for x in others)):
            self.need_shape({"eq": "==", "ne": "!=", "mod": "%"}.get(what, what))
        return out

    method.__name__ = name
    return method


for _name in (
    "__sub__ __rsub__ __truediv__ __rtruediv__ __rfloordiv__ __rmod__ __divmod__ __rdivmod__ __pow__ __rpow__ "
    "__lshift__ __rlshift__ __rshift__ __rrshift__ __and__ __rand__ __or__ __ror__ __xor__ __rxor__ __invert__ "
    "__lt__ __le__ __gt__ __ge__ __abs__ __pos__ __float__ __int__ __eq__ __ne__ __mod__ "
    "__round__ __trunc__ __floor__ __ceil__ bit_length as_integer_ratio conjugate"
).split():
    setattr(OwnSize, _name, _as_number(_name))
for _name in ("real", "imag", "numerator", "denominator"):  # as Fraction reads
    setattr(OwnSize, _name, property(functools.partial(OwnSize.need_shape, what=_name)))


def own_sizes(
    func: Function, out: object, args: Operands, kwargs: Mapping[str, object], mark: Mark, axis: str
) -> object:
    """Sizes of a slice, of which that of the dim that is cut is this rank's own, and strides of dims before it."""
    assert mark.cut is not None
    cut = mark.cut

    def own(size: int) -> OwnSize:
        known = cut.own is not None and sum(cut.own) == size
        return OwnSize.of(size, mark.source, axis, cut if known else cut._replace(parts=None))

    x, *more = args
    assert isinstance(x, torch.Tensor) and isinstance(out, (int, tuple))
    place, strides = x.ndim + cut.dim, func == torch.Tensor.stride
    if isinstance(out, tuple):
        sizes = [own(n) if (each < place if strides else each == place) else n for each, n in enumerate(out)]
        return tuple(sizes) if strides else torch.Size(sizes)
    if func == torch.Tensor.__len__:
        if place == 0:  # Python makes a plain number of it
            raise own(out).refusal("len")
        return out
    dim = kwargs.get("dim", more[0] if more else None)
    if not isinstance(dim, int):
        return own(out)
    return own(out) if (dim % x.ndim < place if strides else dim % x.ndim == place) else out


def own_sizes_in(args: Operands, kwargs: Mapping[str, object]) -> Iterator[OwnSize]:
    """Those among arguments, and in tuples, lists and slices of them."""
    for x in (*args, *kwargs.values()):
        if type(x) is OwnSize:
            yield x
        elif isinstance(x, (tuple, list)):
            yield from own_sizes_in(tuple(x), {})
        elif isinstance(x, slice):
            yield from own_sizes_in((x.start, x.stop, x.step), {})
