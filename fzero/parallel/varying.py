"""What varies between the ranks of a tensor axis in a module, while it runs: what a column gives, and what comes of it.

Such a value is each rank's slice along a dim of features or heads, or each rank's own copy. It goes with others: what
is the same on all ranks is made each rank's own where the two meet, so that cotangents are summed. What mixes the
elements along a dim that is cut is refused, and what is not known to leave it alone; a row or a gather puts the whole
together. Random numbers are each rank's own for slices, and the same otherwise.

A size that is read of a slice is the rank's own, good for shapes alone. What is known goes with tensors into units and
out again, on whatever way (`capture/notes.py`). Compiled units are watched once (`modules/shown.py`). Not looked at is
what Python computes with a size by itself (`0.5 * h.shape[-1]`, `range`). What torch.func maps or differentiates inside
of a module must not be a slice.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from fzero.base import private, pytree
from fzero.base.context import during, variable
from fzero.base.pytree import leaves
from fzero.base.refusals import is_ours
from fzero.capture.handle import READABLE, Function, Handle, Named, Operands, name_of, reading, writes
from fzero.capture.notes import Cut, Following, Mark, Notes, notes
from fzero.comm.axis import Axis
from fzero.parallel.cut_dims import cut_behind
from fzero.parallel.cut_shapes import Mixed
from fzero.parallel.elementwise import BOTH, named
from fzero.parallel.own_size import MADE_LIKE, SHAPED, SIZES, OwnSize, dim_made, own_sizes, own_sizes_in
from fzero.parallel.partial import PARTIAL
from fzero.parallel.randomness import own_stream
from fzero.parallel.spread import Spread

# read values of it
_READS = {
    *named("tolist item numpy __bool__ __float__ __int__ __complex__ __index__ __contains__", torch.Tensor),
    *named("equal allclose is_nonzero", *BOTH),
}
_OURS = "fzero."  # whose own functions read sizes of slices as they are
_SINGLE = (torch.Tensor, int, float, complex, str, torch.dtype, torch.device, type(None))  # arguments of one leaf
GATHER_OWN = "gather(own=True)"  # the name of that map
_RANDOM = {
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout),
    *(F.scaled_dot_product_attention, F.rrelu, F.gumbel_softmax),
    *(torch.rand, torch.randn, torch.rand_like, torch.randn_like, torch.randint_like, torch.normal),
    *(torch.bernoulli, torch.multinomial),
    *(torch.Tensor.bernoulli, torch.Tensor.bernoulli_, torch.Tensor.uniform_, torch.Tensor.normal_),
    *(torch.Tensor.multinomial, torch.Tensor.random_, torch.Tensor.exponential_),
}

MAP = "a map"  # the source of what a map of `fz.parallel` gives, called by a module itself, which its user sees to


class Varying(TorchFunctionMode):
    """Inside, what varies is known."""

    def __init__(self, known: Notes, copy: Callable[[torch.Tensor, Axis], torch.Tensor]) -> None:
        super().__init__()
        self.axis, self._copy, self.known = known.axis, copy, known
        self.note, self.mark_of, self._level = known.note, known.of, private.level()

    def __torch_function__(self, func: Function, types: object, args: Operands = (), kwargs: Named = None) -> object:
        kwargs, spec = dict(kwargs or {}), None
        if not self.known or _running.get() is not self:  # a map sees to it
            return func(*args, **kwargs)
        if func in READABLE or func in SIZES:
            return self._read(func, args, kwargs, str(sys._getframe(1).f_globals.get("__name__")))
        flat: Sequence[object] = args
        if kwargs or not all(isinstance(x, _SINGLE) for x in args):
            flat, spec = pytree.flatten((args, kwargs))
        marks = [self.mark_of(x) for x in flat]
        if private.level() > self._level:
            self._refuse_wrapped(func, flat)
        size = next(own_sizes_in(args, kwargs), None)
        if size is not None and (func not in SHAPED or not any(mark and mark.cut for mark in marks)):
            return self._made(func, size, args, kwargs)
        if not any(marks):
            return func(*args, **kwargs)
        into = writes(func, kwargs)
        if into:
            self._refuse_write(func, flat, marks)
        given, changed = args, kwargs
        if not all(marks):
            own = [x if mark else self._own(x) for x, mark in zip(flat, marks, strict=True)]
            given, changed = (tuple(own), {}) if spec is None else pytree.unflatten(spec, own)
            if any(x is not y for x, y in zip(flat, own, strict=True)):
                note_help(f"what is whole meets slices in {name_of(func)!r}")
        cut = [mark for mark in marks if mark and mark.source]
        before = self._written(*args) if func == torch.Tensor.__setitem__ and cut else Mark("")
        out = self._ran(func, given, changed, cut)
        if func in MADE_LIKE:  # as large as no slice
            return out
        mark = before if func == torch.Tensor.__setitem__ or not cut else self._behind(func, args, kwargs, out, cut)
        for x in (*leaves(out), *given[:1]) if into else leaves(out):
            if isinstance(x, torch.Tensor):
                self.note(x, mark)
        return out

    def _read(self, func: Function, args: Operands, kwargs: dict[str, object], reader: str) -> object:
        """What can be read of a tensor without its values."""
        out, mark = func(*args, **kwargs), self.mark_of(args[0]) if args else None
        if mark is None or mark.cut in (None, PARTIAL) or func not in SIZES or reader.startswith(_OURS):
            return out
        return own_sizes(func, out, args, kwargs, mark, self.axis.name)

    def _ran(self, func: Function, args: Operands, kwargs: dict[str, object], cut: Sequence[Mark]) -> object:
        """What a function gives that is looked at as one."""
        draws = bool(cut) and func in _RANDOM
        if draws:
            note_help(f"{name_of(func)!r} draws for slices")
        with during(_running, None), own_stream(self.axis) if draws else contextlib.nullcontext():
            try:
                return func(*args, **kwargs)
            except (RuntimeError, IndexError) as error:
                if cut and not is_ours(error):
                    error.add_note(
                        f"fzero: operands are this rank's slices of what {cut[0].source!r} gives, cut over axis "
                        f"{self.axis.name!r}: sizes along the dim that is cut are its own."
                    )
                raise

    def _behind(
        self, func: Function, args: Operands, kwargs: dict[str, object], out: object, cut: Sequence[Mark]
    ) -> Mark:
        """How varies what a function gives of slices; what mixes them is refused."""
        unknown = [mark for mark in cut if mark.cut is None]
        gives = any(isinstance(x, torch.Tensor) for x in leaves(out))
        if unknown or not (gives or func in _READS):
            return unknown[0] if unknown else cut[0]

        def cut_of(x: object) -> Cut | None:
            mark = self.mark_of(x)
            return mark.cut if mark else None

        try:
            if func is F.scaled_dot_product_attention:
                self._need_heads(*(*args, *kwargs.values())[:2])
            empty = any(cut_of(x) and x.numel() == 0 for x in leaves((args, kwargs)))
            return Mark(cut[0].source, None if empty else cut_behind(func, args, kwargs, out, cut_of))
        except Mixed:
            raise self.refused(func, cut[0]) from None

    def refused(self, func: Function | str, cut: Mark) -> ValueError:
        what = func if isinstance(func, str) else name_of(func)
        return ValueError(
            f"apply: {what!r} goes over the dim along which the outputs of module {cut.source!r} are cut over axis "
            f"{self.axis.name!r}, takes them apart, or is not known to leave that dim alone: each rank has its slice "
            "of them, and would get another result. Say 'column_gather' of that module in the plan of fz.shard_tensor, "
            "or leave it whole; of what is fused say fz.parallel.cut('column', parts=...). A sum over that dim is put "
            "together by fz.parallel.sum, before anything else is computed of it."
        )

    def _made(self, func: Function, size: OwnSize, args: Operands, kwargs: dict[str, object]) -> object:
        """What is made as large as a slice: the slice of what would be made as large as the whole."""
        dim = dim_made(func, args, kwargs)
        if dim is None:
            raise size.refusal(repr(name_of(func)))
        given = (self._own(args[0]), *args[1:]) if func is torch.Tensor.expand else args
        out = self._ran(func, given, kwargs, [Mark(size.source)])
        assert isinstance(out, torch.Tensor)
        return note(out, Mark(size.source, Cut(dim, size.parts)))

    def _written(self, x: object, index: object, value: object) -> Mark:
        """How a tensor varies once `x[index] = value` has been done."""
        assert isinstance(x, torch.Tensor)
        own, other = self.mark_of(x), self.mark_of(value)
        if own and own.source:
            found = self._behind(torch.Tensor.__getitem__, (x, index), {}, part := x[index], [own])  # type: ignore[index]
            if isinstance(value, torch.Tensor) and isinstance(part, torch.Tensor):
                self._need_beside(part, found, value, other)
            return own
        whole = all(each is ... or each == slice(None) for each in (index if isinstance(index, tuple) else (index,)))
        assert other is not None
        if not whole or not isinstance(value, torch.Tensor) or value.shape != x.shape:
            raise self.refused(torch.Tensor.__setitem__, other)
        return other

    def _need_beside(self, part: torch.Tensor, found: Mark, value: torch.Tensor, other: Mark | None) -> None:
        """Refuses to write to a slice what does not lie as it does."""
        marks = {id(part): found, id(value): other}

        def cut_of(x: object) -> Cut | None:
            mark = marks.get(id(x))
            return mark.cut if mark else None

        if found.cut is not None and not (other and other.source and other.cut is None):
            try:
                cut_behind(torch.add, (part, value), {}, part, cut_of)
            except Mixed:
                raise self.refused(torch.Tensor.__setitem__, found) from None

    def _need_heads(self, q: object, k: object) -> None:
        """Refuses slices of queries' heads with all of several heads of keys, of which some go with each slice."""
        by_q, by_k = self.mark_of(q), self.mark_of(k)
        if not (by_q and by_q.source) or (by_k and by_k.source) or not isinstance(k, torch.Tensor):
            return
        if k.ndim > 2 and k.shape[-3] > 1:
            raise Mixed

    def attended(self, attend: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """What attention gives of q, k and v: heads that are slices, where these are."""
        marks = [self.mark_of(x) for x in tensors]
        if private.level() > self._level:
            self._refuse_wrapped(F.scaled_dot_product_attention, tensors)
        if not any(marks):
            return attend(*tensors)
        own = [x if mark else self._own(x) for x, mark in zip(tensors, marks, strict=True)]
        with unseen():
            out = attend(*own)
        cut = [mark for mark in marks if mark and mark.source]
        self.note(out, self._behind(F.scaled_dot_product_attention, tuple(tensors), {}, out, cut) if cut else Mark(""))
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

    def _refuse_wrapped(self, func: Function, flat: Sequence[object]) -> None:
        for x in flat:
            while isinstance(x, torch.Tensor) and private.is_wrapper(x):
                x = private.inner(x)
                if (mark := self.mark_of(x)) is not None and mark.source:
                    raise ValueError(
                        f"apply: torch.func maps or differentiates within a module what module {mark.source!r} gives, "
                        f"whose outputs are cut over axis {self.axis.name!r}, at {name_of(func)!r}, where nothing is "
                        "known of what it does with a rank's slice. Write it without torch.func, or say "
                        "'column_gather' of that module in the plan of fz.shard_tensor."
                    )

    def _refuse_write(self, func: Function, flat: Sequence[object], marks: Sequence[Mark | None]) -> None:
        first = flat[0] if flat else None
        if isinstance(first, torch.Tensor) and marks[0] is None:
            part = not isinstance(first, Spread) and first._is_view()  # nothing would be known of the whole
            if isinstance(first, Spread) or private.is_differentiated(first) or part:
                source = next(mark.source for mark in marks if mark)
                raise ValueError(
                    f"apply: {name_of(func)!r} writes what module {source!r} gives, whose outputs are cut over axis "
                    f"{self.axis.name!r}, into a tensor that all ranks have. Compute a new one: x = x + y."
                )


# takes what was done in modules for what varies there, in words, where somebody asks
helped: contextvars.ContextVar[list[str] | None] = variable("helped", None)
_running: contextvars.ContextVar[Varying | None] = variable("varying", None)


def watching(run: Function, axis: Axis, copy: Callable[[torch.Tensor, Axis], torch.Tensor]) -> Function:
    """`run`, a function of a module or of one of its units, in which what varies is known.

    Args:
        copy: `maps.shared`.
    """

    @functools.wraps(run)
    def call(*args: object, **kwargs: object) -> object:
        known = notes.get()
        if known is None or known.axis != axis:
            known = Notes(axis)
        mode = Varying(known, copy)
        modes = [*(each for each in private.function_modes() if not isinstance(each, Following)), mode]
        with during(_running, mode), during(notes, known), private.under_function_modes(modes):
            return run(*args, **kwargs)

    return call


def around(call: Callable[..., object], *given: object) -> object:
    """A unit's call, which is watched by itself: what the engine does around it is not looked at."""
    with unseen(notes.get()):
        return call(*given)


@contextlib.contextmanager
def unseen(known: Notes | None = None) -> Iterator[None]:
    """Inside, nothing is looked at, nor noted, unless it is said in which notes."""
    on_top = isinstance(private.function_mode(), (Varying, Following))
    off = private.without_function_mode() if on_top else contextlib.nullcontext()
    with during(_running, None), during(notes, known), off:
        yield


def mark_of(x: object) -> Mark | None:
    """How a tensor varies, where that is known."""
    mode = _running.get()
    return None if mode is None else mode.mark_of(x)


def attended(attend: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """`attend(q, k, v)` of [b, heads, t, d], which is not looked at but for what it calls `seen`."""
    mode = _running.get()
    return attend(*tensors) if mode is None else mode.attended(attend, tensors)


def seen(run: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A user's function of tensors that vary as these do, where other code runs unseen."""
    mode = _running.get()
    marks = [] if mode is None else [mode.mark_of(x) or Mark("") for x in tensors]
    if mode is None or all(mark == Mark("") for mark in marks):
        return run

    def call(*given: torch.Tensor, **options: object) -> torch.Tensor:
        for x, mark in zip(given, marks, strict=True):
            mode.note(x, mark._replace(cut=mark.cut and mark.cut._replace(parts=None)))
        with during(_running, mode), during(notes, mode.known), mode:
            return run(*given, **options)

    return call


def need_whole(func: Callable[..., object], *values: object) -> None:
    """Refuses slices where nothing is known of what a function does with them."""
    mode = _running.get()
    for x in pytree.flatten(values)[0] if mode is not None else ():
        if mode is not None and (mark := mode.mark_of(x)) is not None and mark.source:
            raise mode.refused(func, mark)


def note_help(what: str) -> None:
    """Notes that something was done which code that is not watched does without."""
    told = helped.get()
    if told is not None:
        told.append(what)


def note(x: torch.Tensor, mark: Mark) -> torch.Tensor:
    mode = _running.get()
    if mode is not None:
        mode.note(x, mark)
    return x


def mapped(name: str, ax: Axis, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Notes what a map of `fz.parallel` gave."""
    known = notes.get()
    if known is None:
        return out
    after = known.of(x)
    mode = _running.get()
    if mode is not None and after is not None and after.cut is not None and ax.members == mode.axis.members:
        if (after.cut == PARTIAL) != (name in ("sum", "reduce_scatter")):  # slices are no parts of a sum
            raise mode.refused(f"fz.parallel.{name}", after)
    if ax.members == known.axis.members:
        after = {"copy": Mark(""), GATHER_OWN: Mark(""), "sum": None, "gather": None}.get(name, Mark(MAP))
    known.forget(out) if after is None else known.note(out, after)
    return out
