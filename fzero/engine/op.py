"""The engine: a unit's call gathers its params, runs, frees them, and pulls cotangents back.

Two forms. Without recomputation the unit's own graph is kept and the gathered buffers' storage is emptied in between;
with it (`remat`) only the shards and the inputs are kept. Where some of it is kept by name, the graph is, and what it
saved is computed again. All are one `Node` of the outer derivative.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from fzero.base import hooks, private
from fzero.base.edges import is_users
from fzero.base.interrupts import as_found
from fzero.base.node import Op, Tensors, apply, edges_to, gradients, joint_outputs, refuse_foreign_leaves
from fzero.base.pytree import is_real
from fzero.capture.again import Again
from fzero.capture.handle import Seen, seen
from fzero.capture.second_run import refusing_twice
from fzero.capture.watch import OneLevel, Watch, is_strict, leaf_of
from fzero.comm.axis import done
from fzero.engine.activations import Inputs, Saved
from fzero.engine.call import Call
from fzero.engine.halves import Part, Split
from fzero.engine.later import Later
from fzero.engine.recorded import Recorded
from fzero.engine.traversal import Traversal
from fzero.engine.written import Memories, named, refusing_uncounted, unit_pulled
from fzero.purity.observer import current
from fzero.stores.put import DEVICE, Memory
from fzero.table.layout import Key
from fzero.table.names import NO_NAMES, Names

NESTED = "saved tensor hooks in a derivative's derivative"


@dataclass(eq=False)
class Pull:
    """The kept graph of one first-order run of a unit."""

    keys: list[Key]
    leaves: list[list[torch.Tensor]]
    inputs: dict[int, torch.Tensor]
    outputs: list[torch.Tensor]
    memories: Memories
    surroundings: Callable[[], contextlib.AbstractContextManager[object]]


class UnitOp(Op):
    """A unit's call: gather, run, free; and to pull back, gather again into the same storage, or recompute."""

    def __init__(
        self,
        traversal: Traversal,
        call: Call,
        remat: bool,
        seed: int,
        number: int,
        memory: Memory = DEVICE,
        names: Names = NO_NAMES,
    ) -> None:
        keys = list(call.primals)
        unit = traversal.layout.groups[keys[0]].unit if keys else "of full params"

        def pure(*tensors: torch.Tensor) -> Tensors:
            leaves: dict[int, torch.Tensor] = {}
            for key, primal in zip(keys, tensors, strict=False):
                leaves.update(traversal.layout.groups[key].views(traversal.uses[key].apply(primal)))
            # what they would run again later is not surrounded by what this run finds
            one_level = OneLevel(unit) if private.level() else contextlib.nullcontext()
            with torch.autograd.graph.disable_saved_tensors_hooks(NESTED):
                return call.body(leaves, tensors[len(keys) :], one_level)

        super().__init__(pure, seed, traversal.device)
        self.reduced = len(keys) if any(traversal.uses[key].axis.ranks > 1 for key in keys) else 0
        # a derivative of a derivative recomputes anyway: keep no graph for it
        self._nested = private.level() > 1
        self.recompute = call.recomputes = remat or self._nested
        # then its graph is kept, and of what that saved what has a name
        self._names, self._gives_names = names, names != NO_NAMES
        if self._nested or call.compiles or call.facts.whole:
            self._names = NO_NAMES
        elif self._gives_names:
            self.recompute = False
        self.traversal, self.keys, self.call = traversal, keys, call
        self.number = number
        self.unit = call.unit = unit
        self.name = f"unit {self.unit!r}"
        self._memory = memory
        self._pull: Pull | None = None
        self._fulls: dict[Key, torch.Tensor] = {}  # of this call's own graph
        self._compiles = call.compiles
        self._seen, self._records, self._watched = seen.get() or Seen(), torch.is_grad_enabled(), False
        self._arriving: dict[Key, Callable[[], None]] = {}  # to be waited for before the graph is pulled back
        self._inputs: Inputs | None = None  # that lie elsewhere meanwhile
        self._saved: Saved | Recorded | None = None  # what the graph saved, elsewhere or to be computed again
        self.used = False
        # under a single vjp what a unit closes over is no part of any graph: one run shows the mistake
        self._suspicious = not (traversal.schedule.on_track and private.single_level()) or is_strict()
        traversal.schedule.runs(self)

    def applied(self) -> object:
        """The call's result."""
        operands, wanted = self.call.operands()
        inputs = self._put_away(operands, wanted) if self._memory != DEVICE and self.call.recomputes else None
        result = self.call.finish(apply(self, wanted, *operands))
        if inputs is not None:
            self.call.let_go({id(operands[place]): own for place, own in inputs.stand_ins.items()})
            self.stand_ins = {}
        return result

    def _put_away(self, operands: Sequence[torch.Tensor], wanted: Sequence[int]) -> Inputs | None:
        """Puts the inputs into another memory that only the recomputation needs; none where more levels do."""
        if not (private.single_level() or not private.transforms()) or self.call.first:
            return None
        count = len(self.keys)
        alone = [place for place in wanted if place >= count and self.call.is_alone(place - count)]
        self._inputs = inputs = Inputs(operands, alone, self._memory, f"the inputs of {self.name}")
        self.stand_ins = inputs.stand_ins
        return inputs

    @property
    def runs_again(self) -> bool:  # type: ignore[override]
        return self.recompute or self._pull is None

    def restored(self, saved: Tensors) -> Tensors:
        return self._inputs.restored(saved) if self._inputs is not None else saved

    def run(self, tensors: Tensors, wanted: Sequence[int]) -> Tensors:
        schedule = self.traversal.schedule
        # also where it is recomputed: the graph, which ends with the run, shows what no derivative goes through
        out = self._forward(tensors, wanted, bool(wanted), schedule.gather_next)
        if self.recompute:
            self._pull = None
        if not wanted:
            self._fulls = {}
        elif self.recompute:
            if schedule.is_last():
                for key, full in self._fulls.items():
                    schedule.keep(key, full)
            self._fulls = {}
        elif schedule.is_last():  # the pullback starts with what is gathered last
            self._arriving = dict.fromkeys(self._fulls, done)
        else:
            self._empty()
        return out

    def back(
        self, tensors: Callable[[], Tensors], wanted: Sequence[int], cotangents: Sequence[torch.Tensor | None]
    ) -> dict[int, torch.Tensor] | None:
        with self.traversal.turn, as_found():
            return self._back(tensors, wanted, cotangents)

    def _back(
        self, tensors: Callable[[], Tensors], wanted: Sequence[int], cotangents: Sequence[torch.Tensor | None]
    ) -> dict[int, torch.Tensor] | None:
        schedule = self.traversal.schedule
        keep = ends = self.traversal.retain_graph or private.keeps_graph()
        if self.used:
            raise RuntimeError(used_up(f"unit {self.unit!r}"))
        gather_previous = functools.partial(schedule.gather_previous, self)
        if self.recompute:
            with torch.no_grad():
                self._run_again(tuple([t.detach() for t in tensors()]), wanted, gather_previous)
            keep = False
            if schedule.frees:
                schedule.finish_reductions()
        elif self._pull is None:
            return None
        else:
            for key, full in self._fulls.items():
                (self._arriving.pop(key, None) or schedule.refill(key, full))()
            gather_previous()
            if isinstance(self._saved, Recorded):
                self._saved.comes_with(tensors)
        pull = self._pull
        assert pull is not None
        flat = [leaf for leaves in pull.leaves for leaf in leaves]
        inputs = list(pull.inputs.values())
        keys, sizes = pull.keys, [len(leaves) for leaves in pull.leaves]
        late = self.traversal.late  # whether its params' cotangents are for the second half
        if late is not None and (not keys or any(map(self.traversal.wants, keys))):
            late = None
        parts: list[Part] = []
        # not after the run: of each node that was looked at torch keeps a Python object, as long as the graph lives
        if not self._watched:
            refuse_foreign_leaves(pull.outputs, [*flat, *inputs], self._seen.is_of_unit)
        with self._pulling(pull, keep):
            if late is None or self._compiles:
                found = list(gradients(pull.outputs, [*flat, *inputs], cotangents, keep))
            else:
                split = Split(pull.outputs, inputs, flat, shapes_only=bool(self._fulls))
                if not split.native:
                    late.settle(self.traversal.collect)
                found_inputs, early, parts = split.pull(cotangents, keep)
                del split
                found = [*[early.get(i) for i in range(len(flat))], *found_inputs]
        if late is None:
            self._leave()  # of what does not lead to these outputs
        # what the unit does not depend on has none: zeros would meet infinite derivatives before it
        out = {i: g for i, g in zip(pull.inputs, found[len(flat) :], strict=True) if g is not None}
        del found[len(flat) :]
        if late is not None:
            self._empty()  # what is kept of the leaves would keep it
            later = Later(list(zip(keys, sizes, strict=True)), found, flat, parts, keep)
            found, sizes, keys = [], [], []
            at_once = self._compiles and self.number in late.alone
            late.put(self.number, later, self.traversal.collect, at_once)
            del later
        del flat
        if keep:
            self._empty()
        else:
            self._pull, self._fulls = None, {}
            pull.outputs, pull.leaves, pull.memories, pull.surroundings = [], [], (), contextlib.nullcontext
        for key, size in zip(reversed(keys), reversed(sizes), strict=True):
            grads = found[len(found) - size :]
            del found[len(found) - size :]
            shard = self.traversal.collect(key, grads) if self.traversal.wants(key) else None
            if shard is not None:
                out[self.keys.index(key)] = shard
        if not ends:
            self.forget()
        return out

    def _run_again(self, tensors: Tensors, wanted: Sequence[int], gather_ahead: Callable[[], None]) -> None:
        self._forward(tensors, wanted, True, gather_ahead)

    @contextlib.contextmanager
    def _pulling(self, pull: Pull, keep: bool) -> Iterator[None]:
        """Around the pullback of its graph."""
        with (
            private.without_donation() if keep and self._compiles else contextlib.nullcontext(),
            pull.surroundings(),
            unit_pulled(self.unit, pull.outputs, pull.memories, self._watched),
        ):
            yield

    def forget(self) -> None:
        """Lets go of the call: an output lies in an object that the call knows, and leads to the call by its graph."""
        self.used, self._pull, self._inputs, self._saved = True, None, None, None
        self.call.forget()
        del self.call, self.fn

    def _forward(
        self, tensors: Tensors, wanted: Sequence[int], derived: bool, gather_ahead: Callable[[], None]
    ) -> Tensors:
        """Runs the unit's function.

        Args:
            wanted: positions to differentiate now: a graph is kept for them.
            derived: whether something differentiates this run, now or by running it again.
        """
        traversal, count = self.traversal, len(self.keys)
        self._fulls = {}
        leaves: dict[int, torch.Tensor] = {}
        differentiated: list[list[torch.Tensor]] = []
        fulls: list[torch.Tensor] = []
        for position, key in enumerate(self.keys):
            full, own = traversal.schedule.take(key)
            fulls.append(full)
            if own:
                self._fulls[key] = full
            views = traversal.layout.groups[key].cut(full)
            if position in wanted:
                differentiated.append([view.requires_grad_() for view in views.values()])
            leaves.update(views)
        gather_ahead()
        inputs = list(tensors[count:])
        for position in wanted:
            if position >= count:
                inputs[position - count] = inputs[position - count].detach().requires_grad_()
        grad_mode = torch.enable_grad() if self._records else torch.no_grad()
        begin = [
            *(leaf for group in differentiated for leaf in group),
            *(inputs[p - count] for p in wanted if p >= count),
        ]
        for leaf in begin:  # no other unit, and nobody outside, may compute with these
            self._seen.note(leaf, self.unit)
        thorough = (self._suspicious and (derived or traversal.looked_at)) or self.call.facts.watched
        # what is no input shows itself, as an error, or to the watch
        groups = [traversal.layout.groups[key] for key in self.keys]
        memories = [(full, leaf_of(group)) for full, group in zip(fulls, groups, strict=True)]
        guard = contextlib.nullcontext() if thorough or self.call.compiles else private.without_dead_wrappers()
        putting_away: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        recorded = None
        if self._names != NO_NAMES and wanted:
            what, kept = f"the activations of {self.name}", self.call.facts.kept
            self._saved = recorded = Recorded(self._names, self._memory, what, kept)
            putting_away = recorded.hooks()
        elif self._memory != DEVICE and wanted and not (self.recompute or self.call.compiles):
            self._saved = Saved(self._memory, f"the activations of {self.name}", [*fulls, *inputs])
            putting_away = self._saved.hooks()
        constants = self.call.reach.constants if derived and self.call.recomputes else ()
        refusing = refusing_uncounted(lambda: named(memories)), refusing_twice(self.unit, constants)
        with self.surroundings(), hooks.allowed(), putting_away, guard, grad_mode, refusing[0], refusing[1]:
            watch, call = None, self.call
            if thorough and not call.compiles:
                watch = Watch(self.unit, named(memories), map(id, begin), lambda: call.given)
            self._watched = watch is not None
            one_level = OneLevel(self.unit) if self._nested and derived and not self.call.compiles else None
            noting = recorded and recorded.noting(self.call.first or is_strict())
            observer = None
            if watch is not None and self.call.first and current.get() is None:
                observer = traversal.observing(f"Unit {self.unit!r}")
            looks = [x for x in (watch, one_level, noting, observer) if x is not None]
            try:
                out = call.run(leaves, inputs, fulls, derived, self.unit, _together(looks))
            except Again:  # with what is gathered: the other ranks need not run again
                for key, full in self._fulls.items():
                    traversal.schedule.keep(key, full)
                raise
        if recorded is not None:
            recorded.shown(self.unit, inputs)
            self.call.facts = self.call.facts._replace(kept=recorded.keeps_all)
            stand_ins = self._inputs.stand_ins if self._inputs is not None else ()
            traversal.named.append(recorded.settle([(place, tensors[place]) for place in stand_ins], fulls))
        elif self._gives_names:
            traversal.named.append(None)
        if watch is not None and wanted:
            users = any(is_users(type(node)) for node, _ in edges_to(out))
            self.call.facts = self.call.facts._replace(joint=joint_outputs(out), users=users)
        traversal.users = traversal.users or self.call.facts.users
        self.joint = self.call.facts.joint
        if self.call.compiles:  # whose graphs do not say
            self.joint = dict.fromkeys(range(len(out)), frozenset(range(len(out))))
        if wanted:
            self._pull = Pull(
                [self.keys[p] for p in wanted if p < count],
                differentiated,
                {p: inputs[p - count] for p in wanted if p >= count},
                [o for o in out if is_real(o)],
                memories,
                functools.partial(self.call.refilled, leaves, self.call.inner),
            )
            if watch is not None:
                refuse_foreign_leaves(self._pull.outputs, begin, lambda leaf: id(leaf) not in watch.own)
        self.call.inner = (), []
        return tuple(o.detach() for o in out)

    def _leave(self) -> None:
        for activations in (self._inputs, self._saved):
            if activations is not None:
                activations.leave()

    def _empty(self) -> None:
        """Gives back the memory of the gathered buffers; the call's graph still refers to them."""
        for full in self._fulls.values():
            self.traversal.schedule.empty(full)

    def gather_ahead(self) -> None:
        """Starts to gather what the pullback of this call will need, where the pass that is running comes to it.

        That it still exists says nothing: whether what nobody needs is collected yet may differ between ranks.
        """
        node = self.node() if self.node is not None else None
        if node is None or not private.will_run(node):
            return
        for activations in (self._inputs, self._saved):
            if activations is not None:
                activations.start()
        if self.recompute:
            self.traversal.schedule.gather_ahead(tuple(self.keys))
        elif self._pull is not None:
            for key, full in self._fulls.items():
                if key not in self._arriving:
                    self._arriving[key] = self.traversal.schedule.refill(key, full)

    def fetch_ahead(self) -> None:
        """Starts to bring to the device what the gather of this call will begin with."""
        node = self.node() if self.node is not None else None
        if node is not None and private.will_run(node) and (self.recompute or self._pull is not None):
            self.traversal.schedule.fetch_ahead(tuple(self.keys if self.recompute else self._fulls))

    def forget_ahead(self) -> None:
        """Leaves what was gathered ahead and not used."""
        self._leave()
        for key in list(self._arriving):
            self._arriving.pop(key)()
            self.traversal.schedule.empty(self._fulls[key])


@contextlib.contextmanager
def _together(contexts: Sequence[contextlib.AbstractContextManager[object]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def used_up(what: str) -> str:
    return (
        f"The pullback of {what} was used up by an earlier call, which freed what it kept. "
        "Pass retain_graph=True to every call but the last."
    )
