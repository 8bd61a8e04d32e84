"""Nodes of graphs of torch's operators: what they are, what they need, graphs of some of them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node


def draws(node: Node) -> bool:
    """Tells whether an operator draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    rate = "dropout_p" if "dropout_p" in names else None
    if rate is None:
        return True
    place = names.index(rate)
    given = node.args[place] if place < len(node.args) else node.kwargs.get(rate, 0.0)
    return bool(given != 0.0)


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
