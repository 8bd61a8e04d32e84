"""One run of the step's function under torch.func.vjp, and the pullback that it leaves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fzero import _private, _tree
from fzero._arguments import need_bool
from fzero._checks import nothing_to_pull, split_result
from fzero._collectives import Axis
from fzero._handle import Handle
from fzero._placement import find
from fzero._sharded import Sharded
from fzero._state import TrainState
from fzero._traversal import Delivery, Traversal
from fzero._unit import used_up
from fzero._use import Use

if TYPE_CHECKING:
    from fzero._step import Step


def traversal_of(
    step: Step, state: TrainState, seed: tuple[int, ...], unreduced: bool = False, fused: bool = False
) -> tuple[Traversal, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What one run needs: the traversal, the tensors to differentiate, and the fixed (frozen) ones.

    Args:
        unreduced: leave cotangents full and unreduced (ZeRO-1 while it accumulates).
        fused: params may be overwritten once their cotangents are there.
    """
    params = state.params
    stage = step.stage
    uses, primals, fixed = {}, {}, {}
    # in ZeRO-1 and 2 a run on one rank only is no mistake until it is pulled back
    axis = Axis() if unreduced else params.axis.of_next_run() if stage == 3 else params.axis
    for key in params.keys:
        group = params.layout.groups[key]
        policy = group.row.policy
        assert policy.param and policy.compute and policy.reduce and policy.grad
        shard = params.stored(key)
        held = params.held.get(key)
        grad = policy.reduce if unreduced else policy.grad
        stands = fused or not shard.plain or (not group.row.frozen and (unreduced or grad != policy.param))
        primal = shard.parts[0]
        if stands:
            # cotangents take the primal's dtype and shape: a primal without memory stands for the stored one
            numel = group.numel if unreduced else shard.numel()
            primal = torch.zeros((), dtype=grad, device=shard.device).expand(numel)
        (fixed if group.row.frozen else primals)[key] = primal
        uses[key] = Use(
            tag=key,
            axis=axis,
            shard=shard,
            compute=policy.compute,
            reduce=policy.reduce,
            grad=grad,
            stands=stands,
            gather8=policy.gather is not None,
            held=held,
        )
    device = next(iter(uses.values())).shard.device.type
    traversal = Traversal(params.layout, uses, stage == 3, step.remats, step.compiles, seed, device)
    traversal.schedule.expect(params.axis.orders, step.fn)
    return traversal, primals, fixed


def autocast_of(step: Step, device: str) -> contextlib.AbstractContextManager[Any]:
    """What the function runs under: torch.autocast where the step has it."""
    dtype = find(step.rules, "compute")
    return torch.autocast(device, dtype=dtype, cache_enabled=False) if dtype else contextlib.nullcontext()


def call_function(
    step: Step, state: TrainState, traversal: Traversal, primals: Mapping[str, Any], inputs: Sequence[Any]
) -> Any:
    """The user's function on the tree of full tensors and handles."""
    tree = _tree.unflatten(state.params.structure, traversal.leaves(primals))
    with autocast_of(step, traversal.device), traversal.running(), traversal.schedule.forward():
        return step.fn(tree, *inputs)


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
    """A forward under torch.func.vjp. `outputs`, `aux`, and `pull(cotangents)` with leaves in the outputs' order."""

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
    ) -> None:
        self.state, self.scale = state, state.loss_scale.scale
        flat, self.input_spec = _tree.flatten(tuple(inputs))
        self.count = len(flat)
        self.wanted = _wanted(inputs, argnums)
        traversal, primals, fixed = traversal_of(step, state, seed, unreduced, fused)
        self.unreduced: dict[str, torch.Tensor] = {}  # full cotangents to add before those that are delivered
        self.traversal: Traversal | None = traversal
        traversal.schedule.keeps, traversal.schedule.lean = alone, fused and step.remats
        differentiated = [flat[place] for place in self.wanted]
        self.outer = _private.level() > 0 or (torch.is_grad_enabled() and any(x.requires_grad for x in differentiated))
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
            for leaf in leaves:
                if isinstance(leaf, Handle):
                    raise leaf._refuse("returned from the function")
            kept.real = [i for i, o in enumerate(leaves) if isinstance(o, torch.Tensor) and o.is_floating_point()]
            if not kept.real:
                raise nothing_to_pull(out)
            rest = [i for i, o in enumerate(leaves) if isinstance(o, torch.Tensor) and i not in kept.real]
            aux_leaves, kept.aux_spec = _tree.flatten(aux)
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
        _ = self.state.params  # a donated state says so
        if self._pull is None:
            raise RuntimeError(used_up("this forward"))
        cotangents = self.check(cotangent)
        if self.scale != 1.0:
            cotangents = [c * self.scale for c in cotangents]
        again = retain_graph or self.outer
        assert self.traversal is not None
        self.traversal.retain_graph = again
        traversal, early = self.traversal, receive is not None and not (self.outer or self.traversal.nested)
        traversal.delivery = Delivery(traversal, receive, self.unreduced) if receive is not None and early else None
        # whoever differentiates the result reads it as it comes
        defers = not (self.outer or create_graph or torch.is_anomaly_enabled())
        with torch.enable_grad() if create_graph else self._mode(), self.traversal.schedule.pullback(defers):
            grads, wanted = self._pull(
                tuple(cotangents), retain_graph=again or create_graph, create_graph=create_graph or self.outer
            )
            for key in self.split:
                group, leaves = self.traversal.layout.groups[key], list(grads.pop(key))
                grads[key] = (
                    group.joined_differentiably(leaves) if create_graph else self.traversal.collect(key, leaves, False)
                )
                del leaves
        if traversal.delivery is not None:
            traversal.delivery.finish()
            traversal.delivery, grads = None, {}
        elif receive is not None:
            self._deliver(grads, receive)
        if not again and not create_graph:
            self._pull = None
            self.traversal = None  # a used pullback holds nothing, so a donated state's buffers are free
        out: list[Any] = [None] * self.count
        for place, value in zip(self.wanted, wanted, strict=True):
            out[place] = value / self.scale if self.scale != 1.0 else value
        return grads, out

    def _deliver(self, grads: dict[str, torch.Tensor], receive: Callable[[str, torch.Tensor], Any]) -> None:
        """Where a unit is differentiated twice, grads come all at once."""
        assert self.traversal is not None
        for key in list(grads):
            shard = grads.pop(key)
            if key in self.unreduced:
                use = self.traversal.uses[key]
                shard = shard + use.axis.reduce_scatter(self.unreduced[key], use.tag).to(use.grad)
            receive(key, shard)

    def drop(self) -> None:
        """Forgets the graph."""
        self._pull = self.traversal = None

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


def _wanted(inputs: Sequence[Any], argnums: Sequence[int] | None) -> list[int]:
    """Flat positions of the input tensors to differentiate."""
    out, place = [], 0
    for number, tree in enumerate(inputs):
        for leaf in _tree.flatten(tree)[0]:
            chosen = argnums is None or number in argnums
            if chosen and isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
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
