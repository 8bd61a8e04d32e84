"""One node of whatever differentiates it: `Node` applies an opaque `Op`, and each derivative is another `Node`.

And the walks over plain autograd's graph of what ran inside: gradients, what it begins with, what depends on what.

Inside `Node.forward` no functorch level is active, so an `Op` runs there on plain tensors. Its backward, jvp and vmap
are `Node.apply(Op(transformed function))`: any order and nesting of derivatives comes with it.
"""

from __future__ import annotations

import contextvars
import itertools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from fzero.base import private, refusals, texts
from fzero.base.ambient import Ambient, functions_seen
from fzero.base.context import variable
from fzero.base.pytree import is_real
from fzero.base.random import seeded
from fzero.base.thread_state import FORWARD_ENABLED, RUN_BACKWARD, SET_FORWARD_ENABLED, SET_GRAD_ENABLED

Tensors = tuple[torch.Tensor, ...]
depth: contextvars.ContextVar[int] = variable("depth", 0)  # how many nodes run here, one inside of the other


def first_order() -> bool:
    """Tells whether nothing else differentiates what runs now: then a pullback may take its cheap, final form."""
    return not torch.is_grad_enabled() and private.innermost() is None


def final() -> bool:
    """The same, and no tangents either: then a linear map's transpose may be called as it is, outside of a graph."""
    return first_order() and not private.forward_mode()


class Op:
    """`fn(*tensors) -> tuple of tensors`, with what it was called in.

    That is taken when the op is made, not when it runs: under vmap another op runs than the one that was called, and a
    recomputation must see what the first run saw.
    """

    name = "a unit"
    reduced = 0  # how many of the tensors, the first, have cotangents that ranks reduce together
    plain = True  # whether plain autograd, which is quicker than torch.func, may differentiate what it runs
    pushes = True  # whether forward-mode derivatives may go through it
    stand_ins: Mapping[int, torch.Tensor] = {}  # what is saved in the place of some tensors
    real: Sequence[int] | None = None  # which of its outputs are, if it knows once it has run
    node: weakref.ref[torch.autograd.graph.Node] | None = None  # of the graph
    unused: Collection[int] = ()  # tensors that no output of a transposed op depended on, once it has run

    def __init__(self, fn: Callable[..., Tensors], seed: int | None, ambient: Ambient) -> None:
        self.fn, self.seed, self.ambient = fn, seed, ambient

    def derived(self, fn: Callable[..., Tensors]) -> Op:
        op = Op(fn, self.seed, self.ambient)
        op.reduced, op.plain = self.reduced, self.plain
        return op

    def run(self, tensors: Tensors, wanted: Sequence[int]) -> Tensors:
        """The outputs on plain tensors; `wanted` are the positions whose derivative will be asked for."""
        return self.replay(*tensors)

    def back(
        self, tensors: Callable[[], Tensors], wanted: Sequence[int], cotangents: Sequence[torch.Tensor | None]
    ) -> dict[int, torch.Tensor] | None:
        """First-order cotangents of the wanted tensors, where this op has a cheaper way than recomputing itself.

        Args:
            tensors: what it was called with, to be asked for only where it is needed.
            cotangents: of the real outputs; `None` is zero.
        """
        return None

    def restored(self, saved: Tensors) -> Tensors:
        """What it was called with, of what was saved."""
        return saved

    def replay(self, *tensors: torch.Tensor) -> Tensors:
        with self.ambient.again(), seeded(self.seed):
            return self.fn(*tensors)

    def transposed(self, count: int, wanted: Sequence[int], real: Sequence[int]) -> Op:
        """(tensors, cotangents of the real outputs) -> cotangents of the wanted tensors, by recomputing.

        Of what the outputs do not depend on they are zeros, and it is in `unused` once that has run.
        """
        unused: set[int] = set()

        def fn(*args: torch.Tensor) -> Tensors:
            def forward(*primals: torch.Tensor) -> Tensors:
                out = self.replay(*_replaced(args[:count], wanted, primals))
                return tuple(out[i] for i in real)

            primals = [args[i] for i in wanted]
            if first_order() and self.plain:
                try:
                    found = pulled(forward, primals, args[count:])
                except RuntimeError as error:
                    if texts.says(error, texts.NO_SPARSE):
                        raise TypeError(refusals.sparse(self.name)) from error
                    raise
                unused.update(i for i, g in zip(wanted, found, strict=True) if g is None)
                return tuple(torch.zeros_like(p) if g is None else g for g, p in zip(found, primals, strict=True))

            def looked_at(*primals: torch.Tensor) -> Tensors:
                out = forward(*primals)
                reached = {id(x) for x in (*out, *leaves_of(out))}  # a primal may be put out as it is
                unused.update(i for i, primal in zip(wanted, primals, strict=True) if id(primal) not in reached)
                return out

            _, pull = torch.func.vjp(looked_at, *primals)  # type: ignore[misc]
            return tuple(pull(tuple(args[count:])))

        op = self.derived(fn)
        op.unused = unused
        return op

    def pushed(self, count: int, moving: Sequence[int]) -> Op:
        """(tensors, tangents of the moving ones) -> tangents of the outputs."""

        def fn(*args: torch.Tensor) -> Tensors:
            def forward(*primals: torch.Tensor) -> Tensors:
                return self.replay(*_replaced(args[:count], moving, primals))

            # make_dual refuses expanded tensors
            primals = tuple(args[i].contiguous() for i in moving)
            return torch.func.jvp(forward, primals, tuple(t.contiguous() for t in args[count:]))[1]

        return self.derived(fn)


def _replaced(tensors: Sequence[torch.Tensor], positions: Sequence[int], values: Sequence[torch.Tensor]) -> Tensors:
    out = list(tensors)
    for position, value in zip(positions, values, strict=True):
        out[position] = value
    return tuple(out)


def pulled(
    forward: Callable[..., Tensors], primals: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor | None]:
    """The cotangents of a function's primals, plain tensors, by plain autograd; None where nothing depends on one."""
    with torch.enable_grad():
        leaves = [primal.detach().requires_grad_() for primal in primals]
        out = forward(*leaves)
    refuse_foreign_leaves(out, leaves, text=lambda leaf: f"{closed_over(leaf)} {_MADE}")
    return gradients(out, leaves, cotangents, False)


def _saved(ctx: private.Context) -> Tensors:
    """Returns what a node was called with."""
    try:
        return ctx.op.restored(ctx.saved_tensors)
    except RuntimeError as error:
        if not texts.says(error, texts.WRITES_SAVED):
            raise
        raise ValueError(
            f"An input of {ctx.op.name} was changed in place after it was called, and pulling it back needs what was "
            "there (as it is run again: fz.remat, or a derivative of a derivative). Change a copy instead: "
            "x = x.clone(), or use the operation that is not in place."
        ) from error


class Node(torch.autograd.Function):
    """`Node.apply(op, wanted, *tensors)`: the op's outputs as one node of the outer derivative."""

    @staticmethod
    def forward(op: Op, wanted: Sequence[int], *tensors: torch.Tensor) -> Tensors:  # type: ignore[override]
        token, enabled = depth.set(depth.get() + 1), FORWARD_ENABLED()
        SET_FORWARD_ENABLED(True)  # which a Function's forward is without
        try:  # detached, or a graph inside would lead outside
            return op.run(tuple(map(torch.Tensor.detach, tensors)), wanted)
        finally:
            SET_FORWARD_ENABLED(enabled)
            depth.reset(token)

    @staticmethod
    def setup_context(ctx: private.Context, inputs: tuple[Op, Sequence[int], *Tensors], output: Tensors) -> None:
        op, tensors = inputs[0], inputs[2:]
        if op.node is None:  # of several levels the lowest, which comes first
            # the node that functorch's own context stands before
            op.node = weakref.ref(getattr(ctx, "_pt_inner_ctx", ctx))  # type: ignore[assignment]
        if stand_ins := op.stand_ins:  # of an op that one level differentiates backward
            ctx.save_for_backward(*[stand_ins.get(i, x) for i, x in enumerate(tensors)])
        else:
            ctx.save_for_backward(*tensors)
            if op.pushes:
                ctx.save_for_forward(*tensors)
        real = [i for i, x in enumerate(output) if is_real(x)] if op.real is None else op.real
        ctx.op, ctx.count, ctx.outputs, ctx.real = op, len(tensors), len(output), real
        ctx.meta = [(output[i].shape, output[i].dtype, output[i].device) for i in real] if op.reduced else []
        if len(real) < len(output):
            ctx.mark_non_differentiable(*[x for i, x in enumerate(output) if i not in real])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: private.Context, *cotangents: torch.Tensor | None) -> object:  # type: ignore[override]
        count = ctx.count
        real = tuple(map(cotangents.__getitem__, ctx.real))
        needs = ctx.needs_input_grad[len(ctx.needs_input_grad) - count :]
        wanted = list(itertools.compress(range(count), needs))
        found = ctx.op.back(lambda: _saved(ctx), wanted, real) if first_order() else None
        if found is None:
            tensors = _saved(ctx)
            given = {i: c for i, c in zip(ctx.real, real, strict=True) if c is not None}
            some = bool(given)
            if not some and not ctx.op.reduced:
                return (None,) * (2 + count)
            if not some:  # all the same it runs, as it does on other ranks
                given = {
                    i: torch.zeros(s, dtype=d, device=at) for i, (s, d, at) in zip(ctx.real, ctx.meta, strict=True)
                }
            arguments = (*tensors, *given.values())
            transposed = ctx.op.transposed(count, wanted, [*given])
            out = _applied(transposed, active(arguments), *arguments)
            # zeros would meet infinite derivatives before
            kept = [i for i in wanted if i not in transposed.unused and (some or i < ctx.op.reduced)]
            found = {i: g for i, g in zip(wanted, out, strict=True) if i in kept}
        return (None, None, *map(found.get, range(count)))

    @staticmethod
    def jvp(ctx: private.Context, _: object, __: object, *tangents: torch.Tensor | None) -> object:  # type: ignore[override]
        tensors = ctx.saved_tensors
        moving = {i: t for i, t in enumerate(tangents) if t is not None and is_real(tensors[i])}
        if not (moving and ctx.real):
            return (None,) * ctx.outputs
        arguments = (*tensors, *moving.values())
        out = _applied(ctx.op.pushed(len(tensors), [*moving]), active(arguments), *arguments)
        return tuple(tangent if i in ctx.real else None for i, tangent in enumerate(out))

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], op: Op, wanted: Sequence[int], *tensors: torch.Tensor) -> object:  # type: ignore[override]
        each = torch.func.vmap(op.fn, in_dims=tuple(in_dims[2:]), randomness=info.randomness)

        def mapped(*args: torch.Tensor) -> Tensors:
            return tuple(out.clone() if _is_expanded(out) else out for out in each(*args))

        out = _applied(op.derived(mapped), wanted, *tensors)
        return out, (0,) * len(out)


def _applied(op: Op, wanted: Sequence[int], *tensors: torch.Tensor) -> Tensors:
    with functions_seen.nowhere():
        return Node.apply(op, wanted, *tensors)  # type: ignore[return-value]


OWNER = "_fzero_owner"  # set on what a node returned


def direct(function: type[torch.autograd.Function]) -> Any:
    """`apply` of a Function, quick under plain autograd, of whose contexts Python's collector takes none for garbage.

    From a tensor the collector goes on to its node's context only where nothing else owns either, which it finds out
    twice. Where another thread, in an operation without the GIL, comes to own them in between, the collector takes the
    context and all that it leads to for garbage: they survive, but weak references to them are cleared and finalizers
    called. Where one more node leads there, which lives as long as the tensor, the collector never goes on to it.
    """
    return private.direct(function, own_jointly)


def own_jointly(outs: torch.Tensor | Tensors) -> None:
    """Has a node that lives as long as they do lead to the node that has put them out; see `direct`."""
    owner, enabled = None, torch.is_grad_enabled()
    for x in (outs,) if isinstance(outs, torch.Tensor) else outs:
        if x.requires_grad and owner is None and x.layout == torch.strided:
            SET_GRAD_ENABLED(True)
            owner = x.view_as(x).grad_fn
            SET_GRAD_ENABLED(enabled)
        if x.requires_grad and owner is not None:
            setattr(x, OWNER, owner)


apply = direct(Node)


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Tells whether places of a tensor share memory, as those of what does not depend on what is mapped."""
    return tensor.layout == torch.strided and 0 in tensor.stride()


def active(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The positions of the tensors that some level differentiates."""
    return [i for i, tensor in enumerate(tensors) if private.is_differentiated(tensor)]


def gradients(
    out: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor | None],
    retain_graph: bool,
    create_graph: bool = False,
) -> Sequence[torch.Tensor | None]:
    """torch.autograd.grad over those outputs that depend on anything; None for an unused leaf."""
    outs, given = [], []
    for o, c in zip(out, cotangents, strict=True):
        if c is not None and o.requires_grad:
            outs.append(o)
            given.append(c.to(o.dtype))
    if not outs or not leaves:
        return [None] * len(leaves)
    return RUN_BACKWARD(
        tuple(outs),
        tuple(given),
        retain_graph,
        create_graph,
        tuple(leaves),
        allow_unreachable=True,
        accumulate_grad=False,
    )


def refuse_foreign_leaves(
    out: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    is_foreign: Callable[[torch.Tensor], bool] = lambda leaf: True,
    text: Callable[[torch.Tensor], str] | None = None,
) -> None:
    """A tensor that a unit closed over would get a silent zero gradient: look for graph leaves that are not ours.

    Args:
        is_foreign: of a leaf that is not among `leaves`, whether it is not one that the function made itself.
        text: what is said of one.
    """
    ours = {id(leaf) for leaf in leaves}
    for leaf in leaves_of(out):
        if id(leaf) not in ours and is_foreign(leaf):
            raise ValueError((text or closed_over)(leaf))


def leaves_of(out: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors that the graph of these begins with."""
    todo = [o.grad_fn for o in out if o.grad_fn is not None]
    seen = set(todo)
    for node in todo:  # which grows: a fraction of a microsecond each
        if following := node.next_functions:
            for other, _ in following:
                if other is not None and other not in seen:
                    seen.add(other)
                    todo.append(other)
            continue
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield variable


def edges_to(out: Sequence[torch.Tensor]) -> set[tuple[torch.autograd.graph.Node, int]]:
    """Walks to everything that tensors depend on in their graph: (node, which of its outputs)."""
    todo = [(x.grad_fn, x.output_nr) for x in out if x.grad_fn is not None]
    seen, nodes = set(todo), {node for node, _ in todo}
    for node, _ in todo:
        for other, place in node.next_functions:
            if other is not None:
                seen.add((other, place))
                if other not in nodes:
                    nodes.add(other)
                    todo.append((other, place))
    return seen


_MADE = (
    "If the unit makes it itself, as x.detach().requires_grad_() to differentiate by it, use torch.func.grad there: "
    "this is a derivative of a derivative."
)


def closed_over(tensor: torch.Tensor) -> str:
    return (
        f"A unit closes over a tensor of shape {tuple(tensor.shape)} that is being differentiated, where it cannot be "
        "seen (an object of another library, a cache); its gradient would be lost. Pass this tensor to the unit's "
        "call, or detach() it where no gradient is wanted."
    )
