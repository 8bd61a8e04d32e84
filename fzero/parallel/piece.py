"""Pieces of tokens: between a row and the next column of a module, each rank has its piece of the whole tensor.

What is computed for each token alone (sums, norms over features, layers that are not cut, dropout) is done to the
piece (sequence parallelism as in Korthikanti et al. 2022, arXiv 2205.05198); anything else finds the whole tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F

from fzero.base import private, pytree
from fzero.base.carriers import flatten, flatten_first
from fzero.base.refusals import noted
from fzero.comm import pieces
from fzero.comm.axis import Axis
from fzero.parallel import maps
from fzero.parallel.cuts import Mixed
from fzero.parallel.randomness import own_stream
from fzero.parallel.rules import ELEMENTWISE, cut_behind, draws
from fzero.table.handle import (
    BOTH,
    OF_THE_GRAPH,
    REQUIRES_GRAD,
    Function,
    Handle,
    Named,
    Operands,
    StandIn,
    name_of,
    named,
    reading,
    storage_of,
    writes,
)
from fzero.table.placements import Cut, reads

DIM = -2  # that is cut, from the end: of tokens, before that of features


# what this rank's part answers as the whole tensor would
_OF_EITHER = {
    *(getattr(torch.Tensor, name).__get__ for name in ("grad_fn", "is_leaf", "_version")),
    torch.Tensor.is_inference,
}


class Piece(StandIn):
    """Stands for a whole tensor of which each rank has a piece; whoever reads it gets that, the same on each.

    Once it was written to, or views of it were made, it is the whole tensor from then on, as others may see that.
    """

    local: torch.Tensor | None  # what lies on this rank; None once it is the whole tensor
    value: torch.Tensor | None  # the whole tensor, once it was read
    version: int  # of the whole tensor, when it was read first
    level: int  # functorch's, that it was made at
    axis: Axis  # of the ranks

    @classmethod
    def made(cls, local: torch.Tensor, axis: Axis, count: int) -> Self:
        """The tensor of which this rank has a piece, with `count` tokens in all."""
        shape = list(local.shape)
        shape[DIM] = count
        return cls.of(
            shape,
            local.dtype,
            local.device,
            {"local": local, "value": None, "version": 0, "axis": axis, "level": private.level()},
        )

    @property
    def count(self) -> int:
        return self.shape[DIM]

    @property
    def sizes(self) -> list[int]:
        """Of the ranks' pieces."""
        return pieces.balanced(self.count, self.axis.size)

    def whole(self) -> torch.Tensor:
        """The whole tensor, differentiable."""
        if self.value is None:
            assert self.local is not None
            # as where it was made, as others may read it there, too
            with private.outside_inference(), torch.enable_grad(), private.below_transforms(self.level):
                self.value = maps.gather(self.local, self.axis, DIM, self.sizes)
            self.version = private.version(self.value)
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
            assert isinstance(self, Piece)
            own = self.whole() if self.local is None else self.local
            return func(own) if func in _OF_EITHER else private.is_differentiated(own)
        if func in cls.readable:
            return super().__torch_function__(func, types, args, kwargs)
        if func in OF_THE_GRAPH:
            raise noted(cls.first(args, kwargs).refusal(repr(name_of(func))))
        for x in pytree.flatten((args, kwargs or {}))[0]:
            if isinstance(x, Piece):
                x.need_level()
        out = _computed(func, args, dict(kwargs or {}))
        return _plainly(func, args, kwargs) if out is NotImplemented else out

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype})"

    def own(self) -> torch.Tensor:
        """The whole tensor as each rank's own."""
        if self.local is None:
            return maps.shared(self.whole(), self.axis)
        return maps.gather(self.local, self.axis, DIM, self.sizes, own=True)

    def need_plain(self) -> None:
        """Refuses attributes that its user has set, which do not go through a unit's call, and a graph of its own."""
        self.need_untracked()
        if more := sorted(vars(self).keys() - _ATTRIBUTES):
            raise ValueError(
                f"A tensor of shape {tuple(self.shape)}, of which each rank has a piece (shard_tensor(sequence=True)), "
                f"goes into a unit or comes out of it with an attribute {more[0]!r}, which would be lost. Pass that as "
                "an argument or result of its own, or leave sequence=True out."
            )

    def need_untouched(self, views: Container[int] = ()) -> None:
        """Refuses what a unit did to a piece that it was given, which nobody outside would see.

        Args:
            views: storages of what it returns.
        """
        self.need_plain()
        if self.value is None:
            return
        does = "returns a view of" if storage_of(self.value) in views else ""
        does = "writes to" if private.version(self.value) != self.version else does
        if does:
            raise ValueError(
                f"A unit {does} an argument of shape {tuple(self.shape)}, of which each rank has a piece "
                "(shard_tensor(sequence=True)), and the unit's caller would not see it. Compute a new tensor "
                "(x = x + y, x.clone()), or leave sequence=True out."
            )


def whole(x: torch.Tensor) -> torch.Tensor:
    """A tensor with all of its values."""
    return x.whole() if isinstance(x, Piece) else x


def wholes(value: object) -> Any:
    """A value with whole tensors."""
    leaves, spec = flatten_first(value)
    if not any(isinstance(x, Piece) for x in leaves):
        return value
    return pytree.unflatten(spec, [whole(x) if isinstance(x, Piece) else x for x in leaves])


def _plainly(func: Callable[..., object], args: Operands, kwargs: Named) -> object:
    """A function of whole tensors."""
    leaves, spec = pytree.flatten((args, kwargs or {}))
    own = [x for x in leaves if isinstance(x, Piece)]
    args, kwargs = pytree.unflatten(spec, [whole(x) if isinstance(x, Piece) else x for x in leaves])
    before = [private.version(x.whole()) for x in own]
    out = func(*args, **(kwargs or {}))
    storages = {storage_of(x) for x in pytree.flatten(out)[0] if isinstance(x, torch.Tensor)}
    for x, version in zip(own, before, strict=True):
        value = x.whole()
        written = writes(func, kwargs) or private.version(value) != version
        if written or storage_of(value) in storages:
            x.local = None
    return out


def as_own(x: object, axis: Axis) -> object:
    """What is the same on all ranks, as each rank's own."""
    if isinstance(x, Handle) and (read := reading.get()) is not None:
        x = read(x)
    if isinstance(x, Piece):
        return x.own()
    return maps.shared(x, axis) if isinstance(x, torch.Tensor) and private.is_differentiated(x) else x


class Packed(NamedTuple):
    """A piece where it goes into a unit's call or comes out of it."""

    local: torch.Tensor
    count: int


class Pieces:
    """How pieces go in and out of a module's units, whose calls take plain tensors.

    Those that are arguments, or in tuples of them, go as they are; what else holds one is given the whole tensor in its
    place, as it may be written to.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def inside(self, run: Callable[..., object]) -> Callable[..., object]:
        """A unit's function, of packed arguments."""

        def call(*args: object, **kwargs: object) -> object:
            made: dict[int, Piece] = {}
            opened = [self._opened(x, made) for x in args]
            out = run(*opened, **{name: self._opened(x, made) for name, x in kwargs.items()})
            views = {storage_of(x) for x in flatten(out)[0] if isinstance(x, torch.Tensor)}
            for own in made.values():
                own.need_untouched(views)
            return self.packed(out)

        return call

    def around(self, call: Callable[..., object], leaves: object, args: Operands, kwargs: Given) -> object:
        """A unit's call."""
        given: dict[int, Piece] = {}
        packed = tuple(self.packed(x, given) for x in args)
        out = call(leaves, packed, {name: self.packed(x, given) for name, x in kwargs.items()})
        return self._opened(out, given)

    def whole(self, out: object) -> object:
        """What a module returns, without pieces."""
        return wholes(self._opened(out, {}))

    def packed(self, value: object, given: dict[int, Piece] | None = None) -> object:
        """A value whose pieces are what they consist of; `given` takes them, by the ids of what lies here."""
        if isinstance(value, Piece):
            value.need_plain()
            if value.local is None:
                return value.whole()
            if given is not None:
                given[id(value.local)] = value
            return Packed(value.local, value.count)
        if type(value) is tuple:
            return tuple([self.packed(x, given) for x in value])
        return wholes(value)

    def _opened(self, value: object, known: dict[int, Piece]) -> object:
        """The inverse of `packed`; of what lies here of a piece that is known, it is that one."""
        if isinstance(value, Packed):
            if id(value.local) not in known:
                known[id(value.local)] = Piece.made(value.local, self.axis, value.count)
            return known[id(value.local)]
        return tuple([self._opened(x, known) for x in value]) if type(value) is tuple else value


def scattered(partial: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum of the ranks' tensors [..., tokens, features], of which each has a piece."""
    if partial.ndim < -DIM:
        return maps.sum(partial, axis)
    return Piece.made(maps.reduce_scatter(partial, axis, DIM), axis, partial.shape[DIM])


def cut(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """A whole tensor [..., tokens, features] as one of which each rank has a piece."""
    return x if x.ndim < -DIM else Piece.made(maps.split(x, axis, DIM), axis, x.shape[DIM])


Given = dict[str, Any]
_ATTRIBUTES = frozenset(("local", "value", "version", "axis", "level"))


# ---- what is computed on pieces

# of these each rank may compute its own tokens': they make new tensors, no views
_EACH = {
    *(*ELEMENTWISE, F.linear, *named("matmul __matmul__", *BOTH)),
    *named("dropout alpha_dropout softmax log_softmax", F),
    *named("layer_norm rms_norm", F, torch),
    *named("mean sum amax amin softmax log_softmax", *BOTH),
}


def _computed(func: Function, args: Operands, kwargs: Given) -> object:
    """What a function makes of pieces, as a piece; NotImplemented where it must see them whole."""
    operands, spec = pytree.flatten((args, kwargs))
    pieces_of = [x for x in operands if isinstance(x, Piece) and x.local is not None]
    if func not in _EACH or kwargs.get("out") is not None or kwargs.get("inplace") or not pieces_of:
        return NotImplemented
    if reads(func, args):  # where(x): places
        return NotImplemented
    first, *others = pieces_of
    if any((x.axis, x.count) != (first.axis, first.count) for x in others):
        return NotImplemented
    here, cuts = list[object](), dict[int, Cut]()
    try:
        for x in operands:
            own, is_cut = _here(x, first, func in ELEMENTWISE)
            here.append(own)
            if is_cut:
                cuts[id(own)] = Cut(DIM)
    except Mixed:
        return NotImplemented
    if not all(x.__hash__ for x in here):  # numpy's arrays, of which nothing is known
        return NotImplemented
    args, kwargs = pytree.unflatten(spec, here)
    forms = [(x.shape, x.dtype, id(x) in cuts) if isinstance(x, torch.Tensor) else x for x in here]
    key = (func, spec, *forms)
    if len(_known) > 4096:
        _known.clear()
    if key not in _known:
        _known[key] = _stays(func, args, kwargs, cuts)
    if not _known[key]:
        return NotImplemented
    with own_stream(first.axis) if draws(func, args, kwargs) else contextlib.nullcontext():
        out = func(*args, **kwargs)
    assert isinstance(out, torch.Tensor)
    same = next((x for x in pieces_of if x.local is out), None)
    return Piece.made(out, first.axis, first.count) if same is None else same


_known: dict[object, bool] = {}  # the form of a call -> `_stays`, as this runs in every step


def _stays(func: Function, args: Operands, kwargs: Given, cuts: Mapping[int, Cut]) -> bool:
    """Tells whether each rank computes of its tokens its tokens of what is computed of all."""
    try:
        found = cut_behind(func, args, kwargs, None, lambda x: cuts.get(id(x)))
    except Mixed:
        return False
    return isinstance(found, Cut) and found.dim == DIM


def _here(x: object, beside: Piece, cuts: bool) -> tuple[object, bool]:
    """This rank's part of an operand, and whether it is a piece; one of each token is cut where this is asked for."""
    if isinstance(x, Piece) and x.local is not None:
        return x.local, True
    if not isinstance(x, torch.Tensor):
        return x, False
    if isinstance(x, Piece):
        x = x.whole()
    elif isinstance(x, Handle) and (read := reading.get()) is not None:
        x = read(x)
    if not cuts or x.ndim < -DIM or x.shape[DIM] == 1:
        return maps.shared(x, beside.axis), False
    if x.shape[DIM] != beside.count:
        raise Mixed
    return maps.split(x, beside.axis, DIM, beside.sizes), True
