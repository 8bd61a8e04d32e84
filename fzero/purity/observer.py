"""A look at every operation of torch in one run of a function: what it captures, writes to, makes, and in which order.

Two modes look together. The dispatch mode sees all operations, also those of autograd Functions, of transforms of
torch.func inside and of TorchScript. The function mode sees the tensors as the caller has them: whether one is
differentiated shows there alone.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _python_dispatch as dispatch

from fzero.base import hooks, private, pytree
from fzero.base.as_written import Functions, uncompiled
from fzero.base.carriers import flatten
from fzero.base.context import during, variable
from fzero.base.follow import tangents_of
from fzero.base.node import Op, edges_to
from fzero.base.operators import Operator, kind_of
from fzero.base.places import NOWHERE, Place, is_a_threads, place_here
from fzero.base.refusals import heard, is_library, noted, place_of
from fzero.comm.backend import COLLECTIVES
from fzero.purity.collectives import current
from fzero.table.handle import READABLE, SET_DATA, Function, Named, Operands, StandIn, name_of, storage_of, writes

# which give no derivative on: x.shape, x.detach()
_CONSTANT = READABLE | {torch.Tensor.detach, torch.detach, torch.Tensor.data.__get__}  # type: ignore[attr-defined]
HOOKS = {torch.Tensor.register_hook, torch.Tensor.retain_grad, torch.Tensor.register_post_accumulate_grad_hook}
_ASKS = {torch.autograd.grad, torch.Tensor.register_hook, torch.Tensor.retain_grad}
NameOf = Callable[[torch.Tensor], str]
# which compute nothing: autograd and fake tensors do so by themselves, too
_SILENT = ("aten::detach", "prim::device")
_NUMBERS = (bool, int, float, complex, str, torch.dtype, torch.device, torch.Generator, type(None))
_MADE_OF_NUMBERS = ("aten::lift_fresh", "aten::lift_fresh_copy")  # torch.tensor


class Impure(Exception):
    """What a function does that a pure one does not: raised at once, and said by whoever knows its name.

    Args:
        what: such as "writes to".
        instead: what to write.
    """

    def __init__(self, what: str, place: Place | None, instead: str) -> None:
        super().__init__(what)
        self.what, self.place, self.instead = what, place, instead


def impure(what: str, place: Place | None, instead: str) -> Impure:
    return noted(Impure(what, place, instead))


class Operation(NamedTuple):
    """One operation, as it was called.

    Attributes:
        numbers: its operands that are no tensors, in words; of a generator its state.
        depends: whether any operand depends on what the function was given.
    """

    name: str
    numbers: tuple[str | bytes, ...]
    depends: bool
    place: Place | None


class Seen(NamedTuple):
    """A tensor that an operation was given or has made."""

    is_gone: Callable[[], bool]  # it holds the memory's number, so that nothing else comes to lie there
    shape: torch.Size
    version: int
    place: Place | None


@uncompiled
class Look(dispatch.TorchDispatchMode):
    """Looks at one run, as a context.

    Args:
        given: the memory of what the function is given -> what names a tensor of it.
        objects: ids of the tensors that a unit is given: it sees a part of their gradients, and captures constants
            only. None of a step's own function.
        outer: ids of these as its caller has them.

    Attributes:
        operations: all of them, in order.
        captured: what the function was not given and did not make, by the memory of a tensor.
        made: what depends on something given: whoever keeps it keeps this run's values.
        labels: what names constants of the function, by their memory, also those that were made in its run.
        held: memory that lives as long as this, so that nothing else comes to lie there.
        reruns: whether something may run again in its pullback (hooks of saved tensors, torch.utils.checkpoint).
    """

    supports_higher_order_operators = True
    looks = True  # and changes nothing of what is computed

    def __init__(
        self,
        given: Mapping[int, NameOf],
        objects: Collection[int] | None = None,
        outer: Collection[int] = (),
    ) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.captured: dict[int, Seen] = {}
        self.labels: dict[int, str] = {}
        self.made: list[Seen] = []
        self.held: list[torch.UntypedStorage] = []
        self.constants: dict[int, weakref.ref[torch.Tensor]] = {}  # those that it captures, as the caller has them
        self.reruns = False
        self._unit, self._given, self._objects, self._outer = objects is not None, dict(given), objects or (), outer
        self._own: dict[int, bool] = dict.fromkeys(self._given, True)  # memory -> whether it depends on what is given
        self._functions = Functions(self._called)

    def __enter__(self) -> Look:
        self._functions.__enter__()
        self._token = looking.set(self)
        dispatch._push_mode(self)  # `super().__enter__` notes a mode for all threads, which several may leave so
        return self

    def __exit__(self, *error: object) -> None:
        dispatch._pop_mode()
        looking.reset(self._token)
        self._functions.__exit__(*error)

    def give(self, given: Mapping[int, NameOf]) -> None:
        """Has more memory be what the function is given."""
        self._given = {**given, **self._given}
        self._own |= dict.fromkeys(given, True)

    def own(self, tree: object) -> None:
        """Has tensors be made by the function: what a unit returns that it calls."""
        for x in flatten(tree)[0]:
            if isinstance(x, torch.Tensor) and not isinstance(x, StandIn):
                with beside():
                    for own in (x, *tangents_of(x)):
                        self._own.setdefault(memory_of(private.unwrapped(own)), True)

    # ---- what the modes tell

    def __torch_dispatch__(self, func: Operator, types: object, args: Operands = (), kwargs: Named = None) -> object:
        if getattr(func, "namespace", None) in COLLECTIVES:  # torch.func gives what lies in lists of lists as it is
            args = tuple([pytree.map_leaves(_unwrapped, x) for x in args])
        if looking.get() is not self or not hasattr(func, "_schema"):  # a higher-order one
            return func(*args, **(kwargs or {}))
        depends = self._before(func, args, kwargs or {})
        out = func(*args, **(kwargs or {}))
        place = self.operations[-1].place if self.operations else None
        for x in pytree.tensors_in(out):
            memory = memory_of(x)
            if func._schema.name not in _SILENT and memory not in self._own and memory not in self.captured:
                self._own[memory] = depends
            elif depends and memory in self._own:
                self._own[memory] = True
            if depends and not isinstance(x, StandIn):
                self.made.append(Seen(gone(x, memory not in self._given), x.shape, 0, place))
        return out

    def _before(self, func: Operator, args: Operands, kwargs: Mapping[str, object]) -> bool:
        """Looks at what an operation is given; whether any of it depends on what the function is given."""
        name, place, operands = func._schema.name, place_here(), pytree.tensors_in(*args, *kwargs.values())
        if (place is None and name not in _SILENT) or name in _MADE_OF_NUMBERS:  # this library's own
            for x in operands:
                self._own.setdefault(memory_of(x), False)
        depends = any([self._own.get(memory_of(x), False) for x in operands])
        if place is None:
            return depends
        if func.namespace == "c10d" and (collectives := current.get()) is not None:
            collectives.operated(name.partition("::")[2], place)
        for x in operands:
            if (memory := memory_of(x)) not in self._own:
                self.captured.setdefault(memory, Seen(gone(x), x.shape, private.version(x), place))
        for x in kind_of(func).written(args, kwargs):
            self._refuse_write(x, name, place)
            if name.startswith("aten::_foreach"):  # which torch does not count while a mode looks
                torch.autograd.graph.increment_version(x)
        self.reruns = self.reruns or hooks.any_around()
        # what a generator gives depends on whoever drew from it before
        depends = depends or any(isinstance(x, torch.Generator) for x in (*args, *kwargs.values()))
        flat = [x for x in pytree.flatten((args, kwargs))[0] if isinstance(x, _NUMBERS)]
        numbers = [bytes(x.get_state().numpy()) if isinstance(x, torch.Generator) else repr(x) for x in flat]
        if name not in _SILENT:
            self.operations.append(Operation(name, tuple(numbers), depends, place))
        return depends

    def _called(self, func: Function, args: Operands, kwargs: Named) -> tuple[Operands, Named]:
        if (collectives := current.get()) is not None:
            args, kwargs = collectives.called(func, args, kwargs)
        if looking.get() is self:
            self._look_at(func, args, kwargs)
        return args, kwargs

    def _look_at(self, func: Function, operands: Operands, kwargs: Named) -> None:
        """Looks at tensors as the caller has them."""
        if func in _ASKS:
            _refuse_parts(func, operands, kwargs or {})
        if func in HOOKS:
            self.reruns = True
            if id(operands[0]) in self._objects:
                raise impure(
                    f"calls {func.__name__!r} of a tensor that it is given",
                    place_here(),
                    "A hook is for the whole gradient of a tensor, and a call sees its own part. Call it where "
                    "the tensor is computed, or of another one that you compute here (x = x.view_as(x)).",
                )
        if func in _CONSTANT:
            return
        if func == SET_DATA and _is_itself(*operands):  # type: ignore[arg-type] - as module.to(dtype) sets it
            return
        if writes(func, kwargs) and not is_a_threads():  # before autograd says something else of it
            out = (kwargs or {}).get("out")
            for x in pytree.flatten(operands[:1] if out is None else out)[0]:
                if isinstance(x, torch.Tensor) and not isinstance(x, StandIn):
                    self._refuse_write(private.unwrapped(x), f"::{name_of(func)}", place_here() or NOWHERE)
        for x in pytree.flatten((operands, kwargs or {}))[0] if self._unit else ():
            if not isinstance(x, torch.Tensor) or isinstance(x, StandIn):
                continue
            given = id(x) not in self._outer or id(x) in self._objects  # where nothing is differentiated, they are one
            if given and memory_of(private.unwrapped(x)) in self._own:
                continue
            place = place_here()
            if place is None:  # this library's own
                return
            if _moves(x):
                raise impure(
                    f"closes over a tensor of shape {tuple(x.shape)} that is differentiated or mapped",
                    place,
                    "Give it to the call as an argument, or close over x.detach() if no gradient is wanted.",
                )
            self.constants[id(x)] = weakref.ref(x)

    # ----

    def _refuse_write(self, x: torch.Tensor, name: str, place: Place) -> None:
        memory = memory_of(x)
        if memory in self._given:
            what = self._given[memory](x)
            params = "Params change in step.update only. " if what.startswith("leaf") else ""
            raise impure(
                f"writes to {what} in place, by {name.partition('::')[2]}",
                place,
                f"{params}Write to a copy (x = x.clone()), or use the operation that is not in place. Running "
                "statistics are buffers: fz.functional(module, buffers=True), fz.carry.",
            )
        if memory in self.labels or memory in self.captured or memory not in self._own:
            what = self.labels.get(memory, f"a tensor of shape {tuple(x.shape)} that it closes over")
            raise impure(
                f"writes to {what}, by {name.partition('::')[2]}",
                place,
                "Give it as an argument and return its new value. A module's is a buffer: self.register_buffer, then "
                "fz.functional(module, buffers=True) and fz.carry; or call module.eval() before fz.functional.",
            )


# what looks at the function that is running
looking: contextvars.ContextVar[Look | None] = variable("looking_at_operations", None)


def own_modes() -> list[object]:
    """The user's torch function modes that are on."""
    return [mode for mode in private.function_modes() if not type(mode).__module__.startswith("fzero.")]


@contextlib.contextmanager
def beside() -> Iterator[None]:
    """Inside, nothing is looked at."""
    with during(looking, None):
        yield


@contextlib.contextmanager
def refusing(who: str, defined: Place | None = None) -> Iterator[None]:
    """Around what may do what is not pure."""
    try:
        yield
    except Impure as error:
        error.__traceback__ = None  # whose frames hold what the function is given, and lead back to it
        raise noted(refusal(who, error, defined)) from None


def refusal(who: str, error: Impure, defined: Place | None = None) -> ValueError:
    """What is said of a function that is not pure.

    Args:
        defined: where it is defined, for what no operation shows.
    """
    at = error.place or defined
    place = f" ({at})" if at is not None else ""
    return ValueError(f"{who} {error.what}{place}. {error.instead}")


@contextlib.contextmanager
def looking_at(who: str, given: Mapping[int, NameOf]) -> Iterator[Look]:
    """Around a run of a step's own function, which may close over tensors that are differentiated."""
    look = looking.get()
    if look is not None:  # at what runs this one
        look.give(given)
        yield look
        return
    with refusing(who), heard(), Look(given) as look:
        yield look


def _refuse_parts(func: Function, args: Operands, kwargs: Mapping[str, object]) -> None:
    """Refuses to tell the gradient by one of several tensors that a unit puts out: others may depend on it inside."""
    is_grad = func == torch.autograd.grad
    given = dict(zip(("outputs", "inputs") if is_grad else ("inputs",), args, strict=False)) | dict(kwargs)
    for x in pytree.flatten(given["inputs"])[0]:
        node = getattr(x, "grad_fn", None)
        op = getattr(node, "op", None)
        if node is None or not isinstance(op, Op):
            continue
        others = {(node, other) for other in node.real if other != x.output_nr}
        if is_grad and others:  # those that what is differentiated depends on
            others &= edges_to(pytree.flatten(given["outputs"])[0])
        if others:
            raise impure(
                f"asks {name_of(func)!r} by one of {len(node.real)} tensors that {op.name} returns",
                place_here(),
                "Another one may depend on it inside, which is not seen outside. Differentiate inside the unit, or "
                "return that one alone, and compute the other one of it outside.",
            )


def memory_of(x: torch.Tensor) -> int:
    """A number that tensors which share memory have in common."""
    return storage_of(x) or id(x)


def gone(x: torch.Tensor, memory: bool = True) -> Callable[[], bool]:
    """What tells whether a tensor is gone, with all that share its memory."""
    if not memory or memory_of(x) == id(x):
        reference = weakref.ref(x)
        return lambda: reference() is None
    return StorageWeakRef(x.untyped_storage()).expired


def _unwrapped(x: object) -> object:
    return private.unwrapped(x) if isinstance(x, torch.Tensor) else x


def _moves(x: torch.Tensor) -> bool:
    """Tells whether something differentiates or maps a tensor."""
    try:
        return private.is_mapped(x) or private.is_differentiated(x)
    except RuntimeError:  # within a map of forward-mode derivatives, which torch has no rule for
        return x.requires_grad


# ---- in a unit that more than one derivative goes through

_OF_ONE_LEVEL = {
    *HOOKS,
    *(torch.Tensor.data.__get__, torch.Tensor.data.__set__),  # type: ignore[attr-defined]
    *(torch.Tensor.detach_, torch.detach_),
    torch.Tensor.grad_fn.__get__,  # type: ignore[attr-defined] # whose hooks are no operations
}


def one_level(unit: str) -> Functions:
    """Refuses, in a unit that more than one derivative goes through, what acts on the one alone that sees it.

    A hook of a tensor, or what `x.data` leaves out, belongs to the derivative that is the innermost as the unit runs.
    A unit runs again for each of them by itself, and would have it in all, or in others.
    """
    return Functions(functools.partial(_refuse_levels, unit))


def _refuse_levels(unit: str, func: Function, args: Operands, kwargs: Named) -> tuple[Operands, Named]:
    differentiated = func in _OF_ONE_LEVEL and isinstance(args[0], torch.Tensor) and args[0].requires_grad
    # what only reads may be a library, such as a step within the unit
    if differentiated and (func in HOOKS or not is_library(sys._getframe(2).f_code.co_filename)):
        raise noted(
            ValueError(
                f"Unit {unit!r} takes {name_of(func)!r} of a tensor that is differentiated{place_of()}, where more "
                "than one derivative goes through it (torch.func.grad around it, fz.hvp, create_graph=True). That acts "
                "on one of them alone, and a unit runs again for each. Compute the same by operations (detach() for "
                ".data, an autograd.Function for a hook), or do it outside of units."
            )
        )
    return args, kwargs


def _is_itself(x: torch.Tensor, value: torch.Tensor) -> bool:
    form = lambda tensor: (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
    x, value = private.unwrapped(x), private.unwrapped(value)
    return form(x) == form(value) and private.same_place(x, value)
