"""A graph as code: flat Python in which each message begins early, and runs of torch's operators by Inductor."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fzero.graph import of_torch, operators
from fzero.graph.trace import Traced, draws, extracted, is_item, is_view, result_of

Run = Callable[..., list[Any]]


# `run_of(region, pulls) -> (program, seed)`: of a region or of its pullback, and the number of the seed it draws by
RunOf = Callable[[int, bool], tuple[Run, int | None]]


def compiling(regions: Sequence[Traced], backend: str, seeds: Sequence[int] | None = None) -> RunOf:
    """The programs of one trace's regions, each of which is compiled when it is asked for first.

    Args:
        seeds: of each region's call the number of its seed, where a run has any.
    """
    known: dict[GraphModule, Run] = {}

    def run_of(number: int, pulls: bool) -> tuple[Run, int | None]:
        region = regions[number]
        module = region.pullback if pulls else region.forward
        if module not in known:
            known[module] = by_inductor(module) if backend == "inductor" else compiled(module)
        return known[module], seeds[number] if seeds and region.draws[pulls] else None

    return run_of


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


def leave_unused(module: GraphModule, regions: Sequence[Traced]) -> None:
    """Takes out of regions, and of a graph that calls them, what nobody uses."""
    module.graph.eliminate_dead_code(lambda node: node.is_impure() or node.target in operators.OWN)  # which may send
    used = [set[object]() for _ in regions]
    for node in module.graph.find_nodes(op="call_function", target=operators.REGION):
        used[node.args[1]] |= {user.args[1] for user in node.users if is_item(user)}
    for region, places in zip(regions, used, strict=True):
        own = region.forward.graph
        end = next(iter(own.find_nodes(op="output")))
        end.args = ([x if i in places else None for i, x in enumerate(result_of(region.forward))],)
        own.eliminate_dead_code()
        region.forward.recompile()
    module.recompile()


def compiled(module: GraphModule, run_of: RunOf | None = None, keeps: GraphModule | None = None) -> Run:
    """`run(xs, calls=None) -> outputs`, which empties the list of inputs.

    It is torch.fx's code of a graph in which the graph's own operators are what they stand for.

    Args:
        run_of: the programs of its regions.
        keeps: the graph of the pullback.
    """
    nodes = list(module.graph.nodes)
    gathers = [n for n in nodes if n.target is operators.GATHER]
    parts = [[*own] for _, own in itertools.groupby(gathers, lambda node: min(node.users, key=nodes.index))]
    following = {before[-1]: after for before, after in itertools.pairwise(parts)}
    pulls = [] if keeps is None else keeps.graph.find_nodes(op="call_function", target=operators.PULL)
    again = [n.args for n in pulls[0].all_input_nodes if n.target is operators.GATHER] if pulls else []
    kept = [n for n in parts[-1] if n.args in again] if parts else []

    graph, made, held = Graph(), dict[Node, Node](), dict[str, Any]()
    xs, calls = graph.placeholder("xs"), graph.placeholder("calls", default_value=None)

    def own(value: Any, *args: Any) -> Node:
        """The call of what is none of torch's operators."""
        name = next((name for name, known in held.items() if known is value), f"call_{len(held)}")
        held[name] = value
        return graph.create_node("call_module", name, args)

    for node in nodes:
        args = torch.fx.map_arg(node.args, made.__getitem__)
        first: Any = args[0] if args else None
        match node.target:
            case _ if node.op == "placeholder":
                new = graph.call_method("pop", (xs, 0))
            case str() if node.op == "get_attr":
                held[node.target] = getattr(module, node.target)
                new = graph.get_attr(node.target)
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
                assert run_of is not None
                run, seed = run_of(args[1], target is operators.PULL)
                drawn: Run = lambda xs, calls, run=run, seed=seed: calls.drawn(run, xs, seed)
                new = own(run, first) if seed is None else own(drawn, first, calls)
            case operators.SEND | operators.HOST:
                new = own(node.meta["effect"].start, *args[:-1])
            case operators.ARRIVED:
                new = graph.call_method("__call__", (first,))
            case _:
                new = graph.node_copy(node, made.__getitem__)
        made[node] = new
    code: Run = GraphModule(held, graph).forward
    return code


def joined(forward: GraphModule, pullback: GraphModule, traced: Traced) -> GraphModule:
    """Two graphs as one: `(*inputs, *cotangents) -> (outputs, cotangents of inputs)`."""
    graph, made = Graph(), dict[Node, Node]()
    outs: list[Any] = list(graph.graph_copy(forward.graph, made))  # type: ignore[arg-type]
    inputs = list(graph.find_nodes(op="placeholder"))
    given = list(pullback.graph.find_nodes(op="placeholder"))
    made.update(zip(given, [outs[i] if i >= 0 else inputs[-1 - i] for i in traced.saved], strict=False))
    for node in reversed(given[len(traced.saved) :]):
        with graph.inserting_after(inputs[-1]) if inputs else graph.inserting_before(next(iter(graph.nodes))):
            made[node] = graph.placeholder(f"cotangent_{node.name}")
        made[node].meta = dict(node.meta)
    grads = graph.graph_copy(pullback.graph, made)  # type: ignore[arg-type]
    graph.output((outs[: traced.outputs], grads))
    constants = dict[str, Any]()
    for module in (forward, pullback):
        for node in module.graph.nodes:
            if node.op == "call_module":
                made[node].op, made[node].target = "call_function", getattr(module, node.target)
            elif node.op == "get_attr":
                constants[node.target] = getattr(module, node.target)
    return GraphModule(constants, graph)


# ---- Inductor

_made: dict[str, Run] = {}


def by_inductor(module: GraphModule) -> Run:
    """`run(xs) -> outputs`, which empties the list of inputs.

    What draws random numbers runs as it is: its numbers are those of torch's operators. So do messages.
    """
    calls = [n for n in module.graph.nodes if n.op == "call_function"]
    if not calls or any(draws(n) or n.target in operators.OWN for n in calls):
        return compiled(in_pieces(module))
    constants = [getattr(module, str(n.target)) for n in module.graph.nodes if n.op == "get_attr"]
    inputs = [n for op in ("placeholder", "get_attr") for n in module.graph.nodes if n.op == op]
    module = extracted(module, inputs, calls, result_of(module))
    given = [n.meta["val"] for n in inputs]
    forms = [f"{tuple(x.shape)} {x.stride()} {x.dtype} {x.device}" for x in given]
    text = "\n".join([module.code, *forms, str(torch.get_num_threads())])
    run = _made.get(text)
    if run is None:
        run = _made[text] = of_torch.by_inductor(module, given)
    return run if not constants else lambda xs: run(operator.iadd(xs, constants))


LEAST = 8  # operators that are worth a compilation, and a call of compiled code


def in_pieces(module: GraphModule) -> GraphModule:
    """A graph in which runs of torch's operators between messages and regions are compiled, each as one call."""
    nodes = list(module.graph.nodes)
    inputs = [n for n in nodes if n.op == "placeholder"]
    module = extracted(module, inputs, nodes[len(inputs) : -1], result_of(module))
    runs: list[list[Node]] = [[]]
    for node in [n for n in module.graph.nodes if n.op == "call_function"]:
        if node.target in operators.OWN or draws(node):
            runs.append([])
        elif node.target is not operator.getitem or node.args[0].target not in operators.OWN:
            runs[-1].append(node)
    for number, run in enumerate(runs):
        if sum(not is_view(node) for node in run) >= LEAST:
            _fuse(module, f"piece_{number}", run)
    return module


def _fuse(module: GraphModule, name: str, run: Sequence[Node]) -> None:
    """Puts the call of a compiled piece in the place of operators."""
    graph, inside = module.graph, set(run)
    inputs = list(dict.fromkeys(x for n in run for x in n.all_input_nodes if x not in inside))
    outputs = [n for n in run if any(user not in inside for user in n.users)]
    setattr(module, name, by_inductor(extracted(module, inputs, run, outputs)))
    with graph.inserting_before(run[-1].next):
        called = graph.create_node("call_module", name, tuple(inputs))
        for i, n in enumerate(outputs):
            item = graph.call_function(operator.getitem, (called, i))
            item.meta = dict(n.meta)
            n.replace_all_uses_with(item)
    for n in reversed(run):
        graph.erase_node(n)
