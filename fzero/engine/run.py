"""One run of the step's function under torch.func.vjp: what it returned, and the pullback that it leaves."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any

import torch

from fzero.base import private, pytree
from fzero.base.arguments import named
from fzero.base.ragged import places_in
from fzero.capture.contents import tensors_in
from fzero.engine.delivery import Delivery
from fzero.engine.function import call_function, traversal_of
from fzero.engine.op import used_up
from fzero.engine.pending import Ends, Pending
from fzero.engine.traversal import Traversal
from fzero.state.placing import settle
from fzero.state.train_state import TrainState
from fzero.stores.away import Buffer
from fzero.table.layout import Key
from fzero.table.spec import Spec


class Run:
    """A forward under torch.func.vjp. `outputs`, `aux`, and `pull(cotangents)` with leaves in the outputs' order.

    Args:
        argnums: the inputs to differentiate, which must float; of those in a set, what floats.
        scale: what cotangents are multiplied by.
        unreduced: cotangents of params stay full and unreduced.
        alone: whether no other run of the same step waits for its pullback meanwhile.
        fused: params may be overwritten once their cotangents are there.
        partial: cotangents of params stay in `reduce` dtype, as others will be added to them.
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
    ) -> None:
        self.state: TrainState | None = state
        self.scale, self.partial, self._pulling = scale, partial, threading.RLock()
        flat, spec = pytree.flatten(tuple(inputs))
        self.count = len(flat)
        self.wanted = _wanted(inputs, argnums)
        traversal, primals, fixed = traversal_of(step, state, seed, unreduced, fused)
        self.unreduced: dict[Key, torch.Tensor] = {}  # full cotangents to add before those that are delivered
        self.traversal: Traversal | None = traversal
        traversal.schedule.keeps = alone
        traversal.schedule.frees = fused and traversal.table.remats
        differentiated = [flat[place] for place in self.wanted]
        self.outer = private.level() > 0 or (torch.is_grad_enabled() and any(x.requires_grad for x in differentiated))
        self._leads_on = self.outer  # whether another graph leads to the calls of this one
        returned: list[tuple[pytree.Split, pytree.Split]] = []
        ends: list[Ends] = []
        self._rest: Pending | dict[Key, Buffer] | None = None  # the second half of a pullback, or what it will bring

        def function(primals: dict[Key, torch.Tensor], wanted: list[torch.Tensor]) -> object:
            filled = list(flat)
            for place, value in zip(self.wanted, wanted, strict=True):
                filled[place] = value
            result = call_function(step, state, traversal, {**primals, **fixed}, pytree.unflatten(spec, filled))
            out, aux = split_result(step, result)
            for leaf in pytree.flatten((out, aux))[0]:
                refuse_hidden(leaf)
            outputs, others = (
                pytree.Split(out, is_differentiable, pytree.is_tensor),
                pytree.Split(aux, pytree.is_tensor),
            )
            real, carried = map(tuple, outputs.leaves)
            if not real:
                raise nothing_to_pull(out)
            returned[:] = [(outputs, others)]
            carried = carried, tuple(others.leaves[0])
            outputs.leaves, others.leaves = [], []  # which are this level's
            ends[:] = [Ends(real, wanted, primals)]
            return real, carried

        with self._mode():
            run: Any = torch.func.vjp(function, primals, differentiated, has_aux=True)
        real, self._pull, (rest, aux) = run
        self._ends: Ends | None = ends[0]
        self.returned, others = returned[0]
        self.outputs, self.aux = self.returned.join(real, rest), others.join(aux)
        self.meta = [(tuple(o.shape), o.dtype, o.device) for o in real]

    def _mode(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self.outer else torch.no_grad()

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
            return self._pulled(cotangent, retain_graph, create_graph, receive, before, into)

    def _pulled(
        self,
        cotangent: object,
        retain_graph: bool,
        create_graph: bool,
        receive: Callable[[Key, torch.Tensor], object] | None,
        before: Callable[[Sequence[Key]], object] | None,
        into: Mapping[Key, Buffer] | None = None,
    ) -> tuple[dict[Key, Buffer], list[torch.Tensor | None]]:
        traversal, cotangents = self._begun(cotangent)
        again = retain_graph or self.outer
        self._leads_on = self._leads_on or create_graph
        traversal.retain_graph = again
        # whoever differentiates the result too reads it through the graph; otherwise it is delivered outside of it
        follows = self.outer or private.transforms()  # the params or the cotangent, as nothing but the graph does
        found: dict[Key, Buffer] = {}
        traversal.delivery = delivery = None if follows or create_graph else self._delivery(traversal, found, receive)
        if delivery is not None:
            delivery.into = tensors_of(into)
        try:
            mode = torch.enable_grad() if create_graph else contextlib.nullcontext() if follows else torch.no_grad()
            with mode, traversal.schedule.pullback(before):
                assert self._pull is not None
                grads, wanted = self._pull(
                    tuple(cotangents),
                    retain_graph=again or create_graph,
                    create_graph=create_graph or follows,
                )
                if delivery is not None:
                    delivery.finish()
        except BaseException:
            private.forget_failed_backward()
            raise
        finally:
            traversal.delivery = None
        if delivery is None:
            found = {key: g if self.partial else g.to(traversal.uses[key].grad) for key, g in grads.items()}
        if not again and not create_graph:
            self.drop()
        return found, self._placed(wanted)

    def _begun(self, cotangent: object) -> tuple[Traversal, list[torch.Tensor]]:
        """What a pullback begins with: this run's traversal, and the scaled cotangents of the real outputs."""
        self.need_graph()
        assert self.traversal is not None
        cotangents = self.check(cotangent)
        self._rest = None  # of an earlier pullback, to which this one may not leave the graph
        return self.traversal, [c * self.scale for c in cotangents] if self.scale != 1.0 else cotangents

    def need_graph(self) -> None:
        """Refuses a forward that was pulled back already, or whose state is gone."""
        if self._pull is None or self.state is None:
            raise RuntimeError(used_up("this forward"))
        self.state.params  # noqa: B018 - a donated state says so

    def _delivery(
        self,
        traversal: Traversal,
        found: dict[Key, Buffer],
        receive: Callable[[Key, torch.Tensor], object] | None = None,
    ) -> Delivery:
        """What adds cotangents of params up, into `found` where nobody else receives them."""
        assert self.state is not None
        params = self.state.params

        def keep(key: Key, shard: torch.Tensor) -> None:
            found[key] = settle(params, key, "grads", shard)

        receive = receive or keep
        own = (traversal.schedule, traversal.layout, traversal.nodes, receive, self.unreduced, self.partial)
        return Delivery(*own)

    def _placed(self, wanted: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Cotangents of the flat inputs, None where there is none."""
        out: list[torch.Tensor | None] = [None] * self.count
        for place, value in zip(self.wanted, wanted, strict=True):
            out[place] = value / self.scale if self.scale != 1.0 else value
        return out

    def pull_inputs(self, cotangent: object, retain_graph: bool = False) -> list[torch.Tensor | None]:
        """The first half of `pull`: the cotangents of the flat inputs, and what the second half needs is kept."""
        with self._pulling:
            return self._pulled_inputs(cotangent, retain_graph)

    def _pulled_inputs(self, cotangent: object, retain_graph: bool) -> list[torch.Tensor | None]:
        traversal, cotangents = self._begun(cotangent)
        if self.outer or private.transforms():  # who differentiate the result: the graph is theirs
            grads, out = self._pulled(cotangent, retain_graph, False, None, None)
            self._rest = grads
            return out
        assert self._ends is not None
        found: dict[Key, Buffer] = {}
        pending = Pending(traversal, self._ends, self._delivery(traversal, found), found, retain_graph)
        with self._half(pending):
            wanted = pending.inputs(self._ends, cotangents)
        self._rest = pending
        if not retain_graph:
            self._pull = self._ends = None
        return self._placed(wanted)

    def pull_params(self, into: Mapping[Key, Buffer] | None = None) -> dict[Key, Buffer]:
        """The second half of `pull`, once after the first: the scaled cotangents of the primals, but for those that
        were added to the sums of earlier microbatches."""
        with self._pulling:
            rest, self._rest = self._rest, None
            if rest is None or self.state is None:
                raise RuntimeError(no_first_half("this forward"))
            if not isinstance(rest, Pending):
                return rest
            self.state.params  # noqa: B018 - a donated state says so
            rest.delivery.into = tensors_of(into)
            with self._half(rest):
                rest.params()
            if not rest.retain_graph:
                self.drop()
            return rest.found

    @staticmethod
    @contextlib.contextmanager
    def _half(pending: Pending) -> Iterator[None]:
        """Around one half of a pullback."""
        traversal = pending.traversal
        traversal.delivery, traversal.retain_graph = pending.delivery, pending.retain_graph
        try:
            with torch.no_grad(), traversal.schedule.pullback():
                yield
        except BaseException:
            private.forget_failed_backward()
            raise
        finally:
            traversal.delivery = None

    def drop(self) -> None:
        """Forgets the graph and the state: a used pullback holds nothing, so a donated state's buffers are free."""
        if self.traversal is not None and not self._leads_on:
            self.traversal.schedule.forget_calls()
        self._pull = self._ends = self._rest = self.traversal = self.state = None

    def __del__(self) -> None:
        if (
            getattr(self, "_pull", None) is not None or getattr(self, "_rest", None) is not None
        ):  # nobody pulled it back
            self.drop()

    def check_structure(self, cotangent: object) -> None:
        need_structure(cotangent, self.returned.spec)

    def check(self, cotangent: object) -> list[torch.Tensor]:
        """The cotangents of the real outputs, zeros for `None`; anything else that does not fit is refused."""
        self.check_structure(cotangent)
        names, leaves, _ = pytree.named_leaves(cotangent)
        out = []
        for place, (shape, dtype, device) in zip(self.returned.places[0], self.meta, strict=True):
            leaf, name = leaves[place], names[place] or "the output"
            if leaf is None:
                leaf = torch.zeros(shape, dtype=dtype, device=device)
            got = (
                (tuple(leaf.shape), leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
            )
            if got != (shape, dtype, device):
                raise ValueError(
                    f"cotangent of {name}: got {got}, expected {(shape, dtype, device)}, the shape, dtype and device "
                    "of the output. Convert it with .to(...), or pass the cotangent of this forward's own output."
                )
            out.append(leaf)
        return out


def tensors_of(sums: Mapping[Key, Buffer] | None) -> dict[Key, torch.Tensor]:
    """Those of some sums that lie on the device."""
    return {key: x for key, x in (sums or {}).items() if isinstance(x, torch.Tensor)}


def need_structure(cotangent: object, expected: pytree.Spec | None) -> None:
    """Refuses a cotangent of another structure than the outputs'."""
    spec = pytree.flatten(cotangent)[1]
    if spec != expected:
        raise ValueError(
            f"cotangent: got the structure {spec}, expected that of the outputs, {expected}. "
            "Give one cotangent per output, in the same containers; None counts as zero."
        )


def no_first_half(what: str) -> str:
    return (
        f"The pullback of {what} has no cotangent to pull back to its params: params() comes once after each "
        "inputs(cotangent). Call inputs(cotangent) first, with retain_graph=True to call both again later."
    )


def is_differentiable(value: object) -> bool:
    """Tells whether a value is a tensor of real or complex numbers."""
    return isinstance(value, torch.Tensor) and pytree.is_real(value)


def refuse_hidden(value: object) -> None:
    """Refuses an output that hides tensors, whose derivative nobody could ask for."""
    if not isinstance(value, torch.Tensor) and next(tensors_in(value, lambda _: False), None) is not None:
        raise TypeError(
            f"step: the function returned a {type(value).__name__} that holds tensors and is no pytree; expected "
            "tensors in dicts, lists, tuples and NamedTuples. Return its fields, or register the class with "
            "optree.register_pytree_node."
        )


def _wanted(inputs: Sequence[object], argnums: Collection[int] | None) -> list[int]:
    """Flat positions of the input tensors to differentiate."""
    out, place, lengths = [], 0, {*places_in(tuple(inputs)).values()}
    for number, tree in enumerate(inputs):
        for leaf in pytree.flatten(tree)[0]:
            chosen = argnums is None or number in argnums
            if chosen and is_differentiable(leaf):
                out.append(place)
            elif (
                chosen
                and isinstance(leaf, torch.Tensor)
                and place not in lengths
                and not isinstance(argnums, (frozenset, NoneType))
            ):
                raise TypeError(
                    f"argnums: input {number} has a tensor of dtype {leaf.dtype}, which has no gradient; "
                    "expected floating tensors. Leave it out of argnums."
                )
            place += 1
    return out


def nothing_to_pull(outputs: object) -> ValueError:
    """The error for a function that returned nothing that has a cotangent."""
    return ValueError(
        f"step: the function returned {_returned(outputs)}, expected a floating tensor to pull back from: a scalar "
        "loss (0-d), or outputs with a cotangent of their own. Leave .item() and float(...) out of the function."
    )


def split_result(step: Spec, result: object) -> tuple[object, object]:
    """(outputs, aux) of what the function returned; aux is None where the step has none."""
    if not step.has_aux:
        return result, None
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        got = f"{len(result)} values" if isinstance(result, (tuple, list)) else named(result)
        raise TypeError(
            f"step: the function returned {got}: got no pair, expected (outputs, aux), as the step has has_aux=True. "
            "Return both, or leave has_aux out."
        )
    return result[0], result[1]


def scalar_loss(outputs: object, who: str = "step(state, *inputs)") -> torch.Tensor:
    if isinstance(outputs, torch.Tensor) and outputs.ndim == 0 and outputs.is_floating_point():
        return outputs
    raise ValueError(
        f"{who}: the function returned {_returned(outputs)}, expected a scalar loss (a 0-d floating tensor). "
        "Reduce it (.mean()) and leave .item() out, or pass cotangent= for outputs that are not a scalar; has_aux=True "
        "for (loss, aux)."
    )


def _returned(outputs: object) -> str:
    tensors = [leaf for leaf in pytree.leaves(outputs) if isinstance(leaf, torch.Tensor)]
    return named(outputs) + (f" with {named(tensors[0])}" if tensors and tensors[0] is not outputs else "")
