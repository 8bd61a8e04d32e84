"""The operations of a run as a program over memory, of which those that something needs can be run again.

A buffer is one storage, and its value a number of writes: each operation reads values and makes others. What is known
of some of them is given; the rest follows by running operations again, each on what it was given at first, so that
its bits are the same. Views are no operations: an operand is a view of a buffer.
"""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch.utils import _python_dispatch as dispatch

from fzero.base import as_written, intercept, private
from fzero.base.ambient import default_dtype
from fzero.base.context import during, variable
from fzero.base.operators import Drawing, Function, Kind, drawing_of, is_plain, kind_of, redrawn
from fzero.base.pytree import tensors_in
from fzero.base.thread_state import without_dispatch_modes

P = ParamSpec("P")
T = TypeVar("T")
_current: contextvars.ContextVar[Program | None] = variable("program", None)


@dataclass(eq=False, slots=True)
class Buffer:
    """One storage, as far as a program knows it.

    Attributes:
        writes: how often it was written to.
        blank: whether nothing has been written yet to what it was made with.
    """

    storage: weakref.ref[torch.UntypedStorage]
    writes: int = 0
    blank: bool = False


Value = tuple[Buffer, int]  # what a buffer holds after so many writes


class View(NamedTuple):
    """A tensor: a view of a buffer, which has been written to so many times."""

    buffer: Buffer
    writes: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    conj: bool
    neg: bool

    @property
    def value(self) -> Value:
        return self.buffer, self.writes

    def of(self, base: torch.Tensor) -> torch.Tensor:
        """This view of all the memory of another tensor, with which it counts writes.

        Raises:
            RuntimeError: where that memory is too small.
        """
        if base.dtype == self.dtype and not (base.is_conj() or base.is_neg() or base.is_inference()):
            out = base.as_strided(self.shape, self.stride, self.offset)
        else:
            out = flat(base.untyped_storage(), self).as_strided(self.shape, self.stride, self.offset)
            out = private.counted(out, base)
        out = out.conj() if self.conj else out
        return torch._neg_view(out) if self.neg else out  # type: ignore[attr-defined]

    def is_as(self, x: torch.Tensor) -> bool:
        """Tells whether a tensor lies in its memory as this one does."""
        mine = self.shape, self.stride, self.offset, self.dtype, self.device
        return mine == (x.shape, x.stride(), x.storage_offset(), x.dtype, x.device)


class Operation(NamedTuple):
    """One operation: `function(*args, **kwargs)`, in which views stand for tensors."""

    function: Function
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    reads: tuple[Value, ...]
    makes: tuple[Value, ...]  # which it writes
    results: tuple[View | None, ...]  # those that it returns in memory of its own
    drawing: Drawing | None = None  # what it drew from, and that one's state before
    records: bool = False  # whether plain autograd was on, which some operators look at
    default_dtype: torch.dtype = torch.float32  # which that was, as it is what many make

    def again(self, tensor: Callable[[View], torch.Tensor]) -> object:
        """Runs it once more, in what it ran in, and returns its results.

        Args:
            tensor: makes the operands of the views that stand for them.
        """
        args, kwargs = map_views(self.args, tensor), map_views(self.kwargs, tensor)
        with default_dtype(self.default_dtype), torch.set_grad_enabled(self.records):
            return redrawn(self.function, self.drawing, args, kwargs)


@dataclass
class Part:
    """Operations of a program that make some of its values.

    Attributes:
        operations: in their order.
        given: the values that they begin with.
        last: number of an operation -> the buffers that nobody needs after it.
    """

    operations: list[Operation]
    given: dict[Value, torch.Tensor]
    last: dict[int, list[Buffer]] = field(default_factory=dict)

    def run(self, wanted: Sequence[View], given: Mapping[Value, torch.Tensor]) -> list[torch.Tensor]:
        """Runs them; returns the views, of which those of one memory count writes together.

        Args:
            given: tensors in the memory of the values that are given, which stay as they are.

        Raises:
            RuntimeError: where an operation makes something else than it has made.
        """
        held: dict[Buffer, torch.Tensor] = {}
        writes_to: set[Buffer] = set()

        def tensor(view: View) -> torch.Tensor:
            base = None if view.buffer in writes_to else given.get(view.value)
            base = held.get(view.buffer) if base is None else base
            if base is None:  # of which no more than the shape is read
                return torch.empty_strided(view.shape, view.stride, dtype=view.dtype, device=view.device)
            return view.of(base)

        # modes of functions have seen what led to these, and would take them for the caller's own
        unseen = torch._C.DisableTorchFunction()  # type: ignore[attr-defined]
        with unseen, private.below_transforms(), torch.no_grad(), private.without_autocast():
            for number, operation in enumerate(self.operations):
                writes_to = {buffer for buffer, _ in operation.makes}
                for buffer, writes in operation.makes:
                    before = given.get((buffer, writes - 1))
                    if before is not None:
                        held[buffer] = flat(before.untyped_storage().clone(), before)
                out = tensors_in(operation.again(tensor))
                for view, x in zip(operation.results, out, strict=True):
                    if view is not None:
                        if not view.is_as(x):
                            raise RuntimeError(_another(operation, view, x))
                        held[view.buffer] = x
                del out
                for buffer in self.last.get(number, ()):
                    held.pop(buffer, None)
            writes_to = set()
            return [tensor(view) for view in wanted]


def _another(operation: Operation, view: View, x: torch.Tensor) -> str:
    return (
        f"{operation.function} made {view.dtype} of shape {tuple(view.shape)} and strides {view.stride}, and makes "
        f"{x.dtype} of shape {tuple(x.shape)} and strides {x.stride()} as it runs again: what it depends on beside its "
        "operands is another one now. Pull back in what the unit ran in, or recompute it as a whole: fz.remat without "
        "names."
    )


class Program(dispatch.TorchDispatchMode):
    """Notes each operation that runs inside."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.given: dict[Value, torch.Tensor] = {}
        self.names: dict[str, list[tuple[View, torch.Tensor]]] = {}
        self.sends = False  # whether there were messages
        self._buffers: dict[int, Buffer] = {}
        self._paused = 0

    # ---- what runs

    def __torch_dispatch__(
        self, func: Function, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        named = kwargs or {}
        if self._paused:
            return func(*args, **named)
        kind, operands = kind_of(func), tensors_in(*args, *named.values())
        draws = kind.drawing(args, named)
        drawing = drawing_of(kind, operands, args, named) if draws else None
        written = kind.written(args, named)
        known = kind.known and not (draws and drawing is None) and all(map(is_plain, operands))
        changed = operands if kind.writes_unsaid else written
        self.keep_before(changed)
        if not known:
            out = func(*args, **named)
            self.unseen((*changed, *tensors_in(out)))
            return out
        over = {id(x) for x in written} if kind.overwrites else ()
        views = {id(x): self.view(x, read=not (kind.shapes_only or id(x) in over)) for x in operands}
        settings = torch.is_grad_enabled(), torch.get_default_dtype()
        out = func(*args, **named)
        if not all(map(is_plain, tensors_in(out))):
            self.unseen((*written, *tensors_in(out)))
            return out
        makes, results = self._made(kind, [views[id(x)].buffer for x in written], tensors_in(out), views)
        if makes:  # otherwise it is a view, or a look at a value
            reads = () if kind.shapes_only else dict.fromkeys(view.value for view in views.values())
            template = map_views((args, named), lambda x: views[id(x)])
            self.operations.append(Operation(func, *template, tuple(reads), tuple(makes), results, drawing, *settings))
        return out

    def _made(
        self, kind: Kind, written: Sequence[Buffer], results: Sequence[torch.Tensor], views: Mapping[int, View]
    ) -> tuple[Sequence[Value], tuple[View | None, ...]]:
        """The values that an operation has made, and its results in memory of their own."""
        known = {view.buffer for view in views.values()}
        fresh = [self._fresh(x, kind.blank) for x in results]
        own = tuple([None if view.buffer in known else view for view in fresh])
        makes = dict.fromkeys(view.value for view in own if view is not None)
        for buffer in dict.fromkeys(written):
            buffer.writes, buffer.blank = buffer.writes + 1, False
            makes[buffer, buffer.writes] = None
        return list(makes), own

    def _fresh(self, x: torch.Tensor, blank: bool) -> View:
        """A view of a result, whose memory is new or that of an operand."""
        buffer = self._known(x)
        if buffer is None:
            buffer = self._buffers[_address(x)] = Buffer(weakref.ref(x.untyped_storage()), 1, blank)
        return _view_of(x, buffer)

    def _known(self, x: torch.Tensor) -> Buffer | None:
        buffer = self._buffers.get(_address(x))
        return buffer if buffer is not None and buffer.storage() is not None else None

    # ---- what is known

    def view(self, x: torch.Tensor, read: bool = True) -> View:
        """A tensor as the program knows it. What it has not made is given: it lives on."""
        buffer = self._known(x)
        if buffer is None:
            buffer = self._buffers[_address(x)] = Buffer(weakref.ref(x.untyped_storage()))
            self.given[buffer, 0] = intercept.detached(x)
        elif buffer.blank and read:  # somebody has written to it unseen
            self.unseen((x,))
        return _view_of(x, buffer)

    def keep_before(self, written: Iterable[torch.Tensor]) -> None:
        """Copies what cannot be made again and is about to be written over."""
        for x in filter(is_plain, written):
            buffer = self.view(x, read=False).buffer
            if (buffer, buffer.writes) in self.given and not buffer.blank:
                with contextlib.nullcontext() if private.is_fake(x) else without_dispatch_modes():
                    self.given[buffer, buffer.writes] = flat(x.untyped_storage().clone(), x)

    def unseen(self, tensors: Iterable[torch.Tensor]) -> None:
        """Takes tensors as they are, of which no operation says how they came to be so."""
        for x in tensors:
            if is_plain(x):
                buffer = self._known(x)
                if buffer is None:
                    self.view(x)
                    continue
                buffer.writes, buffer.blank = buffer.writes + 1, False
                self.given[buffer, buffer.writes] = intercept.detached(x)

    def name(self, x: torch.Tensor, name: str) -> None:
        """Gives a value a name."""
        found = self.names.setdefault(name, [])
        with self.paused(), private.below_transforms():
            plain = private.unwrapped(x).detach()
            if is_plain(plain):
                found.append((self.view(plain), plain))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is noted."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def known_view(self, x: torch.Tensor) -> View | None:
        """A tensor as the program knows it; None where it is none that an operation could make."""
        with self.paused():
            return self.view(x) if is_plain(x) else None

    def part(self, wanted: Iterable[View], given: Mapping[Value, torch.Tensor]) -> Part:
        """The operations that make the values of some views, from what cannot be made again and what is given."""
        todo = {view.value for view in wanted}
        at_end = {buffer for buffer, _ in todo}
        begins, chosen = dict[Value, torch.Tensor](), list[Operation]()
        all_given = {**self.given, **given}

        def settle() -> None:
            for value in [value for value in todo if value in all_given]:
                begins[value] = all_given[value]
                todo.discard(value)

        settle()
        for operation in reversed(self.operations):
            if todo.isdisjoint(operation.makes):
                continue
            todo.difference_update(operation.makes)
            todo.update(operation.reads)
            chosen.append(operation)
            settle()
        assert not todo, "a value of a program came from nowhere"
        part = Part(chosen[::-1], begins)
        last = {buffer: n for n, o in enumerate(part.operations) for buffer, _ in (*o.reads, *o.makes)}
        for buffer, number in last.items():
            if buffer not in at_end:
                part.last.setdefault(number, []).append(buffer)
        return part


def flat(storage: torch.UntypedStorage, like: torch.Tensor | View) -> torch.Tensor:
    """All of a storage, as a tensor [elements] of the dtype of another one."""
    return torch.empty(0, dtype=like.dtype, device=like.device).set_(storage)  # type: ignore[call-overload]


def _address(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


def _view_of(x: torch.Tensor, buffer: Buffer) -> View:
    return View(
        *(buffer, buffer.writes, x.shape, x.stride(), int(x.storage_offset()), x.dtype, x.device),
        *(x.is_conj(), x.is_neg()),
    )


def map_views(values: T, by: Callable[..., object]) -> T:
    """Operands with others in the places of views, or of tensors."""
    out: object = values
    if isinstance(values, (torch.Tensor, View)):
        out = by(values)
    elif isinstance(values, tuple):
        out = tuple([map_views(value, by) for value in values])
    elif isinstance(values, list):
        out = [map_views(value, by) for value in values]
    elif isinstance(values, dict):
        out = {name: map_views(value, by) for name, value in values.items()}
    return out  # type: ignore[return-value]


# ---- where it runs


def name(x: torch.Tensor, name: str) -> None:
    """Gives a value a name in the program that is noted on this thread, if any."""
    program = _current.get()
    if program is not None:
        program.name(x, name)


@contextlib.contextmanager
def noting(program: Program) -> Iterator[None]:
    """Inside, a program notes what runs on this thread."""
    # `with program` notes for all threads at once that one is on, which several may leave so: then nothing is compiled
    as_written.begin(program)
    with during(_current, program):
        dispatch._push_mode(program)
        try:
            yield
        finally:
            dispatch._pop_mode()
            as_written.end(program)


def once(call: Callable[P, T], *written: torch.Tensor) -> Callable[P, T]:
    """A call that cannot be run again, as it sends messages: no program notes what it does, but that it has written."""

    def calling(*args: P.args, **kwargs: P.kwargs) -> T:
        program = _current.get()
        if program is None:
            return call(*args, **kwargs)
        program.sends = True
        with program.paused():
            program.keep_before(written)
            out = call(*args, **kwargs)
        program.unseen(written)
        return out

    return calling
