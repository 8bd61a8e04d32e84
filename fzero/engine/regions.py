"""The nodes of a graph that lead to params and to no input, in regions, and which of them wait for the second half.

A region does not wait where nothing in it is worth it, or where it could not be told apart with the same bits: a native
node that computes all of its cotangents together, a sum of three terms or more that would be added in another order.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import Node, get_gradient_edge

from fzero.base import private
from fzero.base.edges import SEPARABLE, SHAPES, WEIGHTS, Edge, Kept, is_hooked, is_python, is_users, name_of
from fzero.base.hooks import has_posthooks


@dataclass(eq=False)
class Region:
    """Nodes that lead to params and to no input, and to each other.

    Attributes:
        into: edges that lead here from nodes that lead to inputs.
        outputs: numbers of outputs that depend on nothing else.
    """

    nodes: list[Node] = field(default_factory=list)
    params: list[int] = field(default_factory=list)
    into: list[tuple[Node, int]] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)


class Regions:
    """The graph that leads from outputs to inputs and params.

    It knows the graph's nodes, and is to be dropped with them.

    Args:
        inputs, params: leaves.
        units: nodes that hand on cotangents by themselves -> their numbers, and along how many of their first edges.
        shapes_only: nothing but nodes that save no tensor may wait, as params are not there any more then.

    Attributes:
        roots: of each output, where its cotangent goes in; None for one that is no end of a graph.
        leads: whether any output depends on an input.
        native: whether no user's Function is among the nodes. One may write to what it is given, and to what it has
            returned: nothing waits where there is any, but for what is pulled back as a whole.
        late: the regions that wait.
        early: the numbers of the params of those that do not.
    """

    def __init__(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        params: Sequence[torch.Tensor],
        units: Mapping[Node, tuple[int, int]] | None,
        shapes_only: bool,
    ) -> None:
        self.units, self._shapes_only = units or {}, shapes_only
        self.roots = [_root_of(o) for o in outputs]
        self._walk()
        wanted, numbers = {id(x) for x in inputs}, {id(x): i for i, x in enumerate(params)}
        leaves = {node: id(variable) for node in self._nodes if (variable := _variable(node)) is not None}
        self._main = self._above(node for node, x in leaves.items() if x in wanted)
        self.leads = bool(self._main)
        self.native = not any(is_users(kind) for kind in {*map(type, self._nodes)})
        below = self._above(node for node, x in leaves.items() if x in numbers) - self._main
        self._regions = self._connected(below)
        for node, x in leaves.items():
            if node in below:
                self._regions[node].params.append(numbers[x])
        regions = dict.fromkeys(self._regions.values())
        self._order: dict[Node, int] | None = None
        everything = not self.leads and not shapes_only  # the second half is the pullback
        worth = [r for r in regions if self.native and self._is_worth(r) and not self._must_not_wait(r)]
        self.late = list(regions) if everything else worth
        late = {i for region in self.late for i in region.params}
        self.early = sorted({i for region in regions for i in region.params} - late)

    def _walk(self) -> None:
        self._nodes = list(dict.fromkeys(edge[0] for edge in self.roots if edge is not None))
        self._into: dict[Node, list[tuple[Node, int, int]]] = {node: [] for node in self._nodes}
        for node in self._nodes:  # which grows
            for k, (other, place) in enumerate(node.next_functions):
                if other is not None:
                    if other not in self._into:
                        self._into[other] = []
                        self._nodes.append(other)
                    self._into[other].append((node, k, place))

    def _above(self, nodes: Iterable[Node]) -> set[Node]:
        """These nodes and all that lead to them."""
        todo = list(nodes)
        seen = set(todo)
        for node in todo:
            for other, _, _ in self._into[node]:
                if other not in seen:
                    seen.add(other)
                    todo.append(other)
        return seen

    def _connected(self, below: set[Node]) -> dict[Node, Region]:
        """The region of each of some nodes."""
        regions: dict[Node, Region] = {}
        near: dict[Node, list[Node]] = {node: [x for x, _ in node.next_functions if x in below] for node in below}
        for node in below:
            near[node] += [x for x, _, _ in self._into[node] if x in below]
        for node in self.units:  # one that hands on all of its cotangents at once keeps its regions together
            own = [x for x, _ in node.next_functions if x in below]
            for x in own if node in self._main else ():
                near[x] += own
        for node in self._nodes:
            if node in below and node not in regions:
                region = Region()
                todo = [node]
                regions[node] = region
                for each in todo:
                    region.nodes.append(each)
                    for x in near[each]:
                        if x not in regions:
                            regions[x] = region
                            todo.append(x)
        for node in self._nodes:
            if node in self._main:
                for k, (x, _) in enumerate(node.next_functions):
                    if x in regions:
                        regions[x].into.append((node, k))
        for i, edge in enumerate(self.roots):
            if edge is not None and edge[0] in regions:
                regions[edge[0]].outputs.append(i)
        return regions

    def is_alone(self, unit: Node) -> bool:
        """Tells whether nothing else uses the params that a unit hands on cotangents of by itself."""
        ends = unit.next_functions[: self.units[unit][1]]
        return unit in self._into and all(node is None or len(self._into[node]) == 1 for node, _ in ends)

    # ---- which regions wait

    def _is_worth(self, region: Region) -> bool:
        """Tells whether there are matrix products to wait for."""
        given = any(node in self.units or self._is_weight(node, k) for node, k in region.into)
        return given or any(node in self.units or name_of(node) in WEIGHTS for node in region.nodes)

    def _is_weight(self, node: Node, k: int) -> bool:
        return k in WEIGHTS.get(name_of(node), ()) and self.can_wait(node, k)

    def can_wait(self, node: Node, k: int) -> bool:
        """Tells whether an edge's cotangent is computed from cotangents and what leads to inputs, which stay."""
        needs = Kept.needs(node, k)
        return needs is not None and all(node.next_functions[place][0] in self._main for place in needs)

    def _must_not_wait(self, region: Region) -> bool:
        for node in {node for node, _ in region.into}:
            if not is_python(node) and (name_of(node) not in SEPARABLE or is_hooked(node) or has_posthooks(node)):
                return True
        for node in region.nodes:
            if is_hooked(node):
                return True
            saves = node.next_functions and name_of(node) not in SHAPES and name_of(node) != "EmbeddingBackward0"
            if self._shapes_only and saves:
                return True
        return self._adds_otherwise(region)

    def _adds_otherwise(self, region: Region) -> bool:
        """Tells whether some sum in a region would be added in another order than in a pullback as a whole."""
        mixed: list[tuple[Node, int]] = []
        own = set(region.nodes)
        for node in region.nodes:
            terms = [(each, place) for each, _, place in self._into[node]]
            terms += [(node, edge[1]) for edge in self.roots if edge is not None and edge[0] is node]
            for nr in {place for _, place in terms}:
                from_here = [each for each, place in terms if place == nr]
                if len(from_here) > 2 and any(each in own for each in from_here if each is not node):
                    mixed.append((node, nr))
        if not mixed:
            return False
        if self._order is None:
            self._order = self._run(self._main | set(self._regions))
        within = self._run(own)
        for node, nr in mixed:
            terms = [(each, k) for each, k, place in self._into[node] if place == nr]
            whole = sorted(terms, key=lambda term: (self._order_of(term[0]), term[1]))
            first = [term for term in whole if term[0] not in own]
            halves = first + sorted([term for term in terms if term[0] in own], key=lambda x: (within[x[0]], x[1]))
            swapped = [whole[1], whole[0], *whole[2:]] if len(whole) > 2 else whole
            # outputs' own cotangents come first in both; of two terms either may be the first
            if halves != whole and ((node, nr) in self.roots or halves != swapped):
                return True
        return False

    def _order_of(self, node: Node) -> int:
        assert self._order is not None
        return self._order[node]

    def _run(self, nodes: Collection[Node]) -> dict[Node, int]:
        """The order in which autograd runs some nodes: of those that may run the one that was made last."""
        left = {node: sum(each in nodes for each, _, _ in self._into[node]) for node in nodes}
        number = itertools.count()  # of leaves, which all come at once, either may be the first
        ready = [(-node._sequence_nr(), next(number), node) for node in self._nodes if left.get(node) == 0]
        heapq.heapify(ready)
        order: dict[Node, int] = {}
        while ready:
            _, _, node = heapq.heappop(ready)
            order[node] = len(order)
            for other, _ in node.next_functions:
                if other in left:
                    left[other] -= 1
                    if left[other] == 0:
                        heapq.heappush(ready, (-other._sequence_nr(), next(number), other))
        return order


def _variable(node: Node) -> torch.Tensor | None:
    return None if node.next_functions else getattr(node, "variable", None)


def _root_of(output: torch.Tensor) -> Edge | None:
    if output.grad_fn is not None:
        return output.grad_fn, output.output_nr
    if not output.requires_grad or private.is_wrapper(output):  # a leaf of a level that has ended is an input
        return None
    edge = get_gradient_edge(output)
    return edge.node, edge.output_nr
