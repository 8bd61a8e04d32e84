"""One graph's pullback in two halves: the inputs' cotangents first, and the params' from what they leave.

The nodes that lead to params and to no input fall into regions. What a region is given, by nodes that do lead to
inputs, is what the first half keeps of it; the second half pulls that back through the region. So a linear layer keeps
its input and its output's cotangent, and multiplies the two later (zero bubble pipelines, Qi et al. 2023).

A region is pulled back in the first half, by autograd alone, where nothing in it is worth waiting for, or where it
could not be told apart with the same bits: a native node that computes all of its cotangents together, a sum of three
terms or more that would be added in another order.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from fzero.base import private
from fzero.base.edges import (
    SEPARABLE,
    SHAPES,
    WEIGHTS,
    Edge,
    Grads,
    Kept,
    along,
    edge_of,
    is_hooked,
    is_python,
    name_of,
)
from fzero.capture.handle import storage_of


@dataclass(eq=False)
class _Value:
    """A cotangent that a region is given along an edge: a tensor, or what one is computed from."""

    edge: Edge
    of: torch.Tensor | Kept
    place: int = 0

    def take(self) -> torch.Tensor:
        return self.of.give(self.place) if isinstance(self.of, Kept) else self.of


@dataclass(eq=False)
class Part:
    """What the second half needs of one region.

    Attributes:
        params: the numbers of the params that it leads to.
        units: numbers of the nodes that hand on cotangents of these params by themselves, as they were pulled back.
        always: edges into it that are pulled back also where nothing came along them.
    """

    params: list[int]
    values: list[_Value] = field(default_factory=list)
    units: list[int] = field(default_factory=list)
    always: list[Edge] = field(default_factory=list)

    def own(self, storages: Collection[int]) -> None:
        """Copies what lies in these storages, which are other people's, too."""
        for value in self.values:
            if isinstance(value.of, torch.Tensor):
                value.of = own(value.of, storages)
            elif value.of.grad is not None:
                value.of.grad = own(value.of.grad, storages)

    def pull(self, params: Sequence[torch.Tensor], retain_graph: bool) -> Sequence[torch.Tensor | None]:
        """The cotangents of this part's params, which are given."""
        values, self.values = self.values, []
        given = {value.edge for value in values}
        pairs = [(edge, _zeros(edge)) for edge in dict.fromkeys(self.always) if edge not in given]
        pairs += [(value.edge, value.take()) for value in values]
        if not pairs:
            return [None] * len(params)
        edges = [GradientEdge(*edge) for edge, _ in pairs]
        return torch.autograd.grad(
            edges, list(params), [x for _, x in pairs], retain_graph=retain_graph, allow_unused=True
        )


def _zeros(edge: Edge) -> torch.Tensor:
    meta = edge[0]._input_metadata[edge[1]]
    return torch.zeros((), dtype=meta.dtype, device=meta.device).expand(tuple(meta.shape))


def own(tensor: torch.Tensor, storages: Collection[int]) -> torch.Tensor:
    """A copy of a tensor in one of these storages, as it lies there: others might be added up in another order."""
    if storage_of(tensor) not in storages:
        return tensor
    if tensor.layout != torch.strided or not tensor.numel() or tensor.is_conj() or tensor.is_neg():
        return tensor.clone()
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr() % 64 // tensor.element_size()
    copy = torch.empty(begin + span, dtype=tensor.dtype, device=tensor.device)
    copy[begin:].copy_(tensor.as_strided((span,), (1,)))
    return copy.as_strided(tensor.shape, tensor.stride(), begin)


@dataclass(eq=False)
class _Region:
    """Nodes that lead to params and to no input, and to each other.

    Attributes:
        into: edges that lead here from nodes that lead to inputs.
        outputs: numbers of outputs that depend on nothing else.
    """

    nodes: list[Node] = field(default_factory=list)
    params: list[int] = field(default_factory=list)
    into: list[tuple[Node, int]] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)


class Split:
    """The graph that leads from outputs to inputs and params, and which of its regions wait for the second half.

    It knows the graph's nodes, and is to be dropped with them.

    Args:
        params: leaves, like the inputs.
        units: nodes that hand on cotangents by themselves -> their numbers, and along how many of their first edges.
        shapes_only: nothing but nodes that save no tensor may wait, as params are not there any more then.

    Attributes:
        leads: whether any output depends on an input.
    """

    def __init__(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        params: Sequence[torch.Tensor],
        units: Mapping[Node, tuple[int, int]] | None = None,
        shapes_only: bool = False,
    ) -> None:
        self._outputs, self._inputs, self._params = outputs, inputs, params
        self._units, self._shapes_only = units or {}, shapes_only
        self._roots = [_root_of(o) for o in outputs]
        self._walk()
        wanted, numbers = {id(x) for x in inputs}, {id(x): i for i, x in enumerate(params)}
        leaves = {node: id(variable) for node in self._nodes if (variable := _variable(node)) is not None}
        self._main = self._above(node for node, x in leaves.items() if x in wanted)
        self.leads = bool(self._main)
        below = self._above(node for node, x in leaves.items() if x in numbers) - self._main
        self._regions = self._connected(below)
        for node, x in leaves.items():
            if node in below:
                self._regions[node].params.append(numbers[x])
        regions = dict.fromkeys(self._regions.values())
        self._order: dict[Node, int] | None = None
        everything = not self.leads and not shapes_only  # the second half is the pullback
        self._late = [r for r in regions if everything or (self._is_worth(r) and not self._must_not_wait(r))]
        late = {i for region in self._late for i in region.params}
        self._early = sorted({i for region in regions for i in region.params} - late)

    def _walk(self) -> None:
        self._nodes = list(dict.fromkeys(edge[0] for edge in self._roots if edge is not None))
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

    def _connected(self, below: set[Node]) -> dict[Node, _Region]:
        """The region of each of some nodes."""
        regions: dict[Node, _Region] = {}
        near: dict[Node, list[Node]] = {node: [x for x, _ in node.next_functions if x in below] for node in below}
        for node in below:
            near[node] += [x for x, _, _ in self._into[node] if x in below]
        for node in self._units:  # one that hands on all of its cotangents at once keeps its regions together
            own = [x for x, _ in node.next_functions if x in below]
            for x in own if node in self._main else ():
                near[x] += own
        for node in self._nodes:
            if node in below and node not in regions:
                region = _Region()
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
        for i, edge in enumerate(self._roots):
            if edge is not None and edge[0] in regions:
                regions[edge[0]].outputs.append(i)
        return regions

    def is_alone(self, unit: Node) -> bool:
        """Tells whether nothing else uses the params that a unit hands on cotangents of by itself."""
        ends = unit.next_functions[: self._units[unit][1]]
        return unit in self._into and all(node is None or len(self._into[node]) == 1 for node, _ in ends)

    # ---- which regions wait

    def _is_worth(self, region: _Region) -> bool:
        """Tells whether there are matrix products to wait for."""
        given = any(node in self._units or self._is_weight(node, k) for node, k in region.into)
        return given or any(node in self._units or name_of(node) in WEIGHTS for node in region.nodes)

    def _is_weight(self, node: Node, k: int) -> bool:
        return k in WEIGHTS.get(name_of(node), ()) and self._can_wait(node, k)

    def _can_wait(self, node: Node, k: int) -> bool:
        """Tells whether an edge's cotangent is computed from cotangents and what leads to inputs, which stay."""
        needs = Kept.needs(node, k)
        return needs is not None and all(node.next_functions[place][0] in self._main for place in needs)

    def _must_not_wait(self, region: _Region) -> bool:
        for node in {node for node, _ in region.into}:
            if not is_python(node) and (name_of(node) not in SEPARABLE or is_hooked(node)):
                return True
        for node in region.nodes:
            if is_hooked(node):
                return True
            saves = node.next_functions and name_of(node) not in SHAPES and name_of(node) != "EmbeddingBackward0"
            if self._shapes_only and saves:
                return True
        return self._adds_otherwise(region)

    def _adds_otherwise(self, region: _Region) -> bool:
        """Tells whether some sum in a region would be added in another order than in a pullback as a whole."""
        mixed: list[tuple[Node, int]] = []
        own = set(region.nodes)
        for node in region.nodes:
            terms = [(each, place) for each, _, place in self._into[node]]
            terms += [(node, edge[1]) for edge in self._roots if edge is not None and edge[0] is node]
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
            if halves != whole and ((node, nr) in self._roots or halves != swapped):
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

    # ---- the first half

    def pull(
        self, cotangents: Sequence[torch.Tensor | None], retain_graph: bool
    ) -> tuple[list[torch.Tensor | None], dict[int, torch.Tensor | None], list[Part]]:
        """The inputs' cotangents, those of params that do not wait, by number, and what the others are pulled from.

        None stands for what nothing depends on.
        """
        live = [
            (o, c.to(o.dtype))
            for o, c in zip(self._outputs, cotangents, strict=True)
            if c is not None and o.requires_grad
        ]
        parts = {region: Part(sorted(region.params)) for region in self._late}
        for region, part in parts.items():
            for i in region.outputs:
                o, c, edge = self._outputs[i], cotangents[i], self._roots[i]
                assert edge is not None
                part.always.append(edge)
                if c is not None:
                    part.values.append(_Value(edge, c.to(o.dtype)))
        asked = [*self._inputs, *[self._params[i] for i in self._early]]
        found: list[torch.Tensor | None] = [None] * len(asked)
        handles = self._watch(parts)
        try:
            if live and asked:
                found = list(
                    torch.autograd.grad(
                        [o for o, _ in live], asked, [c for _, c in live], retain_graph=retain_graph, allow_unused=True
                    )
                )
        finally:
            for handle in handles:
                handle.remove()
        early = dict(zip(self._early, found[len(self._inputs) :], strict=True))
        return found[: len(self._inputs)], early, list(parts.values())

    def _watch(self, parts: Mapping[_Region, Part]) -> list[RemovableHandle]:
        """Notes what nodes hand on to the regions that wait, in the order in which they run."""
        given: dict[Node, dict[int, Part]] = {}
        for region, part in parts.items():
            for node, k in region.into:
                given.setdefault(node, {})[k] = part
                if k >= self._units.get(node, (0, 0))[1]:
                    part.always.append(edge_of(node, k))
        return [
            _watch_python(node, own, self._units.get(node))
            if is_python(node)
            else _watch_native(node, own, [k for k in own if self._can_wait(node, k)])
            for node, own in given.items()
        ]


def _watch_python(node: Node, given: Mapping[int, Part], unit: tuple[int, int] | None) -> RemovableHandle:
    """Such a node hands on everything, whatever is asked for."""

    def after(found: Grads, _: object) -> None:
        for k, part in given.items():
            value = found[k]
            if value is not None:
                part.values.append(_Value(edge_of(node, k), value))
        if unit is not None:
            for part in dict.fromkeys(given.values()):
                part.units.append(unit[0])

    return node.register_hook(after)  # type: ignore[arg-type]


def _watch_native(node: Node, given: Mapping[int, Part], later: Collection[int]) -> RemovableHandle:
    now = [k for k in given if k not in later]

    def before(grads: Grads) -> None:
        values: dict[int, _Value] = {}
        if later and grads[0] is not None:
            kept = Kept(node, grads[0], later)
            values.update((k, _Value(edge_of(node, k), kept, k)) for k in later)
        for k, value in along(node, grads, now).items() if now else ():
            if value is not None:
                values[k] = _Value(edge_of(node, k), value)
        for k in sorted(values):
            given[k].values.append(values[k])

    return node.register_prehook(before)  # type: ignore[arg-type]


def _variable(node: Node) -> torch.Tensor | None:
    return None if node.next_functions else getattr(node, "variable", None)


def _root_of(output: torch.Tensor) -> Edge | None:
    if output.grad_fn is not None:
        return output.grad_fn, output.output_nr
    if not output.requires_grad or private.is_wrapper(output):  # a leaf of a level that has ended is an input
        return None
    edge = get_gradient_edge(output)
    return edge.node, edge.output_nr
