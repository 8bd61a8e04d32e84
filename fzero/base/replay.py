"""A second run of a function that leaves out what was kept of the first one.

The operations that depend on what the function is given have numbers. The first run under a signature (`Recording`)
shows which of them make what has a name. Each later run (`Keeping`) keeps what these make, and its second run
(`Replaying`) is given it: the function runs as it is written, but for these operations.
"""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch.utils import _python_dispatch as dispatch

from fzero.base import as_written, hooks, intercept, private
from fzero.base.context import during, variable
from fzero.base.flops import flops_of
from fzero.base.operators import Function, kind_of
from fzero.base.pytree import tensors_in

P = ParamSpec("P")
T = TypeVar("T")
Plan = Mapping[int, str]  # the number of an operation -> the name of what it makes, which is kept
_current: contextvars.ContextVar[Tracing | None] = variable("tracing", None)
# takes the values that have names, and these, in a function that is traced into a graph
naming: contextvars.ContextVar[Callable[[torch.Tensor, str], object] | None] = variable("naming", None)
# graphs save by the one, fake tensors call the other
_UNSEEN = {torch.ops.aten.detach.default, torch.ops.prim.device.default}


class Held(NamedTuple):
    """A tensor that an operation has made, and how often it was written to since by then."""

    tensor: torch.Tensor
    version: int

    def is_written(self) -> bool:
        """Tells whether it was written to since."""
        return private.version(self.tensor) != self.version


class Tracing(dispatch.TorchDispatchMode):
    """Inside, operations are numbered.

    Attributes:
        names: that were given.
        functions: the operations that have numbers.
    """

    supports_higher_order_operators = True

    def __init__(self, given: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.functions, self.names = list[Function](), set[str]()
        self._paused = False
        self._dependent: dict[int, tuple[int, weakref.ref[object]]] = {}  # memory that depends on what is given
        for x in given:
            self._note(self._dependent, x, 0)

    def __torch_dispatch__(
        self, func: Function, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        named = kwargs or {}
        if self._paused or func in _UNSEEN:
            return func(*args, **named)
        kind, operands, number = kind_of(func), tensors_in(*args, *named.values()), None
        if any([self._noted(self._dependent, x) is not None for x in operands]):
            number = len(self.functions)
            self.functions.append(func)
        out = self._run(number, func, args, named)
        if number is not None:
            for x in (*tensors_in(out), *(operands if kind.writes_unsaid else kind.written(args, named))):
                self._note(self._dependent, x, 0)
        return out

    def _run(self, number: int | None, func: Function, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        return func(*args, **kwargs)

    def _note(self, of: dict[int, tuple[int, weakref.ref[object]]], x: torch.Tensor, number: int) -> None:
        of[key_of(x)] = number, weakref.ref(memory_of(x))

    def _noted(self, of: Mapping[int, tuple[int, weakref.ref[object]]], x: torch.Tensor) -> int | None:
        """What was noted of a tensor's memory; None where that was of memory that is gone."""
        found = of.get(key_of(x))
        return found[0] if found is not None and found[1]() is not None else None

    def name(self, x: torch.Tensor, name: str) -> None:
        self.names.add(name)

    def unseen(self, call: Callable[[], T], written: Sequence[torch.Tensor]) -> T:
        """A call that sends messages, as often as the function runs: how it does so has no numbers."""
        self._paused = True
        try:
            out = call()
        finally:
            self._paused = False
        for x in written:
            self._note(self._dependent, x, 0)
        return out

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


class Recording(Tracing):
    """A first run, which shows what later ones need.

    Args:
        what: whose graph it makes, in words.
        counts: whether FLOPs are counted.

    Attributes:
        total: FLOPs of all operations.
    """

    def __init__(self, given: Sequence[torch.Tensor], what: str, counts: bool = False) -> None:
        super().__init__(given)
        self._what, self._counts, self.total = what, counts, 0
        self._saved: dict[int, int] = {}  # memory that the graph has saved and the run has made -> its bytes
        self._flops: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._origins: dict[int, tuple[int, weakref.ref[object]]] = {}  # memory -> the operation that has made it
        self._own: dict[int, tuple[int, weakref.ref[object]]] = {}  # memory that the run has made
        self._named: dict[str, list[int]] = {}

    def _run(self, number: int | None, func: Function, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        out = func(*args, **kwargs)
        if self._counts:
            flops = flops_of(func, args, kwargs, out)
            self.total += flops
            if number is not None:
                self._flops[number] = flops
        for x in kind_of(func).written(args, kwargs):
            self._origins.pop(key_of(x), None)
        known = {key_of(x) for x in tensors_in(*args, *kwargs.values())}
        fresh = [x for x in tensors_in(out) if key_of(x) not in known]
        for x in fresh:
            self._note(self._own, x, 0)
        if number is not None:
            self._sizes[number] = sum(map(nbytes_of, fresh))
            for x in fresh if _can_be_kept(func, args, kwargs, out) else ():
                self._note(self._origins, x, number)
        return out

    def name(self, x: torch.Tensor, name: str) -> None:
        super().name(x, name)
        origin = self._noted(self._origins, private.unwrapped(x))
        if origin is not None:
            self._named.setdefault(name, []).append(origin)

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        with super().here(), hooks.putting_away(self._what, self._pack, torch.Tensor.detach):
            yield

    def _pack(self, x: torch.Tensor) -> torch.Tensor:
        own = x.detach()
        if self._noted(self._own, own) is not None:
            self._saved[key_of(own)] = nbytes_of(own)
        return own

    def planned(self, names: Collection[str]) -> Plan:
        """What to keep where these names are kept."""
        return {number: name for name in names for number in self._named.get(name, ())}

    def flops(self, plan: Plan) -> int:
        """What the second run costs by this plan."""
        return self.total - sum([self._flops.get(number, 0) for number in plan])

    def nbytes(self, plan: Plan | None) -> int:
        """What is kept by a plan; by None all that the graph saves."""
        return sum(self._saved.values()) if plan is None else sum([self._sizes[number] for number in plan])


class Keeping(Tracing):
    """A run of which is kept what a plan says: another branch than the first run's may have other operations there.

    Attributes:
        held: what is kept of each operation's results, tensors as `Held`.
    """

    def __init__(self, given: Iterable[torch.Tensor], plan: Plan) -> None:
        super().__init__(given)
        self._plan, self.held = plan, dict[int, list[object]]()

    def _run(self, number: int | None, func: Function, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        out = func(*args, **kwargs)
        if number is not None and number in self._plan and _can_be_kept(func, args, kwargs, out):
            self.held[number] = [_held(x) for x in (out if isinstance(out, tuple) else (out,))]
        return out


class Replaying(Tracing):
    """The second run.

    Args:
        functions: the operations of the first one that have numbers.
        held: what was kept, by the numbers of the operations that have made it.
    """

    def __init__(
        self, given: Iterable[torch.Tensor], functions: Sequence[Function], held: Mapping[int, Sequence[object]]
    ) -> None:
        super().__init__(given)
        self._first, self._held = functions, held

    def _run(self, number: int | None, func: Function, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        if number is not None and number in self._held and self._first[number] == func:
            own = [intercept.detached(x) if isinstance(x, torch.Tensor) else x for x in self._held[number]]
            return tuple(own) if len(own) > 1 else own[0]
        return func(*args, **kwargs)

    def differs(self) -> bool:
        """Tells whether the run, which has ended, had other operations than the first one."""
        return self.functions != self._first


def _held(x: object) -> object:
    return Held(own := intercept.detached(x), private.version(own)) if isinstance(x, torch.Tensor) else x


def _can_be_kept(func: Function, args: Sequence[object], kwargs: Mapping[str, object], out: object) -> bool:
    """Tells whether an operation may be left out where its results are there: it makes them, and draws no numbers."""
    if not isinstance(out, (torch.Tensor, tuple)) or kind_of(func).draws(args, kwargs):
        return False
    known = {key_of(x) for x in tensors_in(*args, *kwargs.values())}
    return known.isdisjoint([key_of(x) for x in tensors_in(out)])


def memory_of(x: torch.Tensor) -> object:
    """The memory that a tensor lies in; itself where it is no view of any."""
    return x.untyped_storage() if x.layout == torch.strided and not torch._is_zerotensor(x) else x  # type: ignore[attr-defined]


def key_of(x: torch.Tensor) -> int:
    """A number of that memory, as long as it lives."""
    memory = memory_of(x)
    return memory._cdata if isinstance(memory, torch.UntypedStorage) else id(memory)


def nbytes_of(x: torch.Tensor) -> int:
    memory = memory_of(x)
    return memory.nbytes() if isinstance(memory, torch.UntypedStorage) else 0


def name(x: torch.Tensor, name: str) -> None:
    """Gives a value a name in the run that is traced on this thread, if any."""
    tracing, graph = _current.get(), naming.get()
    if tracing is not None:
        tracing.name(x, name)
    if graph is not None:
        graph(x.detach(), name)


def message(call: Callable[P, T], *written: torch.Tensor) -> Callable[P, T]:
    """A call that sends messages, and writes to these: what it does besides has no part in a run that is traced."""

    def calling(*args: P.args, **kwargs: P.kwargs) -> T:
        tracing = _current.get()
        return call(*args, **kwargs) if tracing is None else tracing.unseen(lambda: call(*args, **kwargs), written)

    return calling
