"""What varies between the ranks of a tensor axis in a module, while it runs: what a column gives, and what comes of it.

Such a value is each rank's slice along a dim of features or heads, or each rank's own copy. It goes with others: what
is the same on all ranks is made each rank's own where the two meet, so that cotangents are summed. What mixes the
elements along a dim that is cut is refused, and what is not known to leave it alone; a row or a gather puts the whole
together. Random numbers are each rank's own for slices, and the same otherwise.

Where a unit is compiled, or torch.func maps inside of a module, nothing is looked at. Nor are numbers: a size that is
read of a slice is the rank's own.
"""

from __future__ import annotations

import contextvars
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from fzero.base import private, pytree
from fzero.base.context import during, variable
from fzero.capture.handle import READABLE, Function, Handle, Named, Operands, name_of, reading, writes
from fzero.comm.axis import Axis
from fzero.parallel.cut_dims import Cut, cut_behind
from fzero.parallel.cut_shapes import Mixed
from fzero.parallel.randomness import own_stream
from fzero.parallel.spread import Spread

GATHER_OWN = "gather(own=True)"  # the name of that map
_RANDOM = {
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout),
    *(F.scaled_dot_product_attention, F.rrelu, F.gumbel_softmax),
    *(torch.bernoulli, torch.rand_like, torch.randn_like, torch.randint_like, torch.normal, torch.multinomial),
    *(torch.Tensor.bernoulli, torch.Tensor.bernoulli_, torch.Tensor.uniform_, torch.Tensor.normal_),
    *(torch.Tensor.multinomial, torch.Tensor.random_, torch.Tensor.exponential_),
}


class Mark(NamedTuple):
    """How a tensor varies.

    Attributes:
        source: the path of the module whose outputs are cut, that it comes from; "" for a copy.
        dim: that is cut, from the end; None where it is not known.
        parts: sizes along it of what is fused there, of this rank's; None where they are not known.
    """

    source: str
    dim: int | None = None
    parts: tuple[int, ...] | None = None


class Varying(TorchFunctionMode):
    """Inside, what varies is known."""

    def __init__(self, axis: Axis, copy: Callable[[torch.Tensor, Axis], torch.Tensor]) -> None:
        super().__init__()
        self.axis, self._copy = axis, copy
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], Mark]] = {}

    def note(self, tensor: torch.Tensor, mark: Mark) -> None:
        self._known[id(tensor)] = weakref.ref(tensor), mark

    def mark_of(self, x: object) -> Mark | None:
        found = self._known.get(id(x))
        return found[1] if found is not None and found[0]() is x else None

    def forget(self, tensor: torch.Tensor) -> None:
        self._known.pop(id(tensor), None)

    def __torch_function__(self, func: Function, types: object, args: Operands = (), kwargs: Named = None) -> object:
        kwargs = dict(kwargs or {})
        if _running.get() is not self or func in READABLE:  # a unit's own, inside, sees to it; or a map does
            return func(*args, **kwargs)
        leaves, spec = pytree.flatten((args, kwargs))
        marks = [self.mark_of(x) for x in leaves]
        if not any(marks):
            return func(*args, **kwargs)
        self._refuse_write(func, kwargs, leaves, marks)
        own = [x if mark else self._own(x) for x, mark in zip(leaves, marks, strict=True)]
        given = args, kwargs
        changed: tuple[Operands, dict[str, object]] = pytree.unflatten(spec, own)
        args, kwargs = changed
        cut = [mark for mark in marks if mark and mark.source]
        if func in _RANDOM and cut:
            with own_stream(self.axis), during(_running, None):
                out = func(*args, **kwargs)
        else:
            with during(_running, None):
                out = func(*args, **kwargs)
        mark = Mark("")
        if cut:
            found = self._cut(func, *given, out, cut[0])
            mark = Mark(cut[0].source) if found is None else Mark(cut[0].source, found.dim, found.parts)
        for x in pytree.flatten((out, args[0]) if writes(func, kwargs) else out)[0]:
            if isinstance(x, torch.Tensor):
                self.note(x, mark)
        return out

    def _cut(self, func: Function, args: Operands, kwargs: dict[str, object], out: object, cut: Mark) -> Cut | None:
        def cut_of(x: object) -> Cut | None:
            mark = self.mark_of(x)
            return Cut(mark.dim, mark.parts) if mark and mark.dim is not None else None

        try:
            return cut_behind(func, args, kwargs, out, cut_of)
        except Mixed:
            raise ValueError(
                f"apply: {name_of(func)!r} goes over the dim along which the outputs of module {cut.source!r} are cut "
                f"over axis {self.axis.name!r}, takes them apart, or is not known to leave that dim alone: each rank "
                "has its slice of them, and would get another result. Say 'column_gather' of that module in the plan "
                "of fz.shard_tensor, or leave it whole; of what is fused say fz.parallel.cut('column', parts=...)."
            ) from None

    def _own(self, x: object) -> object:
        """What is the same on all ranks, as each rank's own."""
        if not isinstance(x, torch.Tensor):
            return x
        if isinstance(x, Handle) and (read := reading.get()) is not None:
            x = read(x)
        if isinstance(x, Spread):
            return x.own()
        return self._copy(x, self.axis) if private.is_differentiated(x) else x

    def _refuse_write(
        self, func: Function, kwargs: dict[str, object], leaves: Sequence[object], marks: Sequence[Mark | None]
    ) -> None:
        first = leaves[0] if leaves else None
        if writes(func, kwargs) and isinstance(first, torch.Tensor) and marks[0] is None:
            if isinstance(first, Spread) or private.is_differentiated(first):
                source = next(mark.source for mark in marks if mark)
                raise ValueError(
                    f"apply: {name_of(func)!r} writes what module {source!r} gives, whose outputs are cut over axis "
                    f"{self.axis.name!r}, into a tensor that all ranks have. Compute a new one: x = x + y."
                )


_running: contextvars.ContextVar[Varying | None] = variable("varying", None)


def watching(run: Function, axis: Axis, copy: Callable[[torch.Tensor, Axis], torch.Tensor]) -> Function:
    """`run`, a function of a module or of one of its units, in which what varies is known.

    Args:
        copy: `fz.parallel.copy`.
    """

    @functools.wraps(run)
    def call(*args: object, **kwargs: object) -> object:
        mode = Varying(axis, copy)
        with during(_running, mode), mode:
            return run(*args, **kwargs)

    return call


def unseen() -> during[Varying | None]:
    """Inside, nothing is noted."""
    return during(_running, None)


def mark_of(x: object) -> Mark | None:
    """How a tensor varies, where that is known."""
    mode = _running.get()
    return None if mode is None else mode.mark_of(x)


def note(x: torch.Tensor, mark: Mark) -> torch.Tensor:
    mode = _running.get()
    if mode is not None:
        mode.note(x, mark)
    return x


def mapped(name: str, ax: Axis, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Notes what a map of `fz.parallel` gave."""
    mode = _running.get()
    if mode is None:
        return out
    before = mode.mark_of(x)
    if ax.members == mode.axis.members:
        after = {"copy": Mark(""), GATHER_OWN: Mark(""), "sum": None, "gather": None}.get(name, Mark("a map"))
    else:
        after = None if before is None else before._replace(dim=None, parts=None)
    mode.forget(out) if after is None else mode.note(out, after)
    return out
