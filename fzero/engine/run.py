"""One run of the step's function: what it returned, and the pullback that it leaves.

Plain autograd differentiates it, as torch.func takes microseconds for each operation; torch.func.vjp where a transform
or another graph goes on through it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fzero.base import private, pytree, refusals
from fzero.base.as_written import need_eager
from fzero.base.follow import is_transformed
from fzero.base.hooks import registered, without_compiled_autograd
from fzero.base.node import edges_to, gradients
from fzero.comm.axis import Axis
from fzero.comm.divergence import failing
from fzero.engine.delivery import Delivery
from fzero.engine.function import call_function, traversal_of
from fzero.engine.halves import Grad, Later, apart_from, pull_first
from fzero.engine.outcome import NO_FIRST_HALF, Outcome, split_both, tensors_of
from fzero.engine.outlets import alike
from fzero.engine.traversal import Traversal
from fzero.engine.written import unwritten
from fzero.state.train_state import TrainState
from fzero.stores.away import Buffer
from fzero.table.counting import Mask
from fzero.table.handle import storage_of
from fzero.table.layout import Key
from fzero.table.spec import Spec


class Ends(NamedTuple):
    """The ends of a run's graph: what its level of torch.func differentiates, or `leaves` in the place of primals."""

    outputs: Sequence[torch.Tensor]
    inputs: Sequence[torch.Tensor]
    primals: dict[Key, torch.Tensor]
    leaves: Mapping[Key, Sequence[torch.Tensor]]

    def params(self) -> list[torch.Tensor]:
        """The leaves, one after the other."""
        return [x for own in self.leaves.values() for x in own]


class Run(Outcome):
    """A forward, and its pullback.

    Args:
        argnums, scale: as in `Outcome`.
        unreduced: cotangents of params stay full and unreduced.
        alone: whether no other run of the same step waits for its pullback meanwhile.
        fused: params may be overwritten once their cotangents are there.
        partial: cotangents of params stay in `reduce` dtype, as others will be added to them.
        mask: as in `Outcome`.
        halves: whether products that give params' cotangents may wait for the second half of a pullback.
    """

    def __init__(
        self,
        step: Spec,
        state: TrainState,
        inputs: Sequence[object],
        argnums: Collection[int] | None,
        seed: tuple[int, ...],
        scale: float,
        unreduced: bool = False,
        alone: bool = True,
        fused: bool = False,
        partial: bool = False,
        mask: Mask | None = None,
        halves: bool = False,
    ) -> None:
        super().__init__(state, inputs, argnums, scale, mask or Mask())
        self.partial, self._pulling, self._overwrites = partial, threading.RLock(), fused and step.donates
        flat, spec = pytree.flatten(tuple(inputs))
        # no graph takes tensors of inference mode
        flat = [x.clone() if isinstance(x, torch.Tensor) and x.is_inference() else x for x in flat]
        traversal, primals, fixed = traversal_of(step, state, seed, unreduced, fused, mask=self.mask)
        self.unreduced: dict[Key, torch.Tensor] = {}  # full cotangents to add before those that are delivered
        self.traversal: Traversal | None = traversal
        traversal.schedule.keeps = alone
        traversal.schedule.frees = fused and traversal.table.remats
        differentiated = [flat[place] for place in self.wanted]
        # what another graph leads to may be among the inputs, or in what the function closes over
        leads_on = torch.is_grad_enabled() and any(x.requires_grad for x in differentiated)
        self.outer = is_transformed() or leads_on
        traversal.straight = not self.outer
        traversal.guards = self.outer and self.mask.partial
        if halves and not self.outer and _is_at_hand(traversal, state.params.axis):
            traversal.begins = {}
        self._leads_on = self.outer  # whether another graph leads to the calls of this one
        returned: list[tuple[pytree.Split, pytree.Split]] = []
        ends = list[Ends]()
        # for the second half of a pullback: what the first has brought, or leaves' and whether the graph stays
        self._rest: dict[Key, Buffer] | tuple[list[Grad], bool] | None = None
        self._used: set[int] | None = None  # takes the leaves that a pullback finds used

        def function(primals: dict[Key, torch.Tensor], wanted: list[torch.Tensor]) -> object:
            filled = list(flat)
            for place, value in zip(self.wanted, wanted, strict=True):
                filled[place] = alike(value, flat[place])
            result = call_function(step, state, traversal, {**primals, **fixed}, pytree.unflatten(spec, filled))
            outputs, others = split_both(step, result)
            self._note_collected(traversal.collected)
            real, carried = map(tuple, outputs.leaves)
            returned[:] = [(outputs, others)]
            carried = carried, tuple(others.leaves[0])
            outputs.leaves, others.leaves = [], []  # which are this level's
            ends[:] = [Ends(real, wanted, primals, traversal.begins or {})]
            return real, carried

        with failing("a forward"):
            if self.outer:
                with refusals.of_hooks_around():
                    run: Any = torch.func.vjp(function, primals, differentiated, has_aux=True)
                real, self._pull, others = run
            else:
                with torch.enable_grad(), private.outside_inference():
                    own = {key: x.detach().requires_grad_() for key, x in primals.items()}
                    found: Any = function(own, [x.detach().requires_grad_() for x in differentiated])
                real, (carried, aux) = found
                real = tuple([x.detach() for x in real])
                others = tuple([x.detach() for x in carried]), tuple([x.detach() for x in aux])
                self._pull = functools.partial(_pulled_plainly, traversal, ends[0])
        self._ends: Ends | None = ends[0]
        self._note(returned[0], real, others)
        self._guarded = guarded(pytree.tensors_in(*flat, *real))

    def pull(
        self,
        cotangent: object,
        retain_graph: bool = False,
        create_graph: bool = False,
        receive: Callable[[Key, torch.Tensor], object] | None = None,
        before: Callable[[Sequence[Key]], object] | None = None,
        into: Mapping[Key, Buffer] | None = None,
    ) -> tuple[dict[Key, Buffer], list[torch.Tensor | None]]:
        """(scaled cotangents of the primals, cotangents of the flat inputs).

        Args:
            receive: takes the reduced cotangent of each group as soon as it is there, in the result's place.
            before: told which groups' unit is about to be pulled back.
            into: sums of earlier microbatches, to which what can be is added; the others are returned.
        """
        with self._pulling:  # one at a time: what is gathered and reduced is the run's own
            cotangents = self._begun(cotangent)
            assert self.traversal is not None
            # whoever differentiates the result too reads it through the graph; otherwise it is delivered outside of it
            follows = self.outer or is_transformed()
            traversal, again = self.traversal, retain_graph or self.outer
            self._leads_on = self._leads_on or create_graph
            traversal.retain_graph = again
            found: dict[Key, Buffer] = {}
            delivery = None
            if not (follows or create_graph):
                delivery = self._delivery(found, receive, into)
            elif self._used is not None:  # the graph is the caller's, and does not say
                self._used.update(range(len(traversal.layout.rows)))
            mode = torch.enable_grad() if create_graph else contextlib.nullcontext() if follows else torch.no_grad()
            with self._passing(again or create_graph, mode, delivery, before):
                assert self._pull is not None
                grads, wanted = self._pull(
                    tuple(cotangents),
                    retain_graph=again or create_graph,
                    create_graph=create_graph or follows,
                )
                if delivery is not None:
                    delivery.finish(grads)
            if delivery is None:
                assert self._ends is not None
                for key, primal in self._ends.primals.items():
                    grad = torch.zeros_like(primal) if (own := grads[key]) is None else own
                    found[key] = grad.to(grad.dtype if self.partial else traversal.uses[key].grad).contiguous()
            if not again and not create_graph:
                self.drop()
            return found, self._placed(wanted)

    def _begun(self, cotangent: object) -> list[torch.Tensor]:
        with failing("a pullback"):
            self.need_graph()
            need_unwritten(self._guarded)
            self._rest = None
            return self.scaled(cotangent)

    def _delivery(
        self,
        found: dict[Key, Buffer],
        receive: Callable[[Key, torch.Tensor], object] | None,
        into: Mapping[Key, Buffer] | None,
    ) -> Delivery:
        assert self.traversal is not None and self.state is not None
        params, schedule = self.state.params, self.traversal.schedule
        out = Delivery(schedule, params, found, receive, self.unreduced, self.partial)
        out.into, out.used = tensors_of(into), self._used
        return out

    @contextlib.contextmanager
    def _passing(
        self,
        stays: bool,
        mode: contextlib.AbstractContextManager[object],
        delivery: Delivery | None,
        before: Callable[[Sequence[Key]], object] | None = None,
    ) -> Iterator[None]:
        """Around a pass of autograd; after an error the graph is dropped, unless it stays."""
        assert self.traversal is not None and self.state is not None
        traversal = self.traversal
        writes = contextlib.nullcontext() if self._overwrites else unwritten(self.state, "A backward")
        traversal.delivery = delivery
        try:
            with failing("a pullback"), writes, mode, traversal.schedule.pullback(before):
                yield
        except BaseException:
            private.forget_failed_backward()
            if not stays:
                self.drop()  # some of its graph is gone
            raise
        finally:
            traversal.delivery = None

    def note_use(self, used: set[int]) -> None:
        self._used = used

    def note_reached(self, used: set[int]) -> None:
        """Adds the leaves of all groups that its outputs lead to, before a pullback."""
        assert self.traversal is not None and self._ends is not None
        nodes = {node for node, _ in edges_to(self._ends.outputs)}
        for key, token in self.traversal.tokens.items():
            if token.grad_fn in nodes:
                used.update(slot.leaf for slot in self.traversal.layout.groups[key].slots)

    def pull_inputs(self, cotangent: object, retain_graph: bool = False) -> list[torch.Tensor | None]:
        """The cotangents of the flat inputs; those of the primals, or what is left to do for them, wait."""
        with self._pulling:
            if not self.waits() or is_transformed():
                self._rest, wanted = self.pull(cotangent, retain_graph)
                return wanted
            cotangents = self._begun(cotangent)
            assert self._ends is not None
            ends, params = self._ends, self._ends.params()
            with self._passing(retain_graph, torch.no_grad(), None):
                grads, found = pull_first(ends.outputs, cotangents, params, ends.inputs, retain_graph)
                refusals.need_no_strays("step: the function", (*params, *ends.inputs))
            wanted = self._placed(_filled(found, ends.inputs))
            # whoever has these may write to them before the second half
            storages = {storage_of(x) for x in (*cotangents, *wanted, *ends.outputs) if x is not None}
            self._rest = [apart_from(x, storages) for x in grads], retain_graph
            if not retain_graph:
                self._pull = self._ends = None
            return wanted

    def waits(self) -> bool:
        """Tells whether products may wait for a second half: not where hooks may change what is pulled back."""
        return bool(self._ends and self._ends.leaves and self.traversal and self.traversal.hooks == registered())

    def pull_params(self, into: Mapping[Key, Buffer] | None = None) -> dict[Key, Buffer]:
        """The scaled cotangents of the primals, once after `pull_inputs`."""
        with self._pulling:
            rest, self._rest = self._rest, None
            if isinstance(rest, dict):
                return rest
            if rest is None or self.state is None or self.traversal is None:
                raise RuntimeError(NO_FIRST_HALF)
            self.state.params  # noqa: B018 - a donated state says so
            (grads, retain_graph), found, traversal = rest, dict[Key, Buffer](), self.traversal
            delivery = self._delivery(found, None, into)
            with self._passing(retain_graph, torch.no_grad(), delivery):
                own = [x.now().value() if isinstance(x, Later) else x for x in grads]
                _delivered(traversal, traversal.begins or {}, own)
                delivery.finish({})
            if not retain_graph:
                self.drop()
            return found

    def drop(self) -> None:
        """Forgets the graph and the state: a used pullback holds nothing, so a donated state's buffers are free."""
        if self.traversal is not None and not self._leads_on:
            self.traversal.schedule.forget_calls()
        self._pull = self._ends = self._rest = self.traversal = self.state = None
        self._guarded = []

    def __del__(self) -> None:
        if getattr(self, "_pull", None) is not None:
            self.drop()  # nobody pulled it back


Guarded = Sequence[tuple[weakref.ref[torch.Tensor], int]]


def guarded(tensors: Sequence[torch.Tensor]) -> Guarded:
    """How often tensors that a pullback may need have been written to."""
    return [(weakref.ref(x), private.version(x)) for x in tensors]


def need_unwritten(tensors: Guarded) -> None:
    """Refuses a write to an input or an output since the run, which the graph may have kept."""
    for reference, before in tensors:
        x = reference()
        if x is not None and private.version(x) != before:
            raise RuntimeError(
                f"pullback: an input or an output of the forward, of shape {tuple(x.shape)}, has been modified by an "
                "inplace operation since, and the pullback may need what it was. Write to a copy: x.clone()."
            )


def _pulled_plainly(
    traversal: Traversal, ends: Ends, cotangents: Sequence[torch.Tensor], retain_graph: bool, create_graph: bool
) -> tuple[dict[Key, torch.Tensor | None], list[torch.Tensor]]:
    """The cotangents of the primals, None where there are none in the graph, and of the inputs."""
    params = ends.params()
    leaves = [*params, *ends.primals.values(), *ends.inputs]
    with without_compiled_autograd():
        found = [*gradients(ends.outputs, leaves, cotangents, retain_graph, create_graph)]
    refusals.need_no_strays("step: the function", leaves)
    grads = dict(zip(ends.primals, found[len(params) :], strict=False))
    wanted = _filled(found[len(params) + len(grads) :], ends.inputs)
    del found[len(params) :]
    return {**grads, **_delivered(traversal, ends.leaves, found)}, wanted


def _filled(found: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.zeros_like(x) if grad is None else grad for grad, x in zip(found, like, strict=True)]


def _delivered(
    traversal: Traversal, leaves: Mapping[Key, Sequence[torch.Tensor]], found: list[torch.Tensor | None]
) -> dict[Key, torch.Tensor | None]:
    """The cotangents of groups, None of those that are delivered, by a list of those of their leaves; it is emptied."""
    out = dict[Key, torch.Tensor | None]()
    for key, own in leaves.items():
        grads = found[: len(own)]
        del found[: len(own)]
        if any(x is not None for x in grads):
            out[key] = traversal.collected_of(key, grads)
    return out


def _is_at_hand(traversal: Traversal, axis: Axis) -> bool:
    """Tells whether a graph may begin with the leaves: nothing is gathered or reduced for them, nor done for units."""
    table, groups = traversal.table, traversal.layout.groups
    if table.acting or table.compiled or private.dispatch_modes() or axis.tensor is not None or axis.further:
        return False
    reduced = [use for key, use in traversal.uses.items() if not groups[key].row.frozen and use.axis.ranks > 1]
    return not reduced and not any(use.transient or use.gather8 for use in traversal.uses.values())


def run_of(
    step: Spec,
    state: TrainState,
    inputs: Sequence[object],
    argnums: Collection[int] | None,
    seed: tuple[int, ...],
    scale: float,
    *,
    partial: bool,
    unreduced: bool,
    alone: bool = True,
    fused: bool = False,
    mask: Mask | None = None,
    halves: bool = False,
) -> Run:
    """A forward: of the step's graph if it has one."""
    need_eager()
    mask = mask or Mask()
    own = functools.partial(
        Run, step, state, inputs, argnums, seed, scale, unreduced, alone, fused, partial, mask, halves
    )
    if step.graphs is None:
        return own()
    tensors = [x for x in pytree.leaves(tuple(inputs)) if isinstance(x, torch.Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):  # another graph goes on through this one
        return own()
    given = {"argnums": argnums, "seed": seed, "scale": scale, "unreduced": unreduced, "alone": alone}
    return step.graphs.run(step, state, inputs, own, partial=partial, mask=mask, **given)  # type: ignore[no-any-return]
