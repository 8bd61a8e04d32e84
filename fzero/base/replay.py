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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch.utils import _python_dispatch as dispatch

from fzero.base import as_written, hooks, private
from fzero.base.as_written import uncompiled
from fzero.base.context import during, variable
from fzero.base.node import edges_to
from fzero.base.operators import Function, flops_of, is_zero, kind_of
from fzero.base.pytree import tensors_in

P = ParamSpec("P")
T = TypeVar("T")
Tensors = Sequence[torch.Tensor]
Named = Mapping[str, object]
# the run that is traced on this thread
tracing: contextvars.ContextVar[Tracing | None] = variable("tracing", None)
# takes the values that have names, and these, in a function that is traced into a graph
naming: contextvars.ContextVar[Callable[[torch.Tensor, str], object] | None] = variable("naming", None)
CONSTANT = -1  # stands for what depends on nothing that the function is given; inputs are -2, -3, ...
_aten = torch.ops.aten
_UNSEEN = {_aten.detach.default, torch.ops.prim.device.default}  # graphs save by the one, fake tensors call the other
# matrix products, whose last two operands are the factors
_PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default})
# what passes values on, whatever they are: without its values, only what a graph saves of it is needed
_PASSES = frozenset(
    f"aten::{name}"
    for name in "view _unsafe_view reshape t transpose permute unsqueeze squeeze expand alias add sub "
    "neg _to_copy clone mul div".split()
)
_READING = {"numpy", "tolist", "__array__", "__dlpack__"}  # functions that read values past all operators


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


@uncompiled
class Tracing(dispatch.TorchDispatchMode):
    """Inside, operations are numbered.

    Attributes:
        names: that were given.
    """

    supports_higher_order_operators = True

    def __init__(self, given: Iterable[torch.Tensor], plan: Plan | None = None) -> None:
        super().__init__()
        self.plan, self.trace, self.names = plan, list[Traced](), set[str]()
        self.matches = plan is not None  # what has run so far
        self._hooks = hooks.registered()
        self._makers: dict[int, tuple[int, weakref.ref[object]]] = {}
        self._paused = False
        for i, x in enumerate(given):
            self._note(x, -2 - i)

    def __torch_dispatch__(
        self, func: Function, types: object, args: tuple[object, ...] = (), kwargs: Named | None = None
    ) -> object:
        named = kwargs or {}
        if self._paused or func in _UNSEEN:
            return func(*args, **named)
        kind, operands = kind_of(func), tensors_in(*args, *named.values())
        reads = tuple([self._maker(x) for x in operands])
        number = self._next(func, reads) if any([each != CONSTANT for each in reads]) else None
        written = operands if kind.writes_unsaid else kind.written(args, named)
        out = self._run(number, func, args, named)
        made = tensors_in(out)
        self._made(number, operands, written, made)
        for x in (*made, *written):
            self._note(x, number)
        return out

    def _next(self, func: Function, reads: tuple[int, ...]) -> int:
        number, own = len(self.trace), Traced(func, reads)
        self.trace.append(own)
        if self.plan is not None and self.matches:
            self.matches = number < len(self.plan.trace) and self.plan.trace[number] == own
        return number

    def _run(self, number: int | None, func: Function, args: Sequence[object], kwargs: Named) -> object:
        return func(*args, **kwargs)

    def _made(self, number: int | None, operands: Tensors, written: Tensors, made: Tensors) -> None:
        """Looks at what an operation has done."""

    def _maker(self, x: torch.Tensor) -> int:
        return _living(self._makers, x, CONSTANT)

    def _note(self, x: torch.Tensor, number: int | None) -> None:
        memory = _memory_of(x)
        if number is None:
            self._makers.pop(_key_of(memory), None)
        else:
            self._makers[_key_of(memory)] = number, weakref.ref(memory)

    def is_followed(self) -> bool:
        """Tells whether the run, which has ended, was as the plan says."""
        return self.plan is not None and self.matches and len(self.trace) == len(self.plan.trace)

    def is_opaque(self, outputs: Tensors) -> bool:
        """Tells whether what a hook or a user's Function holds may be among what the run, which has ended, has made."""
        return hooks.registered() != self._hooks or any(hooks.is_users(type(node)) for node, _ in edges_to(outputs))

    def name(self, x: torch.Tensor, name: str) -> None:
        self.names.add(name)

    def send(self, call: Callable[[], T], operands: Tensors, written: Tensors) -> T:
        """Sends messages, which are one operation of what is sent, and of what they are received in."""
        self._paused, reads = True, tuple([self._maker(x) for x in (*operands, *written)])
        try:
            out = call()
        finally:
            self._paused = False
        number = self._next(sending, reads)
        self._made(number, (), written, ())
        for x in written:
            self._note(x, number)
        return out

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Inside, it sees what runs on this thread."""
        # `with self` is for all threads at once that one is on, which several may leave so: then nothing is compiled
        as_written.begin(self)
        with during(tracing, self):
            dispatch._push_mode(self)
            try:
                yield
            finally:
                dispatch._pop_mode()
                as_written.end(self)


class Recording(Tracing):
    """A first run, which shows what later ones need.

    Args:
        what: whose graph it makes, in words.
        counts: whether FLOPs are counted.

    Attributes:
        total: FLOPs of all operations.
    """

    def __init__(self, given: Tensors, what: str, counts: bool = False) -> None:
        super().__init__(given)
        self._what, self._counts, self.total = what, counts, 0
        self._saved: dict[int, int] = {}  # memory that the graph has saved and the run has made -> its bytes
        self._flops: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._origins: dict[int, tuple[int | None, weakref.ref[object]]] = {}  # memory -> the operation that began it
        self._changed: set[int | None] = set()  # operations whose results cannot be kept
        self._named: dict[str, list[int]] = {}
        self._read: set[int] = set()  # operations whose results the graph has saved, or Python has read
        self._outputs: set[int] = set()
        self._opaque = False

    def _run(self, number: int | None, func: Function, args: Sequence[object], kwargs: Named) -> object:
        out = func(*args, **kwargs)
        if kind_of(func).draws(args, kwargs) or isinstance(out, list):  # a run without it draws other numbers later
            self._changed.add(number)
        if self._counts:
            flops = flops_of(func, args, kwargs, out)
            self.total += flops
            if number is not None:
                self._flops[number] = flops
        return out

    def _made(self, number: int | None, operands: Tensors, written: Tensors, made: Tensors) -> None:
        known = {_key_of(_memory_of(x)) for x in operands}
        new = {key: memory for memory in map(_memory_of, made) if (key := _key_of(memory)) not in known}
        self._origins.update({key: (number, weakref.ref(memory)) for key, memory in new.items()})
        self._changed.update([self._origin(x) for x in written])
        if number is not None:
            self._sizes[number] = sum(map(_nbytes_of, new.values()))

    def _origin(self, x: torch.Tensor) -> int | None:
        return _living(self._origins, x, None)

    def name(self, x: torch.Tensor, name: str) -> None:
        super().name(x, name)
        origin = self._origin(private.unwrapped(x))
        if origin is not None and origin not in self._changed:
            self._named.setdefault(name, []).append(origin)

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        functions = as_written.Functions(self._called)
        with super().here(), hooks.putting_away(self._what, self._pack, torch.Tensor.detach), functions:
            yield

    def _called(self, func: Function, args: tuple[object, ...], kwargs: Named | None) -> as_written.Called:
        if getattr(func, "__name__", "") in _READING:
            self._read.update([self._maker(private.unwrapped(x)) for x in tensors_in(*args)])
        return args, kwargs

    def _pack(self, x: torch.Tensor) -> torch.Tensor:
        own = x.detach()
        memory = _memory_of(own)
        if _key_of(memory) in self._origins:
            self._saved[_key_of(memory)] = _nbytes_of(memory)
        self._read.add(self._maker(own))  # by a Function of this library's, which may save its result
        return own

    def end(self, outputs: Tensors) -> None:
        """Notes the run's results, with their graph."""
        self._opaque = self.is_opaque(outputs)
        self._outputs = {self._maker(x) for x in outputs}

    def planned(self, names: Collection[str]) -> Plan:
        """What to keep and to leave out where these names are kept."""
        keeps = {number: name for name in names for number in self._named.get(name, ()) if number not in self._changed}
        needed = self._needed(keeps)
        products = {number for number, own in enumerate(self.trace) if own.function in _PRODUCTS}
        keeps = {number: name for number, name in keeps.items() if number in needed}
        return Plan(self.trace, keeps, frozenset(products - needed))

    def _needed(self, keeps: Collection[int]) -> set[int]:
        """The operations whose values something needs besides outputs, where those of these are kept."""
        every = set(range(len(self.trace)))
        ends = every.difference(*[own.reads for own in self.trace])
        # another end is for Python, which may read it, as a hook may any value
        needed = every if self._opaque else self._read | (ends - self._outputs)
        for number, (function, reads) in reversed([*enumerate(self.trace)]):
            name = function._schema.name if isinstance(function, torch._ops.OpOverload) else ""
            some = number not in keeps if number in needed else name not in _PASSES
            if some and not kind_of(function).shapes_only:
                needed.update(reads)
        return needed

    def flops(self, plan: Plan) -> int:
        """What the second run costs by this plan."""
        return self.total - sum([self._flops.get(number, 0) for number in {*plan.keeps, *plan.blanks}])

    def nbytes(self, plan: Plan | None) -> int:
        """What is kept by a plan; by None all that the graph saves."""
        return sum(self._saved.values()) if plan is None else sum([self._sizes[number] for number in plan.keeps])


class Keeping(Tracing):
    """A run of which is kept what a plan says."""

    def __init__(self, given: Iterable[torch.Tensor], plan: Plan) -> None:
        super().__init__(given, plan)
        self._keeps, self._held = plan.keeps, dict[int, list[object]]()

    def _run(self, number: int | None, func: Function, args: Sequence[object], kwargs: Named) -> object:
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
    """

    def __init__(
        self, given: Iterable[torch.Tensor], plan: Plan | None, held: Mapping[int, Sequence[object]], blanks: bool
    ) -> None:
        super().__init__(given, plan)
        self._held, self._blanks = held, plan.blanks if plan is not None and blanks else frozenset[int]()

    def _run(self, number: int | None, func: Function, args: Sequence[object], kwargs: Named) -> object:
        if number is not None and self.matches:
            if number in self._held:
                own = [private.detached(x) if isinstance(x, torch.Tensor) else x for x in self._held[number]]
                return tuple(own) if len(own) > 1 else own[0]
            if number in self._blanks:
                a, b = tensors_in(*args)[-2:]
                return a.new_zeros((*a.shape[:-1], b.shape[-1]))
        return func(*args, **kwargs)


def _held(x: object) -> object:
    return Held(own := private.detached(x), private.version(own)) if isinstance(x, torch.Tensor) else x


# ---- the memory of tensors


def _living(of: Mapping[int, tuple[T, weakref.ref[object]]], x: torch.Tensor, default: T) -> T:
    """What is known of a tensor's memory, by its key; `default` where that was of memory that is gone."""
    found = of.get(_key_of(_memory_of(x)))
    return found[0] if found is not None and found[1]() is not None else default


def _memory_of(x: torch.Tensor) -> object:
    """The memory that a tensor lies in; itself where it is no view of any."""
    return x.untyped_storage() if x.layout == torch.strided and not is_zero(x) else x


def _key_of(memory: object) -> int:
    """A number of memory, as long as it lives."""
    return memory._cdata if isinstance(memory, torch.UntypedStorage) else id(memory)


def _nbytes_of(memory: object) -> int:
    return memory.nbytes() if isinstance(memory, torch.UntypedStorage) else 0


# ---- of the run that goes on


def sending(call: Callable[P, T], *written: torch.Tensor) -> Callable[P, T]:
    """A call that sends messages, and writes to these tensors, which no operator tells of."""

    def calling(*args: P.args, **kwargs: P.kwargs) -> T:
        run = tracing.get()
        if run is None:
            return call(*args, **kwargs)
        return run.send(lambda: call(*args, **kwargs), tensors_in(*args, *kwargs.values()), written)

    return calling
