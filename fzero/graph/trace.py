"""A function and its pullback as two graphs of torch's operators, by one run of it on tensors without values."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fzero.base.operators import kind_of
from fzero.base.private import is_fake
from fzero.base.pytree import is_real
from fzero.base.refusals import place_of
from fzero.graph import of_torch, operators
from fzero.graph.numbers import Made, Numbers, marked, number_of

OWN_GENERATOR = (
    "jit: the function draws from a generator of its own, which a graph would go on with from call to call. Draw from "
    "torch's default one, or give the numbers as an input."
)
DRAWS_TWICE = (
    "jit: a unit draws random numbers, and so does the backward of an operation in it (torch.autograd.Function), and "
    "its forward is recomputed (fz.remat): a graph has one stream for both. Leave fz.remat or jit out."
)
READS_MADE = (
    "jit: a unit or step{} reads a tensor that the function around it made or was given, as from a closure, a default "
    "argument, a list or an attribute. Pass it as an argument of the unit or step."
)
# of a function of tensors: outputs, places of those with cotangents, what else is differentiated
Traceable = Callable[[Sequence[torch.Tensor]], Any]
Tensors = Sequence[torch.Tensor]
# outputs, places of those with cotangents, and `pull(outputs, cotangents by place)`
Derived = tuple[Tensors, Sequence[int], Callable[..., Sequence[torch.Tensor | None]]]


@dataclass(eq=False)
class Traced:
    """Two graphs: `forward(*primals) -> (*outputs, *saved)`, `pullback(*saved, *cotangents)`.

    Tensors that the function closes over are attributes of them.

    Attributes:
        outputs: the number of outputs.
        real: the places of those that have cotangents.
        saved: for each tensor that the pullback is given first, its place: among the outputs of the forward (from 0),
            or among its inputs (from -1 down).
        reached: for each differentiated primal, and for what else is, whether its cotangent is there.
        draws: whether the forward draws random numbers, and the pullback those of the forward again.
    """

    forward: GraphModule
    pullback: GraphModule
    outputs: int
    real: Sequence[int]
    saved: Sequence[int]
    reached: Sequence[bool]
    draws: tuple[bool, bool]


def trace(
    fn: Traceable,
    primals: Sequence[torch.Tensor],
    wanted: Sequence[int],
    decompositions: of_torch.Table,
    recompute: Collection[str] | None = None,
    free: Collection[int] = (),
    stays: Collection[int] = (),
    level: bool = False,
) -> Traced:
    """Traces a function and its pullback.

    Args:
        fn: `fn(primals) -> (outputs, places of those with cotangents, what else is differentiated)`, called once.
        primals: tensors of the fake mode that is active.
        wanted: the places of those that are differentiated.
        recompute: the names of values to save, where the pullback computes again what else it needs of the forward.
        free: the places of the primals that the pullback can be given again, so that casts of them are not saved.
        stays: the groups whose buffers the pullback is given, and does not gather again.
        level: whether it is differentiated by `torch.func.vjp`, and nothing but primals is.
    """
    real: list[int] = []  # the places of outputs that have cotangents
    kinds: list[type | None] = []  # of outputs that are numbers of Python

    def run(given: Sequence[torch.Tensor]) -> tuple[Tensors, Sequence[int], Tensors]:
        with Made(), Numbers():
            outs, places, others = fn(given)
        kinds[:] = map(number_of, outs)
        return outs, places, others

    def by_autograd(given: Tensors) -> Derived:
        own = [x.detach().requires_grad_() if i in wanted else x for i, x in enumerate(given)]
        with torch.enable_grad():
            outs, places, others = run(own)
        asked = [*[own[i] for i in wanted], *others]

        def pull(outs: Tensors, cotangents: Mapping[int, torch.Tensor]) -> Sequence[torch.Tensor | None]:
            ends = [i for i in cotangents if outs[i].requires_grad]
            if not ends or not asked:
                return [None] * len(asked)
            given = [cotangents[i] for i in ends]
            return torch.autograd.grad([outs[i] for i in ends], asked, given, allow_unused=True)

        return outs, places, pull

    def by_func(given: Tensors) -> Derived:
        floats = [i for i, x in enumerate(given) if is_real(x)]
        moved: list[int] = []

        def moving(*own: torch.Tensor) -> Any:
            every = list(given)
            for i, x in zip(floats, own, strict=True):
                every[i] = x
            outs, places, _ = run(every)
            moved[:] = [i for i in places if is_real(outs[i])]
            return tuple([outs[i] for i in moved] or [torch.zeros((), device="cpu")]), outs

        result: Any = torch.func.vjp(moving, *[given[i] for i in floats], has_aux=True)
        _, pullback, outs = result

        def pull(outs: Tensors, cotangents: Mapping[int, torch.Tensor]) -> Sequence[torch.Tensor | None]:
            if not wanted or not moved:
                return [None] * len(wanted)
            every = [cotangents[i] if i in cotangents else torch.zeros_like(outs[i]) for i in moved]
            grads = dict(zip(floats, pullback(tuple(every)), strict=True))
            return [grads[i] for i in wanted]

        return outs, moved if wanted else (), pull

    def joint(*given: torch.Tensor) -> list[torch.Tensor | None]:
        outs, places, pull = (by_func if level else by_autograd)(given)
        outs = [x.clone() if any(x is y for y in given) or not is_fake(x) else x for x in outs]
        real[:] = [i for i in places if not of_torch.is_constant(outs[i])]
        cotangents = {i: operators.tangent(outs[i].detach()) for i in real}
        return [*[x.detach() for x in outs], *cotangents.values(), *pull(outs, cotangents)]

    module = of_torch.traced(joint, primals, decompositions)
    graph, count = module.graph, len(kinds)
    of_torch.draw_in_place(graph)
    for same in _SAME:  # another tensor of the same values, for autograd alone
        for node in graph.find_nodes(op="call_function", target=same):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    result = list(graph.find_nodes(op="output")[0].args[0])  # type: ignore[arg-type]
    outs, tangents, grads = result[:count], result[count : count + len(real)], result[count + len(real) :]
    for node in graph.nodes:
        if node.op == "get_attr":
            value = getattr(module, str(node.target))
            if isinstance(value, torch.Generator):
                raise ValueError(OWN_GENERATOR)
            if isinstance(value, torch.Tensor) and is_fake(value):
                raise ValueError(READS_MADE.format(place_of()))
            node.meta.setdefault("val", value)
        if node.target in operators.EFFECTS:
            node.meta["effect"] = operators.tracing.get().effects[node.args[-1]]
    for out, kind in zip(outs, kinds, strict=True):
        if kind and isinstance(out, Node):
            marked(out.meta["val"], kind)
    parts = outs, tangents, grads
    return _parted(module, *parts, real, recompute, free, stays, bool(decompositions))  # type: ignore[arg-type]


_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.lift_fresh.default)


def _parted(
    module: GraphModule,
    outs: Sequence[Any],
    tangents: Sequence[Node],
    grads: Sequence[Any],
    real: Sequence[int],
    recompute: Collection[str] | None,
    free: Collection[int],
    stays: Collection[int],
    fuses: bool,
) -> Traced:
    """Cuts the graph of both into a forward and a pullback."""
    kept: set[Node] = set()  # of the forward, by their names
    for node in module.graph.find_nodes(op="call_function", target=operators.NAMED):
        if node.args[1] in (recompute or ()):
            kept.add(node.args[0])  # type: ignore[arg-type]
        module.graph.erase_node(node)
    nodes = list(module.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    begin = nodes.index(tangents[0]) if tangents else len(nodes)
    effects = {n: None for n in nodes if draws(n) or checks(n) or n.target in operators.EFFECTS}
    after: set[Node] = {*tangents, *[n for n in nodes[begin:] if n in effects]}  # the pullback's own
    for node in nodes:  # and what depends on it
        if node.op == "call_function" and any(x in after for x in node.all_input_nodes):
            after.add(node)
    needed = ancestors([x for x in outs if isinstance(x, Node)] + [n for n in effects if n not in after])
    needed |= {n for n in nodes if n not in after and is_item(n) and n.args[0] in needed}
    forward = [node for node in nodes if node in needed and node not in after]
    ends = [*[x for x in grads if isinstance(x, Node)], *[n for n in effects if n in after]]
    pulled = ancestors(ends, stop=set(tangents))
    stored = {placeholders[i] for i in free} | {n for n in nodes if n.target is operators.GATHER}
    first = set(forward) | set(placeholders)

    def again(node: Node) -> bool:
        """Whether the pullback makes a value of the forward anew: a look at another, a cast of a param, or all."""
        if node.op in ("placeholder", "get_attr"):
            return node.op == "get_attr"
        if node not in first or node.target is operators.GATHER:
            return node not in first or node.args[0] not in stays
        if recompute is not None:
            came = bool(recompute) and is_item(node) and node.args[0].target is operators.ARRIVED  # type: ignore[union-attr]
            return not came and node not in kept
        source = node.args[0] if node.args and isinstance(node.args[0], Node) else None
        of_param = node.target in of_torch.CASTS and source is not None and root(source) in stored
        return is_view(node) or of_param or (fuses and is_pointwise(node) and node not in outs)

    if recompute is not None:
        drawing = any(draws(n) for n in pulled)
        sends = not recompute  # else what has come is kept, as it is without a graph
        ends += [n for n in effects if n in first and (sends if n.target in operators.SENT else drawing)]
    own, saved, todo = set[Node](), set[Node](), [*ends]
    for node in todo:  # which grows
        if node in own or node in saved or node in tangents:
            continue
        if node not in after and not again(node):
            saved.add(node)
            continue
        own.add(node)
        todo += node.all_input_nodes
    again_drawn = any(draws(n) and n not in after for n in own)
    if again_drawn and any(draws(n) and n in after for n in own):
        raise ValueError(DRAWS_TWICE)
    held = [n for n in nodes if n in saved]
    out_of = {n: i for i, n in reversed([*enumerate(outs)])}
    apart = [n for n in held if n.op != "placeholder" and n not in out_of]
    fw = extracted(module, placeholders, forward, [*outs, *apart])
    bw = extracted(module, [*held, *tangents], [n for n in nodes if n in own], list(grads))
    numbers = {**out_of, **{node: i for i, node in enumerate(apart, len(outs))}}
    places = {node: -1 - i for i, node in enumerate(placeholders)}
    return Traced(
        forward=fw,
        pullback=bw,
        outputs=len(outs),
        real=tuple(real),
        saved=tuple(numbers[n] if n in numbers else places[n] for n in held),
        reached=tuple(isinstance(x, Node) for x in grads),
        draws=(any(map(draws, forward)), again_drawn),
    )


# ---- nodes: what they are, what they need, graphs of some of them


def draws(node: Node) -> bool:
    """Tells whether an operator draws random numbers."""
    own: Any = node.target
    return own is of_torch.bernoulli or (callable(own) and kind_of(own).draws(node.args, node.kwargs))


def checks(node: Node) -> bool:
    """Tells whether an operator makes nothing and may raise, as after a factorization: torch's own checks."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and not schema.returns and not schema.is_mutable


def is_item(node: Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def result_of(module: GraphModule) -> Sequence[Any]:
    return next(iter(module.graph.find_nodes(op="output"))).args[0]  # type: ignore[return-value]


def is_view(node: Node) -> bool:
    """Tells whether an operator makes nothing but another look at its first argument."""
    if node.op != "call_function":
        return False
    if is_item(node):
        return is_view(node.args[0])  # type: ignore[arg-type]
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.is_mutable or not schema.arguments:
        return False
    info = schema.arguments[0].alias_info
    return info is not None and not info.is_write


def is_pointwise(node: Node) -> bool:
    """Tells whether Inductor computes an operator element by element, in one pass with those around it."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) and not draws(node)


def root(node: Node) -> Node:
    while is_view(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def ancestors(of: Sequence[Node] | set[Node], stop: set[Node] = frozenset()) -> set[Node]:  # type: ignore[assignment]
    out, todo = set(of), list(of)
    while todo:
        node = todo.pop()
        if node in stop:
            continue
        for x in node.all_input_nodes:
            if x not in out:
                out.add(x)
                todo.append(x)
    return out


def extracted(
    module: GraphModule, inputs: Sequence[Node], nodes: Sequence[Node], outputs: Sequence[object]
) -> GraphModule:
    """A graph of its own of some nodes."""
    graph, made = Graph(), dict[Node, Node]()
    for node in inputs:
        made[node] = graph.placeholder(node.name)
        made[node].meta = dict(node.meta)
    for node in nodes:
        if node.op != "placeholder" and node not in made:
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.output([made[x] if isinstance(x, Node) else None for x in outputs])
    return GraphModule(module, graph)
