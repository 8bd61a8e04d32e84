"""One run of the step's function under torch.func.vjp, and the pullback that it leaves."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fzero.base import private, pytree
from fzero.base.arguments import need_bool
from fzero.capture.contents import tensors_in
from fzero.engine.delivery import Delivery
from fzero.engine.function import call_function, traversal_of
from fzero.engine.op import used_up
from fzero.engine.outputs import nothing_to_pull, scalar_loss, split_result
from fzero.engine.traversal import Traversal
from fzero.state.sharded import Sharded
from fzero.state.train_state import TrainState
from fzero.table.layout import Key
from fzero.table.microbatch import mean_of, parts_of
from fzero.table.spec import Spec


@dataclass
class _Outputs:
    """The outputs' structure: which are differentiated, which are only carried."""

    spec: Any = None
    real: Sequence[int] = ()
    carried: Mapping[int, Any] | None = None
    aux_spec: Any = None
    aux_tensors: Sequence[int] = ()
    aux_static: Sequence[Any] = ()


class Run:
    """A forward under torch.func.vjp. `outputs`, `aux`, and `pull(cotangents)` with leaves in the outputs' order.

    Args:
        unreduced: cotangents of params stay full and unreduced.
        alone: whether no other run of the same step waits for its pullback meanwhile.
        fused: params may be overwritten once their cotangents are there.
        partial: cotangents of params stay in `reduce` dtype, as others will be added to them.
    """

    def __init__(
        self,
        step: Spec,
        state: TrainState,
        inputs: Sequence[Any],
        argnums: Sequence[int] | None,
        seed: tuple[int, ...],
        unreduced: bool = False,
        alone: bool = True,
        fused: bool = False,
        partial: bool = False,
    ) -> None:
        self.state: TrainState | None = state
        self.scale, self.partial = scale_of(step, state), partial
        flat, self.input_spec = pytree.flatten(tuple(inputs))
        self.count = len(flat)
        self.wanted = _wanted(inputs, argnums)
        traversal, primals, fixed = traversal_of(step, state, seed, unreduced, fused)
        self.unreduced: dict[Any, torch.Tensor] = {}  # full cotangents to add before those that are delivered
        self.traversal: Traversal | None = traversal
        traversal.schedule.keeps = alone
        traversal.schedule.lean = fused and any(row.remat for row in traversal.table.rows)
        differentiated = [flat[place] for place in self.wanted]
        self.outer = private.level() > 0 or (torch.is_grad_enabled() and any(x.requires_grad for x in differentiated))
        self._leads_on = self.outer  # whether another graph leads to the calls of this one
        # whoever differentiates the pullback too does so with respect to the buffers
        self.split = [] if self.outer or fused else [key for key in primals if traversal.is_split(key)]
        given: dict[Key, Any] = dict(primals)
        for key in self.split:
            given[key] = tuple(traversal.layout.groups[key].cut(primals[key]).values())
        del primals
        kept = _Outputs()

        def function(primals: dict[Key, Any], wanted: list[torch.Tensor]) -> Any:
            filled = list(flat)
            for place, value in zip(self.wanted, wanted, strict=True):
                filled[place] = value
            result = call_function(
                step, state, traversal, {**primals, **fixed}, pytree.unflatten(self.input_spec, filled)
            )
            out, aux = split_result(step, result)
            leaves, kept.spec = pytree.flatten(out)
            aux_leaves, kept.aux_spec = pytree.flatten(aux)
            for leaf in (*leaves, *aux_leaves):
                refuse_hidden(leaf)
            kept.real = [i for i, o in enumerate(leaves) if is_differentiable(o)]
            if not kept.real:
                raise nothing_to_pull(out)
            rest = [i for i, o in enumerate(leaves) if isinstance(o, torch.Tensor) and i not in kept.real]
            kept.aux_tensors = [i for i, o in enumerate(aux_leaves) if isinstance(o, torch.Tensor)]
            kept.aux_static = [None if isinstance(o, torch.Tensor) else o for o in aux_leaves]
            kept.carried = {i: o for i, o in enumerate(leaves) if not isinstance(o, torch.Tensor)}
            carried = (tuple(leaves[i] for i in rest), tuple(aux_leaves[i] for i in kept.aux_tensors))
            box.append(rest)
            return tuple(leaves[i] for i in kept.real), carried

        box: list[list[int]] = []
        with self._mode():
            run: Any = torch.func.vjp(function, given, differentiated, has_aux=True)
        real, self._pull, (rest, aux) = run
        leaves = dict(kept.carried or {})
        leaves.update(zip(kept.real, real, strict=True))
        leaves.update(zip(box[-1], rest, strict=True))
        self.kept, self.real = kept, real
        self.outputs = pytree.unflatten(kept.spec, [leaves[i] for i in sorted(leaves)])
        aux_leaves = list(kept.aux_static)
        for place, value in zip(kept.aux_tensors, aux, strict=True):
            aux_leaves[place] = value
        self.aux = pytree.unflatten(kept.aux_spec, aux_leaves)
        self.meta = [(tuple(o.shape), o.dtype, o.device) for o in real]
        self.real = ()

    def _mode(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.outer else torch.no_grad()

    def pull(
        self,
        cotangent: Any,
        retain_graph: bool = False,
        create_graph: bool = False,
        receive: Callable[[Key, torch.Tensor], Any] | None = None,
    ) -> tuple[dict[Any, torch.Tensor], list[Any]]:
        """(scaled cotangents of the primals, cotangents of the flat inputs).

        Args:
            receive: takes the reduced cotangent of each group as soon as it is there, in the result's place.
        """
        if self._pull is None or self.state is None:
            raise RuntimeError(used_up("this forward"))
        _ = self.state.params  # a donated state says so
        cotangents = self.check(cotangent)
        if self.scale != 1.0:
            cotangents = [c * self.scale for c in cotangents]
        again = retain_graph or self.outer
        self._leads_on = self._leads_on or create_graph
        traversal = self.traversal
        assert traversal is not None
        traversal.retain_graph = again
        found: dict[Any, torch.Tensor] = {}
        # whoever differentiates the result too reads it through the graph; otherwise it is delivered outside of it
        delivers = not (self.outer or create_graph)
        delivery = None
        if delivers:
            delivery = Delivery(
                *(traversal.schedule, traversal.layout, traversal.nodes),
                *(receive or found.__setitem__, self.unreduced, self.partial),
            )
            traversal.gates.delivery = delivery
        try:
            with torch.enable_grad() if create_graph else self._mode(), traversal.schedule.pullback():
                grads, wanted = self._pull(
                    tuple(cotangents), retain_graph=again or create_graph, create_graph=create_graph or self.outer
                )
                for key in self.split:
                    group, leaves = traversal.layout.groups[key], list(grads.pop(key))
                    if delivers:
                        traversal.collect(key, leaves)
                    else:
                        grads[key] = group.joined_differentiably(leaves)
                    del leaves
                if delivery is not None:
                    delivery.finish()
        finally:
            traversal.gates.delivery = None
        if not delivers:
            policies = {key: traversal.layout.groups[key].row.policy for key in grads}
            found = {key: g if self.partial else g.to(policies[key].grad) for key, g in grads.items()}
        if not again and not create_graph:
            self.drop()
        out: list[Any] = [None] * self.count
        for place, value in zip(self.wanted, wanted, strict=True):
            out[place] = value / self.scale if self.scale != 1.0 else value
        return found, out

    def drop(self) -> None:
        """Forgets the graph and the state: a used pullback holds nothing, so a donated state's buffers are free."""
        if self.traversal is not None and not self._leads_on:
            self.traversal.schedule.forget_calls()
        self._pull = self.traversal = self.state = None

    def __del__(self) -> None:
        if getattr(self, "_pull", None) is not None:  # nobody pulled it back
            self.drop()

    def check_structure(self, cotangent: Any) -> None:
        spec = pytree.flatten(cotangent)[1]
        if spec != self.kept.spec:
            raise ValueError(
                f"cotangent: got the structure {spec}, expected that of the outputs, {self.kept.spec}. "
                "Give one cotangent per output, in the same containers; None counts as zero."
            )

    def check(self, cotangent: Any) -> list[torch.Tensor]:
        """The cotangents of the real outputs, zeros for `None`; anything else that does not fit is refused."""
        self.check_structure(cotangent)
        names, leaves, _ = pytree.named_leaves(cotangent)
        out = []
        for place, (shape, dtype, device) in zip(self.kept.real, self.meta, strict=True):
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


def is_differentiable(value: Any) -> bool:
    """Whether a value is a tensor of real or complex numbers."""
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def refuse_hidden(value: Any) -> None:
    """Refuses an output that hides tensors, whose derivative nobody could ask for."""
    if not isinstance(value, torch.Tensor) and next(tensors_in(value, lambda _: False), None) is not None:
        raise TypeError(
            f"step: the function returned a {type(value).__name__} that holds tensors and is no pytree; expected "
            "tensors in dicts, lists, tuples and NamedTuples. Return its fields, or register the class with "
            "optree.register_pytree_node."
        )


def _wanted(inputs: Sequence[Any], argnums: Sequence[int] | None) -> list[int]:
    """Flat positions of the input tensors to differentiate."""
    out, place = [], 0
    for number, tree in enumerate(inputs):
        for leaf in pytree.flatten(tree)[0]:
            chosen = argnums is None or number in argnums
            if chosen and is_differentiable(leaf):
                out.append(place)
            elif argnums is not None and chosen and isinstance(leaf, torch.Tensor):
                raise TypeError(
                    f"argnums: input {number} has a tensor of dtype {leaf.dtype}, which has no gradient; "
                    "expected floating tensors. Leave it out of argnums."
                )
            place += 1
    return out


@dataclass
class Pullback:
    """What `step.vjp` returns beside the outputs: takes their cotangent, returns (grads, input cotangents)."""

    _call: Callable[..., tuple[Sharded, tuple[Any, ...]]]

    def __call__(
        self, cotangent: Any, retain_graph: bool = False, create_graph: bool = False
    ) -> tuple[Sharded, tuple[Any, ...]]:
        """Pulls a cotangent of the outputs back.

        Args:
            cotangent: the outputs' structure; `None` for an output counts as zero.
            retain_graph: keep what is needed to call again; otherwise it is freed.
            create_graph: make the result differentiable.

        Returns:
            grads, sharded like the params at every stage, means over the data-parallel ranks; and a tuple with one
            cotangent per input, `None` where it was not differentiated.
        """
        need_bool(retain_graph, "pullback", "retain_graph")
        need_bool(create_graph, "pullback", "create_graph")
        return self._call(cotangent, retain_graph, create_graph)


def seed_of(state: TrainState, rng: int, microbatch: int) -> tuple[int, ...]:
    """What everything random in one run comes from."""
    return (state.seed, state.step, state.params.axis.data_rank, microbatch, rng)


def scale_of(step: Spec, state: TrainState) -> float:
    """What cotangents are multiplied by inside the pullback."""
    return math.prod(extra.scale(state.extra[extra.name]) for extra in step.extras if extra.scale)


def grads_of(step: Spec, state: TrainState, buffers: dict[Any, torch.Tensor], times: float = 1.0) -> Sharded:
    """Scaled sums of gradients as a tree like the params; `times` is by what to divide them too."""
    params = state.params
    return Sharded(params.layout, params.axis, params.structure, buffers, None, scale_of(step, state) * times)


def runs(
    step: Spec,
    state: TrainState,
    inputs: Sequence[Any],
    cotangent: Any,
    rng: int,
    losses: list[torch.Tensor],
    auxes: list[Any],
    unreduced: bool,
    fused: bool = False,
) -> Iterator[tuple[Run, Any, float]]:
    """One forward a microbatch, the cotangent to pull back, and by what to divide the sum; notes losses and aux.

    Args:
        unreduced: cotangents stay full and unreduced; in a fused step not the last one's.
        fused: the last one's pullback will update the params.
    """
    micro = step.microbatches
    pieces: list[Any] | None = None
    times = 1.0
    for i, part in enumerate(micro.split(inputs)):
        last = fused and i == micro.count - 1
        seed, several = seed_of(state, rng, i), micro.count > 1
        run = Run(step, state, part, (), seed, unreduced and not last, fused=last, partial=several)
        outputs, run.outputs = run.outputs, None
        if cotangent is None or (isinstance(outputs, torch.Tensor) and outputs.ndim == 0):
            losses.append(scalar_loss(outputs))
        if pieces is None:
            given = cotangent
            if given is None:
                given = torch.ones_like(outputs if micro.count == 1 else mean_of([outputs]))
            elif micro.count > 1:
                run.check_structure(given)
            pieces, times = micro.split_cotangent(given, [parts_of(outputs)] * micro.count)
        ct = pieces[i]
        auxes.append(run.aux)
        del outputs
        yield run, ct, times
        del run
