"""A graph as flat Python: each operator a call, each tensor freed after its last use, each message begun early."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from fzero.graph import operators
from fzero.graph.trace import Traced

Run = Callable[..., list[Any]]


class Region(NamedTuple):
    """The programs of a region and of its pullback, and the numbers of the seeds that each draws by, if it does."""

    runs: tuple[Run, Run]
    seeds: tuple[int | None, int | None] = None, None


def scheduled(module: GraphModule, groups: Sequence[int | None] = ()) -> GraphModule:
    """The same graph with each gather before its first use, and gradients reduced where they are there.

    Args:
        groups: of each output the group whose gradient it is, None for others.
    """
    graph = module.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in [n for n in graph.nodes if n.target is operators.GATHER]:
        min(node.users, key=order.__getitem__).prepend(node)
    end = next(iter(graph.find_nodes(op="output")))
    result = list(end.args[0])
    for i, (x, group) in enumerate(zip(result, groups, strict=False)):
        if group is not None and isinstance(x, Node):
            with graph.inserting_after(x):
                result[i] = graph.call_function(operators.REDUCE, (x, group))
    end.args = (result,)
    module.recompile()
    return module


def compiled(
    module: GraphModule,
    constants: Sequence[torch.Tensor] = (),
    regions: Mapping[int, Region] | None = None,
    keeps: GraphModule | None = None,
) -> Run:
    """`run(xs, calls=None) -> outputs`, which empties the list of inputs.

    It is torch.fx's code of a graph in which the graph's own operators are what they stand for.

    Args:
        constants: tensors behind the inputs.
        regions: by number.
        keeps: the graph of the pullback.
    """
    nodes = list(module.graph.nodes)
    gathers = [n for n in nodes if n.target is operators.GATHER]
    parts = [[*own] for _, own in itertools.groupby(gathers, lambda node: min(node.users, key=nodes.index))]
    following = {before[-1]: after for before, after in itertools.pairwise(parts)}
    pulls = [] if keeps is None else keeps.graph.find_nodes(op="call_function", target=operators.PULL)
    again = [n.args for n in pulls[0].all_input_nodes if n.target is operators.GATHER] if pulls else []
    kept = [n for n in parts[-1] if n.args in again] if parts else []
    inputs = sum(node.op == "placeholder" for node in nodes) - len(constants)

    graph, made, held = Graph(), dict[Node, Node](), dict[str, Any]()
    xs, calls = graph.placeholder("xs"), graph.placeholder("calls", default_value=None)

    def own(value: Any, *args: Any) -> Node:
        """The call of what is none of torch's operators."""
        name = next((name for name, known in held.items() if known is value), f"call_{len(held)}")
        held[name] = value
        return graph.create_node("call_module", name, args)

    for i, node in enumerate(nodes):
        args = torch.fx.map_arg(node.args, made.__getitem__)
        first: Any = args[0] if args else None
        match node.target:
            case _ if node.op == "placeholder" and i < inputs:
                new = graph.call_method("pop", (xs, 0))
            case _ if node.op == "placeholder":
                held[f"constant_{i}"] = constants[i - inputs]
                new = graph.get_attr(f"constant_{i}")
            case _ if node.op == "output":
                new = graph.output(list(first))
            case _ if node.op == "call_module":
                new = own(getattr(module, str(node.target)), [*args])
            case operators.GATHER:
                new = graph.call_method("take", (calls, first))
                if node in following:
                    graph.call_method("ahead", (calls, [n.args[0] for n in following[node]]))
                if node in kept:
                    graph.call_method("keep", (calls, first, new))
            case operators.REDUCE:
                new = graph.call_method("reduce", (calls, *args))
            case operators.REGION | operators.PULL as target:
                region, second = (regions or {})[args[1]], target is operators.PULL
                run, seed = region.runs[second], region.seeds[second]
                new = own(run, first) if seed is None else own(_drawing(run, seed), first, calls)
            case operators.SEND | operators.HOST:
                new = own(node.meta["effect"].start, *args[:-1])
            case operators.ARRIVED:
                new = graph.call_method("__call__", (first,))
            case _:
                new = graph.node_copy(node, made.__getitem__)
        made[node] = new
    code: Run = GraphModule(held, graph).forward
    return code


def _drawing(run: Run, seed: int) -> Run:
    return lambda xs, calls: calls.drawn(run, xs, seed)


def joined(forward: GraphModule, pullback: GraphModule, traced: Traced) -> GraphModule:
    """Two graphs as one: `(*inputs, *constants, *cotangents) -> (outputs, cotangents of inputs)`."""
    graph, made = Graph(), dict[Node, Node]()
    outs: list[Any] = list(graph.graph_copy(forward.graph, made))  # type: ignore[arg-type]
    inputs = list(graph.find_nodes(op="placeholder"))
    given = list(pullback.graph.find_nodes(op="placeholder"))
    begin, end = len(traced.saved), len(given) - len(traced.pulled)
    made.update(zip(given, [outs[i] if i >= 0 else inputs[-1 - i] for i in traced.saved], strict=False))
    for node, number in zip(given[end:], traced.pulled, strict=True):
        made[node] = inputs[len(inputs) - len(traced.constants) + number]
    for node in reversed(given[begin:end]):
        with graph.inserting_after(inputs[-1]) if inputs else graph.inserting_before(next(iter(graph.nodes))):
            made[node] = graph.placeholder(f"cotangent_{node.name}")
        made[node].meta = dict(node.meta)
    grads = graph.graph_copy(pullback.graph, made)  # type: ignore[arg-type]
    graph.output((outs[: traced.outputs], grads))
    for module in (forward, pullback):
        for node in module.graph.find_nodes(op="call_module"):
            made[node].op, made[node].target = "call_function", getattr(module, str(node.target))
    return GraphModule(torch.nn.Module(), graph)
