"""A look at the values of a run, operation by operation: what is not finite, where it begins, and what comes of it.

Below autograd and functorch, also in pullbacks. What an operation makes is not finite for the first time where nothing
that it takes is so; from there its births are followed through memory to what the run gives.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import CodeType, FrameType
from typing import NamedTuple

import torch
from torch.autograd.graph import Node
from torch.utils import _python_dispatch as dispatch

from fzero.base import hooks, private, pytree
from fzero.base.as_written import uncompiled
from fzero.base.context import in_function
from fzero.base.patterns import ROOT
from fzero.base.places import Place, frames, place_in
from fzero.base.refusals import is_library
from fzero.base.thread_state import without_dispatch_modes
from fzero.engine.dispatch import plain_call
from fzero.engine.op import UnitOp
from fzero.engine.outcome import split_result
from fzero.engine.traversal import current, here
from fzero.engine.traversal import known as known_leaves
from fzero.explaining import births
from fzero.explaining.births import INF, NAN, Operand, Operator, Taint, is_plain, kinds_of, measured
from fzero.explaining.report import BACKWARD, FORWARD, Fault, Overflow, short
from fzero.state.train_state import TrainState
from fzero.table.handle import Handle, storage_of
from fzero.table.layout import Group
from fzero.table.spec import Spec


class _Op(NamedTuple):
    """What is known of an operation of the forward, for its pullback."""

    name: str
    unit: str | None
    place: Place | None
    engine: bool = False  # it gathers, copies or sums, and the caller did not write it


@uncompiled
class Values(dispatch.TorchDispatchMode):
    """The look at one run of a step on this rank; magnitudes beyond a limit are noted."""

    supports_higher_order_operators = True  # each as one operation

    def __init__(self, state: TrainState, limit: float) -> None:
        super().__init__()
        self._layout, self._limit = state.layout, limit
        self.phase, self.microbatch, self._at = FORWARD, 0, 0
        self._batch: int | None = None
        self._ops: dict[int, _Op] = {}  # number of a node -> the operation that it is of
        self._taints: dict[int, Taint] = {}
        self._leaves: dict[int, tuple[Group, int]] = {}  # storage -> its group, and where the group's buffer begins
        self._inputs: dict[int, list[tuple[int, str]]] = {}  # storage -> where tensors begin in it, and their names
        self._sources: dict[tuple[int, int, str], Fault] = {}
        self._call: tuple[FrameType, str | None] | None = None  # of a unit that is a plain call
        self._present: object = None
        self.large: dict[tuple[str, str], Overflow] = {}  # (unit, phase) -> what was largest beyond the limit
        self.left: dict[int, Taint] = {}  # what the outputs' values come of, by microbatch
        # the leaves whose cotangents are not finite, in the order of the pullback: microbatch, path, what of
        self.pulled: list[tuple[int, str, Taint]] = []

    # ---- a microbatch

    def begin(self, microbatch: int, batch: int | None, cotangent: object) -> None:
        """A microbatch begins, of so many examples, which will be pulled back with its part of a cotangent."""
        self.phase, self.microbatch, self._batch = FORWARD, microbatch, batch
        self._ops, self._taints, self._call = {}, {}, None
        self._inputs = {}
        for x in pytree.tensors_in(cotangent):
            self._note_input(x, "the cotangent")

    def enter(self, params: object, inputs: Sequence[object], carry: object = None) -> None:
        """The function begins, with these params and inputs, and what it has carried so far."""
        with without_dispatch_modes(), private.below_transforms():
            for index, leaf in enumerate(pytree.flatten(params)[0]):
                if isinstance(leaf, torch.Tensor) and not isinstance(leaf, Handle):
                    self._note_leaf(index, leaf)
            for what, tree in (("input", tuple(inputs)), ("carry", carry)):
                for name, x in zip(*pytree.named_leaves(tree)[:2], strict=True):
                    if isinstance(x, torch.Tensor):
                        self._note_input(private.unwrapped(x), f"{what} {name}" if name else f"the {what}")

    def leave(self, outputs: object) -> None:
        """The function has returned these outputs."""
        with without_dispatch_modes(), private.below_transforms():
            taint = Taint()
            for x in pytree.leaves(outputs):
                if isinstance(x, torch.Tensor) and is_plain(x := private.unwrapped(x)):
                    taint = taint.joined(self._taint(x.detach()))
            self.left[self.microbatch] = taint

    def _note_input(self, x: torch.Tensor, name: str) -> None:
        if is_plain(x):
            self._taints.pop(storage_of(x), None)  # of what was done with it before, as to copy it
            self._inputs.setdefault(storage_of(x), []).append((int(x.storage_offset()), name))

    def _note_leaf(self, index: int, leaf: torch.Tensor) -> None:
        x = private.unwrapped(leaf)
        key, slot = self._layout.key_of[self._layout.rows[index].path]
        if is_plain(x):
            self._leaves[storage_of(x)] = self._layout.groups[key], int(x.storage_offset()) - slot.offset

    # ---- an operation

    def __torch_dispatch__(
        self, func: Operator, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        kwargs, name = kwargs or {}, str(func)
        given = [x for x in pytree.tensors_in(args, kwargs) if is_plain(x)]
        does_write, overwritten = births.writes(func), births.overwritten_by(name, given)
        before = [measured(x) for x in given if x is not overwritten] if does_write else None
        out = func(*args, **kwargs)
        made = [x for x in pytree.tensors_in(out) if is_plain(x)]
        if does_write:
            made += [x for x in given if all(x is not other for other in made)]
        if overwritten is not None:
            self._taints.pop(storage_of(overwritten), None)
        for memory in {storage_of(x) for x in made} - {storage_of(x) for x in given}:  # which others had before
            for known in (self._taints, self._leaves, self._inputs):
                known.pop(memory, None)
        if made and not name.startswith(births.MAKES_NOTHING):
            self._look(name, (args, kwargs), given, before, made)
        return out

    def _look(
        self,
        name: str,
        arguments: object,
        given: Sequence[torch.Tensor],
        before: Sequence[Operand] | None,
        made: Sequence[torch.Tensor],
    ) -> None:
        self._at += 1
        op = self._running(name)
        for x in made:
            own = measured(x)
            if not own.finite:
                is_view = before is None and any(storage_of(x) == storage_of(each) for each in given)
                taken = [measured(each) for each in given] if before is None else before
                self._follow(x, op, arguments, taken, is_view)
            if not op.engine:
                self._note_large(own, op)

    def _running(self, name: str) -> _Op:
        """The operation that runs; in a pullback with the unit and the line of the one that is pulled back."""
        if in_function.get():  # a forward, also one that a pullback runs again
            own = _Op(name, self._unit(), *_line())
            self._ops.setdefault(hooks.next_number() - 1, own)  # what follows before the next node has none
            return own
        of = self._pulled_op()
        return _Op(name, None, None, True) if of is None else _Op(name, of.unit, of.place)

    def _pulled_op(self) -> _Op | None:
        """The operation of the caller's that is pulled back; None for what the engine does."""
        node = hooks.node_that_runs()
        if node is None or getattr(getattr(type(node), "_forward_cls", None), "__name__", "") in _ENGINES:
            return None
        number = hooks.number_of(node)
        if number in self._ops or not isinstance(node, torch.autograd.function.BackwardCFunction):
            return self._ops.get(number)
        # of a Function under torch.func, which has made more nodes before its forward
        return self._ops.get(min([each for each in self._ops if each > number], default=number))

    def _unit(self) -> str | None:
        """The unit that runs, if that is known."""
        present = here.get()
        if present:
            owner, index = next(iter(present))
            if present is not self._present:
                self._present = present
                for (_, number), leaf in present.items():
                    self._note_leaf(number, leaf)
            return owner.layout.rows[index].unit
        if current.get() is not None or known_leaves.get() is None:
            return ROOT
        calls = [frame for frame in frames(()) if frame.f_code is _PLAIN]
        if not calls:
            return None
        if self._call is None or self._call[0] is not calls[-1]:  # the outermost: a unit within a unit is a call
            given = pytree.tensors_in(*[calls[-1].f_locals[name] for name in ("args", "kwargs", "leaves")])
            found = [self._leaves.get(storage_of(x)) for x in map(private.unwrapped, given) if is_plain(x)]
            units = [own[0].unit for own in found if own is not None and own[0].unit != ROOT]
            self._call = calls[-1], next(iter(units), None)
        return self._call[1]

    def _note_large(self, own: Operand, op: _Op) -> None:
        value = max(abs(own.low), abs(own.high))
        if not self._limit < value < 0.5 * torch.finfo(own.tensor.dtype).max:  # where masks have their numbers
            return
        key = (op.unit or ROOT, self.phase)
        if key not in self.large or value > self.large[key].largest:
            self.large[key] = Overflow(*key, value, op.name, str(op.place or ""))

    # ---- what is not finite

    def _follow(self, x: torch.Tensor, op: _Op, arguments: object, before: Sequence[Operand], is_view: bool) -> None:
        """Notes what the values of a result that is not finite come of; of a view its memory tells that."""
        came = Taint()
        for each in before:
            if not each.finite:
                came = came.joined(self._taint(each.tensor))
        has_nan, has_inf = kinds_of(x)
        new = Taint(came.nan if has_nan else frozenset(), came.inf if has_inf else frozenset())
        if has_nan and not came.nan:
            begun = frozenset({each for each in came.inf if not each.given})
            new.nan = begun or frozenset({self._birth(NAN, x, op, before, not before)})
        if has_inf and not came.inf and not came.nan:
            named = any(isinstance(each, float) and not math.isfinite(each) for each in pytree.flatten(arguments)[0])
            new.inf = frozenset({self._birth(INF, x, op, before, not before or named)})
        elif has_inf and not came.inf:
            new.inf = came.nan
        if not is_view:
            self._taints[storage_of(x)] = new
        self._note_pulled(x, new)

    def _taint(self, x: torch.Tensor) -> Taint:
        """What the values of a tensor come of, if they are not finite."""
        has_nan, has_inf = kinds_of(x)
        if not (has_nan or has_inf):
            return Taint()
        memory, leaf = storage_of(x), self._leaf(x)
        if leaf is not None:
            taint = self._source(x, leaf, leaf, has_nan)
        elif memory in self._taints:
            taint = self._taints[memory]
        else:
            what = "a tensor that the function closes over" if in_function.get() else "what came from elsewhere"
            begun = [pair for pair in self._inputs.get(memory, ()) if pair[0] <= x.storage_offset()]
            what = max(begun)[1] if begun else what
            taint = self._source(x, what, None, has_nan)
        return Taint(taint.nan if has_nan else frozenset(), taint.inf if has_inf else frozenset())

    def _source(self, x: torch.Tensor, source: str, leaf: str | None, has_nan: bool) -> Taint:
        found = []
        for kind in (NAN, INF):
            known = self.microbatch, storage_of(x), kind + source
            birth = self._sources.get(known)
            if birth is None:
                op = _Op("", self._layout.key_of[leaf][0].unit if leaf else None, None)
                birth = self._birth(kind, x, op, (), kind == INF and not has_nan and not bool((x == math.inf).any()))
                birth = self._sources[known] = dataclasses.replace(birth, leaf=leaf, source=source)
            found.append(frozenset({birth}))
        return Taint(*found)

    def _birth(self, kind: str, x: torch.Tensor, op: _Op, before: Sequence[Operand], given: bool) -> Fault:
        pulled = None if in_function.get() else self._pulled_op()
        leaves = [(max(abs(each.low), abs(each.high)), self._leaf(each.tensor)) for each in before]
        leaf = max([(size, path) for size, path in leaves if path is not None and size == size], default=(0, None))[1]
        return Fault(
            phase=self.phase,
            kind=kind,
            unit=op.unit,
            op=op.name,
            pulled="" if pulled is None else pulled.name,
            place=str(op.place or ""),
            leaf=leaf,
            microbatch=self.microbatch,
            examples=births.examples_of(x, self._batch),
            count=int((~x.isfinite()).sum()),
            shape=tuple(x.shape),
            dtype=short(x.dtype),
            operands=tuple([births.described(*each, kinds_of(each.tensor)) for each in before]),
            given=given or op.engine,
            at=self._at,
        )

    def _leaf(self, x: torch.Tensor) -> str | None:
        """The path of the leaf that a tensor lies in."""
        found = self._leaves.get(storage_of(x))
        return None if found is None else found[0].leaf_at(int(x.storage_offset()) - found[1])

    # ---- cotangents of leaves

    def _note_pulled(self, x: torch.Tensor, taint: Taint) -> None:
        """Notes a cotangent of a leaf, which the node that runs hands on to where its graph begins."""
        node = hooks.node_that_runs()
        if node is None or self.phase != BACKWARD or in_function.get() or self._pulled_op() is None:
            return
        for other, place in node.next_functions:
            path = self._begins(other, place, x) if other is not None else None
            if path is not None:
                self.pulled.append((self.microbatch, path, taint))

    def _begins(self, node: Node, place: int, x: torch.Tensor) -> str | None:
        variable, keys = getattr(node, "variable", None), getattr(node, "keys", None)
        if isinstance(variable, torch.Tensor) and tuple(variable.shape) == tuple(x.shape):
            own = private.unwrapped(variable)
            return self._leaf(own) if is_plain(own) else None
        if isinstance(keys, tuple):  # of groups outside of units
            slots = [slot for key in keys for slot in self._layout.groups[key].slots]
            return slots[place].path if place < len(slots) and slots[place].shape == tuple(x.shape) else None
        return None


class Observed:
    """A step's function, whose values are looked at."""

    def __init__(self, step: Spec, values: Values) -> None:
        self._step, self._values = step, values
        self.__name__ = step.name

    def __call__(self, params: object, *inputs: object) -> object:
        carry, own = (inputs[0], inputs[1:]) if self._step.carries else (None, inputs)
        self._values.enter(params, own, carry)
        out = self._step.fn(params, *inputs)
        self._values.leave(split_result(self._step, out)[0])
        return out


_ENGINES = ("Node", "_Full")  # nodes, by the names of their Functions
_PLAIN: CodeType = plain_call.__code__
_UNTIL = (Observed.__call__.__code__,)
_ENTRIES = (_PLAIN, UnitOp._called.__code__)
_ENGINE = ("fzero.engine.", "fzero.comm.", "fzero.table.", "fzero.state.")


def _line() -> tuple[Place | None, bool]:
    """The line of the caller's code that runs, and whether it is the engine that runs there."""
    own, entered = False, False
    for frame in frames(_UNTIL, (__name__,)):
        if not is_library(frame.f_code.co_filename):
            return place_in(frame), own
        entered = entered or frame.f_code in _ENTRIES
        own = own or (not entered and str(frame.f_globals.get("__name__")).startswith(_ENGINE))
    return None, own
