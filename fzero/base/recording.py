"""The first run of a function that will run again: which of its operations make what is kept, or is needed."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch.overrides import TorchFunctionMode

from fzero.base import hooks, private
from fzero.base.operators import Function, flops_of, kind_of
from fzero.base.pytree import tensors_in
from fzero.base.replay import PASSES, PRODUCTS, Plan, Tracing, key_of, living, memory_of


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
        self._origins: dict[int, tuple[int | None, weakref.ref[object]]] = {}  # memory -> the operation that began it
        self._changed: set[int | None] = set()  # operations whose results cannot be kept
        self._named: dict[str, list[int]] = {}
        self._read: set[int] = set()  # operations whose results the graph has saved, or Python has read
        self._outputs: set[int] = set()
        self._opaque = False

    def _run(self, number: int | None, func: Function, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        out = func(*args, **kwargs)
        if kind_of(func).draws(args, kwargs):  # a run without it would draw other numbers later
            self._changed.add(number)
        if self._counts:
            flops = flops_of(func, args, kwargs, out)
            self.total += flops
            if number is not None:
                self._flops[number] = flops
        return out

    def _made(
        self,
        number: int | None,
        func: Function,
        operands: Sequence[torch.Tensor],
        written: Sequence[torch.Tensor],
        made: Sequence[torch.Tensor],
        out: object,
    ) -> None:
        known, size = {key_of(x) for x in operands}, 0
        for x in made:
            if key_of(x) not in known:
                size += nbytes_of(x)
                self._origins[key_of(x)] = number, weakref.ref(memory_of(x))
        self._changed.update([self._origin(x) for x in written])
        if number is None:
            return
        self._sizes[number] = size
        if isinstance(out, list):
            self._changed.add(number)

    def _origin(self, x: torch.Tensor) -> int | None:
        return living(self._origins, x, None)

    def name(self, x: torch.Tensor, name: str) -> None:
        super().name(x, name)
        plain = private.unwrapped(x)
        origin = self._origin(plain)
        if origin is not None and origin not in self._changed:
            self._named.setdefault(name, []).append(origin)

    def reads(self, x: torch.Tensor) -> None:
        """Notes that values are read by no operation."""
        self._read.add(self._maker(private.unwrapped(x)))

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        with super().here(), hooks.putting_away(self._what, self._pack, torch.Tensor.detach), _Reads(self):
            yield

    def _pack(self, x: torch.Tensor) -> torch.Tensor:
        own = x.detach()
        if key_of(own) in self._origins:
            self._saved[key_of(own)] = nbytes_of(own)
        self._read.add(self._maker(own))  # by a Function of this library's, which may save its result
        return own

    def end(self, outputs: Sequence[torch.Tensor]) -> None:
        """Notes the run's results, with their graph."""
        self._opaque = self.is_opaque(outputs)
        self._outputs = {self._maker(x) for x in outputs}

    def planned(self, names: Collection[str]) -> Plan:
        """What to keep and to leave out where these names are kept."""
        keeps = {number: name for name in names for number in self._named.get(name, ()) if number not in self._changed}
        needed = self._needed(keeps)
        products = {number for number, own in enumerate(self.trace) if own.function in PRODUCTS}
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
            some = number not in keeps if number in needed else name not in PASSES
            if some and not kind_of(function).shapes_only:
                needed.update(reads)
        return needed

    def flops(self, plan: Plan) -> int:
        """What the second run costs by this plan."""
        return self.total - sum([self._flops.get(number, 0) for number in {*plan.keeps, *plan.blanks}])

    def nbytes(self, plan: Plan | None) -> int:
        """What is kept by a plan; by None all that the graph saves."""
        if plan is None:
            return sum(self._saved.values())
        came = {key_of(x): nbytes_of(x) for each in self.sent for x in each}
        return sum([self._sizes[number] for number in plan.keeps]) + sum(came.values())


class _Reads(TorchFunctionMode):
    """Shows what reads values past all operators."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(
        self, func: Function, types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        if getattr(func, "__name__", "") in _READING:
            for x in tensors_in(*args):
                self._recording.reads(x)
        return func(*args, **(kwargs or {}))


_READING = {"numpy", "tolist", "__array__", "__dlpack__"}


def nbytes_of(x: torch.Tensor) -> int:
    memory = memory_of(x)
    return memory.nbytes() if isinstance(memory, torch.UntypedStorage) else 0
