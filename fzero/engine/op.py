"""The engine: a unit's call gathers its params, runs, frees them, and pulls cotangents back.

Two forms. Without recomputation the unit's own graph is kept and the gathered buffers' storage is emptied in between;
with it (`remat`) only the shards and the inputs are kept, and what has a name. Both are one node for who is outside.
Where nothing needs one (`Signature.straight`), runs after the first are a part of the graph outside: `engine.straight`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from fzero.base import hooks, private, pytree
from fzero.base.ambient import functions_seen
from fzero.base.context import proves, within
from fzero.base.follow import is_pushed
from fzero.base.node import Tensors, apply, own_jointly
from fzero.base.places import Place, definition_of
from fzero.base.random import seeded
from fzero.base.refusals import noted
from fzero.base.replay import Keeping, Recording, Replaying
from fzero.base.thread_state import SET_GRAD_ENABLED
from fzero.engine.activations import Inputs, Saved
from fzero.engine.compiled import compiled
from fzero.engine.named import Named, Unit, looking
from fzero.engine.pullback import PulledOp
from fzero.engine.signature import Signature
from fzero.engine.surroundings import Surroundings, closed
from fzero.engine.traversal import Traversal, inside
from fzero.engine.written import Memories, leaf_of
from fzero.purity import check
from fzero.purity.collectives import current as collectives
from fzero.purity.observer import Impure, one_level, refusal
from fzero.purity.trial import Trial
from fzero.stores.memories import DEVICE
from fzero.table.layout import Key
from fzero.table.placements import marks_of, notes

NESTED = "saved tensor hooks in a derivative's derivative"
Around = Callable[..., contextlib.AbstractContextManager[object]]


class UnitOp(PulledOp):
    """A unit's call: gather, run, free; and to pull back, gather again into the same storage, or recompute.

    Args:
        fn: what runs; `eager` the same without a compiler.
        flat: its arguments, flat; `spec` their structure, with this call's order of entries.
        around: `around(args[0])` surrounds the pullback, which may run parts of the function again.
    """

    # what the first run showed, if it was the first under its signature, until it has run again
    _first: Trial | None = None

    def __init__(
        self,
        traversal: Traversal,
        signature: Signature,
        fn: Callable[..., object],
        eager: Callable[..., object],
        flat: Sequence[object],
        spec: pytree.Spec,
        around: Around | None,
        seed: int,
    ) -> None:
        transformed = signature.transformed
        if signature.wanted or transformed:  # or nothing runs it again
            self.ambient = Surroundings(traversal.device)
        self.seed, self.traversal, self.signature = seed, traversal, signature
        self.unit_fn, self._eager = fn, eager
        self.keys, self.name = signature.keys, signature.name
        for key in self.keys:
            if traversal.uses[key].axis.ranks > 1:
                self.reduced = len(self.keys)
        # a derivative of a derivative recomputes anyway: keep no graph for it
        self.recompute = signature.nested or (signature.remat and not (signature.looks and looking.get() is not None))
        self._flat, self._spec, self._around, self._notes = flat, spec, around, notes.get()
        self._noted = marks_of(self._notes, [flat[place] for place in signature.tensors]) if self._notes else ()
        self._fulls, self._arriving, self.wanted = {}, {}, signature.wanted
        self.pushes = transformed
        self.number = traversal.schedule.called(signature.keys, self)

    def fn(self, *tensors: torch.Tensor) -> Tensors:  # type: ignore[override]
        """The call as a pure function of stored buffers and tensors, under any derivative."""
        leaves: dict[int, torch.Tensor] = {}
        for key, primal in zip(self.keys, tensors, strict=False):
            leaves.update(self.traversal.layout.groups[key].views(self.traversal.uses[key].apply(primal)))
        inputs = tensors[len(self.keys) :]
        alone = one_level(self.unit) if private.level() else _NOTHING
        hooks_off = torch.autograd.graph.disable_saved_tensors_hooks(NESTED)
        with hooks_off, alone, torch.set_grad_enabled(self.signature.grad):
            out = self._called(self._runs, leaves, inputs)
        return tuple(self._let_out(out, leaves, inputs, ()))

    @property
    def _runs(self) -> Callable[..., object]:
        return self._eager if private.level() else self.unit_fn

    def applied(self, carriers: Sequence[object]) -> object:
        """The call's result.

        Args:
            carriers: objects among its arguments whose content the function may change.
        """
        flat, signature = self._flat, self.signature
        transformed = signature.transformed
        operands: list[Any] = [*map(self.traversal.tokens.__getitem__, self.keys)]
        operands += map(flat.__getitem__, signature.tensors)
        if transformed:
            needs = private.is_differentiated if signature.grad else is_pushed
            self.wanted = [i for i, x in enumerate(operands) if needs(x)]
        memory = signature.memory
        if memory != DEVICE and self.recompute and self.wanted and not transformed:
            alone = [i for i in self.wanted if i >= len(self.keys)]
            self._inputs = Inputs(operands, alone, memory, f"the inputs of {self.name}")
            self.stand_ins = self._inputs.stand_ins
        if transformed:
            out = apply(self, self.wanted, *operands)
        elif self.wanted:
            own_jointly(out := apply.plainly(self, self.wanted, *operands))
        else:
            out = self.run(tuple(operands), ())
        if self.stand_ins:  # whose tensors lie elsewhere now
            held = list(flat)
            for i, own in self.stand_ins.items():
                held[signature.tensors[i - len(self.keys)]] = own
            self._flat, self.stand_ins = held, {}
        if self.recompute or transformed:  # and a loop goes on, whose variables the function may close over
            eager, self._eager = self._eager, closed(self._eager)
            if self._eager is not eager:
                self.unit_fn = compiled(self._eager) if signature.compiles else self._eager
        return self._outside(out, carriers)

    # ---- forward

    def run(self, tensors: Tensors, wanted: Sequence[int]) -> Tensors:
        schedule = self.traversal.schedule
        # also where it is recomputed: the graph, which ends with the run, shows what no derivative goes through
        # a node is applied unseen by modes and by the classes of its operands, and what it runs is not
        seen = [functions_seen(self.ambient.functions)] if self.signature.transformed else ()
        run = functools.partial(self._forward, tensors, wanted, bool(wanted), schedule.gather_next)
        out = within(seen, run) if seen else run()
        if self.recompute:
            self._pull = None
        if wanted and not self.recompute:
            self._put_down()
        elif wanted and schedule.is_last():  # the pullback starts with what is gathered last
            for key, full in self._fulls.items():
                schedule.keep(key, full)
        if self.recompute or not wanted:
            self._fulls = {}
        return out

    def _forward(
        self, tensors: Tensors, wanted: Sequence[int], derived: bool, gather_ahead: Callable[[], None]
    ) -> Tensors:
        """Runs the unit's function.

        Args:
            wanted: positions to differentiate now: a graph is kept for them.
            derived: whether something differentiates this run, now or by running it again.
        """
        traversal, signature, count = self.traversal, self.signature, len(self.keys)
        schedule, groups, given = traversal.schedule, traversal.layout.groups, tensors[count:]
        self._fulls = {}
        leaves: dict[int, torch.Tensor] = {}
        differentiated: dict[Key, list[torch.Tensor]] = {}
        fulls: list[torch.Tensor] = []
        for position, key in enumerate(self.keys):
            full, own = schedule.take(key)
            fulls.append(full)
            if own:
                self._fulls[key] = full
            views = groups[key].cut(full)
            if position in wanted:
                differentiated[key] = [*map(torch.Tensor.requires_grad_, views.values())]
            leaves.update(views)
        gather_ahead()
        inputs: dict[int, torch.Tensor] = {}
        for position in wanted:
            if position >= count:
                inputs[position] = tensors[position].requires_grad_()
        entered = private.versions((*fulls, *given))
        memories: Memories = ()
        # what runs again is not proven before it has, in a pullback
        again = self.recompute and not signature.transformed and wanted and not signature.repeated
        tries = self._first is None and (again or not signature.proven) and signature.proves and proves.get()
        if again or not signature.proven:
            memories = [(x, leaf_of(groups[key])) for x, key in zip(fulls, self.keys, strict=True)]
        around: list[contextlib.AbstractContextManager[object]] = []
        if signature.nested and derived and not signature.compiles:
            around.append(one_level(self.unit))
        saves = bool(wanted) and not self.recompute and signature.memory != DEVICE
        enabled, refused = torch.is_grad_enabled(), hooks.allow()
        SET_GRAD_ENABLED(signature.grad)
        try:
            trial = traced = None
            if tries:
                what = f"the activations of {self.name}"  # hooks are at work as in the real run, and put nothing away
                tried = [hooks.putting_away(what, lambda x: x.detach(), torch.Tensor.detach)] if saves else []
                trial = within([*tried, *around], functools.partial(self._tried, leaves, given, memories))
                run = functools.partial(self._compared, trial, leaves, given)
            elif self._first is not None:
                run = functools.partial(self._repeated, leaves, given, memories)
            else:
                run = functools.partial(self._called, self.unit_fn, leaves, given)
            if saves and not signature.compiles:
                self._saved = Saved(signature.memory, f"the activations of {self.name}", [*fulls, *given])
                around.append(self._saved.hooks())
            if signature.named:
                traced = self._traced(wanted, [*leaves.values(), *given])
                if traced is not None:
                    around.append(traced.here())
            with seeded(self.seed):
                out = within(around, run) if around else run()
            if traced is not None:
                self._has_run(traced, out, [x for x in given if x.requires_grad])
            put = self._let_out(out, leaves, given, fulls)
        finally:
            SET_GRAD_ENABLED(enabled)
            if refused:
                hooks.refuse_again(refused)
        if private.versions((*fulls, *given)) != entered:
            self._refuse_writes(fulls, entered)
        first = trial is not None or not (signature.proves or signature.proven)
        self.real, outputs = [], []
        for i, x in enumerate(put):
            if x.is_floating_point() or x.is_complex():
                self.real.append(i)
                outputs.append(x)
        if first:
            if not signature.proves:
                check.note(self.unit, None)
            signature.proven = True
            # of several outputs the sums inside have another order, and who writes to one of several views is refused
            several = len(outputs) > 1 or any(map(private.is_one_of_several, outputs))
            others = several or signature.reruns or signature.collects or self._notes
            signature.straight = signature.straight and trial is not None and not others
        if wanted:
            filled = functools.partial(self._refilled, leaves, given) if signature.reruns else None
            self._pull = differentiated, inputs, outputs, filled
        return tuple(map(torch.Tensor.detach, put))

    def _tried(self, leaves: Mapping[int, torch.Tensor], tensors: Sequence[torch.Tensor], memories: Memories) -> Trial:
        """A trial run, which is dropped."""
        indices = list(leaves)

        def run(given: Sequence[torch.Tensor]) -> Sequence[object]:
            return self._called(self._eager, dict(zip(indices, given, strict=False)), given[len(indices) :])

        with self._observing():  # or ranks would wait for one that the real run refuses
            given: Sequence[torch.Tensor] = [*leaves.values(), *tensors]
            outer = [cast(torch.Tensor, self._flat[place]) for place in self.signature.tensors]
            return Trial(f"Unit {self.unit!r}", run, given, memories, self.seed, outer=outer, defined=self._defined)

    @property
    def _defined(self) -> Place | None:
        return definition_of(self._eager)

    def _observing(self) -> contextlib.AbstractContextManager[object]:
        return _NOTHING if collectives.get() is not None else self.traversal.collectives(f"Unit {self.unit!r}")

    def _compared(
        self, trial: Trial, leaves: Mapping[int, torch.Tensor], tensors: Sequence[torch.Tensor]
    ) -> Sequence[object]:
        """The flat result of the real run, which must be as the trial was."""
        signature = self.signature
        with self._observing():
            out = trial.compared(functools.partial(self._called, self._eager, leaves, tensors))
        signature.reruns = trial.reruns or trial.look.reruns
        signature.opaque, signature.constants = trial.opaque, [*trial.look.constants.values()]
        check.note(self.unit, len(trial.look.captured))
        if self.recompute and not (signature.transformed or signature.repeated):  # a level has operations of its own
            trial.keep(out)
            self._first = trial
        return self._called(self.unit_fn, leaves, tensors) if signature.compiles else out

    def _repeated(
        self, leaves: Mapping[int, torch.Tensor], tensors: Sequence[torch.Tensor], memories: Memories
    ) -> Sequence[object]:
        """The flat result of the first run in a pullback, which must do what the one before it did."""
        signature, first = self.signature, self._first
        assert first is not None
        run = functools.partial(self._called, self._eager, leaves, tensors)
        out = first.repeated(run, [*leaves.values(), *tensors], memories)
        self._first, signature.repeated = None, True
        return self._called(self.unit_fn, leaves, tensors) if signature.compiles else out

    @contextlib.contextmanager
    def _refilled(self, leaves: Mapping[int, torch.Tensor], tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Around a pullback that may run parts of the function again (torch.utils.checkpoint)."""
        filled = list(self._flat)
        for place, index in self.signature.handles:
            filled[place] = leaves[index]
        for place, x in zip(self.signature.tensors, tensors, strict=True):
            filled[place] = x
        args, _ = pytree.unflatten(self._spec, filled)
        with inside({(self.traversal, index): x for index, x in leaves.items()}):
            with self._around(args[0]) if self._around else _NOTHING:
                yield

    def _traced(
        self, wanted: Sequence[int], given: Sequence[torch.Tensor]
    ) -> Recording | Keeping | Replaying | None:
        """What looks at the function, where something is kept by name."""
        signature = self.signature
        if not wanted or not signature.looks:
            if self._saved is None:
                self.traversal.named.append(None)
            return None
        if not (again := isinstance(self._saved, Named)):
            what = f"the activations of {self.name}"
            self._saved = Named(signature.names, signature.memory, what, signature.plan)
        assert isinstance(self._saved, Named)
        return self._saved.second(given, self._first is None) if again else self._saved.first(given)

    def _has_run(
        self, run: Recording | Keeping | Replaying, out: Sequence[object], inputs: Sequence[torch.Tensor]
    ) -> None:
        signature = self.signature
        if isinstance(run, Replaying):
            if run.plan is not None and not run.is_followed():
                what = "calls other operations when it runs again, with the same arguments (fz.remat with names)"
                raise noted(refusal(f"Unit {self.unit!r}", Impure(what, None, _SAME), self._defined))
            return
        assert isinstance(self._saved, Named)
        self.traversal.named.append({*run.names})
        outputs = [x for x in out if isinstance(x, torch.Tensor)]
        if isinstance(run, Recording):
            run.end(outputs)
            signature.plan = run.planned(signature.names.all)
            look = looking.get()
            if look is not None:
                look(Unit(self.unit, run, inputs))
        elif not run.is_followed():
            signature.plan = None  # it branches: the next one shows what this does
        self._saved.keep(run, outputs)


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
_SAME = "Let nothing but its arguments decide what it computes."
