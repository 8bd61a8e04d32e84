"""One run of the step's function under torch.func.vjp, and the pullback that it leaves."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fzero import _private, _tree
from fzero._arguments import need_bool
from fzero._checks import nothing_to_pull, split_result
from fzero._collectives import Axis
from fzero._contents import tensors_in
from fzero._delivery import Delivery
from fzero._formats import Stored
from fzero._handle import Handle, storage_of
from fzero._layout import Group
from fzero._node import active
from fzero._placement import find
from fzero._refusals import heard, refuse_outside
from fzero._sharded import Sharded
from fzero._state import TrainState
from fzero._traversal import Traversal, read
from fzero._unit import used_up
from fzero._use import Use
from fzero._watch import is_strict, refuse_leaks, watching_run

if TYPE_CHECKING:
    from fzero._step import Step


def traversal_of(
    step: Step,
    state: TrainState,
    seed: tuple[int, ...],
    unreduced: bool = False,
    fused: bool = False,
    derived: bool = True,
) -> tuple[Traversal, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What one run needs: the traversal, the tensors to differentiate, and the fixed (frozen) ones.

    Args:
        unreduced: leave cotangents full and unreduced (ZeRO-1 while it accumulates).
        fused: params may be overwritten once their cotangents are there.
        derived: whether it will be pulled back.
    """
    params = state.params
    stage = step.stage
    uses, primals, fixed = {}, {}, {}
    # in ZeRO-1 and 2 one rank alone may run forward
    numbered = stage == 3 or (stage and derived)
    axis = Axis() if unreduced else params.axis.of_next_run(state.step) if numbered else params.axis
    for key in params.keys:
        group = params.layout.groups[key]
        policy = group.row.policy
        assert policy.param and policy.compute and policy.reduce and policy.grad
        held = params.held.get(key)
        shard = params.stored(key) if key in params.buffers else _stand_in(params, key)
        stands = fused or not shard.plain or (not group.row.frozen and (unreduced or policy.reduce != policy.param))
        primal = shard.parts[0]
        if stands:
            # cotangents take the primal's dtype and shape: a primal without memory stands for the stored one
            numel = group.numel if unreduced else shard.numel()
            primal = torch.zeros((), dtype=policy.reduce, device=shard.device).expand(numel)
        (fixed if group.row.frozen else primals)[key] = primal
        uses[key] = Use(
            tag=key,
            axis=axis,
            shard=shard,
            compute=policy.compute,
            reduce=policy.reduce,
            grad=policy.grad,
            wire=policy.wire,
            stands=stands,
            gather8=policy.gather is not None,
            held=held,
        )
    device = next(iter(uses.values())).shard.device.type
    traversal = Traversal(params.layout, uses, stage == 3, step.remats, step.compiles, seed, device)
    return traversal, primals, fixed


def _stand_in(params: Sharded, key: str) -> Stored:
    """For a shard that lies in the full buffer at hand: nobody reads it, and it must not count as a holder of that."""
    full, numel = params.held[key], params.layout.shard_numel(key)
    form = params.format(key)
    return Stored(form, (torch.zeros((), dtype=full.dtype, device=full.device).expand(numel),))


def autocast_of(step: Step, device: str) -> contextlib.AbstractContextManager[Any]:
    """What the function runs under: torch.autocast where the step has it."""
    dtype = find(step.rules, "compute")
    return torch.autocast(device, dtype=dtype, cache_enabled=False) if dtype else contextlib.nullcontext()


def call_function(
    step: Step, state: TrainState, traversal: Traversal, primals: Mapping[str, Any], inputs: Sequence[Any]
) -> Any:
    """The user's function on the tree of full tensors and handles."""
    tensors = [x for x in _tree.flatten((dict(primals), inputs))[0] if isinstance(x, torch.Tensor)]
    form = (_private.level(), torch.is_grad_enabled(), tuple(active(tensors)))
    traversal.schedule.expect(state.params.axis.records, step.fn, form)
    stored = _stored(state.params)
    versions = [_private.version(buffer) for buffer, _ in stored.values()]
    # in a graph of plain autograd's nothing but a look at each operation tells what a unit has leaked
    first = not traversal.schedule.ran_before or is_strict() or (torch.is_grad_enabled() and _private.level() == 0)
    watch: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    leaves = traversal.leaves(primals)
    entered = [None if isinstance(x, Handle) else _private.version(_private.unwrapped(x)) for x in leaves]
    if first and not step.compiles:
        full = [leaf for leaf in leaves if not isinstance(leaf, Handle)]
        roots = {storage_of(leaf): functools.partial(_leaf_of, traversal, leaves) for leaf in full}
        watch = watching_run(roots | {storage: leaf_of for storage, (_, leaf_of) in stored.items()})
    elif traversal.acts:
        watch = watching_run(None)
    tree = _tree.unflatten(state.params.structure, leaves)
    with autocast_of(step, traversal.device), traversal.running(), traversal.schedule.forward(), watch:
        try:
            with heard():
                out = step.fn(tree, *inputs)
        except RuntimeError as error:
            refuse_outside(error)
            raise
        out = _tree.map_leaves(lambda x: read(x) if isinstance(x, Handle) else x, out)
        if traversal.acts:
            refuse_leaks(out)
    if [_private.version(buffer) for buffer, _ in stored.values()] != versions:
        state.kill(
            "The step's function wrote to the params of this state in place, and what they were is lost. Compute with "
            "a copy (w = w.clone()), and go on from another state."
        )
        raise ValueError(
            "step: the function wrote to its params in place, which this state did not survive. Params change in "
            "step.update only: compute with a copy (w = w.clone()), or use operations that are not in place."
        )
    for row, leaf, version in zip(state.params.layout.rows, leaves, entered, strict=True):
        if version is not None and _private.version(_private.unwrapped(leaf)) != version:
            raise ValueError(
                f"step: the function writes to leaf {row.path!r} in place, outside of units (as "
                "nn.Embedding(max_norm=...) does). Params change in step.update only: compute with a copy (w = "
                "w.clone()), or use operations that are not in place."
            )
    return _tree.map_leaves(lambda x: _apart(x, stored), out)


def _stored(params: Sharded) -> dict[int, tuple[torch.Tensor, Callable[[torch.Tensor], str]]]:
    """Storage -> a buffer of the params, and what names the leaf that a view of it belongs to."""
    out: dict[int, tuple[torch.Tensor, Callable[[torch.Tensor], str]]] = {}
    for key in params.keys:
        group = params.layout.groups[key]
        shard = params.layout.shard_numel(key) * params.axis.rank

        def leaf_of(tensor: torch.Tensor, group: Group = group, start: int = 0) -> str:
            return f"Leaf {group.leaf_at(start + int(_private.unwrapped(tensor).storage_offset()))!r}"

        full = params.held.get(key)
        for part in params.stored(key).parts if full is None else (*params.stored(key).parts, full):
            start = 0 if full is not None and storage_of(part) == storage_of(full) else shard
            out[storage_of(part)] = part, functools.partial(leaf_of, start=start)
    return out


def _leaf_of(traversal: Traversal, leaves: Sequence[torch.Tensor], tensor: torch.Tensor) -> str:
    """Names the full leaf, of those that the function has, that a tensor is a view of."""
    offsets = [
        (_private.unwrapped(leaf).storage_offset(), row.path)
        for leaf, row in zip(leaves, traversal.layout.rows, strict=True)
        if storage_of(leaf) == storage_of(tensor)
    ]
    own = _private.unwrapped(tensor).storage_offset()
    return f"Leaf {max(found for found in offsets if found[0] <= own)[1]!r}"


def _apart(value: Any, stored: Mapping[int, Any]) -> Any:
    """What is given out must not be a state's own memory: the caller may write to it."""
    return value.clone() if isinstance(value, torch.Tensor) and storage_of(value) in stored else value


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
        step: Step,
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
        self.scale, self.partial = state.loss_scale.scale, partial
        flat, self.input_spec = _tree.flatten(tuple(inputs))
        self.count = len(flat)
        self.wanted = _wanted(inputs, argnums)
        traversal, primals, fixed = traversal_of(step, state, seed, unreduced, fused)
        self.unreduced: dict[str, torch.Tensor] = {}  # full cotangents to add before those that are delivered
        self.traversal: Traversal | None = traversal
        traversal.schedule.keeps, traversal.schedule.lean = alone, fused and step.remats
        differentiated = [flat[place] for place in self.wanted]
        self.outer = _private.level() > 0 or (torch.is_grad_enabled() and any(x.requires_grad for x in differentiated))
        self._leads_on = self.outer  # whether another graph leads to the calls of this one
        # whoever differentiates the pullback too does so with respect to the buffers
        self.split = [] if self.outer or fused else [key for key in primals if traversal.is_split(key)]
        given: dict[str, Any] = dict(primals)
        for key in self.split:
            given[key] = tuple(traversal.layout.groups[key].cut(primals[key]).values())
        del primals
        kept = _Outputs()

        def function(primals: dict[str, Any], wanted: list[torch.Tensor]) -> Any:
            filled = list(flat)
            for place, value in zip(self.wanted, wanted, strict=True):
                filled[place] = value
            result = call_function(
                step, state, traversal, {**primals, **fixed}, _tree.unflatten(self.input_spec, filled)
            )
            out, aux = split_result(step, result)
            leaves, kept.spec = _tree.flatten(out)
            aux_leaves, kept.aux_spec = _tree.flatten(aux)
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
        self.outputs = _tree.unflatten(kept.spec, [leaves[i] for i in sorted(leaves)])
        aux_leaves = list(kept.aux_static)
        for place, value in zip(kept.aux_tensors, aux, strict=True):
            aux_leaves[place] = value
        self.aux = _tree.unflatten(kept.aux_spec, aux_leaves)
        self.meta = [(tuple(o.shape), o.dtype, o.device) for o in real]
        self.real = ()

    def _mode(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.outer else torch.no_grad()

    def pull(
        self,
        cotangent: Any,
        retain_graph: bool = False,
        create_graph: bool = False,
        receive: Callable[[str, torch.Tensor], Any] | None = None,
    ) -> tuple[dict[str, torch.Tensor], list[Any]]:
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
            delivery = Delivery(traversal, receive or found.__setitem__, self.unreduced, self.partial)
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
        spec = _tree.flatten(cotangent)[1]
        if spec != self.kept.spec:
            raise ValueError(
                f"cotangent: got the structure {spec}, expected that of the outputs, {self.kept.spec}. "
                "Give one cotangent per output, in the same containers; None counts as zero."
            )

    def check(self, cotangent: Any) -> list[torch.Tensor]:
        """The cotangents of the real outputs, zeros for `None`; anything else that does not fit is refused."""
        self.check_structure(cotangent)
        names, leaves, _ = _tree.named_leaves(cotangent)
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
        for leaf in _tree.flatten(tree)[0]:
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
