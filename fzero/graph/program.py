"""A graph as flat Python: each operator a call, each tensor freed after its last use, each message begun early."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fzero.graph import operators
from fzero.graph.trace import Traced

Run = Callable[..., list[Any]]
_PLAIN = (int, float, bool, str, type(None))


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
    regions: Mapping[int, tuple[Run, Run, bool, bool, int]] | None = None,
    keeps: GraphModule | None = None,
) -> Run:
    """`run(xs, calls=None) -> outputs`, which empties the list of inputs.

    Args:
        constants: tensors behind the inputs.
        regions: by number the programs of a region, whether each draws random numbers, and the number of its seed.
        keeps: the graph of the pullback.
    """
    graph: Graph = module.graph
    names: dict[Node, str] = {}
    scope: dict[str, Any] = {"getitem": operator.getitem}
    lines: list[str] = []
    known: dict[int, str] = {}

    def constant(value: object) -> str:
        if type(value) in _PLAIN and value == value and value not in (float("inf"), -float("inf")):
            return repr(value)
        if isinstance(value, Node):
            return names[value]
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            inner = ", ".join(map(constant, value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if value else ''})"
        name = known.setdefault(id(value), f"k{len(known)}")
        scope[name] = value
        return name

    def call(target: object, args: Sequence[object], kwargs: Mapping[str, object]) -> str:
        said = getattr(target, "__name__", "").replace(".", "_")  # "<lambda>" is no name in code
        name = known.setdefault(id(target), f"f{len(known)}_{said if said.isidentifier() else ''}")
        scope[name] = target
        given = [*map(constant, args), *[f"{k}={constant(v)}" for k, v in kwargs.items()]]
        return f"{name}({', '.join(given)})"

    nodes = list(graph.nodes)
    last: dict[Node, Node] = {}
    for node in nodes:
        for x in node.all_input_nodes:
            last[x] = node
    dying: dict[Node, list[Node]] = {}
    for x, node in last.items():
        dying.setdefault(node, []).append(x)
    gathers = [n for n in nodes if n.target is operators.GATHER]
    parts = [[*own] for _, own in itertools.groupby(gathers, lambda node: min(node.users, key=nodes.index))]
    following = {before[-1]: after for before, after in itertools.pairwise(parts)}
    pulls = [] if keeps is None else keeps.graph.find_nodes(op="call_function", target=operators.PULL)
    again = [n.args for n in pulls[0].all_input_nodes if n.target is operators.GATHER] if pulls else []
    kept = [n for n in parts[-1] if n.args in again] if parts else []
    placeholders = [n for n in nodes if n.op == "placeholder"]
    for i, node in enumerate(nodes):
        names[node] = f"v{i}"
    own = placeholders[: len(placeholders) - len(constants)]
    if own:
        lines.append(f"{', '.join(names[n] for n in own)}, = xs")
    for n, value in zip(placeholders[len(own) :], constants, strict=True):
        scope[names[n]] = value
        lines.append(f"{names[n]}_ = {names[n]}")
        names[n] += "_"
    lines.append("xs.clear()")
    unused = [n for n in placeholders if n not in last]
    if unused:
        lines.append(" = ".join(names[n] for n in unused) + " = None")
    for node in nodes:
        indent = ""
        if node.op == "placeholder":
            continue
        if node.op == "output":
            lines.append(f"return {constant(list(node.args[0]))}")  # type: ignore[call-overload]
            break
        name = names[node]
        if node.op == "call_module":
            lines.append(f"{name} = {call(getattr(module, str(node.target)), ([*node.args],), {})}")
        elif node.target is operators.GATHER:
            lines.append(f"{name} = calls.take({node.args[0]})")
            if node in following:
                lines.append(f"calls.ahead({[n.args[0] for n in following[node]]})")
            if node in kept:
                lines.append(f"calls.keep({node.args[0]}, {name})")
        elif node.target is operators.REDUCE:
            x, group = node.args
            lines.append(f"{name} = None; calls.reduce({names[x]}, {group})")  # type: ignore[index]
        elif node.target in (operators.REGION, operators.PULL):
            assert regions is not None
            given, number = node.args
            forward, pullback, *drawing, seed = regions[number]  # type: ignore[index]
            pulls = node.target is operators.PULL
            if drawing[pulls]:
                lines.append(f"with calls.seeded({seed}):")
                indent = "    "
            lines.append(f"{indent}{name} = {call(pullback if pulls else forward, (given,), {})}")
        elif node.target in (operators.SEND, operators.HOST):
            lines.append(f"{name} = {call(node.meta['message'].start, node.args[:-1], {})}")
        elif node.target is operators.ARRIVED:
            lines.append(f"{name} = {constant(node.args[0])}()")
        elif node.target is operator.getitem:
            lines.append(f"{name} = {constant(node.args[0])}[{node.args[1]}]")
        else:
            lines.append(f"{name} = {call(node.target, node.args, node.kwargs)}")
        gone = [names[x] for x in dying.get(node, ())] + ([name] if node not in last else [])
        if gone:
            lines.append(" = ".join(gone) + " = None")
    source = "def run(xs, calls=None):\n" + "\n".join(f"    {line}" for line in lines)
    exec(compile(source, f"<graph {id(graph):x}>", "exec"), scope)
    run: Run = scope["run"]
    run.source = source  # type: ignore[attr-defined]
    return run


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
