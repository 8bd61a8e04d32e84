"""The type of a value on each mesh axis, and how types travel through operators and maps in a dry run.

On an axis a value is *invariant* (the same on all ranks, and its cotangent too), *varying* (each rank has its own, and
its own cotangent) or *constant* (made of no input: it goes with both). An operator of invariant values makes an
invariant one, of varying ones a varying one; where both meet, the cotangent of the invariant one would be *partial*,
one summand of it on each rank: `copy` is missing before it. These are the types of spmd_types and of JAX's shard_map.
Of varying values more is known where it can be told: see `forms`.
"""

from __future__ import annotations

import contextvars
import functools
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch as dispatch

from fzero.base import private, pytree
from fzero.base.as_written import uncompiled
from fzero.base.context import variable
from fzero.base.places import Place, frames, place_in
from fzero.base.refusals import is_library
from fzero.comm import backend
from fzero.comm.axis import Axis
from fzero.parallel.axis import is_averaged

WHO = "parallel.check"
Axes = frozenset[str]
MOST_DIMS = 64  # that a tensor may have
TOLD = 8 * (1 + MOST_DIMS)  # bytes of the sizes that ranks tell each other
_ATTRIBUTE = "_fzero_type"  # of a tensor; a functorch level keeps the tensor that it wraps, and so this


class AxisTypeError(ValueError):
    """A map of `fz.parallel` is missing or needless; `fz.parallel.check` raises it.

    Attributes:
        place: the line in your code; None if only the outputs show it.
    """

    def __init__(self, message: str, place: Place | None = None) -> None:
        super().__init__(message)
        self.place = place


@dataclass(eq=False, slots=True)
class Type:
    """The type of a tensor and of all views of its memory."""

    varying: Axes  # the axes on which it varies
    constant: bool  # it is made of no input
    source: str | Place  # where it comes from, in words
    leaf: str = ""  # the path of a leaf that it varies because of
    writes: int = 0  # how often its memory was written to


class Conversion(NamedTuple):
    """A map of `fz.parallel` that `fz.parallel.check` has met.

    Attributes:
        name: of the map, such as "sum".
        axis: that it communicates over.
        place: the line that calls it.
        shape: of this rank's input.
        transposed: True in a pullback of that line.
        messages: exchanges with the other ranks of the axis.
        sent: bytes that this rank sends.
    """

    name: str
    axis: str
    place: Place
    shape: tuple[int, ...]
    transposed: bool
    messages: int
    sent: int


@dataclass(eq=False)
class DryRun:
    """One dry run: where it is, and what it has met."""

    ignored: Axes  # on which nothing is checked
    until: CodeType  # the code that began it
    over: Axis | None = None  # the only axis that is checked, also as a part of other ones; None for all
    pulls_back: bool = False
    guessed: bool = False  # it has asked for sizes of other ranks, which nobody tells
    doubts: list[tuple[Place, str]] = field(default_factory=list)  # what the caller's code does that types do not know
    # what is wrong but by chance, of which values tell unless each rank returns its own
    unlikely: list[AxisTypeError] = field(default_factory=list)
    conversions: list[Conversion] = field(default_factory=list)
    axes: dict[str, int] = field(default_factory=dict)  # single ones of maps that no mean is over, and their sizes
    told: list[int] = field(default_factory=list)  # bytes that ranks tell each other for the next conversion
    _sizes: dict[tuple[str, int], list[int]] = field(default_factory=dict)

    @property
    def automatic(self) -> bool:
        """Tells whether it runs by itself, before a function's first run."""
        return self.over is not None

    def where(self) -> Place:
        return place(self.until) if not self.pulls_back or is_users() else Place("", 0, "the pullback")

    def doubt(self, what: str) -> None:
        self.doubts.append((self.where(), what))

    def exchange(self, axis: str, *_: object) -> None:
        raise NotImplementedError(f"ranks of axis {axis!r} would communicate")

    def size(self, _: str, own: int) -> int:
        return own

    def rank(self, _: str, own: int) -> int:
        """A rank's number, by which the caller's code may compute what no tensor shows."""
        if is_users():
            self.doubt("ax.rank")
        return own

    def sizes(self, ax: Axis, own: int) -> list[int]:
        """The sizes of a dim on all ranks: as something of this size was cut before, or else the same on all."""
        self.told.append(TOLD)
        self.guessed = True
        return self._sizes.get((ax.name, own), [own] * ax.size)

    def note_sizes(self, ax: Axis, sizes: Sequence[int]) -> None:
        self._sizes[ax.name, sizes[ax.rank]] = list(sizes)

    def checked(self, ax: Axis) -> Axes:
        """The mesh axes of an axis on which types are checked."""
        if self.over is not None:
            return frozenset((self.over.name,)) if {*self.over.members} <= {*ax.members} else frozenset()
        return frozenset() if is_averaged(ax) else frozenset(ax.name.split(", ")) - self.ignored


running: contextvars.ContextVar[DryRun | None] = variable("dry_run", None)
# what sees the operations of the module that is running, in its first run or in later ones
running_mode: contextvars.ContextVar[TorchFunctionMode | None] = variable("varying", None)


def need_silence(func: object) -> None:
    """Ends a check that runs by itself where the function communicates by torch.distributed, before it sends."""
    run = running.get()
    if run is not None and run.automatic:
        if {getattr(func, "namespace", None), getattr(func, "__module__", None)} & backend.COLLECTIVES:
            raise NotImplementedError(f"{func} communicates")


def type_of(tensor: torch.Tensor) -> Type:
    """What is no input and made of none is a constant, but for what a gradient is taken by: a captured param, say."""
    found = vars(tensor).get(_ATTRIBUTE) or vars(private.unwrapped(tensor)).get(_ATTRIBUTE)
    return found or Type(frozenset(), not tensor.requires_grad, "a tensor that the function captures")


def is_typed(tensor: torch.Tensor) -> bool:
    return _ATTRIBUTE in vars(tensor)


def set_type(tensor: torch.Tensor, own: Type) -> torch.Tensor:
    setattr(tensor, _ATTRIBUTE, own)
    return tensor


@uncompiled
class Watch(dispatch.TorchDispatchMode):
    """Inside, every operator gives what it makes a type, below autograd and functorch, also in pullbacks.

    Args:
        alike: whether a tensor that varies on an axis is a copy of what all ranks have.

    Attributes:
        draws: an operator has drawn random numbers.
    """

    supports_higher_order_operators = True  # each as one operation

    def __init__(self, run: DryRun, alike: Callable[[torch.Tensor, str], bool]) -> None:
        super().__init__()
        self._run, self._alike, self.draws = run, alike, False

    def __torch_dispatch__(self, func: Any, types: object, args: tuple[object, ...] = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        name = str(func)
        if name.startswith("prim."):
            return func(*args, **kwargs)
        need_silence(func)
        self.draws = self.draws or torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        operands = tensors_in((args, kwargs))
        joined, error = self._joined(name, [] if _plain(name).startswith(_MAKING) else operands)
        try:
            out = _called(func, args, kwargs, operands)
        except RuntimeError as failed:
            raise (error or failed) from (failed if error else None)
        made = tensors_in(out)
        if error is not None and any(map(pytree.is_real, made)):
            raise error
        if made or _writing(func):
            joined.source = self._run.where()
            memory = {_memory(tensor): type_of(tensor) for tensor in operands} if _aliases(func) else {}
            for tensor in _written(func, args, kwargs):
                own = type_of(tensor)
                own.writes += 1
                own.varying, own.constant = own.varying | joined.varying, own.constant and joined.constant
                own.leaf = own.leaf or joined.leaf
                set_type(tensor, own)
            for tensor in made:
                set_type(tensor, memory.get(_memory(tensor)) or joined)
        return out

    def _joined(self, name: str, operands: Sequence[torch.Tensor]) -> tuple[Type, AxisTypeError | None]:
        """The type of what an operator makes, and what is wrong if that has a derivative."""
        pairs = [(tensor, own) for tensor in operands if not (own := type_of(tensor)).constant]
        varying = frozenset[str]().union(*[own.varying for _, own in pairs])
        for axis in varying:  # copies of what all ranks have, which have no cotangent, are as good as that
            own = [x for x, each in pairs if axis in each.varying]
            alike = not self.draws and all(not x.requires_grad and self._alike(x, axis) for x in own)
            if len(own) < len(pairs) and alike:
                varying -= {axis}
        error, leaf = None, next((own.leaf for _, own in pairs if own.varying and own.leaf), "")
        for tensor, own in pairs:
            missing = varying - own.varying - self._run.ignored
            if missing and error is None and tensor.requires_grad and torch.is_grad_enabled():
                axis = min(missing)
                other = next(each for _, each in pairs if axis in each.varying)
                where = self._run.where()
                error = AxisTypeError(_missing_copy(name, where, axis, own, other), where)
        return Type(varying, not pairs, "", leaf), error


def _missing_copy(name: str, place: Place, axis: str, own: Type, other: Type) -> str:
    return (
        f"parallel.check: {place}: {_plain(name)} takes a value that is invariant on axis {axis!r} (from {own.source}) "
        f"and one that varies on it (from {_from(other)}). A conversion is missing: fz.parallel.copy or split of the "
        "first, or fz.parallel.sum or gather of the second, comes before it. Without one, each rank has a part of the "
        "first one's cotangent. If nothing is differentiated by it, detach it, or leave it out: argnums= of step.vjp, "
        "constants= of the check."
    )


def _from(own: Type) -> str:
    """Where a value comes from, and the leaf that it is made of."""
    return f"{own.source}{f', of {own.leaf!r}' if own.leaf and own.source != repr(own.leaf) else ''}"


# ---- operators


def _called(
    func: Callable[..., object], args: Sequence[object], kwargs: dict[str, object], operands: Sequence[torch.Tensor]
) -> object:
    """What an operator gives, also of tensors without values beside constants with values that the function made."""
    real = [x for x in operands if not private.is_fake(x)]
    if real and len(real) < len(operands):
        written = _written(func, args, kwargs)
        if len(written) == 1 and any(written[0] is x for x in real):
            return written[0]  # whose values nobody may read then
        if any(x.grad_fn is not None for x in real):  # which torch warns of
            plain = {id(x): x.detach() for x in real}
            flat, spec = pytree.flatten((args, kwargs))
            args, kwargs = pytree.unflatten(spec, [plain.get(id(x), x) for x in flat])
    return func(*args, **kwargs)


# what takes nothing of its operands but shapes
_MAKING = ("new_", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like")


def _plain(name: str) -> str:
    """An operator's name without its namespace and overload."""
    return name.split(".")[1] if name.count(".") > 1 else name


@functools.lru_cache(4096)
def _aliases(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    return schema is not None and any(each.alias_info is not None for each in schema.returns)


@functools.lru_cache(4096)
def _writing(func: Any) -> tuple[tuple[int, str], ...]:
    """The numbers and names of arguments that an operator writes to."""
    schema = getattr(func, "_schema", None)
    arguments = enumerate(schema.arguments if schema is not None else ())
    return tuple([(i, each.name) for i, each in arguments if each.alias_info is not None and each.alias_info.is_write])


def _written(func: Any, args: Sequence[object], kwargs: dict[str, object]) -> list[torch.Tensor]:
    given = [args[i] if i < len(args) else kwargs.get(name) for i, name in _writing(func)]
    return tensors_in(given)


def tensors_in(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


# ---- places


def place(until: CodeType) -> Place:
    """The innermost line of the caller's code that runs, up to the frame of `until`; of a library's where none does."""
    every = list(frames((until,), _LOOKING))
    users = [frame for frame in every if not is_library(frame.f_code.co_filename)]
    own = [frame for frame in every if frame.f_globals.get("__name__", "").startswith("fzero.")]
    for frame in users or own:
        return place_in(frame)
    return Place("", 0, "the function itself")


def is_users() -> bool:
    """Tells whether the caller's code has called what runs, and none of this library."""
    return not caller(_LOOKING).startswith("fzero.")


def caller(beside: Collection[str] = ("fzero.parallel.forms",)) -> str:
    """The name of the module whose code has called what runs of torch, but for modules `beside`."""
    every = (str(frame.f_globals.get("__name__")) for frame in frames((), (*beside, __name__)))
    return next((name for name in every if name.partition(".")[0] != "torch"), "")


def place_of(error: BaseException) -> Place:
    """The innermost line of the caller's code that an error has left."""
    left = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)][1:]
    users = [(frame, line) for frame, line in left if not is_library(frame.f_code.co_filename)]
    for frame, line in reversed(users or left[:1]):
        return Place(frame.f_code.co_filename, line, frame.f_code.co_name)
    return Place("", 0, "the function itself")


_LOOKS = ("check", "forms", "maps", "own_size", "varying", "watched")
_LOOKING = (__name__, *(f"fzero.parallel.{name}" for name in _LOOKS), "fzero.comm.axis", "fzero.comm.linear")
