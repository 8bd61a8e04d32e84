"""One run of the step's function under torch.func.vjp: what it returned, and the pullback that it leaves."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fzero.base import private, pytree, refusals
from fzero.base.follow import is_transformed
from fzero.base.hooks import without_compiled_autograd
from fzero.base.node import edges_to, gradients
from fzero.comm.divergence import failing
from fzero.engine.delivery import Delivery
from fzero.engine.function import call_function, traversal_of
from fzero.engine.outcome import Outcome, no_first_half, split_both, tensors_of
from fzero.engine.outlets import alike
from fzero.engine.traversal import Traversal
from fzero.engine.written import unwritten
from fzero.state.placing import settle
from fzero.state.sharded import Sharded
from fzero.state.train_state import TrainState
from fzero.stores.away import Buffer
from fzero.table.counting import Mask
from fzero.table.layout import Key
from fzero.table.spec import Spec


class Ends(NamedTuple):
    """The ends of a run's graph: what its level of torch.func differentiates."""

    outputs: Sequence[torch.Tensor]
    inputs: Sequence[torch.Tensor]
    primals: dict[Key, torch.Tensor]


class Run(Outcome):
    """A forward under torch.func.vjp, and its pullback.

    Args:
        argnums, scale: as in `Outcome`.
        unreduced: cotangents of params stay full and unreduced.
        alone: whether no other run of the same step waits for its pullback meanwhile.
        fused: params may be overwritten once their cotangents are there.
        partial: cotangents of params stay in `reduce` dtype, as others will be added to them.
        mask: as in `Outcome`.
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
        traversal.guards = self.outer and self.mask.partial
        self._leads_on = self.outer  # whether another graph leads to the calls of this one
        returned: list[tuple[pytree.Split, pytree.Split]] = []
        ends = list[Ends]()
        self._rest: dict[Key, Buffer] | None = None  # what a pullback has brought, for its second half
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
            ends[:] = [Ends(real, wanted, primals)]
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
                real, others = pytree.map(torch.Tensor.detach, found)
                self._pull = functools.partial(_pulled_plainly, ends[0])
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
            with failing("a pullback"):
                self.need_graph()
                assert self.traversal is not None and self.state is not None
                need_unwritten(self._guarded)
                self._rest, cotangents = None, self.scaled(cotangent)
            # whoever differentiates the result too reads it through the graph; otherwise it is delivered outside of it
            follows = self.outer or is_transformed()
            traversal, again = self.traversal, retain_graph or self.outer
            self._leads_on = self._leads_on or create_graph
            traversal.retain_graph = again
            found: dict[Key, Buffer] = {}
            delivery = None
            if not (follows or create_graph):
                delivery = delivery_of(traversal, self.state.params, found, receive, self.unreduced, self.partial)
                delivery.into, delivery.used = tensors_of(into), self._used
            elif self._used is not None:  # the graph is the caller's, and does not say
                self._used.update(range(len(traversal.layout.rows)))
            traversal.delivery = delivery
            mode = torch.enable_grad() if create_graph else contextlib.nullcontext() if follows else torch.no_grad()
            writes = contextlib.nullcontext() if self._overwrites else unwritten(self.state, "A backward")
            try:
                with failing("a pullback"), writes, mode, traversal.schedule.pullback(before):
                    assert self._pull is not None
                    grads, wanted = self._pull(
                        tuple(cotangents),
                        retain_graph=again or create_graph,
                        create_graph=create_graph or follows,
                    )
                    if delivery is not None:
                        delivery.finish(grads)
            except BaseException:
                private.forget_failed_backward()
                if not again and not create_graph:
                    self.drop()  # some of its graph is gone
                raise
            finally:
                traversal.delivery = None
            if delivery is None:
                assert self._ends is not None
                for key, primal in self._ends.primals.items():
                    grad = torch.zeros_like(primal) if (own := grads[key]) is None else own
                    found[key] = grad.to(grad.dtype if self.partial else traversal.uses[key].grad).contiguous()
            if not again and not create_graph:
                self.drop()
            return found, self._placed(wanted)

    def note_use(self, used: set[int]) -> None:
        self._used = used

    def note_reached(self, used: set[int]) -> None:
        """Adds the leaves of all groups that its outputs lead to, before a pullback."""
        assert self.traversal is not None and self._ends is not None
        nodes = {node for node, _ in edges_to(self._ends.outputs)}
        for key, token in self.traversal.tokens.items():
            if token.grad_fn in nodes:
                used.update(slot.leaf for slot in self.traversal.layout.groups[key].slots)

    def is_used_up(self) -> bool:
        return self._pull is None

    def pull_inputs(self, cotangent: object, retain_graph: bool = False) -> list[torch.Tensor | None]:
        """The cotangents of the flat inputs; those of the primals, which come with them, wait for `pull_params`."""
        with self._pulling:
            self._rest, wanted = self.pull(cotangent, retain_graph)
            return wanted

    def pull_params(self, into: object = None) -> dict[Key, Buffer]:
        """The scaled cotangents of the primals, once after `pull_inputs`."""
        with self._pulling:
            rest, self._rest = self._rest, None
            if rest is None:
                raise RuntimeError(no_first_half("this forward"))
            return rest

    def drop(self) -> None:
        """Forgets the graph and the state: a used pullback holds nothing, so a donated state's buffers are free."""
        if self.traversal is not None and not self._leads_on:
            self.traversal.schedule.forget_calls()
        self._pull = self._ends = self._rest = self.traversal = self.state = None
        self._guarded = []

    def __del__(self) -> None:
        if getattr(self, "_pull", None) is not None:
            self.drop()  # nobody pulled it back


def delivery_of(
    traversal: Traversal,
    params: Sharded,
    found: dict[Key, Buffer],
    receive: Callable[[Key, torch.Tensor], object] | None,
    unreduced: Mapping[Key, torch.Tensor],
    partial: bool,
) -> Delivery:
    """What adds cotangents of params up, into `found` where nobody else receives them."""

    def keep(key: Key, shard: torch.Tensor) -> None:
        found[key] = settle(params, key, "grads", shard)

    return Delivery(traversal.schedule, traversal.layout, receive or keep, unreduced, partial)


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
    ends: Ends, cotangents: Sequence[torch.Tensor], retain_graph: bool, create_graph: bool
) -> tuple[dict[Key, torch.Tensor | None], list[torch.Tensor]]:
    """The cotangents of the primals, None where there are none in the graph, and of the inputs."""
    leaves = [*ends.primals.values(), *ends.inputs]
    with without_compiled_autograd():
        found = gradients(ends.outputs, leaves, cotangents, retain_graph, create_graph)
    refusals.need_no_strays("step: the function", leaves)
    grads = dict(zip(ends.primals, found, strict=False))
    rest = zip(found[len(grads) :], ends.inputs, strict=True)
    return grads, [torch.zeros_like(x) if g is None else g for g, x in rest]
