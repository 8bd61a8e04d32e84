"""One run of the step's function by plain autograd, where all params are at hand in full and nothing acts on units.

torch.func takes microseconds for each operation, and joins cotangents at the end. Here the graph begins with the
leaves: the cotangent of a linear layer's weight goes to its sum without a tensor between (`engine.weights`). The
results are those of `Run`, bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch

from fzero.base import private, pytree, refusals
from fzero.base.hooks import without_compiled_autograd
from fzero.base.node import edges_to
from fzero.base.products import Later, Product
from fzero.comm.divergence import failing
from fzero.engine.function import call_function
from fzero.engine.leaves import Adding, Leaves
from fzero.engine.outcome import Outcome, is_transformed, no_first_half, split_both
from fzero.engine.outlets import alike
from fzero.engine.run import Run
from fzero.engine.weights import Grad, apart_from, pull, pull_first, weights_of
from fzero.engine.written import unwritten
from fzero.state.placing import settle
from fzero.state.train_state import TrainState
from fzero.stores.away import Buffer
from fzero.table.counting import Mask
from fzero.table.handle import storage_of
from fzero.table.layout import Key
from fzero.table.spec import Spec

Into = Mapping[Key, Buffer] | None
# what the first half of a pullback leaves: the params' cotangents, and whether the graph is asked again
Rest = tuple[list[Grad], bool]


class PlainRun(Outcome):
    """A forward by plain autograd. `outputs`, `aux`, and the pullbacks of `Run`.

    Args:
        argnums, seed, scale, partial, mask: as in `Run`.
        again: makes a `Run` of the same.
    """

    def __init__(
        self,
        step: Spec,
        state: TrainState,
        inputs: Sequence[object],
        argnums: Collection[int] | None,
        seed: tuple[int, ...],
        scale: float,
        leaves: Leaves,
        partial: bool,
        mask: Mask,
        again: Callable[[], Run],
    ) -> None:
        super().__init__(state, inputs, argnums, scale, mask)
        self._leaves, self._partial, self._pulling = leaves, partial, threading.RLock()
        self._rest: Rest | Run | None = None
        flat, spec = pytree.flatten(tuple(inputs))
        self._again: Callable[[], Run] | None = again
        self._entered = [(x, private.version(x)) for x in flat if isinstance(x, torch.Tensor)]
        with torch.enable_grad(), private.outside_inference():
            every, filled = leaves.made(), list(flat)
            for i, x in enumerate(flat):
                if isinstance(x, torch.Tensor) and (x.requires_grad or x.is_inference()):
                    filled[i] = x.clone() if x.is_inference() else x.detach()  # no graph takes the former
            for place in self.wanted:
                filled[place] = alike(filled[place].detach().requires_grad_(), flat[place])
            self._params = [every[place.slot.leaf] for place in leaves.params]
            self._inputs = [filled[place] for place in self.wanted]
            arguments = pytree.unflatten(spec, filled)
            traversal = leaves.traversal(seed, every, mask)
            self._hooks = traversal.hooks
            with failing("a forward"):
                result = call_function(step, state, traversal, {}, arguments)
            outputs, others = returned = split_both(step, result)
            self._note_collected(traversal.collected)
            if torch.is_autocast_enabled(state.params.device.type):  # its cache would hold on to leaves
                torch.clear_autocast_cache()
        if not traversal.schedule.ran_before:
            leaves.check(every)
        self._real: Sequence[torch.Tensor] | None = outputs.leaves[0]
        real, rest, aux = (leaves.given_out(own) for own in (*outputs.leaves, others.leaves[0]))
        outputs.leaves, others.leaves = [], []  # which are the graph's
        self._note(returned, real, (rest, aux))

    def pull(
        self, cotangent: object, retain_graph: bool = False, create_graph: bool = False, *, into: Into = None
    ) -> tuple[dict[Key, Buffer], list[torch.Tensor | None]]:
        """As of `Run`: (scaled cotangents of the primals that were not added to sums, those of the flat inputs)."""
        with self._pulling:
            if create_graph or is_transformed(cotangent):
                pulled = self._run_again().pull(cotangent, retain_graph, create_graph)
                if not retain_graph:
                    self.drop()
                return pulled
            real, cotangents = self._begun(cotangent)
            sums, params = self._sums(into), self._params
            with self._around(retain_graph):
                ends = [o for o in real if o.requires_grad]
                weights = [] if self._hooks.any() else weights_of(ends, params, self._inputs)
                totals = sums.places([weight.number for weight in weights])
                others = [i for i in range(len(params)) if i not in totals]
                asked = [*self._inputs, *[params[i] for i in others]]
                added: set[int] = set()

                def add(number: int, product: Product) -> None:
                    product.add_to(*totals[number])
                    added.add(number)

                found = pull(ends, self._given(cotangents), asked, weights, add, retain_graph)
                count = len(self._inputs)
                out = self._filled(found[:count])
                return self._summed(sums, dict(zip(others, found[count:], strict=True)), added, retain_graph), out

    @contextlib.contextmanager
    def _around(self, retain_graph: bool) -> Iterator[None]:
        assert self.state is not None
        try:
            with private.outside_inference(), torch.no_grad(), without_compiled_autograd(), private.without_autocast():
                with failing("a pullback"), unwritten(self.state, "A backward"):
                    yield
        except BaseException:
            private.forget_failed_backward()
            if not retain_graph:
                self.drop()  # some of its graph is gone
            raise

    def _sums(self, into: Into) -> Adding:
        assert self._leaves is not None
        return Adding(self._leaves, None if self.mask.masked else into)

    def _summed(
        self, sums: Adding, found: dict[int, torch.Tensor | None], added: Collection[int], retain_graph: bool
    ) -> dict[Key, Buffer]:
        """Adds cotangents to sums, and returns the sums that begin."""
        assert self.state is not None and self._leaves is not None
        refusals.need_no_strays("step: the function", (*self._params, *self._inputs))
        if self._leaves.used is not None:
            numbers = {*added, *[i for i, x in found.items() if x is not None]}
            self._leaves.used.update(self._leaves.params[i].slot.leaf for i in numbers)
        sums.add(found, added)
        out: dict[Key, Buffer] = {}
        for key, total in sums.fresh.items():
            own = total if self._partial else total.to(self._leaves.uses[key].grad)
            out[key] = settle(self.state.params, key, "grads", own.zero_() if self.mask.masked else own)
        if not retain_graph:
            self.drop()
        return out

    def _given(self, cotangents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        assert self._real is not None
        return [c.to(o.dtype) for o, c in zip(self._real, cotangents, strict=True) if o.requires_grad]

    def pull_inputs(self, cotangent: object, retain_graph: bool = False) -> list[torch.Tensor | None]:
        """The first half of `pull`: the cotangents of the flat inputs, and what the second half needs is kept."""
        with self._pulling:
            if is_transformed(cotangent):
                self._rest = run = self._run_again()
                wanted = run.pull_inputs(cotangent, retain_graph)
            else:
                real, cotangents = self._begun(cotangent)
                with self._around(retain_graph):
                    waits = not self._hooks.any()
                    found, pulled = pull_first(real, cotangents, self._params, self._inputs, waits, retain_graph)
                    wanted = self._filled(pulled)
                    # whoever has these may write to them before the second half
                    storages = {storage_of(x) for x in (*cotangents, *wanted, *real) if x is not None}
                    self._rest = [apart_from(x, storages) for x in found], retain_graph
            if not retain_graph:
                self._real, self._inputs = None, []
            return wanted

    def pull_params(self, into: Into = None) -> dict[Key, Buffer]:
        """The second half of `pull`, once after the first: cotangents of the primals that were not added to sums."""
        with self._pulling:
            rest, self._rest = self._rest, None
            if isinstance(rest, Run):
                grads = rest.pull_params(into)
                if self._real is None:
                    self.drop()
                return grads
            if rest is None or self.state is None:
                raise RuntimeError(no_first_half("this forward"))
            self.state.params  # noqa: B018 - a donated state says so
            grads, retain_graph = rest
            with self._around(retain_graph):
                sums = self._sums(into)
                late = {i: x.now() for i, x in enumerate(grads) if isinstance(x, Later)}
                for i, total in sums.places(late).items():
                    late[i].add_to(*total)
                early = {i: x for i, x in enumerate(grads) if not isinstance(x, Later)}
                return self._summed(sums, early, late, retain_graph)

    def _run_again(self) -> Run:
        """A run of the same under torch.func: for whoever differentiates the pullback, or maps it."""
        self.need_graph()
        assert self._again is not None
        if any(private.version(x) != version for x, version in self._entered):
            raise ValueError(
                "pullback: a transform is around it, for which the function runs again, and an input of its run has "
                "been written to in place. Write to a copy (x = x.clone()), or transform the vjp with its pullback."
            )
        return self._again()

    def _begun(self, cotangent: object) -> tuple[Sequence[torch.Tensor], list[torch.Tensor]]:
        self.need_graph()
        assert self._real is not None
        self._rest = None
        return self._real, self.scaled(cotangent)

    def note_use(self, used: set[int]) -> None:
        assert self._real is not None and self._leaves is not None
        ends = {*map(id, self._real), *[id(getattr(node, "variable", None)) for node, _ in edges_to(self._real)]}
        self._leaves.used, places = used, zip(self._params, self._leaves.params, strict=True)
        used.update(place.slot.leaf for x, place in places if id(x) in ends)

    def is_used_up(self) -> bool:
        return self._real is None

    def _filled(self, found: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        pairs = zip(found, self._inputs, strict=True)
        return self._placed([torch.zeros_like(x) if grad is None else grad for grad, x in pairs])

    def drop(self) -> None:
        """Forgets the graph and the state: a used pullback holds nothing, so a donated state's buffers are free."""
        self._real = self._rest = self._leaves = self.state = self._again = None
        self._inputs, self._params, self._entered = [], [], []


def run_of(
    leaves: Leaves | None,
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
) -> Run | PlainRun:
    """A forward on these leaves, if there are any; otherwise a `Run`."""
    again = functools.partial(Run, step, state, inputs, argnums, seed, scale, unreduced, alone, fused, partial, mask)
    leads_on = torch.is_grad_enabled() and any(map(_leads_on, pytree.leaves(tuple(inputs))))
    own: Callable[[], Run | PlainRun] = again
    if leaves is not None and not leads_on:
        own = functools.partial(
            PlainRun, step, state, inputs, argnums, seed, scale, leaves, partial, mask or Mask(), again
        )
    if step.graphs is None or leads_on:
        return own()
    mask = mask or Mask()
    given = {"argnums": argnums, "seed": seed, "scale": scale, "unreduced": unreduced, "alone": alone}
    return step.graphs.run(step, state, inputs, own, again=again, partial=partial, mask=mask, **given)


def _leads_on(x: object) -> bool:
    """Tells whether another graph leads to an input, and goes on through this one."""
    return isinstance(x, torch.Tensor) and x.requires_grad
