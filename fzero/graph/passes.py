"""Passes over the graph of a function: what nobody uses of a region is not computed."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Mapping

import torch
from torch.fx import GraphModule, Node

from fzero.graph import operators
from fzero.graph.nodes import is_view, result_of
from fzero.graph.signatures import meta_of
from fzero.graph.trace import Traced

_aten = torch.ops.aten
_SCALED = {  # zero if an operand is
    *(_aten.mul.Tensor, _aten.mul.Scalar, _aten.neg.default, _aten.mm.default, _aten.bmm.default),
}
_LINEAR = {  # zero if the first operand is
    *(_aten.div.Tensor, _aten.div.Scalar, _aten.sum.default, _aten.sum.dim_IntList, _aten.clone.default),
    *(_aten._to_copy.default, torch.ops.prims.convert_element_type.default, operator.getitem),
}


def silenced(pullback: GraphModule, places: Collection[int]) -> GraphModule:
    """A pullback some of whose inputs, cotangents by which nobody differentiates, are zero: less is left to add."""
    graph = pullback.graph
    zero = {node for i, node in enumerate(graph.find_nodes(op="placeholder")) if i in places}
    blank = set[Node]()  # zeros that are no cotangents: by what is infinite their products are no zeros
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        first, second = (*node.args, None, None)[:2]
        if (node.target, 0) in ((_aten.scalar_tensor.default, first), (_aten.full.default, second)):
            blank.add(node)
        elif node.target in _SCALED and (first in zero or second in zero):
            zero.add(node)
        elif (node.target in _LINEAR or is_view(node) or _pulls(node)) and first in zero:
            zero.add(node)
        elif node.target is _aten.where.self and zero.intersection(node.args[1:]):
            zero |= {node} if zero.union(blank).issuperset(node.args[1:]) else set()
        elif node.target is _aten.add.Tensor and not node.kwargs:
            for own, other in ((first, second), (second, first)):
                if own in zero and isinstance(other, Node) and meta_of(other.meta["val"]) == meta_of(node.meta["val"]):
                    node.replace_all_uses_with(other)
                    zero |= {node} if other in zero else set()
                    break
    for node in zero:  # what is computed of infinite values would be no zero
        value = node.meta.get("val")
        if node.op == "placeholder" or not isinstance(value, torch.Tensor) or not value.is_contiguous():
            continue
        if any(user not in zero for user in node.users):
            with graph.inserting_after(node):
                kwargs = {"dtype": value.dtype, "device": value.device}
                made = graph.call_function(_aten.full.default, ([*value.shape], 0), kwargs)
            made.meta = dict(node.meta)
            node.replace_all_uses_with(made, lambda user: user not in zero)
    graph.eliminate_dead_code()
    return pullback


def _pulls(node: Node) -> bool:
    """Tells whether an operator is a pullback of torch's, linear in the cotangent, its first argument."""
    return str(getattr(node.target, "_schema", "")).partition("(")[0].partition(".")[0].endswith("_backward")


def of_use(module: GraphModule, regions: list[Traced], silent: Mapping[int, Collection[int]]) -> None:
    """Takes out of regions, and of their calls in a graph, what nobody uses.

    Args:
        silent: for each region that is pulled back, the places among its cotangents of those that are always zero.
    """
    graph = module.graph
    for number, region in enumerate(regions):
        held = len(region.saved)
        silenced(region.pullback, {held + i for i in silent.get(number, ())})
        inputs = list(region.pullback.graph.find_nodes(op="placeholder"))
        gone = [i for i, node in enumerate(inputs) if not node.users]
        for i in gone:
            region.pullback.graph.erase_node(inputs[i])
        region.pullback.recompile()
        for node in graph.find_nodes(op="call_function", target=operators.PULL):
            if node.args[1] == number:
                node.args = [x for i, x in enumerate(node.args[0]) if i not in gone], number
        saved = [place for i, place in enumerate(region.saved) if i not in gone]
        regions[number] = dataclasses.replace(region, saved=saved)
    graph.eliminate_dead_code(lambda node: node.is_impure() or node.target in operators.OWN)  # which may send
    used: dict[object, set[object]] = {}
    for node in graph.find_nodes(op="call_function", target=operators.REGION):
        places = used.setdefault(node.args[1], set())
        places |= {user.args[1] for user in node.users if user.target is operator.getitem}
    for number, region in enumerate(regions):
        own = region.forward.graph
        end = next(iter(own.find_nodes(op="output")))
        end.args = ([x if i in used.get(number, ()) else None for i, x in enumerate(result_of(region.forward))],)
        own.eliminate_dead_code()
        region.forward.recompile()
    module.recompile()
