"""What varies between the ranks of a tensor axis in a module, while it runs: what a column gives, and what comes of it.

Such a value is each rank's slice along a dim of features or heads, or each rank's own copy. It goes with others: what
is the same on all ranks is made each rank's own where the two meet, so that cotangents are summed. What mixes the
elements along a dim that is cut is refused, and what is not known to leave it alone; a row or a gather puts the whole
together. Random numbers are each rank's own for slices, and the same otherwise.

Where a unit is compiled nothing is looked at. Nor are numbers: a size that is read of a slice is the rank's own. What
torch.func maps or differentiates inside of a module must not be a slice.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
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

_SINGLE = (torch.Tensor, int, float, complex, str, torch.dtype, torch.device, type(None))  # arguments of one leaf
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


class Marked(NamedTuple):
    """A tensor that varies, where it goes into a unit's call or comes out of it."""

    tensor: torch.Tensor
    source: str
    dim: int | None
    parts: tuple[int, ...] | None


class Varying(TorchFunctionMode):
    """Inside, what varies is known."""

    def __init__(self, axis: Axis, copy: Callable[[torch.Tensor, Axis], torch.Tensor]) -> None:
        super().__init__()
        self.axis, self._copy = axis, copy
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], Mark]] = {}
        self._level = private.level()

    def note(self, tensor: torch.Tensor, mark: Mark) -> None:
        self._known[id(tensor)] = weakref.ref(tensor), mark

    def mark_of(self, x: object) -> Mark | None:
        found = self._known.get(id(x))
        return found[1] if found is not None and found[0]() is x else None

    def forget(self, tensor: torch.Tensor) -> None:
        self._known.pop(id(tensor), None)

    @contextlib.contextmanager
    def anew(self) -> Iterator[None]:
        """Inside, a unit is watched by itself."""
        before = self._known, self._level
        self._known, self._level = {}, private.level()
        try:
            yield
        finally:
            self._known, self._level = before

    def __torch_function__(self, func: Function, types: object, args: Operands = (), kwargs: Named = None) -> object:
        if not self._known or func in READABLE or _running.get() is not self:  # a map sees to it
            return func(*args, **(kwargs or {}))
        kwargs, spec = dict(kwargs or {}), None
        leaves: Sequence[object] = args
        if kwargs or not all(isinstance(x, _SINGLE) for x in args):
            leaves, spec = pytree.flatten((args, kwargs))
        marks = [self.mark_of(x) for x in leaves]
        if private.level() > self._level:
            self._refuse_wrapped(func, leaves)
        if not any(marks):
            return func(*args, **kwargs)
        into = writes(func, kwargs)
        if into:
            self._refuse_write(func, leaves, marks)
        given, changed = args, kwargs
        if not all(marks):
            own = [x if mark else self._own(x) for x, mark in zip(leaves, marks, strict=True)]
            given, changed = (tuple(own), {}) if spec is None else pytree.unflatten(spec, own)
        cut = [mark for mark in marks if mark and mark.source]
        before = self._written(*args) if func == torch.Tensor.__setitem__ and cut else Mark("")
        with during(_running, None), own_stream(self.axis) if cut and func in _RANDOM else contextlib.nullcontext():
            out = func(*given, **changed)
        mark = Mark("")
        if func == torch.Tensor.__setitem__:
            mark = before
        elif cut:
            found = self._cut(func, args, kwargs, out, cut[0])
            mark = Mark(cut[0].source) if found is None else Mark(cut[0].source, found.dim, found.parts)
        results = [out] if isinstance(out, torch.Tensor) else pytree.flatten(out)[0]
        for x in (*results, *given[:1]) if into else results:
            if isinstance(x, torch.Tensor):
                self.note(x, mark)
        return out

    def _cut(self, func: Function, args: Operands, kwargs: dict[str, object], out: object, cut: Mark) -> Cut | None:
        def cut_of(x: object) -> Cut | None:
            mark = self.mark_of(x)
            return Cut(mark.dim, mark.parts) if mark and mark.dim is not None else None

        try:
            if func is F.scaled_dot_product_attention:
                self._need_heads(*(*args, *kwargs.values())[:2])
            return cut_behind(func, args, kwargs, out, cut_of)
        except Mixed:
            raise self.refused(func, cut) from None

    def refused(self, func: Function, cut: Mark) -> ValueError:
        return ValueError(
            f"apply: {name_of(func)!r} goes over the dim along which the outputs of module {cut.source!r} are cut over "
            f"axis {self.axis.name!r}, takes them apart, or is not known to leave that dim alone: each rank has its "
            "slice of them, and would get another result. Say 'column_gather' of that module in the plan of "
            "fz.shard_tensor, or leave it whole; of what is fused say fz.parallel.cut('column', parts=...)."
        )

    def _written(self, x: object, index: object, value: object) -> Mark:
        """How a tensor varies once `x[index] = value` has been done."""
        assert isinstance(x, torch.Tensor)
        own, other = self.mark_of(x), self.mark_of(value)
        if own and own.source:
            self._cut(torch.Tensor.__getitem__, (x, index), {}, x[index], own)  # type: ignore[index]
            return own
        whole = all(each is ... or each == slice(None) for each in (index if isinstance(index, tuple) else (index,)))
        assert other is not None
        if not whole or not isinstance(value, torch.Tensor) or value.shape != x.shape:
            raise self.refused(torch.Tensor.__setitem__, other)
        return other

    def _need_heads(self, q: object, k: object) -> None:
        """Refuses slices of queries' heads with all of several heads of keys, of which some go with each slice."""
        by_q, by_k = self.mark_of(q), self.mark_of(k)
        if not (by_q and by_q.source) or (by_k and by_k.source) or not isinstance(k, torch.Tensor):
            return
        if k.ndim > 2 and k.shape[-3] > 1:
            raise Mixed

    def attended(
        self, attend: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor], watched: bool
    ) -> torch.Tensor:
        """What attention gives of q, k and v: heads that are slices, where these are."""
        marks = [self.mark_of(x) for x in tensors]
        if private.level() > self._level:
            self._refuse_wrapped(F.scaled_dot_product_attention, tensors)
        if not any(marks):
            return attend(*tensors)
        own = [x if mark else self._own(x) for x, mark in zip(tensors, marks, strict=True)]
        with contextlib.nullcontext() if watched else unseen():
            out = attend(*own)
        cut = [mark for mark in marks if mark and mark.source]
        found = self._cut(F.scaled_dot_product_attention, tuple(tensors), {}, out, cut[0]) if cut else None
        self.note(out, Mark(cut[0].source if cut else "", found.dim if found is not None else None))
        return out

    def _own(self, x: object) -> object:
        """What is the same on all ranks, as each rank's own."""
        if not isinstance(x, torch.Tensor):
            return x
        if isinstance(x, Handle) and (read := reading.get()) is not None:
            x = read(x)
        if isinstance(x, Spread):
            return x.own()
        return self._copy(x, self.axis) if private.is_differentiated(x) else x

    def _refuse_wrapped(self, func: Function, leaves: Sequence[object]) -> None:
        for x in leaves:
            while isinstance(x, torch.Tensor) and private.is_wrapper(x):
                x = private.inner(x)
                if (mark := self.mark_of(x)) is not None and mark.source:
                    raise ValueError(
                        f"apply: torch.func maps or differentiates within a module what module {mark.source!r} gives, "
                        f"whose outputs are cut over axis {self.axis.name!r}, at {name_of(func)!r}, where nothing is "
                        "known of what it does with a rank's slice. Write it without torch.func, or say "
                        "'column_gather' of that module in the plan of fz.shard_tensor."
                    )

    def _refuse_write(self, func: Function, leaves: Sequence[object], marks: Sequence[Mark | None]) -> None:
        first = leaves[0] if leaves else None
        if isinstance(first, torch.Tensor) and marks[0] is None:
            part = not isinstance(first, Spread) and first._is_view()  # nothing would be known of the whole
            if isinstance(first, Spread) or private.is_differentiated(first) or part:
                source = next(mark.source for mark in marks if mark)
                raise ValueError(
                    f"apply: {name_of(func)!r} writes what module {source!r} gives, whose outputs are cut over axis "
                    f"{self.axis.name!r}, into a tensor that all ranks have. Compute a new one: x = x + y."
                )


_running: contextvars.ContextVar[Varying | None] = variable("varying", None)


def watching(run: Function, axis: Axis, copy: Callable[[torch.Tensor, Axis], torch.Tensor]) -> Function:
    """`run`, a function of a module or of one of its units, in which what varies is known.

    Args:
        copy: `maps.shared`.
    """

    @functools.wraps(run)
    def call(*args: object, **kwargs: object) -> object:
        mode = _running.get()
        if mode is not None and mode.axis == axis and any(each is mode for each in private.function_modes()):
            with mode.anew():
                return within(args, kwargs)
        mode = Varying(axis, copy)
        with during(_running, mode), mode:
            return within(args, kwargs)

    def within(args: Operands, kwargs: dict[str, object]) -> object:
        return packed(run(*map(opened, args), **{name: opened(x) for name, x in kwargs.items()}))

    return call


def around(call: Callable[..., object], leaves: object, args: Operands, kwargs: dict[str, object]) -> object:
    """A unit's call, in which what varies among its arguments, or in tuples of them, is known to do so."""
    return opened(call(leaves, tuple(map(packed, args)), {name: packed(x) for name, x in kwargs.items()}))


def packed(value: object) -> object:
    mark = mark_of(value)
    if mark is not None and isinstance(value, torch.Tensor):
        return Marked(value, *mark)
    return tuple(map(packed, value)) if type(value) is tuple else value


def opened(value: object) -> object:
    """The inverse of `packed`."""
    if isinstance(value, Marked):
        return note(value.tensor, Mark(*value[1:]))
    return tuple(map(opened, value)) if type(value) is tuple else value


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Inside, nothing is noted, nor looked at."""
    mode, off = _running.get(), contextlib.nullcontext()
    on_top = mode is not None and private.function_mode() is mode
    with during(_running, None), private.without_function_mode() if on_top else off:
        yield


def mark_of(x: object) -> Mark | None:
    """How a tensor varies, where that is known."""
    mode = _running.get()
    return None if mode is None else mode.mark_of(x)


def attended(
    attend: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor], watched: bool = False
) -> torch.Tensor:
    """`attend(q, k, v)` of [b, heads, t, d], which torch's function modes do not see as one.

    Args:
        watched: what it does is looked at, too: it is its user's.
    """
    mode = _running.get()
    return attend(*tensors) if mode is None else mode.attended(attend, tensors, watched)


def need_whole(func: Callable[..., object], *values: object) -> None:
    """Refuses slices where nothing is known of what a function does with them."""
    mode = _running.get()
    for x in pytree.flatten(values)[0] if mode is not None else ():
        if mode is not None and (mark := mode.mark_of(x)) is not None and mark.source:
            raise mode.refused(func, mark)


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
