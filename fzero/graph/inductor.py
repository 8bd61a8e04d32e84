"""Graphs of torch's operators, compiled by Inductor: once for all that are alike."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fzero.graph import of_torch, operators, program
from fzero.graph.nodes import draws, extracted, is_view, result_of
from fzero.graph.program import Run

_made: dict[str, Run] = {}


def compiled(module: GraphModule, constants: Sequence[torch.Tensor] = ()) -> Run:
    """`run(xs) -> outputs`, which empties the list of inputs.

    What draws random numbers runs as it is: its numbers are those of torch's operators. So do messages.
    """
    placeholders = list(module.graph.find_nodes(op="placeholder"))
    calls = [n for n in module.graph.nodes if n.op == "call_function"]
    if not calls or any(draws(n) or n.target in operators.OWN for n in calls):
        return program.compiled(in_pieces(module), constants)
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
    setattr(module, name, compiled(extracted(module, inputs, run, outputs)))
    with graph.inserting_before(run[-1].next):
        called = graph.create_node("call_module", name, tuple(inputs))
        for i, n in enumerate(outputs):
            item = graph.call_function(operator.getitem, (called, i))
            item.meta = dict(n.meta)
            n.replace_all_uses_with(item)
    for n in reversed(run):
        graph.erase_node(n)
