"""A second run of a function that leaves out what was kept of the first one, and products that nobody needs.

The operations that depend on what the function is given have numbers. Its first run (`Recording`) shows which of them
make what has a name, and which go to nothing but outputs: that is the `Plan`. Each later run (`Keeping`) keeps what the
plan says, and the second one (`Replaying`) is given it: the function runs as it is written, but for these operations.
Both follow the plan as long as they do the same operations of the same operands.
"""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch.utils import _python_dispatch as dispatch

from fzero.base import as_written, intercept, private
from fzero.base.context import during, variable
from fzero.base.hooks import Registrations, is_users
from fzero.base.node import edges_to
from fzero.base.operators import Function, kind_of
from fzero.base.pytree import tensors_in

P = ParamSpec("P")
T = TypeVar("T")
_current: contextvars.ContextVar[Tracing | None] = variable("tracing", None)
# takes the values that have names, and these, in a function that is traced into a graph
naming: contextvars.ContextVar[Callable[[torch.Tensor, str], object] | None] = variable("naming", None)
CONSTANT = -1  # stands for what depends on nothing that the function is given; inputs are -2, -3, ...
_aten = torch.ops.aten
_UNSEEN = {_aten.detach.default, torch.ops.prim.device.default}  # graphs save by the one, fake tensors call the other


class Traced(NamedTuple):
    """One operation.

    Attributes:
        reads: for each operand, the number of the operation that came to its memory last.
    """

    function: Function
    reads: tuple[int, ...]


class Held(NamedTuple):
    """A tensor that an operation has made, and how often it was written to since by then."""

    tensor: torch.Tensor
    version: int

    def is_written(self) -> bool:
        """Tells whether it was written to since."""
        return private.version(self.tensor) != self.version


class Plan(NamedTuple):
    """What later runs keep and leave out.

    Attributes:
        keeps: the number of an operation -> the name of what it makes.
        blanks: numbers of matrix products that go to nothing but outputs.
    """

    trace: Sequence[Traced]
    keeps: Mapping[int, str]
    blanks: frozenset[int]


class Tracing(dispatch.TorchDispatchMode):
    """Inside, operations are numbered.

    Attributes:
        names: that were given.
        sent: what came by each message, in order.
    """

    supports_higher_order_operators = True

    def __init__(self, given: Iterable[torch.Tensor], plan: Plan | None = None) -> None:
        super().__init__()
        self.plan, self.trace, self.names = plan, list[Traced](), set[str]()
        self.matches = plan is not None  # what has run so far
        self.sent: list[list[torch.Tensor]] = []
        self._registered = Registrations()
        self._places: dict[int, list[tuple[int, int]]] = {}  # memory -> where it is in `sent`
        self._makers: dict[int, tuple[int, weakref.ref[object]]] = {}
        self._paused = False
        for i, x in enumerate(given):
            self._note(x, -2 - i)

    def __torch_dispatch__(
        self, func: Function, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        named = kwargs or {}
        if self._paused or func in _UNSEEN:
            return func(*args, **named)
        kind, operands = kind_of(func), tensors_in(*args, *named.values())
        reads = tuple([self._maker(x) for x in operands])
        number = self._next(func, reads) if any([each != CONSTANT for each in reads]) else None
        written = operands if kind.writes_unsaid else kind.written(args, named)
        if self._places:
            self._copy_sent(written)
        out = self._run(number, func, args, named)
        made = tensors_in(out)
        self._made(number, func, operands, written, made, out)
        for x in (*made, *written):
            self._note(x, number)
        return out

    def _next(self, func: Function, reads: tuple[int, ...]) -> int:
        number, own = len(self.trace), Traced(func, reads)
        self.trace.append(own)
        if self.plan is not None and self.matches:
            self.matches = number < len(self.plan.trace) and self.plan.trace[number] == own
        return number

    def _run(self, number: int | None, func: Function, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        return func(*args, **kwargs)

    def _made(
        self,
        number: int | None,
        func: Function,
        operands: Sequence[torch.Tensor],
        written: Sequence[torch.Tensor],
        made: Sequence[torch.Tensor],
        out: object,
    ) -> None:
        """Looks at what an operation has done."""

    def _maker(self, x: torch.Tensor) -> int:
        return living(self._makers, x, CONSTANT)

    def _note(self, x: torch.Tensor, number: int | None) -> None:
        if number is None:
            self._makers.pop(key_of(x), None)
        else:
            self._makers[key_of(x)] = number, weakref.ref(memory_of(x))

    def is_followed(self) -> bool:
        """Tells whether the run, which has ended, was as the plan says."""
        return self.plan is not None and self.matches and len(self.trace) == len(self.plan.trace)

    def is_opaque(self, outputs: Sequence[torch.Tensor]) -> bool:
        """Tells whether what a hook or a user's Function holds may be among what the run, which has ended, has made."""
        return self._registered.any() or any(is_users(type(node)) for node, _ in edges_to(outputs))

    # ---- names and messages

    def name(self, x: torch.Tensor, name: str) -> None:
        self.names.add(name)

    def send(self, call: Callable[[], T], written: Sequence[torch.Tensor]) -> T:
        """Sends messages, and keeps what has come."""
        self._paused = True
        try:
            out = self._come(call, written)
        finally:
            self._paused = False
        number = self._next(done, ())
        self._made(number, done, (), written, (), None)
        for x in written:
            self._note(x, number)
        return out

    def _come(self, call: Callable[[], T], written: Sequence[torch.Tensor]) -> T:
        out = call()
        for i, x in enumerate(written):
            self._places.setdefault(key_of(x), []).append((len(self.sent), i))
        self.sent.append([intercept.detached(x) for x in written])
        return out

    def _copy_sent(self, written: Sequence[torch.Tensor]) -> None:
        """Copies what has come and is about to be written over."""
        for x in written:
            for call, place in self._places.pop(key_of(x), ()):
                self.sent[call][place] = self.sent[call][place].clone()

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Inside, it sees what runs on this thread."""
        # `with self` is for all threads at once that one is on, which several may leave so: then nothing is compiled
        as_written.begin(self)
        with during(_current, self):
            dispatch._push_mode(self)
            try:
                yield
            finally:
                dispatch._pop_mode()
                as_written.end(self)


class Keeping(Tracing):
    """A run of which is kept what a plan says."""

    def __init__(self, given: Iterable[torch.Tensor], plan: Plan) -> None:
        super().__init__(given, plan)
        self._keeps, self._held = plan.keeps, dict[int, list[object]]()

    def _run(self, number: int | None, func: Function, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        out = func(*args, **kwargs)
        if number is not None and number in self._keeps and self.matches:
            self._held[number] = [_held(x) for x in (out if isinstance(out, tuple) else (out,))]
        return out

    def held(self) -> dict[int, list[object]]:
        """What is kept of each operation's results, tensors as `Held`."""
        return self._held if self.is_followed() else {}


class Replaying(Tracing):
    """The second run.

    Args:
        held: what was kept, by the numbers of the operations that have made it.
        blanks: whether the plan's blanks are left out.
        sent: what came by the first run's messages, which are not sent again.
    """

    def __init__(
        self,
        given: Iterable[torch.Tensor],
        plan: Plan | None,
        held: Mapping[int, Sequence[object]],
        blanks: bool,
        sent: Sequence[Sequence[torch.Tensor]],
    ) -> None:
        super().__init__(given, plan)
        self._held, self._coming = held, iter(sent)
        self._blanks = plan.blanks if plan is not None and blanks else frozenset[int]()

    def _run(self, number: int | None, func: Function, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        if number is not None and self.matches:
            if number in self._held:
                own = [intercept.detached(x) if isinstance(x, torch.Tensor) else x for x in self._held[number]]
                return tuple(own) if len(own) > 1 else own[0]
            if number in self._blanks:
                a, b = tensors_in(*args)[-2:]
                return a.new_zeros((*a.shape[:-1], b.shape[-1]))
        return func(*args, **kwargs)

    def _come(self, call: Callable[[], T], written: Sequence[torch.Tensor]) -> T:
        for x, value in zip(written, next(self._coming), strict=True):
            x.copy_(value)
        return done  # type: ignore[return-value]


def _held(x: object) -> object:
    return Held(own := intercept.detached(x), private.version(own)) if isinstance(x, torch.Tensor) else x


# matrix products, whose last two operands are the factors
PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default})
# what passes values on, whatever they are: without its values, only what a graph saves of it is needed
PASSES = frozenset(
    f"aten::{name}" for name in "view _unsafe_view reshape t transpose permute unsqueeze squeeze expand alias add sub "
    "neg _to_copy clone mul div".split()
)


def living(of: Mapping[int, tuple[T, weakref.ref[object]]], x: torch.Tensor, default: T) -> T:
    """What is known of a tensor's memory, by its key; `default` where that was of memory that is gone."""
    found = of.get(key_of(x))
    return found[0] if found is not None and found[1]() is not None else default


def memory_of(x: torch.Tensor) -> object:
    """The memory that a tensor lies in; itself where it is no view of any."""
    return x.untyped_storage() if x.layout == torch.strided and not torch._is_zerotensor(x) else x  # type: ignore[attr-defined]


def key_of(x: torch.Tensor) -> int:
    """A number of that memory, as long as it lives."""
    memory = memory_of(x)
    return memory._cdata if isinstance(memory, torch.UntypedStorage) else id(memory)


def done() -> None:
    """Stands for the end of a message that has come before."""


def name(x: torch.Tensor, name: str) -> None:
    """Gives a value a name in the run that is traced on this thread, if any."""
    tracing, graph = _current.get(), naming.get()
    if tracing is not None:
        tracing.name(x, name)
    if graph is not None:
        graph(x.detach(), name)


def once(call: Callable[P, T], *written: torch.Tensor) -> Callable[P, T]:
    """A call that sends messages: in a second run what has come is there already."""

    def calling(*args: P.args, **kwargs: P.kwargs) -> T:
        tracing = _current.get()
        return call(*args, **kwargs) if tracing is None else tracing.send(lambda: call(*args, **kwargs), written)

    return calling
