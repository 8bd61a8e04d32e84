"""A size that is read of a rank's slice: good for shapes, where every rank has its own, and refused as a number."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping

import torch

from fzero.parallel.types import running, running_mode
from fzero.table.handle import BOTH, Function, Operands, named
from fzero.table.placements import Cut, Mark, notes

_NBYTES = torch.Tensor.nbytes.__get__  # type: ignore[attr-defined]
SIZES = {torch.Tensor.shape.__get__, *named("size numel nelement stride __len__", torch.Tensor), torch.numel, _NBYTES}  # type: ignore[attr-defined]
SHAPED = frozenset(named("view reshape unflatten expand", *BOTH))  # of slices, by sizes


class OwnSize(int):
    """The size of a dim that is cut, on this rank.

    Shapes may be made of it, of multiples of it and of parts that it consists of. What else is computed with it would
    be another number on one rank than for the whole: it is refused, while the function runs that read it.
    """

    source: str  # the path of the module whose outputs are cut
    axis: str  # the name of the axis that they are cut over
    cut: Cut  # how a tensor with this size is cut

    @classmethod
    def of(cls, size: int, source: str, axis: str, cut: Cut) -> OwnSize:
        self = cls(size)
        self.source, self.axis, self.cut = source, axis, cut
        return self

    def __hash__(self) -> int:
        """Not the number's: what a library keeps by the shapes that it is given knows slices from wholes."""
        run = running.get()
        if run is not None and running_mode.get() is None and not _checks(sys._getframe(1)):
            run.doubt("a size as a key")
        return hash((int.__index__(self), self.source, self.axis, self.cut))

    def _like(self, size: int) -> OwnSize:
        cut = self.cut.sized(int.__index__(self), size) if len(self.cut.parts or ()) == 1 else None
        return OwnSize.of(size, self.source, self.axis, cut or self.cut._replace(parts=None))

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


def _checks(frame: types.FrameType) -> bool:
    """Tells whether a library asks, that looks whether a shape can be: what it does next depends on no more."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] in ("einops", "fzero", "torch")


def _is_shape(size: OwnSize, what: str, other: object = 0) -> bool:
    """Tells whether shapes may be made of what an operator gives: multiples, parts and sums of sizes of slices."""
    if what in ("add", "radd"):
        return type(other) is OwnSize or (type(other) is int and not other)  # which sum() begins with
    if what == "floordiv":
        return type(other) is int and other != 0 and not int.__mod__(size, other)
    return type(other) is int


_SHAPES = "add radd mul rmul floordiv neg".split()
_SIGNS = {"eq": "==", "ne": "!=", "mod": "%", "add": "+", "mul": "*", "floordiv": "//"}


def _operator(name: str) -> Callable[..., object]:
    plain, what = getattr(int, name), name.strip("_")

    def method(self: OwnSize, *others: object) -> object:
        out = plain(self, *others)
        if out is NotImplemented and not any(isinstance(x, (float, complex)) for x in others):
            return out
        if what in _SHAPES and _is_shape(self, what, *others):
            return self._like(out)
        if what in ("eq", "ne"):  # whether it is empty may be asked
            refused = type(others[0]) is int and bool(others[0]) and not _checks(sys._getframe(1))
        else:
            refused = what != "mod" or not _checks(sys._getframe(1))
        if refused:
            self.need_shape(_SIGNS.get(what, what))
        return out

    method.__name__ = name
    return method


for _name in (
    "__add__ __radd__ __mul__ __rmul__ __floordiv__ __neg__ "
    "__sub__ __rsub__ __truediv__ __rtruediv__ __rfloordiv__ __rmod__ __divmod__ __rdivmod__ __pow__ __rpow__ "
    "__lshift__ __rlshift__ __rshift__ __rrshift__ __and__ __rand__ __or__ __ror__ __xor__ __rxor__ __invert__ "
    "__lt__ __le__ __gt__ __ge__ __abs__ __pos__ __float__ __int__ __eq__ __ne__ __mod__ "
    "__round__ __trunc__ __floor__ __ceil__ bit_length as_integer_ratio conjugate"
).split():
    setattr(OwnSize, _name, _operator(_name))
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
    is_own = lambda dim: dim < place if strides else dim == place
    if isinstance(out, tuple):
        sizes = [own(n) if is_own(dim) else n for dim, n in enumerate(out)]
        return tuple(sizes) if strides else torch.Size(sizes)
    if func == torch.Tensor.__len__:
        if place:
            return out
        raise own(out).refusal("len")  # Python makes a plain number of it
    dim = kwargs.get("dim", more[0] if more else None)
    return own(out) if not isinstance(dim, int) or is_own(dim % x.ndim) else out


def own_sizes_in(args: Operands, kwargs: Mapping[str, object]) -> Iterator[OwnSize]:
    """Those among arguments, and in tuples, lists and slices of them."""
    for x in (*args, *kwargs.values()):
        if type(x) is OwnSize:
            yield x
        elif isinstance(x, (tuple, list)):
            yield from own_sizes_in(tuple(x), {})
        elif isinstance(x, slice):
            yield from own_sizes_in((x.start, x.stop, x.step), {})
