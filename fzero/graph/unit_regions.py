"""A run of the step's function on tensors without values: each unit that it calls is a region of the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fzero.base import collecting, private, pytree
from fzero.base.carriers import changing, flatten_first
from fzero.base.context import during, proves
from fzero.base.replay import naming
from fzero.base.thread_state import without_values
from fzero.comm import pieces
from fzero.comm.axis import Axis
from fzero.engine.called import CalledOp
from fzero.engine.dispatch import autocast_to
from fzero.engine.function import given_out
from fzero.engine.outcome import split_both
from fzero.engine.outlets import Dressed, Same
from fzero.engine.schedule import first_runs
from fzero.engine.signature import Signature
from fzero.engine.traversal import Traversal, autocast
from fzero.graph import of_torch, operators
from fzero.graph.errors import need_open, need_plain
from fzero.graph.operators import Effects, like
from fzero.graph.regions import Regions
from fzero.graph.signatures import Identity, ambient_of, form_of, meta_of
from fzero.graph.trace import Traced, trace
from fzero.table.handle import Handle, storage_of
from fzero.table.layout import Key
from fzero.table.placements import marks_of, noted, notes, noting
from fzero.table.spec import Spec

# the graphs of a step's function, the form of its outputs, and that of its aux and of what it collects
FunctionGraphs = tuple[Traced, pytree.Split, pytree.Split]


class UnitRegions(Traversal, Regions):
    """A traversal whose units are regions, and whose leaves are handles of buffers without values."""

    def __init__(self, own: Traversal, axis: Axis, decompositions: of_torch.Table, inline: bool, derived: bool) -> None:
        super().__init__(own.layout, own.table, own.uses, (), own.device, axis)
        Regions.__init__(self, without_values(), decompositions, inline)
        self.axis, self.effects = axis, Effects()
        self.means, self.run, self.mask = own.means, own.run, own.mask
        self.derived = derived
        self.acts = True
        self.seeds: list[int] = []  # of each region's call, the number of its seed in the run
        self._alike: dict[object, Any] = {}
        self.keys = list(self.layout.groups)
        self.drawn = 0
        self.fulls: list[tuple[int, torch.Tensor]] = []  # group, its buffer, for each differentiated use
        self.inlined = False

    def trace(
        self, step: Spec, structure: pytree.Spec, inputs: Sequence[object], wanted: Sequence[int]
    ) -> FunctionGraphs:
        """Traces the step's function.

        Args:
            structure: of the params.
            wanted: the places of the flat inputs that are differentiated.
        """
        flat, spec = pytree.flatten(tuple(inputs))
        places = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor)]
        splits = list[pytree.Split]()

        def run(given: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Sequence[int], Sequence[torch.Tensor]]:
            filled = list(flat)
            for place, x in zip(places, given, strict=True):
                filled[place] = x
            own: tuple[Any, ...] = pytree.unflatten(spec, filled)
            tree = pytree.unflatten(structure, self.leaves({}))
            about = own, self.table.sequence
            known = noted(self.tensor, first_runs(self.axis.records, step.fn, self.derived, about), about, None)
            with (
                autocast(self.device, self.table.outside),
                torch.set_grad_enabled(self.derived),
                self.running(),
                during(proves, False),
                during(notes, known),
                during(collecting.current, self.collected),
            ):
                out = step.fn(tree, *own)
                out = pytree.map_leaves(given_out, out)
            outputs, aux = split_both(step, out)
            need_open(pytree.leaves(out))
            others = pytree.Split((aux.join(*aux.leaves), {**self.collected}), pytree.is_tensor)
            splits[:] = outputs, others
            (real, rest), (more,) = outputs.leaves, others.leaves
            outputs.leaves, others.leaves = [], []
            put = [*real, *rest, *more]
            fulls = [full for _, full in self.fulls]
            memories = {storage_of(x) for x in (*given, *fulls)}
            put = [x.clone() if storage_of(x) in memories else x for x in put]
            return put, range(len(real)), fulls

        self.next_seed, self.traced_unit = self._next, self.unit_call
        parts = during(operators.tracing, self), during(pieces.graph, self.effects), during(naming, operators.NAMED)
        try:
            with self.mode, parts[0], parts[1], parts[2]:
                given = [like(flat[i]) for i in places]
                stays = [i for i, key in enumerate(self.keys) if not key.unit]
                traced = trace(run, given, [places.index(i) for i in wanted], self.decompositions, stays=stays)
        finally:
            self.uses, self.tokens = {}, {}  # or the state's buffers would be held
            del self.next_seed, self.traced_unit
        for each in (traced, *self.traced):
            need_plain((*each.forward.graph.nodes, *each.pullback.graph.nodes))
        if self.inlined and any(traced.draws):
            raise ValueError(
                "jit: the function differentiates a unit itself and draws random numbers, which would be others in a "
                "graph. Leave jit out."
            )
        return traced, splits[0], splits[1]

    def _next(self) -> int:
        self.drawn += 1
        return 0

    # ---- what the graph's operators return

    def gathered(self, group: int) -> torch.Tensor:
        key = self.keys[group]
        use = self.uses[key]
        return torch.empty(self.layout.groups[key].numel, dtype=use.compute, device=use.device)

    # ---- leaves

    def full(self, key: Key) -> torch.Tensor:
        """The full buffer of a group, for one use."""
        group = self.keys.index(key)
        with private.below_transforms():  # whoever differentiates the function goes on through it at its own level
            full = operators.GATHER(group)
            if self.derived and not self.layout.groups[key].row.frozen:
                full = full.detach().requires_grad_()
                self.fulls.append((group, full))
        return full

    def leaves(self, primals: Mapping[Key, torch.Tensor]) -> list[torch.Tensor]:
        out: dict[int, torch.Tensor] = {}
        for key, group in self.layout.groups.items():
            if key.unit:
                stand_in = self.gathered(self.keys.index(key))
                if self.derived and not group.row.frozen:
                    stand_in = stand_in.requires_grad_()
                self.tokens[key] = stand_in
                rows, dtype = self.layout.rows, self.uses[key].compute
                for slot in group.slots:
                    out[slot.leaf] = Handle(self, key, slot.leaf, rows[slot.leaf], dtype, stand_in, slot.shape)
            else:
                self._full_leaves(out, (key,), group.views(self.full(key)).values())
        return [out[index] for index in range(len(self.layout.rows))]

    def read(self, handle: Handle) -> torch.Tensor:
        """A unit's leaf in full, outside of that unit."""
        return self.layout.groups[handle.key].views(self.full(handle.key))[handle.index].clone()

    # ---- units

    def unit_call(
        self, fn: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object], seed: int | None
    ) -> object:
        """A unit's call: a region of the graph, or, where the function differentiates it, operators of that."""
        number = self.drawn
        if seed is None:
            self.drawn += 1
        flat, spec = flatten_first((args, kwargs))
        carriers = changing((args, kwargs))
        signature = Signature(self, fn, flat, spec, False, bool(carriers), False)
        op = CalledOp.__new__(CalledOp)
        op.traversal, op.signature, op.name, op._eager = self, signature, signature.name, fn
        fulls = [self.full(key) for key in signature.keys]
        tensors: list[Any] = [flat[place] for place in signature.tensors]
        op._flat, op._spec, op._notes, op._noted = flat, spec, notes.get(), marks_of(notes.get(), tensors)
        with autocast_to(self, signature.casts):
            if self.inline or private.level() or any(map(private.is_wrapped, tensors)):
                self.inlined = True
                out = op._called(fn, self._views(signature.keys, fulls), tensors)
                op._recipes = range(len(out))
                return op._outside(out, carriers)  # type: ignore[arg-type]
            operands = [*fulls, *tensors]
            wanted = [i for i, x in enumerate(operands) if x.requires_grad and signature.grad]
            traced = self._known(op, operands, wanted, len(fulls))
            self.traced.append(traced)
            self.seeds.append(number)
            return op._outside(self.call_region(len(self.traced) - 1, wanted, operands), carriers)

    def _views(self, keys: Sequence[Key], fulls: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        views = [self.layout.groups[key].views(full) for key, full in zip(keys, fulls, strict=True)]
        return {index: view for own in views for index, view in own.items()}

    def _known(self, op: CalledOp, operands: Sequence[torch.Tensor], wanted: Sequence[int], count: int) -> Traced:
        """The region of a call, which may have been traced for another one that is alike."""
        signature, flat = op.signature, op._flat
        numbers = {key: i for i, key in enumerate(signature.keys)}
        forms = [
            (numbers[x.key], self.layout.key_of[x.path][1].offset, tuple(x.shape))
            if isinstance(x, Handle)
            else ("tensor", type(x))
            if isinstance(x, torch.Tensor)
            else form_of(x)
            for x in flat
        ]
        metas = [meta_of(x) for x in operands]
        own = signature.remat, signature.names, signature.grad
        rest = *map(tuple, (forms, metas, wanted)), op._spec, ambient_of(self.device), own
        acts = op._notes is not None and bool(op._notes.first.acting)  # units may do other things with slices
        which = Identity(op) if noting() is not None else Identity(op._eager) if acts else form_of(op._eager)
        key = which, *rest
        known = self._alike.get(key)
        if known is not None:
            traced, op._spec_out, op._takes, op._recipes, signature.collects = known
            return traced
        recompute = signature.names.save if signature.remat else None

        def run(given: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Sequence[int], Sequence[torch.Tensor]]:
            leaves = self._views(signature.keys, given[:count])
            with torch.set_grad_enabled(signature.grad):
                out = op._called(op._eager, leaves, given[count:])
            put = op._let_out(out, leaves, given[count:], given[:count])
            return put, [i for i, x in enumerate(put) if pytree.is_real(x)], ()

        with self.mode, of_torch.untraced():
            given = [like(x) for x in operands]
            traced = trace(run, given, wanted, self.decompositions, recompute, range(count))
        of_call = (Dressed, torch.Tensor)  # what is this call's own
        recipes = [x.value if isinstance(x, Same) else x for x in op._recipes]
        if not signature.carriers and not any(isinstance(x, of_call) for x in recipes):
            self._alike[key] = traced, op._spec_out, op._takes, op._recipes, signature.collects
        return traced
