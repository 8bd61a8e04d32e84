"""A function and its pullback as two graphs of torch's operators, by one run of it on tensors without values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fzero.graph import of_torch, operators
from fzero.graph.nodes import ancestors, draws, extracted, is_item, is_pointwise, is_view, root
from fzero.graph.numbers import Made, Numbers, marked, number_of

OWN_GENERATOR = (
    "jit: the function draws from a generator of its own, which a graph would go on with from call to call. Draw from "
    "torch's default one, or give the numbers as an input."
)
# of a function of tensors: outputs, places of those with cotangents, what else is differentiated
Traceable = Callable[[Sequence[torch.Tensor]], Any]


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
        draws: whether the forward, and the pullback, draw random numbers.
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
    still: Callable[[], Collection[int]] = tuple,
) -> Traced:
    """Traces a function and its pullback.

    Args:
        fn: `fn(primals) -> (outputs, places of those with cotangents, what else is differentiated)`, called once.
        primals: tensors of the fake mode that is active.
        wanted: the places of those that are differentiated.
        recompute: the names of values to save, where the pullback computes again what else it needs of the forward.
        free: the places of the primals that the pullback can be given again, so that casts of them are not saved.
        stays: the groups whose buffers the pullback is given, and does not gather again.
        level: whether it is differentiated by `torch.func.vjp`; `fn(primals)` returns outputs alone.
        still: the places of those outputs that have no derivative, at a level; asked once `fn` has run.
    """
    real: list[int] = []
    kinds: list[type | None] = []  # of outputs that are numbers of Python
    count = 0

    def joint(*given: torch.Tensor) -> list[torch.Tensor | None]:
        nonlocal count
        own = [x.detach().requires_grad_() if i in wanted else x for i, x in enumerate(given)]
        with torch.enable_grad():
            with Made(), Numbers():
                outs, places, others = fn(own)
            kinds[:] = map(number_of, outs)
            outs = [x if of_torch.is_fake(x) else x.clone() for x in outs]
            places = [i for i in places if not of_torch.is_constant(outs[i])]
        real[:], count = places, len(outs)
        ends = [outs[i] for i in places if outs[i].requires_grad]
        tangents = [operators.tangent(outs[i].detach()) for i in places]
        moving = [t for i, t in zip(places, tangents, strict=True) if outs[i].requires_grad]
        asked = [*[own[i] for i in wanted], *others]
        found: Sequence[torch.Tensor | None] = [None] * len(asked)
        if ends and asked:
            found = torch.autograd.grad(ends, asked, moving, allow_unused=True)
        return [*[x.detach() for x in outs], *tangents, *found]

    def joint_at_a_level(*given: torch.Tensor) -> list[torch.Tensor | None]:
        nonlocal count
        floats = [i for i, x in enumerate(given) if is_real(x)]
        reals: list[bool] = []

        def moving(*own: torch.Tensor) -> Any:
            every = list(given)
            for i, x in zip(floats, own, strict=True):
                every[i] = x
            with Made(), Numbers():
                outs = fn(every)
            kinds[:] = map(number_of, outs)
            reals[:] = [is_real(x) and i not in still() for i, x in enumerate(outs)]
            kept = [x for x, own in zip(outs, reals, strict=True) if own]
            others = [x for x, own in zip(outs, reals, strict=True) if not own]
            return tuple(kept) or (torch.zeros((), device="cpu"),), others

        result: Any = torch.func.vjp(moving, *[given[i] for i in floats], has_aux=True)
        kept, pull, others = result
        count = len(reals)
        parts = iter(kept), iter(others)
        outs = [next(parts[not own]) for own in reals]
        outs = [x.clone() if any(x is y for y in given) or not of_torch.is_fake(x) else x for x in outs]
        real[:] = [i for i, own in enumerate(reals) if own and wanted and not of_torch.is_constant(outs[i])]
        tangents = [operators.tangent(outs[i]) for i in real]
        if not wanted:
            return outs
        own_of = dict(zip(real, tangents, strict=True))
        moved = [own_of[i] if i in own_of else torch.zeros_like(outs[i]) for i, own in enumerate(reals) if own]
        moved = moved or [torch.zeros_like(kept[0])]
        grads = dict(zip(floats, pull(tuple(moved)), strict=True))
        return [*outs, *tangents, *[grads[i] for i in wanted]]

    module = of_torch.traced(joint_at_a_level if level else joint, primals, decompositions)
    graph = module.graph
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
            node.meta.setdefault("val", value)
        if node.target in operators.EFFECTS:
            node.meta["effect"] = operators.tracing.get().effects[node.args[-1]]
    for out, kind in zip(outs, kinds, strict=True):
        if kind and isinstance(out, Node):
            marked(out.meta["val"], kind)
    parts = outs, tangents, grads
    return _parted(module, *parts, real, recompute, free, stays, bool(decompositions))  # type: ignore[arg-type]


_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.lift_fresh.default)


def is_real(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


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
    effects = {n: None for n in nodes if draws(n) or n.target in operators.EFFECTS}
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
        draws=(any(map(draws, forward)), any(draws(n) for n in own)),
    )
