"""Graphs of torch's operators, compiled by Inductor: once for all that are alike."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fzero.graph import of_torch, operators, program
from fzero.graph.program import Run
from fzero.graph.trace import draws, extracted, is_view

_made: dict[str, Run] = {}


def compiled(module: GraphModule, constants: Sequence[torch.Tensor] = (), drawing: bool = False) -> Run:
    """`run(xs) -> outputs`, which empties the list of inputs.

    What draws random numbers runs as it is: its numbers are those of torch's operators. So do messages.
    """
    placeholders = list(module.graph.find_nodes(op="placeholder"))
    called = {n.target for n in module.graph.nodes if n.op == "call_function"}
    if drawing or not called.difference(operators.OWN) or called.intersection(operators.OWN):
        return program.compiled(in_pieces(module), constants=constants)
    text = "\n".join([module.code, *[_form(n.meta["val"]) for n in placeholders], str(torch.get_num_threads())])
    run = _made.get(text)
    if run is None:
        run = _made[text] = of_torch.by_inductor(module, [n.meta["val"] for n in placeholders])
    if not constants:
        return run

    def call(xs: list[Any]) -> list[Any]:
        xs += constants
        return run(xs)

    return call


def _form(x: torch.Tensor) -> str:
    return f"{tuple(x.shape)} {x.stride()} {x.dtype} {x.device}"


def table() -> of_torch.Table:
    """The decompositions that Inductor wants."""
    return of_torch.inductor_decompositions()


LEAST = 8  # operators that are worth a compilation, and a call of compiled code


def in_pieces(module: GraphModule) -> GraphModule:
    """A graph in which runs of torch's operators between messages and regions are compiled, each as one call."""
    number, numbers, plain = 0, dict[str, int](), False
    counts: dict[int, int] = {}
    items = [n for n in module.graph.nodes if n.op == "call_function"]
    for node in items:
        special = node.target in operators.OWN or draws(node)
        if node.target is operator.getitem and node.args[0].target in operators.OWN:
            numbers[node.name] = numbers[node.args[0].name]
            continue
        if special or not plain:
            number += 1
        plain = not special
        numbers[node.name] = number
        counts[number] = 0 if special else counts.get(number, 0) + (not is_view(node))
    worth = {n for n, count in counts.items() if count >= LEAST}
    if not worth:
        return module
    return _fused(module, numbers, worth)


def _fused(module: GraphModule, numbers: Mapping[str, int], worth: set[int]) -> GraphModule:
    graph, made = Graph(), dict[Node, Node]()
    nodes = list(module.graph.nodes)
    members: dict[int, list[Node]] = {}
    for node in nodes:
        if numbers.get(node.name) in worth:
            members.setdefault(numbers[node.name], []).append(node)
    modules: dict[str, Any] = {}
    done: set[int] = set()
    for node in nodes:
        number = numbers.get(node.name)
        if number not in worth:
            made[node] = graph.node_copy(node, made.__getitem__)
            continue
        if number in done:
            continue
        done.add(number)
        own = members[number]
        inside = set(own)
        inputs = list(dict.fromkeys(x for n in own for x in n.all_input_nodes if x not in inside))
        outputs = [n for n in own if any(user not in inside for user in n.users)]
        piece = extracted(module, inputs, own, outputs)
        name = f"piece_{number}"
        modules[name] = compiled(piece)
        called = graph.call_module(name, tuple(made[x] for x in inputs))
        for i, n in enumerate(outputs):
            made[n] = graph.call_function(operator.getitem, (called, i))
            made[n].meta = dict(n.meta)
    out = GraphModule(torch.nn.Module(), Graph())
    for name, run in modules.items():
        setattr(out, name, run)
    out.graph = graph
    return out
