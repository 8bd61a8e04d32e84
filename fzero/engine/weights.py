"""Which params' cotangents are one product of two matrices each, and are added to a sum without a tensor between.

So are those of the weights of linear layers: where torch adds them up (AccumulateGrad) it writes the product to a new
tensor first, and reads it again; and where autocast has rounded a weight, once more in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node
from torch.utils.hooks import RemovableHandle

from fzero.base.edges import Grads, Kept, is_hooked, name_of
from fzero.base.hooks import has_posthooks, register

_T, _CAST = "TBackward0", "ToCopyBackward0"  # what lies between a weight and its product


class Weight(NamedTuple):
    """A param that is used in one product of two matrices, and nowhere else.

    Attributes:
        number: the param's.
        place: of the edge that leads to it, of the product's node.
        transposed: whether its transpose is used.
    """

    number: int
    place: int
    transposed: bool
    dtype: torch.dtype

    def add_to(self, kept: Kept, total: torch.Tensor, first: bool) -> None:
        """Adds its cotangent to its sum."""
        kept.add_to(self.place, total.t() if self.transposed else total, first, self.dtype)


class Graph:
    """The graph that leads from outputs to some of the leaves. To be dropped with it."""

    def __init__(self, outputs: Iterable[torch.Tensor]) -> None:
        self.ends = [o for o in outputs if o.requires_grad]
        roots = [o.grad_fn for o in self.ends if o.grad_fn is not None]
        self.nodes = list(dict.fromkeys(roots))
        self.uses: dict[Node, list[tuple[Node, int]]] = {node: [] for node in self.nodes}
        self._roots = set(roots)
        for node in self.nodes:  # which grows
            for k, (other, _) in enumerate(node.next_functions):
                if other is not None:
                    if other not in self.uses:
                        self.uses[other] = []
                        self.nodes.append(other)
                    self.uses[other].append((node, k))

    def leaves(self) -> dict[int, Node]:
        """id of a leaf -> its node."""
        return {
            id(variable): node
            for node in self.nodes
            if not node.next_functions and (variable := getattr(node, "variable", None)) is not None
        }

    def weights(self, params: Sequence[torch.Tensor], leaves: Mapping[int, Node]) -> list[tuple[Node, Weight]]:
        """Those among some leaves that are used in one product each, and its node."""
        out: list[tuple[Node, Weight]] = []
        for number, param in enumerate(params):
            node = leaves.get(id(param))
            if node is None or param.ndim != 2 or param.is_complex() or param._backward_hooks:  # type: ignore[attr-defined]
                continue
            transposed, cast, uses = False, False, self.uses[node]
            while len(uses) == 1 and node not in self._roots:
                node, place = uses[0]
                name = name_of(node)
                if Kept.is_product(node, place):
                    if not (is_hooked(node) or has_posthooks(node)):
                        out.append((node, Weight(number, place, transposed, param.dtype)))
                    break
                if name != _T and (name != _CAST or cast):  # of two casts each would round
                    break
                transposed, cast, uses = transposed is not (name == _T), cast or name == _CAST, self.uses[node]
        return out

    def above(self, nodes: Iterable[Node], seen: set[Node]) -> None:
        """Adds these nodes, and all that lead to them, to those that were seen."""
        todo = [node for node in nodes if node not in seen]
        seen.update(todo)
        for node in todo:
            for other, _ in self.uses[node]:
                if other not in seen:
                    seen.add(other)
                    todo.append(other)


def pull(
    graph: Graph,
    cotangents: Sequence[torch.Tensor],
    asked: Sequence[torch.Tensor],
    leaves: Mapping[int, Node],
    weights: Sequence[tuple[Node, Weight]],
    totals: Mapping[int, tuple[torch.Tensor, bool]],
    retain_graph: bool,
) -> tuple[list[torch.Tensor | None], set[int]]:
    """The cotangents of the leaves that are asked for, and the numbers of the weights whose were added to their sums.

    Args:
        cotangents: of the graph's ends.
        totals: the weights' sums by number, and whether they begin.
    """
    added: set[int] = set()

    def add(own: Sequence[Weight], kept: Kept) -> None:
        for weight in own:
            weight.add_to(kept, *totals[weight.number])
            added.add(weight.number)

    by_node: dict[Node, list[Weight]] = {}
    for node, weight in weights:
        by_node.setdefault(node, []).append(weight)
    runs: set[Node] = set()
    graph.above([leaves[id(x)] for x in asked if id(x) in leaves], runs)
    ends: list[Node] = []  # whose cotangents are asked for, as autograd would not come by otherwise
    handles: list[RemovableHandle] = []
    for node, own in sorted(by_node.items(), key=lambda pair: pair[0]._sequence_nr()):
        if node not in runs:
            ends.append(node)
            graph.above([node], runs)
            continue

        def before(grads: Grads, node: Node = node, own: Sequence[Weight] = own) -> None:
            if grads[0] is not None:
                add(own, Kept(node, grads[0], [weight.place for weight in own]))

        handles.append(register(node.register_prehook, before))
    found: Sequence[torch.Tensor | None] = [None] * (len(asked) + len(ends))
    try:
        if found and graph.ends:
            wanted = [*asked, *[GradientEdge(node, 0) for node in ends]]
            found = torch.autograd.grad(
                graph.ends,
                wanted,
                cotangents,
                retain_graph=retain_graph,
                allow_unused=True,  # type: ignore[arg-type]
            )
    finally:
        for handle in handles:
            handle.remove()
    for node, grad in zip(ends, found[len(asked) :], strict=True):
        if grad is not None:
            add(by_node[node], Kept(node, grad, [weight.place for weight in by_node[node]]))
    return list(found[: len(asked)]), added
