"""The signature of a unit's call: what decides whether a later call is like one that was proven to be pure."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from fzero.base import private, pytree
from fzero.base.carriers import VALUES
from fzero.base.collecting import open_here
from fzero.base.node import OWNER
from fzero.base.patterns import ROOT
from fzero.base.refusals import noted
from fzero.base.replay import Plan
from fzero.base.thread_state import autocasts, function_modes_on
from fzero.engine.traversal import Traversal
from fzero.purity.observer import own_modes
from fzero.stores.memories import DEVICE
from fzero.table.handle import Handle
from fzero.table.names import NO_NAMES
from fzero.table.rows import Row

KEPT = 8  # signatures of one call
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_HANDLE, _TENSOR, _VALUE = range(3)


class Signature:
    """One form of a unit's call, and what its first run has shown.

    Attributes:
        keys: the groups of its leaves, in order.
        handles: for each leaf, its place among the flat arguments and its index.
        primals: for each key, the place of one of its leaves.
        tensors: the places of its tensors.
        wanted: the positions of what is differentiated, keys first and then tensors.
        trained: the keys among them; `moving` the tensors, by their positions among those.
        straight: whether its operations may be a part of the run's graph; its first run may show that not.
        transformed: whether a transform of torch.func is active.
        casts: the dtype of its autocast.
        proves: whether its first run proves that it is pure.
        proven: whether a run under it was, or has shown what later runs need to know.
        reruns: whether its pullback may run parts of the function again (torch.utils.checkpoint).
        nested: whether it is a derivative's derivative.
        looks: whether operations can be looked at, so that some are kept by name.
        plan: what it keeps by name, and leaves out as it runs again.
    """

    def __init__(
        self,
        traversal: Traversal,
        fn: object,
        flat: Sequence[Any],
        spec: pytree.Spec,
        transformed: bool,
        carriers: bool,
        proves: bool,
    ) -> None:
        self.code = code_of(fn)
        keys = dict.fromkeys(sorted({x.key for x in flat if isinstance(x, Handle)}))  # as dicts may differ in order
        self.spec, self.keys = spec, tuple(keys)
        self.handles = [(place, x.index) for place, x in enumerate(flat) if isinstance(x, Handle)]
        first = {x.key: place for place, x in reversed([*enumerate(flat)]) if isinstance(x, Handle)}
        self.primals = [first[key] for key in self.keys]
        self.tensors = [p for p, x in enumerate(flat) if isinstance(x, torch.Tensor) and not isinstance(x, Handle)]
        self.grad, self.transformed, self.depth = torch.is_grad_enabled(), transformed, traversal.depth()
        self.modes, self.autocasts = len(own_modes()), autocasts()  # that are around it
        operands = [flat[place].primal for place in self.primals] + [flat[place] for place in self.tensors]
        moves = [self.grad and private.is_differentiated(x) for x in operands]
        self.wanted = [i for i, own in enumerate(moves) if own]
        self.trained = tuple([key for key, own in zip(self.keys, moves, strict=False) if own])
        self.moving = [i for i, own in enumerate(moves[len(keys) :]) if own]
        moving = {self.tensors[i] for i in self.moving}
        self.forms: list[tuple[int, object]] = []
        self.dressed = False  # whether tensors are of classes of the user's, or have attributes
        for place, x in enumerate(flat):
            if isinstance(x, Handle):
                self.forms.append((_HANDLE, x.index))
            elif isinstance(x, torch.Tensor):
                self.forms.append((_TENSOR, (type(x), x.dtype, x.ndim, place in moving)))
                self.dressed = self.dressed or type(x) not in _PLAIN or bool(vars(x).keys() - {OWNER})
            else:
                self.forms.append((_VALUE, x))
        # ---- what the table says of its unit
        rows = [traversal.table.units[unit] for unit in dict.fromkeys(key.unit for key in keys)]
        self.unit = self.keys[0].unit if keys else unit_of(traversal, flat)
        self.name = f"unit {self.unit!r}"
        self.compiles = any(row.compile for row in rows)
        self.remat, self.nested = any(row.remat for row in rows), self.depth > 1
        self.memory = next((row.activations for row in rows if row.activations != DEVICE), DEVICE)
        self.names = next((row.names for row in rows if row.names != NO_NAMES), NO_NAMES)
        self.named = self.names != NO_NAMES
        self.looks = not (self.nested or self.compiles or transformed)
        self.casts = _compute_dtype([*rows, *_full_rows(traversal, flat)], traversal.table.outside)
        self.carriers, self.proves = carriers, proves
        self.collectors = open_here()
        special = transformed or self.remat or self.compiles or carriers or self.collectors or self.dressed
        self.straight = bool(self.wanted) and self.memory == DEVICE and not special
        # ---- what its first run shows
        self.collects = False
        self.proven = self.repeated = self.pulled = self.reruns = False
        self.plan: Plan | None = None
        self.opaque: set[type] = set()  # objects that it returns, which hold no tensor
        self.returns: set[type] = set()
        self.constants: Sequence[weakref.ref[torch.Tensor]] = ()  # that it closes over

    def fits(self, traversal: Traversal, fn: object, flat: Sequence[Any], spec: pytree.Spec, transformed: bool) -> bool:
        """Tells whether a call has this signature."""
        if code_of(fn) is not self.code or open_here() != self.collectors:
            return False
        if transformed != self.transformed or torch.is_grad_enabled() != self.grad or spec != self.spec:
            return False
        if transformed and traversal.depth() != self.depth:
            return False
        if (len(own_modes()) if function_modes_on() else 0) != self.modes or autocasts() != self.autocasts:
            return False
        for x, (kind, own) in zip(flat, self.forms, strict=True):
            if kind == _HANDLE:
                if type(x) is not Handle or x.index != own or x.owner is not traversal:
                    return False
            elif kind == _TENSOR:
                if not isinstance(x, torch.Tensor):
                    return False
                attributes = x.__dict__
                if attributes and not self.dressed and (len(attributes) > 1 or OWNER not in attributes):
                    return False
                moves = self.grad and (private.is_differentiated(x) if transformed else x.requires_grad)
                if (type(x), x.dtype, x.ndim, moves) != own:
                    return False
            elif x is not own and (type(x) is not type(own) or type(x) not in VALUES or x != own):
                return False
        for each in self.constants:
            constant = each()
            if constant is not None and constant.requires_grad:
                return False
        return True


def code_of(fn: object) -> object:
    """What functions have in common that are made anew in each run."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(getattr(fn, "__func__", fn), "__code__", type(fn))


def unit_of(traversal: Traversal, flat: Sequence[object]) -> str:
    """Names the unit of a call that is given full leaves."""
    index = next((own for x in flat if (own := traversal.origins.get(id(x))) is not None), None)
    return "of full params" if index is None else traversal.layout.rows[index].unit


def _full_rows(traversal: Traversal, flat: Sequence[object]) -> list[Row]:
    """The rows of units whose leaves a call is given in full, as nothing else is done with those."""
    indices = [i for x in flat if (i := traversal.origins.get(id(x))) is not None]
    units = dict.fromkeys(traversal.layout.rows[i].unit for i in indices)
    return [traversal.table.units[unit] for unit in units if unit != ROOT]


def _compute_dtype(rows: Sequence[Row], outside: torch.dtype | None) -> torch.dtype | None:
    """The dtype of a call's autocast, which its rows say: `outside`, that of its caller, if there are none."""
    wanted = {row.autocast for row in rows} or {outside}
    if len(wanted) > 1:
        raise noted(
            ValueError(
                f"A unit's call is given leaves of {', '.join(f'unit {row.unit!r}' for row in rows)}, which autocast "
                f"has in {' and '.join(map(str, wanted))}; expected one dtype. Let a pattern match all of them or none."
            )
        )
    (dtype,) = wanted
    return dtype
