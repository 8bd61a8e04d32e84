"""One run of the step's function by plain autograd, where all params are at hand in full and nothing acts on units.

torch.func takes microseconds for each operation, and joins cotangents at the end. Here the graph begins with the
leaves: each cotangent goes to its place in the sum of all microbatches at once, that of a linear layer's weight without
a tensor between (`engine.weights`). The results are those of `Run`, bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch.autograd.graph import Node

from fzero.base import private, pytree, texts
from fzero.base.edges import edge_of
from fzero.base.hooks import Registrations, without_compiled_autograd
from fzero.base.node import edges_to
from fzero.comm.divergence import failing
from fzero.engine.adding import Adding, Waits, pull_back
from fzero.engine.function import call_function
from fzero.engine.halves import Split, apart_from
from fzero.engine.leaves import UNFIT, Alias, Leaves, Unfit, known, need_apart, says_unfit
from fzero.engine.outcome import Outcome, is_transformed, no_first_half, split_both
from fzero.engine.outlets import alike
from fzero.engine.run import Run
from fzero.engine.schedule import Record
from fzero.engine.weights import Graph, Rest, Waiting, Weight, pull
from fzero.engine.written import run_pulled
from fzero.state.placing import settle
from fzero.state.train_state import TrainState
from fzero.stores.away import Buffer
from fzero.table.counting import Mask
from fzero.table.handle import storage_of
from fzero.table.layout import Key
from fzero.table.spec import Spec

Finish = Callable[[Mapping[Key, Buffer] | None], dict[Key, Buffer]]


class PlainRun(Outcome):
    """A forward by plain autograd. `outputs`, `aux`, and the pullbacks of `Run`.

    Args:
        argnums, seed, scale, partial, mask: as in `Run`.
        again: makes a `Run` of the same.

    Raises:
        Unfit: it is to be run under torch.func, and so are the call's other microbatches.
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
        self._rest: Rest | Waits | Run | None = None
        flat, spec = pytree.flatten(tuple(inputs))
        own = [x for x in flat if isinstance(x, torch.Tensor)]
        if any(x.is_inference() for x in own):
            raise Unfit
        if torch.is_grad_enabled() and any(flat[place].requires_grad for place in self.wanted):
            raise Unfit  # another graph leads to it, and goes on through this one
        self._again: Callable[[], Run] | None = again
        self._entered = [(x, private.version(x)) for x in own]
        filled = [x.detach() if isinstance(x, torch.Tensor) and x.requires_grad else x for x in flat]
        versions = [private.version(flat[place]) for place in self.wanted]
        self._hooks, every = Registrations(), leaves.made()
        self._params = [every[place.slot.leaf] for place in leaves.params]
        with torch.enable_grad(), private.outside_inference():
            self._inputs = [flat[place].detach().requires_grad_() for place in self.wanted]
            for place, leaf in zip(self.wanted, self._inputs, strict=True):
                filled[place] = alike(Alias.apply(leaf), flat[place])
            arguments = pytree.unflatten(spec, filled)
            try:
                traversal = leaves.traversal(seed, every, mask)
                with failing("a forward", lambda error: not says_unfit(error)):
                    result = call_function(step, state, traversal, {}, arguments)
            except (RuntimeError, TypeError) as error:
                if says_unfit(error):
                    known(step, state)[UNFIT] = Record()
                    raise Unfit from error
                if not texts.says(error, texts.WRITES_LEAF):
                    raise
                raise ValueError(
                    "step: the function writes to one of its params in place. Params change in step.update only: "
                    "compute with a copy (w = w.clone()), or use operations that are not in place."
                ) from error
            outputs, others = returned = split_both(step, result)
            self._note_collected(traversal.collected)
            if torch.is_autocast_enabled(state.params.device.type):  # its cache would hold on to leaves
                torch.clear_autocast_cache()
        leaves.check(every)
        for leaf in (*self._params, *self._inputs):
            leaf.grad = None  # what the function has pulled back by itself is not of this pullback
        need_apart(flat, self.wanted, versions)
        self._real: Sequence[torch.Tensor] | None = outputs.leaves[0]
        real, rest, aux = (leaves.given_out(own) for own in (*outputs.leaves, others.leaves[0]))
        outputs.leaves, others.leaves = [], []  # which are the graph's
        self._note(returned, real, (rest, aux))

    def pull(
        self, cotangent: object, retain_graph: bool = False, *, into: Mapping[Key, Buffer] | None = None
    ) -> tuple[dict[Key, Buffer], list[torch.Tensor | None]]:
        """As of `Run`: (scaled cotangents of the primals that were not added to sums, those of the flat inputs)."""
        with self._pulling:
            if is_transformed(cotangent):
                pulled = self._run_again().pull(cotangent, retain_graph)
                if not retain_graph:
                    self.drop()
                return pulled
            self.need_graph()
            assert self._leaves is not None
            sums = Adding(self._leaves, None if self.mask.masked else into)
            with self._around():
                finish, out = self._pulled(cotangent, retain_graph, sums)
                return finish(None), out

    def pull_early(self, cotangent: object) -> tuple[Finish, list[torch.Tensor | None]]:
        """`pull` in two: the cotangents of the flat inputs, as soon as they are known, and what goes on with those of
        the primals, given the sums of the microbatches before this one."""
        with self._pulling:
            if is_transformed(cotangent):
                grads, out = self.pull(cotangent)
                return lambda _: grads, out
            with self._around():
                finish, out = self._pulled(cotangent, False, None)
            return functools.partial(self._later, finish), out

    def _later(self, finish: Finish, into: Mapping[Key, Buffer] | None) -> dict[Key, Buffer]:
        with self._pulling, self._around():
            return finish(into)

    @contextlib.contextmanager
    def _around(self) -> Iterator[None]:
        try:
            with private.outside_inference(), torch.no_grad(), without_compiled_autograd(), private.without_autocast():
                with failing("a pullback"), run_pulled(self.state):
                    yield
        except BaseException:
            private.forget_failed_backward()
            raise

    def _pulled(
        self, cotangent: object, retain_graph: bool, sums: Adding | None
    ) -> tuple[Finish, list[torch.Tensor | None]]:
        real, leaves, cotangents = self._begun(cotangent)
        graph = Graph(real, self._params)
        if not self._is_torchs(graph):
            waits, out = self._as_torch(graph, cotangents, retain_graph, sums)
        elif sums is not None and leaves.products is False and sums.takes(self._params):
            return self._added(graph, cotangents, retain_graph, sums)
        else:
            waits, out = self._parted(graph, graph.weights(self._params), cotangents, retain_graph, sums)
        return functools.partial(self._finish, waits), out

    def _is_torchs(self, graph: Graph) -> bool:
        """Nobody but torch acts in a pullback: nobody sees in which way cotangents come to their sums."""
        return graph.native and not self._hooks.any() and not torch.is_anomaly_enabled()

    def _as_torch(
        self, graph: Graph, cotangents: Sequence[torch.Tensor], retain_graph: bool, sums: Adding | None
    ) -> tuple[Waits, list[torch.Tensor | None]]:
        """`_parted`, where users' Functions or hooks act: exactly as torch would have it."""
        grads, found = pull_back(graph.ends, self._given(cotangents), self._params, self._inputs, retain_graph)
        if self._leaves is not None and self._leaves.used is not None:  # a Function may have leaves of its own
            own = zip(self._leaves.params, grads, strict=True)
            self._leaves.used.update([place.slot.leaf for place, grad in own if grad is not None])
        if sums is None:  # whoever has these, as a Function has its workspace, may write to them until it goes on
            grads = [None if x is None else x.clone() for x in grads]
        out = self._filled(found)
        self._let_go(retain_graph)
        return Waits(dict(enumerate(grads)), set(), False, [], sums, retain_graph), self._placed(out)

    def _given(self, cotangents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        assert self._real is not None
        return [c.to(o.dtype) for o, c in zip(self._real, cotangents, strict=True) if o.requires_grad]

    def _let_go(self, retain_graph: bool) -> None:
        if not retain_graph:
            self._real, self._inputs, self._entered, self._again = None, [], [], None

    def _parted(
        self,
        graph: Graph,
        weights: Sequence[tuple[Node, Weight]],
        cotangents: Sequence[torch.Tensor],
        retain_graph: bool,
        sums: Adding | None,
    ) -> tuple[Waits, list[torch.Tensor | None]]:
        """What waits of the cotangents of the primals, and those of the flat inputs.

        Args:
            sums: those of earlier microbatches, where they are known: what goes on has less to do.
        """
        real, leaves, params = self._real, self._leaves, self._params
        assert real is not None and leaves is not None
        own = {weight.number for _, weight in weights}
        others = [i for i in range(len(params)) if i not in own]
        asked = [*self._inputs, *[params[i] for i in others]]
        totals = None if sums is None else {number: sums.place(number) for number in own}
        later: list[Waiting] = []
        found, added, gained = pull(graph, self._given(cotangents), asked, weights, totals, retain_graph, later)
        count = len(self._inputs)
        out = self._filled(found[:count])
        if sums is None:  # whoever has these may write to them until it goes on
            storages = self._storages(real, cotangents, out)
            later[:] = [waiting.apart_from(storages) for waiting in later]
            found[count:] = [None if x is None else apart_from(x, storages) for x in found[count:]]
        self._let_go(retain_graph)
        rest = dict(zip(others, found[count:], strict=True))
        return Waits(rest, added, gained, later, sums, retain_graph), self._placed(out)

    def _finish(self, waits: Waits, into: Mapping[Key, Buffer] | None) -> dict[Key, Buffer]:
        leaves = self._leaves
        assert leaves is not None
        sums = Adding(leaves, None if self.mask.masked else into) if waits.sums is None else waits.sums
        quick = waits.add_to(sums)
        if leaves.products is None:  # those to come have such products, too
            leaves.products = quick
        sums.add_strays(self._params)
        grads = self._grads(sums)
        if not waits.retain_graph:
            self.drop()
        return grads

    def pull_inputs(self, cotangent: object, retain_graph: bool = False) -> list[torch.Tensor | None]:
        """The first half of `pull`: the cotangents of the flat inputs, and what the second half needs is kept."""
        with self._pulling:
            if is_transformed(cotangent):
                self._rest = run = self._run_again()
                wanted = run.pull_inputs(cotangent, retain_graph)
                if not retain_graph:
                    self._real, self._inputs = None, []
                return wanted
            return self._pulled_inputs(cotangent, retain_graph)

    def _pulled_inputs(self, cotangent: object, retain_graph: bool) -> list[torch.Tensor | None]:
        with self._around():
            real, _, cotangents = self._begun(cotangent)
            graph = Graph(real, self._params)
            if not self._is_torchs(graph):
                self._rest, wanted = self._as_torch(graph, cotangents, retain_graph, None)
                return wanted
            weights = graph.weights(self._params)
            known = {weight.number for _, weight in weights}
            if graph.is_light([x for i, x in enumerate(self._params) if i not in known]):
                self._rest, wanted = self._parted(graph, weights, cotangents, retain_graph, None)
                return wanted
            split = Split(real, self._inputs, self._params)
            pulled, early, parts = split.pull(cotangents, retain_graph)
            out = self._filled(pulled)
            storages = self._storages(real, cotangents, out)
            for part in parts:
                part.own(storages)  # whoever has these may write to them before the second half
            products = {weight.number: (weight, edge_of(node, weight.place)) for node, weight in weights}
            early = {i: None if x is None else apart_from(x, storages) for i, x in early.items()}
            self._rest = Rest(parts, early, products, retain_graph)
            if not retain_graph:
                self._real, self._inputs = None, []
            return self._placed(out)

    def pull_params(self, into: Mapping[Key, Buffer] | None = None) -> dict[Key, Buffer]:
        """The second half of `pull`, once after the first: cotangents of the primals that were not added to sums."""
        with self._pulling:
            if isinstance(self._rest, Run):
                rest, self._rest = self._rest, None
                grads = rest.pull_params(into)
                if self._real is None:
                    self.drop()
                return grads
            return self._pulled_params(into)

    def _pulled_params(self, into: Mapping[Key, Buffer] | None) -> dict[Key, Buffer]:
        with self._around():
            rest, self._rest = self._rest, None
            assert not isinstance(rest, Run)
            if rest is None or self.state is None or self._leaves is None:
                raise RuntimeError(no_first_half("this forward"))
            self.state.params  # noqa: B018 - a donated state says so
            if isinstance(rest, Waits):
                return self._finish(rest, into)
            parts, found, weights, retain_graph = rest
            sums, params, added = Adding(self._leaves, None if self.mask.masked else into), self._params, set[int]()
            for part in parts:
                weight, edge = weights.get(part.params[0], (None, None)) if len(part.params) == 1 else (None, None)
                kept = part.only(edge) if edge is not None else None
                if weight is not None and kept is not None:
                    weight.add_to(kept, *sums.place(weight.number))
                    added.add(weight.number)
                    continue
                pulled = part.pull([params[i] for i in part.params], retain_graph)
                found.update(zip(part.params, pulled, strict=True))
            sums.add(found, added)
            sums.add_strays(self._params)
            grads = self._grads(sums)
            if not retain_graph:
                self.drop()
            return grads

    def _added(
        self, graph: Graph, cotangents: Sequence[torch.Tensor], retain_graph: bool, sums: Adding
    ) -> tuple[Finish, list[torch.Tensor | None]]:
        """`_pulled`, where autograd adds up as quickly as anybody."""
        found = sums.pull(graph.ends, self._given(cotangents), self._params, self._inputs, retain_graph)
        out = self._placed(self._filled(found))
        if not retain_graph:
            self.drop()
        return lambda _: {}, out

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

    def _begun(self, cotangent: object) -> tuple[Sequence[torch.Tensor], Leaves, list[torch.Tensor]]:
        self.need_graph()
        assert self._real is not None and self._leaves is not None
        self._rest = None
        return self._real, self._leaves, self.scaled(cotangent)

    def note_use(self, used: set[int]) -> None:
        assert self._real is not None and self._leaves is not None
        ends = {*map(id, self._real), *[id(getattr(node, "variable", None)) for node, _ in edges_to(self._real)]}
        self._leaves.used, places = used, zip(self._params, self._leaves.params, strict=True)
        used.update(place.slot.leaf for x, place in places if id(x) in ends)

    def is_used_up(self) -> bool:
        return self._real is None

    def _filled(self, found: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        out: list[torch.Tensor] = []
        for grad, x in zip(found, self._inputs, strict=True):
            own = [each for each in (grad, x.grad) if each is not None]  # as `Adding.add_strays`
            x.grad = None
            out.append(functools.reduce(torch.add, own) if own else torch.zeros_like(x))
        return out

    def _storages(self, *values: Sequence[torch.Tensor]) -> set[int]:
        """Of the flat inputs, and of other tensors that somebody else has."""
        return {storage_of(x) for own in (*values, self._inputs) for x in own}

    def _grads(self, sums: Adding) -> dict[Key, Buffer]:
        assert self.state is not None and self._leaves is not None
        out: dict[Key, Buffer] = {}
        for key, total in sums.fresh.items():
            own = total if self._partial else total.to(self._leaves.uses[key].grad)
            out[key] = settle(self.state.params, key, "grads", own.zero_() if self.mask.masked else own)
        return out

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
    once: bool = False,
) -> Run | PlainRun:
    """A forward on these leaves, if there are any and they fit; otherwise a `Run`."""
    more = unreduced, alone, fused, partial, mask, once
    own = functools.partial(Run, step, state, inputs, argnums, seed, scale, *more)
    if leaves is not None and leaves.fit:
        try:
            return PlainRun(step, state, inputs, argnums, seed, scale, leaves, partial, mask or Mask(), own)
        except Unfit:
            leaves.fit = False
    return own()
