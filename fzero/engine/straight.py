"""A unit's call in a run that plain autograd differentiates, once a run before has shown what it does.

Its operations are then a part of the run's own graph. One node stands where they begin, which puts out the unit's
params and its inputs: to it all their cotangents come, at once. A hook where they end brings the params back before the
first of them is pulled back. A graph of its own for each unit (`engine.op`), which everything else needs, takes 0.1 ms
more: `benchmarks/overhead.py`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence

import torch

from fzero.base import hooks, private, pytree
from fzero.base.node import Tensors, first_order, own_jointly
from fzero.base.random import seeded
from fzero.engine.gathered import GatheredOp
from fzero.engine.pullback import used_up
from fzero.engine.signature import Signature
from fzero.engine.traversal import Traversal


class StraightOp(GatheredOp):
    """A unit's call, whose operations are a part of the graph around it.

    Args:
        fn: what runs.
        flat: its arguments, flat; `spec` their structure, with this call's order of entries.
    """

    used = False
    _notes = None  # of no call that may run straight
    _passes: frozenset[int] = frozenset()  # of autograd, which are between the unit's end and its beginning
    _stays = False  # whether a derivative goes on through a pullback, which may read the params at any time

    def __init__(
        self,
        traversal: Traversal,
        signature: Signature,
        fn: Callable[..., object],
        flat: Sequence[object],
        spec: pytree.Spec,
        seed: int,
    ) -> None:
        self.traversal, self.signature, self.seed = traversal, signature, seed
        self.keys, self.name = signature.keys, signature.name
        self._eager, self._flat, self._spec = fn, flat, spec
        self._fulls, self._arriving = {}, {}
        self.number = traversal.schedule.called(signature.keys, self)

    def applied(self, carriers: Sequence[object]) -> object:
        """The call's result."""
        traversal, signature = self.traversal, self.signature
        given: list[torch.Tensor] = [*map(self._flat.__getitem__, signature.tensors)]  # type: ignore[list-item]
        fulls, leaves, own = list[torch.Tensor](), dict[int, torch.Tensor](), list[torch.Tensor]()
        indices = list[int]()
        for key in self.keys:
            full, transient = traversal.schedule.take(key)
            fulls.append(full)
            if transient:
                self._fulls[key] = full
            views = traversal.layout.groups[key].cut(full)
            leaves.update(views)
            if key in signature.trained:
                own += views.values()
                indices += views
        tokens = map(traversal.tokens.__getitem__, signature.trained)
        begun = _begin(self, tuple(own), *tokens, *map(given.__getitem__, signature.moving))
        if len(begun) == 1:
            own_jointly(begun)
        leaves.update(zip(indices, begun, strict=False))
        for i, x in zip(signature.moving, begun[len(indices) :], strict=True):
            given[i] = x
        traversal.schedule.gather_next()
        entered = private.versions((*fulls, *given))
        with seeded(self.seed):
            out = self._called(self._eager, leaves, given)
        put = self._let_out(out, leaves, given, fulls)
        if private.versions((*fulls, *given)) != entered:
            self._refuse_writes(fulls, entered)
        for x in put:
            if x.grad_fn is not None:
                self._end_at(x, given)
        self._put_down()
        result = self._outside(put, carriers)
        # nothing runs again, and variables of the function may come to hold the result, which leads here
        del self._flat, self._spec, self._spec_out, self._eager, self._takes
        return result

    def _end_at(self, x: torch.Tensor, given: Sequence[torch.Tensor]) -> None:
        """Has the params brought back before the cotangent of an output is pulled back."""
        whole = x._base
        for y in given:
            if y._base is whole:  # what has ended other units
                break
        else:  # who writes to a view has its own node replaced, and a new one put before that of the whole
            if whole is not None and whole.grad_fn is not None:
                hooks.before(whole, self._enter)
        hooks.before(x, self._enter)

    # ---- pullback

    def _enter(self, _: object) -> None:
        """Before the first of the operations is pulled back. None is in a pass that asks for the output's cotangent."""
        own = private.pass_that_runs()
        if own in self._passes or not self._is_reached():
            return
        if self.used:
            raise RuntimeError(used_up(f"unit {self.unit!r}"))
        self._passes |= {own}
        if not self._stays:
            self._refill()
            self._stays = not first_order()
        self.traversal.schedule.gather_previous(self)

    def back(self, cotangents: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Those of the stored buffers, None where they are delivered, and of the inputs; after all operations."""
        traversal, final = self.traversal, first_order()
        keeps = self._stays or traversal.retain_graph or private.keeps_graph()
        self._passes -= {private.pass_that_runs()}
        if not keeps:
            self._fulls = {}
        elif not (self._stays or self._passes):
            self._empty()
        given, out = iter(cotangents), list[torch.Tensor | None]()
        for key in self.signature.trained:
            own = [*itertools.islice(given, len(traversal.layout.groups[key].slots))]
            wanted = private.will_run(traversal.tokens[key].grad_fn)
            if not final:  # zeros would meet infinite derivatives before it
                wanted = wanted and (traversal.uses[key].axis.ranks > 1 or any(x is not None for x in own))
            collect = traversal.collect if final else traversal.collected_of
            out.append(collect(key, own) if wanted else None)
        if not keeps:
            self.used = True
        return [*out, *given]

    def forget(self) -> None:
        """Lets go of the call."""
        self.used, self._fulls = True, {}

    def gather_ahead(self) -> None:
        """Starts to gather what the pullback of this call will need, where the pass that is running comes to it."""
        if self._is_ahead():
            self._start_refill()

    def fetch_ahead(self) -> None:
        """Starts to bring to the device what the gather of this call will begin with."""
        if self._is_ahead():
            self.traversal.schedule.fetch_ahead([*self._fulls])

    def _is_ahead(self) -> bool:
        return not (self.used or self._stays or self._passes) and self._is_reached()

    def _is_reached(self) -> bool:
        """Tells whether the pass that is running comes to the unit's beginning."""
        node = self.node() if self.node is not None else None
        return node is not None and private.will_run(node)


class _Begin(torch.autograd.Function):
    """`apply(op, leaves, *buffers, *inputs)`: the leaves of stored buffers, and inputs, of one call."""

    @staticmethod
    def forward(op: StraightOp, leaves: Tensors, *operands: torch.Tensor) -> Tensors:  # type: ignore[override]
        return (*leaves, *operands[len(op.signature.trained) :])

    @staticmethod
    def setup_context(ctx: private.Context, inputs: tuple[StraightOp, *Tensors], _: object) -> None:
        ctx.op, ctx.keys = inputs[0], inputs[0].signature.trained
        ctx.op.node = weakref.ref(ctx)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: private.Context, *cotangents: torch.Tensor | None) -> object:  # type: ignore[override]
        return (None, None, *ctx.op.back(cotangents))


_begin: Callable[..., Tensors] = private.direct(_Begin).plainly
